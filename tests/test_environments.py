"""Environments that are not a developer's shell: whatever is set, a command ends without a traceback."""

import os
import subprocess
import sys

import pytest

from treeopt.records.rundir import RunDirectory

from .helpers.runs import make_run

COMMANDS = (
    "--help", "list", "list engines vllm", "show", "show mc_sim_7b_63", "show --json", "status",
    "search --budget 8", "score mc_sim_7b_63", "plot tree latency --format svg", "report", "export --to tensorrt-llm",
    "tune settings.csv", "import nothing.json", "convert nothing --to medusa -o heads", "train --kind nothing -o heads",
)  # fmt: skip
# By name: the variables that are set, those that are not, and the options of Python.
ENVIRONMENTS = {
    "optimised": ({}, (), ("-OO",)),
    "notebook": ({"MPLBACKEND": "module://matplotlib_inline.backend_inline"}, (), ()),
    "nonsense": ({"MPLBACKEND": "nonsense"}, (), ()),
    "C": ({"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, (), ()),
    "homeless": ({}, ("HOME", "XDG_CACHE_HOME"), ()),
    "read-only": ({"HOME": "/proc", "XDG_CACHE_HOME": "/proc"}, (), ()),
    "dumb": ({"TERM": "dumb", "NO_COLOR": "1"}, (), ()),
    "narrow": ({"COLUMNS": "20"}, (), ()),
    "nothing": ({"COLUMNS": "x", "TERM": "", "LANG": "xx", "TMPDIR": "/nowhere"}, ("PATH",), ()),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environments")
    make_run(RunDirectory(folder / "treeopt-run").path, batch_sizes=(1,))
    (folder / "settings.csv").write_text("setting,batch size,tokens/s\nplain,1,100\nk=2,1,140\nk=4,1,150\n")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_no_environment_ends_a_command_in_a_traceback(folder, name):
    """Nor does a closed stdin; what does not exist is refused in a sentence, all else is done."""
    added, removed, options = ENVIRONMENTS[name]
    environment = {key: value for key, value in os.environ.items() if key not in removed} | added
    for words in COMMANDS:
        command = [sys.executable, *options, "-m", "treeopt", *words.split()]
        done = subprocess.run(
            ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            check=False,
        )
        said = (done.stdout + done.stderr).decode()
        assert "Traceback" not in said, (words, said)
        assert "Exception ignored" not in said, (words, said)
        assert done.returncode == (
            0 if "nothing" not in words else 1 if "import" in words or "convert" in words else 2
        ), (words, said)
