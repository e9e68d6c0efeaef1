"""The report: one HTML file with the tables, the pictures, the engines' files and where it all comes from.

What is shown is computed here as small records; templates/report.html.j2 lays it out and escapes every
text. The page loads nothing, and its own policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from treeopt import __version__
from treeopt.errors import OutOfRange, TreeoptError
from treeopt.export.write import export_plan, runners
from treeopt.files import storage, writing
from treeopt.files.shell import command_line, printable
from treeopt.records.benchmark import Benchmark
from treeopt.records.expected import GroupFigures
from treeopt.records.inputs import made_from, not_a_check, timed_elsewhere
from treeopt.records.origins import Drafter
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.rules import option_of, rule_of
from treeopt.records.rundir import RunDirectory, maker
from treeopt.report import bench_table
from treeopt.report.bench_table import about_rule, group_rows, has_one_text, text_price
from treeopt.report.canvas import Mark, curve_canvas, tree_canvas
from treeopt.report.dynamic_table import KINDS, KINDS_NOTE, kind_rows
from treeopt.report.figures import FIGURES, Picture, pictures, svg_element
from treeopt.report.figures.registry import Inputs
from treeopt.report.plan_table import certainty, mixture, plan_rows, price, schedule
from treeopt.report.verdict import doubts, entry_doubts, measured_ties, speedup_over
from treeopt.report.wording import count, pm
from treeopt.trees.tree import Choice

INTERACTIVE = ("tree", "throughput")  # figures that the page draws itself
SHOWN = ("source", "sequences", "positions", "target_agreement", "prompts", "max_new_tokens", "measures", "peak_bytes")
UNSAID = (
    "schema",
    "entries",
    "schedule",
    "inputs",
    "provenance",
    "constraint",
    "total",
    "error_between",
    "tests_between",
)
BENCH_NOTES = ("prompts", "max_new_tokens", "inputs", "loop_share", "skipped", "provenance")


@dataclass(frozen=True)
class Example:
    """Real texts in which a path was accepted: (what came before, accepted guesses)."""

    path: Choice
    texts: list[tuple[str, str]]


@dataclass(frozen=True)
class FileNotes:
    """What a file says beside its figures."""

    examples: list[Example] | None = None
    skipped: list[dict[str, Any]] | None = None
    inputs: dict[str, str] | None = None
    provenance: dict[str, Any] | None = None
    answers: dict[str, Any] | None = None
    loop_share: float | None = None


class Origins:
    """Where the report's figures come from, file by file.

    notes   : file -> what it says beside its figures
    records : file -> {what: value}, for the table of origins
    """

    def __init__(self) -> None:
        self.notes: dict[str, FileNotes] = {}
        self.records: dict[str, dict[str, Any]] = {}

    def add(self, file: Path, info: Mapping[str, Any], **more: Any) -> None:
        """Add a file that was read; ``info`` is what it holds beside its figures."""
        self.notes[file.name] = notes = storage.typed(FileNotes, info, file)
        record = {**(notes.provenance or {}), **{key: info.get(key) for key in SHOWN}, **more}
        if isinstance(rule := record.get("acceptance"), Mapping):
            record["acceptance"] = option_of(rule)
        if notes.inputs:
            record["made from"] = {name: f"sha256 {sha256[:12]}" for name, sha256 in notes.inputs.items()}
        if notes.answers:
            record["answers"] = _answers(notes.answers)
        if notes.loop_share is not None:
            record["ended in a loop"] = f"{notes.loop_share:.0%} of the answers, cut there"
        self.records[file.name] = record

    def add_bench(self, file: Path, bench: Benchmark) -> None:
        """The same of a benchmark."""
        info = {name: getattr(bench, name) for name in BENCH_NOTES}
        self.add(file, info, dtype=bench.dtype, rounds=bench.rounds)

    def examples(self) -> dict[Choice, list[tuple[str, str]]]:
        """Path -> real texts in which it was accepted."""
        return {example.path: example.texts for notes in self.notes.values() for example in notes.examples or ()}

    def skipped(self) -> list[str]:
        """Prompts and turns that were left out, each once."""
        return list(dict.fromkeys(_text(row) for notes in self.notes.values() for row in notes.skipped or ()))


def write_report(
    run: RunDirectory, *, hint: Callable[[str], object] = str, drawn: Sequence[Picture | str] | None = None
) -> Path:
    """Write ``report.html`` from whatever files the run has, and return its path.

    hint  : gets a sentence on everything that is missing, with the command that makes it
    drawn : pictures of this run that need not be drawn again

    Raises InvalidInput where the run has no plan.
    """
    plan, inputs, origins = run.read_plan(), Inputs(run), Origins()
    try:
        file = run.calibration if run.calibration.exists() else run.path / "calibration"
        origins.add(file, inputs.calibration.meta)
        drafter = plan.drafter or Drafter()
        if not drafter.get("num_heads"):
            plan = replace(plan, drafter={**drafter, "num_heads": inputs.calibration.num_heads})
    except OutOfRange:
        pass  # what the plan was made from is not at hand
    if run.profile.exists():
        origins.add(run.profile, inputs.profile.info, runtime=inputs.profile.runtime)
    searched = {key: value for key, value in plan.document().items() if key not in UNSAID}
    about = {"inputs": plan.inputs, "provenance": plan.provenance}
    origins.add(run.plan, about, **searched, search_limits=plan.document()["constraint"])
    sections = [_section(i, plan, inputs, origins) for i in range(len(plan.entries))]
    engines = [_engine(file, run, plan, origins) for file in run.engine_benches()]
    origin, rule = origin_rows(origins.records), rule_of(plan.acceptance)
    old = _stale(run, origins.notes)
    if drawn is None:
        drawn = list(pictures(run, names=[name for name in FIGURES if name not in INTERACTIVE]))
    shown = [p for p in drawn if isinstance(p, Picture) and p.figure.name not in INTERACTIVE]
    page = render(
        plan=plan,
        plan_rows=plan_rows(plan),
        kinds=(KINDS, kind_rows(plan), KINDS_NOTE),
        about_plan=[said for said in (mixture(plan, hint=False), price(plan), schedule(plan)) if said],
        sections=sections,
        engines=engines,
        origin=origin,
        stale=[*old, *map(not_a_check, sorted({s["elsewhere"] for s in sections} - {""}))],
        against=doubts(plan) if plan.mix else [],
        about_rule=about_rule(plan.acceptance),
        one_text=has_one_text(plan.acceptance),
        rule=rule,
        asked="" if rule == "greedy" else option_of(plan.acceptance or {}),
        subject={key: ", ".join(value for value, _ in values) for key, values in origin},
        pictures=[(p, svg_element(p.svg, f"figure-{i}-")) for i, p in enumerate(shown)],
        skipped=origins.skipped(),
        marks=[m for s in sections for c in (s["tree"], s["curve"]) if c is not None for m in c.marks],
    )
    writing.write_text(run.report, page)
    for said, command in old.items():
        hint(f"{said} Make it again with: {command}")
    for missing in filter(None, [*(s["missing"] for s in sections), *(p for p in drawn if isinstance(p, str))]):
        hint(missing)
    return run.report


def _section(i: int, plan: Plan, inputs: Inputs, origins: Origins) -> dict[str, Any]:
    """What the template shows of an entry; its benchmark is added to the origins."""
    run, entry = inputs.run, plan.entries[i]
    bench, missing = None, None
    try:
        bench, own = inputs.bench(entry.batch_size), run.bench_of(entry.batch_size)
        origins.add_bench(own if own.exists() else run.bench, bench)
    except OutOfRange as reason:
        missing = str(reason)
    elsewhere = timed_elsewhere(run, plan, bench) if bench else ""
    return {
        "entry": entry,
        "bench": bench,
        "elsewhere": elsewhere,
        "missing": missing,
        "speedup": speedup_over(bench, "plain") if bench else None,
        "doubts": entry_doubts(plan, entry, None if elsewhere else bench),
        "ties": measured_ties(bench) if bench else [],
        "price": text_price(plan.acceptance, bench),
        "tree": tree_canvas(inputs, entry, origins.examples(), f"tree-{i}"),
        "curve": curve_canvas(entry, f"curve-{i}"),
        "groups": _groups(entry, bench),
        "exports": list(_exports(run, plan, entry)),
    }


def _engine(file: Path, run: RunDirectory, plan: Plan, origins: Origins) -> dict[str, Any]:
    """What the template shows of a benchmark by another runtime, and what its figures lack."""
    bench = Benchmark.load(file)
    origins.add_bench(file, bench)
    where = timed_elsewhere(run, plan, bench)
    said = (bench.about_engine, not_a_check(where, bench.engine) if where else "")
    return {"bench": bench, "notes": [*filter(None, said)]}


def render(*, marks: list[Mark], **content: Any) -> str:
    """The page: every text escaped by the template; what marks say goes to the script as JSON."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    folder = resources.files("treeopt.report") / "templates"
    style, script = ((folder / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=PackageLoader("treeopt.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["pm"] = pm
    environment.globals.update(certainty=certainty, bench_table=bench_table, count=count)
    page = environment.get_template("report.html.j2").render(
        tips={m.id: {"title": m.title, "rows": m.rows, "examples": m.examples} for m in marks},
        style=Markup(style),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        svg=Markup,
        version=__version__,
        **content,
    )
    return printable(page)


def origin_rows(records: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(what, [(value, files)]): each known value once, with the files that say so where they differ.

    >>> origin_rows({"a.json": {"dtype": "float32", "seed": 0}, "b.json": {"dtype": "float16", "seed": None}})
    [('dtype', [('float32', 'a.json'), ('float16', 'b.json')]), ('seed', [('0', '')])]
    """
    rows = []
    for key in dict.fromkeys(key for record in records.values() for key in record):
        values: dict[str, list[str]] = {}
        for file, record in records.items():
            if record.get(key) not in (None, {}, []):
                values.setdefault(_text(record[key]), []).append(file)
        if values:
            alone = len(values) == 1 and key != "command"
            said = [(value, "" if alone else ", ".join(files)) for value, files in values.items()]
            rows.append((key.replace("_", " "), said))
    return rows


def _answers(answers: Mapping[str, Any]) -> str:
    """How the answers of a calibration came about."""
    if not answers.get("given"):
        return "decoded by the target"
    estimate, sampled = ("an estimate for greedy decoding", f"sampled at temperature {answers.get('temperature')}")
    return f"given with the prompts: {estimate if answers.get('is_estimate') else sampled}"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{str(key).replace('_', ' ')} {_text(v)}" for key, v in value.items() if v is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _stale(run: RunDirectory, notes: Mapping[str, FileNotes]) -> dict[str, str]:
    """A sentence on each plan or benchmark that was made from others than are here now, and the command to run again."""
    found: dict[str, str] = {}
    for file, this in notes.items():
        if file == run.plan.name or file.startswith(run.bench.stem):
            found |= dict.fromkeys(made_from(run, run.path / file, this.inputs), run.command(*maker(file)))
    return found


def _groups(entry: PlanEntry, bench: Benchmark | None) -> list[list[str]]:
    """The chosen tree on each group of prompts, predicted and, where the benchmark has it, measured."""
    chosen = bench if bench and "chosen" in {c.name for c in bench.contenders} else None
    rows = []
    measured = dict(zip(chosen.groups, (row[1:] for row in group_rows(chosen)), strict=True)) if chosen else {}
    for name in dict.fromkeys([*entry.groups, *(chosen.groups if chosen else [])]):
        of = entry.groups.get(name, GroupFigures())
        rates = pm(of.tokens_per_step, of.tokens_per_step_stderr), pm(of.speedup, _speedup_stderr(of, entry))
        rows.append([name or "(no group)", *rates, *(measured.get(name, ["–"] * 4) if chosen else [])])
    return rows


def _speedup_stderr(of: GroupFigures, entry: PlanEntry) -> float | None:
    """Of a group's predicted speedup: tokens per step vary with its prompts, and the step with the rounds of timing."""
    if not (of.speedup and of.tokens_per_step and of.tokens_per_step_stderr is not None):
        return None
    of_step = (entry.step_ms_stderr or 0.0) / (entry.step_ms or 1.0)
    return of.speedup * math.hypot(of.tokens_per_step_stderr / of.tokens_per_step, of_step)


def _exports(run: RunDirectory, plan: Plan, entry: PlanEntry) -> Iterator[dict[str, Any]]:
    """The files of each engine that can run the drafter; None for one that does not take the tree."""
    for name in runners((plan.drafter or {}).get("kind")):
        words = ["treeopt", "export", "--to", name, "--run", str(run.path)]
        words += ["--batch-size", str(entry.batch_size)] if len(plan.entries) > 1 else []
        export: dict[str, Any] = {"engine": name, "command": command_line(*words), "made": None}
        with suppress(TreeoptError):  # the command says why
            export["made"] = export_plan(plan, name, batch_size=entry.batch_size)
        yield export
