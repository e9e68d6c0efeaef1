"""Without torch, transformers, datasets and safetensors: what needs no model runs, and what runs one says how to get them."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from treeopt.runtime.waiting import RUNS_MODELS

from .helpers.lying_server import Engine, lying
from .test_merge import calibration, shard

PROGRAM = """
import json, shlex, sys
absent = sys.argv.pop(1).split()
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in absent else self.finder.find_spec(name, *rest)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Without, sys.meta_path)
from click.testing import CliRunner
from treeopt.cli import cli
results = [CliRunner().invoke(cli, shlex.split(line)) for line in sys.argv[1:]]
print(json.dumps([(one.exit_code, one.stdout, one.stderr, repr(one.exception)) for one in results]))
"""
SHIPPED = "vicuna-7b-medusa1"
CONFIG = {
    "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024, "vocab_size": 1000,
    "model_type": "llama", "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("no-models")
    (place / "config.json").write_text(json.dumps(CONFIG))
    (place / "steps.csv").write_text("batch_size,size,depth,step_ms\n1,1,0,10\n1,8,3,11\n1,16,4,13\n")
    (place / "table.csv").write_text("head,rank,accuracy\n1,0,0.6\n1,1,0.2\n2,0,0.4\n2,1,0.1\n")
    blocks, hashes, _ = calibration(0, 2)
    for i in range(2):
        (place / f"part-{i}").mkdir()
        shard(blocks, hashes, f"{i + 1}/2").save(place / f"part-{i}" / "trace.npz")
    run(place, "search", "--calibration", SHIPPED, "--budget", "8")
    return place


def run_all(place: Path, lines: Sequence[str], code: int = 0, absent: Sequence[str] = RUNS_MODELS) -> list[str]:
    """What each of the commands prints, or says where it could not, one after the other in a process that lacks packages."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, " ".join(absent), *lines],
        cwd=place, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for line, result in zip(lines, found, strict=True):
        assert result[0] == code, (line, result)
    return [out if code == 0 else said for _, out, said, _ in found]


def run(place: Path, *words: str, **options: Any) -> str:
    return run_all(place, [shlex.join(words)], **options)[0]


LIGHT = (
    "--help",
    "calibrate --help",
    "train --help",
    "list",
    "list engines vllm",
    "search --calibration vicuna-7b-medusa1 --budget 8 --for tensorrt-llm --run other",
    "show",
    "score mc_sim_7b_63 --calibration vicuna-7b-medusa1",
    "import table.csv --trials 1000 --run imported",
    "import treeopt-run/plan.json:1",
    "export --to medusa",
    "plot",
    "report",
    "compare vicuna-7b-medusa1 vicuna-7b-medusa1",
    "status",
    "import part-0 part-1 --run merged",
    "profile --from-csv steps.csv --run timed",
    "profile --analytical H100-SXM --model config.json --run computed",
)
HEAVY = (
    "run",
    "calibrate",
    "profile",
    "profile --random-weights config.json",
    "bench",
    "bench --engine openvino",
    "convert heads --to medusa -o out",
    "train -o heads",
)


def test_what_needs_no_model_runs(folder):
    assert all(run_all(folder, LIGHT))


def test_what_runs_a_model_says_how_to_install_it(folder):
    for said in run_all(folder, HEAVY, code=1):
        assert "This runs a model, which needs torch" in said
        assert "pip install 'treeopt[models]'" in said


@pytest.mark.long
def test_a_server_that_is_up_is_tuned(folder):
    with lying(Engine((0.7, 0.5), 0.02)) as server, lying(Engine((), 0.012)) as plain:
        words = ("tune", server.url, "--plain", plain.url, "--minutes", "0.02", "--drafter", "eagle3", "--run", "tuned")
        said = run(folder, *words)
    assert re.search("vllm serve .+ --speculative-config", said)
