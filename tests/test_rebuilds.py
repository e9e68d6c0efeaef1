"""The script that builds an engine for each size worth it, run with stand-ins for TensorRT-LLM's programs."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from treeopt.cli import cli
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile

STAND_IN = """\
#!/bin/sh
# Each program records its words; the benchmark writes the report that trtllm-bench writes.
echo "$(basename "$0") $*" >> "$LOG"
while [ $# -gt 1 ]; do
    case "$1" in
        --report_json) report="$2";;
        --medusa_choices) choices="$2";;
        --output_dir) mkdir -p "$2";;
    esac
    shift
done
[ -n "$report" ] || exit 0
n=$(cat "$choices" /dev/null | wc -l)
accepted=$(awk "BEGIN {print 1 + log(1 + $n) / 3}")
rate=$(awk "BEGIN {print 100 * $accepted / (1 + $n / 40)}")
stats="\\"decoding_stats\\": {\\"acceptance_length_percentiles\\": {\\"average\\": $accepted}}"
[ "$n" -gt 0 ] || stats="\\"decoding_stats\\": null"
echo "{\\"performance\\": {\\"system_output_throughput_tok_s\\": $rate}, $stats}" > "$report"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with stand-ins on the path and a checkout's two convert scripts."""
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("trtllm-build", "trtllm-bench"):
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(stat.S_IRWXU)
    for name in ("medusa", "llama"):
        script = tmp_path / "examples" / name / "convert_checkpoint.py"
        script.parent.mkdir(parents=True)
        script.write_text("import sys, os\nos.makedirs(sys.argv[sys.argv.index('--output_dir') + 1])\n")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    return tmp_path


def run(*words: str) -> str:
    found = CliRunner().invoke(cli, words)
    assert found.exit_code == 0, found.output
    return found.stdout


def test_build_time_and_search_again(folder):
    table = run("search", "--calibration", "vicuna-7b-medusa1", "--for", "tensorrt-llm", "--rebuilds", "4")
    assert "Worth building at batch size 1" in " ".join(table.split())
    sizes = [tree["size"] for tree in Plan.load(Path("treeopt-run/plan.json")).entries[0].rebuilds["trees"]]
    assert len(sizes) == 4
    run("export", "--to", "tensorrt-llm")
    script = folder / "treeopt-run" / "export" / "tensorrt-llm"
    where = {"MODEL": "m", "HEADS": "h", "DATASET": "d", "FOLDER": str(script)}
    done = subprocess.run(
        ["sh", script / "rebuild.sh"], env=os.environ | where, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "treeopt profile --from-csv" in done.stdout
    log = (folder / "log").read_text()
    for size in sizes:
        assert f"--medusa_choices {script}/size-{size}.yml" in log
    assert log.count("trtllm-bench") == 5
    run("profile", "--from-csv", str(script / "results.csv"), "--runtime", "tensorrt-llm")
    profile = LatencyProfile.load(Path("treeopt-run/profile.json"))
    assert sorted({point.size for point in profile.points}) == sizes
    assert profile.plain(1, profile.settings[0][1]).ms == pytest.approx(10.0)
    second = json.loads(
        run(
            "search",
            "--calibration",
            "vicuna-7b-medusa1",
            "--profile",
            "treeopt-run/profile.json",
            "--for",
            "tensorrt-llm",
            "--measured-only",
            "--json",
        )
    )
    assert second["entries"][0]["size"] in {1, *sizes}
    assert second["entries"][0]["step_ms"] is not None
    assert second["runtime"]["name"] == "tensorrt-llm"
