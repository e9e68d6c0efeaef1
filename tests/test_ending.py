"""The last words of `treeopt run`: right whatever was found, for a demo and for a model of one's own, and to be copied."""

import shlex
from dataclasses import replace

import click.testing
import pytest

from tests.helpers.runs import at_speed, make_run, some_bench, some_plan
from tests.test_hostile_names import NAMES
from treeopt.cli import cli
from treeopt.records.rundir import RunDirectory
from treeopt.report import figures
from treeopt.report.page import write_report
from treeopt.report.verdict import ending


def told(speeds, *, engines=("vllm", "sglang"), is_demo=False, run="r", blocks=6):
    """The ending of a run whose chosen trees are so many times as fast as plain decoding; None: not to speculate."""
    plan = some_plan(tuple(range(1, 1 + len(speeds))))
    entries = [
        entry.served(entry.plain) if speed is None else entry for entry, speed in zip(plan.entries, speeds, strict=True)
    ]
    benches = []
    for i, speed in enumerate(speeds, 1):
        bench = at_speed(some_bench(blocks=blocks), speed or 1.0)
        benches.append(replace(bench, contenders=tuple(replace(c, batch_size=i) for c in bench.contenders)))
    plan = replace(plan, entries=tuple(entries))
    return ending(RunDirectory(run), plan, benches, engines, is_demo=is_demo)


@pytest.mark.parametrize(
    ("speeds", "found", "command"),
    [
        ([1.5], "decodes 1.50 (1.50 to 1.50) times as fast as plain decoding (", "export --to vllm"),
        (
            [0.8],
            "is slower than plain decoding: 0.80 (0.80 to 0.80) times as fast, so not speculating is best (ended with the last prompt, after 6 answers).",
            "report",
        ),
        ([1.0], "it is not shown to pay (settled after 6 answers).", "bench --num-prompts 12"),
        ([None], "no tree is shown to pay, so not speculating is the plan.", "report"),
        ([0.8, 1.5], "at batch size 2 a tree of", "export --to vllm"),
        ([0.8, 1.0], "at batch size 1 a tree of", "bench --num-prompts 12 --batch-size 2"),
    ],
)
def test_what_was_found_and_what_to_do_next_whatever_it_is(speeds, found, command):
    said, following = told(speeds)
    assert said.startswith("Found: ")
    assert found in said
    assert "these prompts on this machine" in said
    assert following == f"treeopt {command} --run r"


def test_few_prompts_and_no_engine_are_said_right():
    said, following = told([1.5], blocks=1)
    assert "too little was timed" in said
    assert following.startswith("treeopt bench --num-prompts ")
    assert told([1.5], engines=())[1] == "treeopt report --run r"
    plan, bench = some_plan((1,)), some_bench()
    untimed = tuple(replace(c, blocks=[]) for c in bench.contenders)
    said, following = ending(RunDirectory("r"), plan, [replace(bench, contenders=untimed)], ["vllm"], is_demo=False)
    assert "nothing was timed" in said
    assert "bench --num-prompts" in following


def test_the_demo_says_that_its_figures_are_the_demos():
    for speed in (1.5, 1.0, None):
        said, following = told([speed], is_demo=True)
        assert "This holds for the demo model on this machine. Your own model and heads need a run of their own" in said
        assert following.startswith("treeopt run --model MODEL --drafter HEADS --prompts prompts.jsonl --run")


@pytest.mark.parametrize("name", [name for name in NAMES if name.isprintable()])
def test_the_next_command_is_one_that_the_command_line_takes(name, monkeypatch):
    """Copied, it names the very run, whatever that is called."""
    for speed in (1.5, 0.8, 1.0):
        _, *words = shlex.split(told([speed], run=name)[1])
        assert words[-1] == str(RunDirectory(name).path)
        command = cli.commands[words[0]]
        asked = command.make_context(words[0], words[1:])
        assert asked.params["run"] == words[-1]
    result = click.testing.CliRunner().invoke(cli, [*shlex.split(told([1.5], is_demo=True)[1])[1:], "--help"])
    assert result.exit_code == 0


@pytest.mark.long
def test_the_page_of_a_run_shows_the_pictures_that_it_drew(tmp_path):
    run = make_run(tmp_path / "run", batch_sizes=(1,))
    alone = write_report(run)[0].read_text()
    drawn = list(figures.pictures(run))
    figures.draw(run, drawn=drawn)
    page = write_report(run, drawn=drawn)[0].read_text()
    assert figures.svg_element((run.figures / "accuracy.svg").read_bytes(), "figure-1-") in page
    assert page.count("<svg") == alone.count("<svg")
