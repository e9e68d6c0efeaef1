"""The documents and the layout say what the code does."""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

from treeopt.cli import cli
from treeopt.files import places
from treeopt.files.storage import to_json
from treeopt.records.calibration import Calibration
from treeopt.records.profile import LatencyProfile

ROOT = Path(__file__).resolve().parents[1]


def test_every_command_has_help_with_an_example_and_json_and_is_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, command in cli.commands.items():
        assert f"Example:\n    treeopt {name}" in command.help, name
        assert re.search(rf"(treeopt |`){name}[ `]", readme), name
        assert any("--json" in parameter.opts for parameter in command.params), name


SHIPPED = [("calibration", Calibration.load), ("profiles", LatencyProfile.load)]


SKILL = (ROOT / "skills" / "choose-speculation" / "SKILL.md").read_text("utf-8")


def test_every_command_of_the_skill_parses():
    """So far as that can be told without running it; an agent reads the page in one view."""
    lines = re.findall(r"^treeopt (.+)$", SKILL, re.M)
    assert len(lines) > 10
    for line in lines:
        name, *words = shlex.split(line)
        cli.commands[name].make_context(name, words)
    assert SKILL.count("\n") <= 80


@pytest.mark.parametrize(("kind", "load"), SHIPPED)
def test_every_shipped_file_loads(kind, load):
    assert all(load(path) for path in places.shipped(kind).values())


@pytest.mark.parametrize("kind", [kind for kind, _ in SHIPPED])
def test_the_table_of_shipped_files_says_what_the_files_say(kind):
    """Every file has its row, every row its file, and "–" stands where the file says nothing."""
    readme = (ROOT / kind / "README.md").read_text(encoding="utf-8")
    header, _, *rows = [line for line in readme.splitlines() if line.startswith("|")]
    assert header == "| name | source | device | date | command |"
    assert sorted(rows) == sorted(row_of(path) for path in places.shipped(kind).values())


def row_of(path: Path) -> str:
    document = json.loads(path.read_text(encoding="utf-8"))
    said = document["provenance"]
    source = document.get("source", "measured")
    published = said.get("published_in")
    cells = [
        f"`{path.stem}`",
        f"{source}: {published}" if published else source,
        said.get("device"),
        (said.get("time") or said.get("published") or "")[:10],
        f"`{said['command']}`" if said.get("command") else None,
    ]
    return f"| {' | '.join(cell or '–' for cell in cells)} |"


def test_only_the_runtime_imports_torch():
    for path in (ROOT / "treeopt").rglob("*.py"):
        if "runtime" in path.parts:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                heavy = r"(import|from) (torch|transformers|datasets|matplotlib|scipy|networkx)\b"
                assert not re.match(heavy, ast.unparse(node)), path


def test_json_refuses_what_is_not_finite():
    with pytest.raises(ValueError, match="JSON"):
        to_json({"a": float("nan")})
