"""Tables fit the line: none is wider, no word is broken, no name or figure is cut; --help likewise."""

import re
from dataclasses import replace
from functools import cache
from io import StringIO

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from tests.conftest import examples
from tests.helpers.runs import long_trace, some_bench, some_profile
from treeopt.cli import cli
from treeopt.engines.registry import ENGINES
from treeopt.growth.score import score_tree
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.calibration import Calibration
from treeopt.report.bench_table import bench_table
from treeopt.report.engine_table import engine_table, method_table
from treeopt.report.latency_table import profile_table
from treeopt.report.plan_table import plan_table
from treeopt.report.status import FileStatus, RunStatus
from treeopt.report.table import Column, Table, texts
from treeopt.report.tables import calibration_table, score_table, status_table, training_table
from treeopt.trees.published import published_tree
from treeopt.trees.shapes import Limits

NAME = "a-name-of-fifty-characters-without-a-single-space-x"
WIDTHS = (80, 120)


def rendered(renderable, width: int) -> str:
    console = Console(file=StringIO(), width=width, markup=False, highlight=False, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def tokens(text: str) -> list[str]:
    """Words of a text, without the table's frame."""
    return [word for word in re.split(r"[\s─-╿]+", text) if word]


def check(text: str, width: int, *words: str) -> None:
    """No line is wider, and every word stands there whole."""
    assert max(map(cell_len, text.splitlines())) <= width, text
    missing = set(words) - set(tokens(text))
    assert not missing, (missing, text)


cells = st.text(st.sampled_from("ab1 ±-…日"), max_size=30).filter(lambda text: cell_len(text) <= 30)  # fits any line


@examples(25)
@given(
    st.integers(1, 5).flatmap(lambda n: st.lists(st.tuples(*[cells] * n), min_size=1, max_size=4)),
    st.integers(0, 5),
    st.integers(36, 140),
)
@example([("", "", "", "", ""), ("", " 1111", "", "", "")], 2, 36)
def test_any_table_fits_any_line(rows, left, width):
    columns = [f"col {number}" for number in range(len(rows[0]))]
    spare = columns[: len(columns) // 2 : -1]  # the last one first
    table = Table("A title", texts(*columns, names=left, spare=spare), rows, caption="and a caption")
    text = rendered(table, width)
    kept = len(columns) - sum(name in " ".join(text.partition("Left out")[2].split()) for name in spare)
    check(text, width, *(word for row in rows for cell in row[:kept] for word in tokens(cell)))
    for row in rows:
        for cell in row[min(left, len(columns)) : kept]:
            assert " ".join(cell.split()) in " ".join(text.replace("│", " ").split()), "a figure is never wrapped"


def test_what_a_narrow_line_leaves_out_is_said():
    table = Table("T", texts("name", "figure", "extra", names=1, spare=("extra",)), [("n", "1" * 40, "2" * 40)])
    assert "2" * 40 in rendered(table, 120)
    narrow = rendered(table, 60)
    assert "2" * 40 not in narrow
    assert "Left out on a line this narrow: extra." in narrow
    lines = ["T", "n", "figure", "1" * 40, "extra", "2" * 40]
    assert tokens(rendered(table, 45)) == lines, "as lines, with every figure"
    columns = [Column("batch", lambda row: row[0]), Column("drafter", lambda row: row[1], names=True)]
    lines = rendered(Table("T", columns, [("8", NAME)]), 40).splitlines()
    assert lines[1].strip() == "batch 8", "of a table of copied text, whose names are second, it was the figure alone"


@cache
def shown() -> dict:
    """Every table that a command prints, with long names and large figures, and words that must be whole in it."""
    trace, profile = long_trace(4), some_profile([1, 16, 4096])
    bench = some_bench((NAME, f"{NAME}-2"))
    plan = plan_trees(trace, profile, PlanRequest(Limits(64), batch_sizes=profile.batch_sizes))
    contenders = [replace(c, name=NAME if c.name == bench.contenders[-1].name else c.name) for c in bench.contenders]
    calibration = Calibration.from_trace(trace)
    hits = {"hits": [[123456]] * 4, "trials": [234567] * 4, "sequences": 1234, "tokens_per_step": 2.1}
    calibration.meta["groups"] = {NAME: hits, "b": hits}
    before = {"trials": [10**6] * 4, "accuracy": [0.123456] * 4, "head_loss_nats": [1.5] * 4}
    texts = {"held_out": {"before": before, "after": before}, "texts": {"held_out": 12}}
    file = FileStatus(name=f"{NAME}.json", made="2026-01-01T00:00:00Z", holds=NAME, of=NAME, command=f"treeopt {NAME}")
    return {
        "plan": (plan_table(plan), [str(entry.chosen.size) for entry in plan.entries]),
        "profile": (profile_table(profile), ["4096", "256"][:1]),
        "calibration": (calibration_table(calibration), [NAME, "1234"]),
        "bench": (bench_table(replace(bench, contenders=tuple(contenders))), [NAME, f"{NAME}-2"]),
        "score": (score_table(score_tree(trace, published_tree().cut(max_depth=4)), NAME), [NAME, "smallest"]),
        "training": (training_table({"steps": 10**6, "seconds": 10**5, **texts}, f"treeopt {NAME}"), [NAME, "0.123"]),
        "engines": (engine_table(ENGINES), list(ENGINES)),
        **{f"engine {name}": (method_table(engine), ["drafters", name]) for name, engine in ENGINES.items()},
        "status": (status_table(RunStatus(run=NAME, files=[file], why="", next=None)), [NAME, f"{NAME}.json"]),
    }


@pytest.mark.parametrize("width", WIDTHS)
def test_every_table_fits(width):
    for table, words in shown().values():
        check(rendered(table, width), width, *words)


def helped(*words: str, width: int = 80, last: str = "--help") -> str:
    found = CliRunner().invoke(cli, [*words, last], terminal_width=width, env={"COLUMNS": str(width)})
    assert found.exit_code == 0, found.output
    return found.output


def test_the_list_of_commands_has_whole_sentences():
    listed = helped().partition("Commands:")[2].strip().splitlines()
    assert len(listed) == len(cli.commands), "a line each"
    assert all(re.fullmatch(r" *[a-z-]+ +[A-Z][^.]+\.", line) for line in listed), listed


@pytest.mark.parametrize("name", cli.commands)
def test_help_fits_a_screen_and_help_all_has_every_option(name):
    """A screen has 50 lines of 80 columns; --help shows 15 options at most."""
    short = helped(name)
    assert len(short.splitlines()) <= 50
    assert len(re.findall(r"^  -", short, re.M)) <= 15
    whole = helped(name, last="--help-all") if "--help-all" in short else short
    for option in (p for p in cli.commands[name].params if isinstance(p, click.Option)):
        assert len(re.findall(rf"^  (?:-\w, )?{option.opts[-1]}(?![\w-])", whole, re.M)) >= 1, option.opts


COMPLETED = [
    ("calibrate", "--num-p", {"--num-prompts"}),
    ("calibrate --drafter", "eagle", {"file"}),
    ("score", "mc_", {"file"}),
    ("compare treeopt-run", "be", {"file"}),
]


@pytest.mark.parametrize(("words", "begun", "expected"), COMPLETED)
def test_the_shell_completes_options_choices_and_files(words, begun, expected):
    shell = ShellComplete(cli, {}, "treeopt", "_TREEOPT_COMPLETE")
    found = shell.get_completions(words.split(), begun)
    assert {one.value if one.type == "plain" else one.type for one in found} == expected
