"""The book of answers (`tests/answers/`) and the README's line, as its text says it."""

import json
import re
import shlex
from math import inf
from pathlib import Path

import pytest

from treeopt.records.plan import Plan

from .answers.book import BOOK, answer_of, moves, written
from .answers.cases import CASES
from .conftest import invoke

README = Path(__file__).parent.parent / "README.md"
# What makes a command of the line short enough for the suite.
SHORT = {
    "calibrate": "--num-prompts 16 --max-new-tokens 24",
    "profile": "--time-limit 4",
    "bench": "--num-prompts 4 --rounds 1",
    "export": "--anyway",
    "plot": "--format svg",
}


@pytest.mark.parametrize("name", CASES)
def test_answer(name):
    """No decision moves, and no figure by more than its error: `make answers` says what did, `WRITE=1` writes it."""
    beyond = [sentence for sentence, errors in moves(written(name), answer_of(name)) if errors > 1]
    assert not beyond, "\n".join(beyond)


def test_every_page_of_the_book_has_its_case():
    assert {path.stem for path in BOOK.glob("*.json")} == CASES.keys()


FIGURE = {"value": 2.0, "stderr": 0.1}


@pytest.mark.parametrize(
    ("before", "after", "errors"),
    [
        (FIGURE, FIGURE, []),
        (FIGURE, {"value": 2.05, "stderr": 0.1}, [0.5]),
        (FIGURE, {"value": 2.3, "stderr": 0.1}, [3.0]),
        (FIGURE, {"value": 2.0, "stderr": 0.2}, [0.0]),
        (FIGURE, {"value": None, "stderr": None}, [inf]),
        ({"value": 2.0, "stderr": None}, {"value": 2.01, "stderr": None}, [inf]),
        ({"tied_sizes": [3, 4]}, {"tied_sizes": [3, 4, 5]}, [inf]),
        ({"files": {"a.json": ["1"]}}, {"files": {"b.json": ["1"]}}, [inf, inf]),
        ({"share": 0.5}, {"share": 0.5 + 1e-9}, []),
        ({"share": 0.5}, {"share": 0.51}, [inf]),
    ],
    ids=["same", "within", "beyond", "error", "unknown", "exact", "ties", "files", "rounding", "share"],
)
def test_a_move_is_counted_in_errors(before, after, errors):
    assert [number for _, number in moves(before, after)] == pytest.approx(errors)


@pytest.mark.long
def test_the_readme_line(tmp_path, monkeypatch):
    """The README's line of commands in an empty folder, and what it names beside: measured, chosen, exported, decoded, drawn."""
    block = re.search(r"```\n(treeopt calibrate .*?)```", README.read_text("utf-8"), re.DOTALL)
    assert block, "the README has no line of commands"
    commands = [shlex.split(line, comments=True)[1:] for line in block[1].splitlines()]
    assert [words[0] for words in commands] == ["calibrate", "profile", "search", "export"]
    commands += [["bench"], ["plot"], ["search", "--for", "tgi"], ["export", "--to", "tgi"]]
    monkeypatch.chdir(tmp_path)
    run, speculates = tmp_path / "treeopt-run", True
    for words in commands:
        refused = words[0] == "export" and not speculates  # an engine is told nothing where nothing is to be told
        invoke(*words, *shlex.split(SHORT.get(words[0], "")), code=int(refused))
        if words[0] == "search":
            speculates = Plan.load(run / "plan.json").speculates
    bench = json.loads((run / "bench.json").read_text("utf-8"))
    for contender in bench["contenders"]:
        assert contender["steps"] == contender["replayed_steps"]
    assert (run / "export" / "tensorrt-llm").exists() == (run / "export" / "tgi").exists() == speculates
    assert list(run.rglob("tree*.svg"))
