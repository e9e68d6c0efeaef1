"""Steps that a CUDA graph replays decode as the decoder does (benchmarks/gpu_steps.py), and `make gpu` runs up to the device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeopt.records.profile import LatencyProfile
from treeopt.runtime.decode import decode
from treeopt.runtime.setup import Setup
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target, device_name
from treeopt.trees.tree import Tree

from .conftest import examples, random_prompts, tiny_heads, tiny_model, trees
from .test_docs import row_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from gpu_steps import StaticVisits, static_texts

ROOT = Path(__file__).resolve().parents[1]
NEVER = StopRule(frozenset(), 24, at_loops=False)


def texts_both_ways(target, tree, prompts, batch_size):
    """Tokens and steps of every answer: by static steps, and by the decoder."""
    heads = tiny_heads(target)
    rows = decode(target, heads, prompts, tree, batch_size=batch_size, stop=NEVER)
    static = static_texts(Setup(target, heads, NEVER), prompts, tree, batch_size)
    return static, [(row.tokens, row.steps) for row in rows]


@examples(8)
@given(trees(), st.integers(0, 1000), st.integers(1, 3))
@pytest.mark.long
def test_static_steps_give_the_decoders_texts_and_steps(target, tree, seed, batch_size):
    ours, theirs = texts_both_ways(target, tree, random_prompts(seed), batch_size)
    assert ours == theirs


def test_a_static_step_that_computes_something_else_is_not_timed(target, monkeypatch):
    """Its mask shows every node all others."""
    setup, mask = Setup(target, tiny_heads(target), NEVER), target.mask

    def wrong(cache, starts, ancestors, depths):
        static = type(cache).__name__ == "StaticCache"
        return mask(cache, starts, torch.ones_like(ancestors) if static else ancestors, depths)

    StaticVisits(setup, [[1, 2, 3], [4, 5]], [Tree.dense([3, 2])])
    monkeypatch.setattr(target, "mask", wrong)
    with pytest.raises(RuntimeError, match=r"nothing was timed"):
        StaticVisits(setup, [[1, 2, 3], [4, 5]], [Tree.dense([3, 2])])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_replayed_graphs_give_the_decoders_texts_and_steps():
    target = Target(tiny_model(dtype=torch.float32).cuda())
    for tree in (Tree.chain(0), Tree.chain(3), Tree.dense([4, 2])):
        ours, theirs = texts_both_ways(target, tree, random_prompts(0), 3)
        assert ours == theirs


def test_records_name_the_model_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU number {device.index}")
    assert device_name(torch.device("cuda:1")) == "cuda:1 (GPU number 1)"


@pytest.mark.long
def test_make_gpu_runs_up_to_the_device_and_goes_on_from_what_it_has(tmp_path):
    """Twice: the second time nothing is measured again."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--dry", "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=tmp_path)
    shipped = tmp_path / "shipped"
    profiles = sorted((shipped / "profiles").glob("*.json"))
    assert [path.stem for path in profiles] == [f"tiny--cpu-bfloat16-{way}" for way in ("eager", "graphs")]
    table = (shipped / "profiles" / "README.md").read_text(encoding="utf-8")
    page = (shipped / "docs" / "gpu.md").read_text(encoding="utf-8")
    for path in profiles:
        assert LatencyProfile.load(path).fixed
        assert row_of(path) in table
        assert f"`{path.stem}`" in page
    assert "      - Steps on a GPU: gpu.md\n" in (shipped / "mkdocs.yml").read_text(encoding="utf-8")
    exact = json.loads((tmp_path / "exactness.json").read_text(encoding="utf-8"))
    assert len(exact) == 32
    assert all(row["equal"] == row["compared"] for row in exact if row["dtype"] == "float32")
    assert any(row["tokens_per_step"] > 1.5 for row in exact if row["way"] == "graphs")
    measured = {path: path.read_bytes() for path in tmp_path.glob("*.json")}
    subprocess.run(command, check=True, cwd=tmp_path)
    assert measured == {path: path.read_bytes() for path in tmp_path.glob("*.json")}
