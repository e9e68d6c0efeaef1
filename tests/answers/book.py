"""Make the answers of the book, and say what moved against the written ones and by how many errors.

An answer is JSON: what was planned by batch size, the schedule, the text of every exported file, and what the last command
prints as JSON. A number that has an error is ``{"value", "stderr"}``.
"""

import json
import shlex
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

from click.testing import CliRunner

from treeopt import __version__
from treeopt.cli import cli
from treeopt.records.figure import Figure
from treeopt.records.plan import Plan, PlanEntry

from .cases import CASES

HERE = Path(__file__).parent
INPUTS, BOOK = HERE / "inputs", HERE / "book"
SAME = 1e-6  # relative: other processors round otherwise


def answer_of(name: str) -> dict[str, Any]:
    """Run a case in an empty folder. Returns its answer; AssertionError with the output where a command fails."""
    case, printed = CASES[name], ""
    with TemporaryDirectory() as folder, chdir(folder):
        if case.inputs:
            copytree(INPUTS / case.inputs, "run")
        for command in case.commands:
            printed = _run(command)
        run = Path("run")
        answer: dict[str, Any] = {}
        if (run / "plan.json").exists():
            plan = Plan.load(run / "plan.json")
            answer["plan"] = [_entry(entry) for entry in plan]
            answer["schedule"] = [[part.first, part.last, part.entry] for part in plan.schedule]
        if (run / "export").exists():
            files = sorted(path for path in (run / "export").rglob("*") if path.is_file() and path.name[0] != ".")
            answer["files"] = {str(path.relative_to(run)): _lines(path) for path in files}
        if "--json" in case.commands[-1]:
            answer["printed"] = _without_origin(json.loads(printed))
    return answer


def _lines(path: Path) -> list[str]:
    """The lines of an exported file, without the version that wrote it."""
    return path.read_text("utf-8").replace(f"treeopt {__version__}", "treeopt").split("\n")


def _run(command: str) -> str:
    words = [str(INPUTS / word[1:]) if word.startswith("@") else word for word in shlex.split(command)]
    words = ["run" if word == "." else word for word in words]
    takes_run = words[0] != "compare"
    result = CliRunner().invoke(cli, [*words, "--run", "run"] if takes_run else words)
    assert result.exit_code in (0, 3), f"treeopt {command}\n{result.output}{result.exception}"
    return result.stdout


def _entry(entry: PlanEntry) -> dict[str, Any]:
    return {
        "batch_size": entry.batch_size,
        "chosen": _figure(entry.chosen),
        "tied_sizes": entry.tied_sizes,
        "accepted": entry.accepted,
        "others": {kind: _figure(figure) for kind, figure in entry.others.items()},
    }


def _figure(figure: Figure) -> dict[str, Any]:
    """The draft with its tokens per step, step [ms] and speedup."""
    draft = figure.draft
    choices = str([list(choice) for choice in draft.choices]) if hasattr(draft, "choices") else None
    answer = {"kind": draft.kind, "rows": draft.rows, "depth": draft.depth, "choices": choices, "draft": str(draft)}
    for name in ("tokens_per_step", "step_ms", "speedup"):
        estimate = getattr(figure, name)
        answer[name] = {"value": estimate and estimate.value, "stderr": estimate and estimate.stderr}
    return answer


def _without_origin(value: Any) -> Any:
    """A printed document without paths, hashes, times and versions."""
    if isinstance(value, dict):
        return {
            k: _without_origin(v)
            for k, v in value.items()
            if k not in ("provenance", "inputs", "schema", "path", "file")
        }
    return [_without_origin(item) for item in value] if isinstance(value, list) else value


def moves(before: Any, after: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """What moved: a sentence, and by how many standard errors; infinity where there is no error or it is no number."""
    if isinstance(before, dict) and isinstance(after, dict):
        if {"value", "stderr"} == before.keys() == after.keys():
            yield from _move(before, after, place)
            return
        for key in [*before, *(key for key in after if key not in before)]:
            where = f"{place} {key}".strip()
            if key not in before or key not in after:
                yield f"{where} {'is gone' if key in before else 'is new'}", float("inf")
            else:
                yield from moves(before[key], after[key], where)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from moves(old, new, f"{place}[{number}]")
    elif isinstance(before, float) and isinstance(after, float | int) and abs(after - before) <= SAME * abs(before):
        return
    elif before != after:
        yield f"{place}: {before} became {after}", float("inf")


def _move(before: dict[str, Any], after: dict[str, Any], place: str) -> Iterator[tuple[str, float]]:
    old, new, error = before["value"], after["value"], before["stderr"]
    if None in (old, new, error):
        yield from moves(before["value"], after["value"], place)
        return
    if abs(new - old) > SAME * abs(old):
        errors = abs(new - old) / error if error else float("inf")
        yield f"{place}: {old:.4g} ±{error:.2g} became {new:.4g}, by {errors:.2f} errors", errors
    yield from ((f"{sentence} of its error", 0.0) for sentence, _ in moves(error, after["stderr"], place))


def written(name: str) -> dict[str, Any]:
    """The answer of a case as the book has it."""
    answer: dict[str, Any] = json.loads((BOOK / f"{name}.json").read_text("utf-8"))
    return answer


def write(name: str, answer: dict[str, Any]) -> None:
    text = json.dumps(answer, indent=1, sort_keys=True, ensure_ascii=False)
    (BOOK / f"{name}.json").write_text(f"{text}\n", "utf-8")
