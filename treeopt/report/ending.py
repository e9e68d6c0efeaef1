"""What `treeopt run` says last: what was found, for what that holds, and the next command."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from treeopt.files.shell import command_line
from treeopt.records.benchmark import Benchmark
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.rundir import RunDirectory
from treeopt.report.verdict import doubt, speedup_over, times
from treeopt.report.wording import count

OWN_RUN = ("run", "--model", "MODEL", "--drafter", "HEADS", "--prompts", "prompts.jsonl", "--run", "my-run")


def ending(
    run: RunDirectory, plan: Plan, benches: Sequence[Benchmark], engines: Sequence[str], *, is_demo: bool
) -> tuple[str, str]:
    """What was found and for what it holds, and the command to run next.

    benches : of each of the plan's entries
    engines : those that files were written for
    """
    each = [found(entry, bench) for entry, bench in zip(plan.entries, benches, strict=True)]
    if len(each) > 1:
        each = [f"at batch size {entry.batch_size} {said}" for entry, said in zip(plan.entries, each, strict=True)]
    result = f"Found: {'; '.join(each)}."
    if is_demo:
        meaning = "This holds for the demo model on this machine. Your own model and heads need a run of their own:"
        return f"{result} {meaning}", command_line(program(), *OWN_RUN)
    meaning, words = _next(plan, benches, engines)
    return f"{result} This holds for these prompts on this machine. {meaning}:", command_line(
        program(), *words, "--run", run.path
    )


def found(entry: PlanEntry, bench: Benchmark) -> str:
    """What a benchmark comes to at one batch size."""
    if entry.size == 1:
        return "no tree is predicted to beat plain decoding, so not speculating is the plan"
    speedup = speedup_over(bench, "plain")
    if speedup is None:
        return "nothing was timed, since the prompts are too few for a full batch"
    said = f"a tree of {count(entry.size, 'row')} decodes {times(speedup)} as fast as plain decoding"
    if not doubt(speedup):
        return said
    if speedup.high is None:
        return f"{said}, but the prompts are too few to show a gain"
    return f"{said}, so not speculating is best" if speedup.high < 1 else f"{said}, which does not show a gain"


def _next(plan: Plan, benches: Sequence[Benchmark], engines: Sequence[str]) -> tuple[str, list[object]]:
    """Why, and the words of the next command for a model of one's own."""
    open_: list[Benchmark] = []
    for entry, bench in zip(plan.entries, benches, strict=True):
        speedup = speedup_over(bench, "plain")
        if entry.size == 1 or (speedup is not None and speedup.high is not None and speedup.high < 1):
            continue
        if speedup is None or doubt(speedup):
            open_.append(bench)
        elif engines:
            return f"To start {engines[0]} with it", ["export", "--to", engines[0]]
    if open_:
        prompts = len({answer.id for answer in open_[0].contenders[0].sequences}) or open_[0].contenders[0].compared
        size = ["--batch-size", open_[0].contenders[0].batch_size] if len(plan.entries) > 1 else []
        return "More prompts may tell", ["bench", "--num-prompts", max(2 * prompts, 8), *size]
    return "For all figures in one page", ["report"]


def program() -> str:
    """What a shell calls treeopt by: its path, where it was started by that and is not found by its name."""
    called = sys.argv[0]
    return called if Path(called).name == "treeopt" and not shutil.which("treeopt") else "treeopt"
