"""The report: one HTML page with the tables, the pictures, the commands that deploy the plan, and where it all comes from.

What is shown is computed here as small records; templates/report.html.j2 lays it out and escapes every text. The page
loads nothing, and its own policy lets no script run.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from treeopt import __version__
from treeopt.engines.base import Names
from treeopt.engines.plans import first_taking
from treeopt.engines.registry import runners
from treeopt.errors import OutOfRange
from treeopt.files import storage, writing
from treeopt.files.shell import command_line, printable
from treeopt.records.benchmark import Benchmark
from treeopt.records.inputs import model_and_drafter, not_a_check
from treeopt.records.origins import Provenance
from treeopt.records.plan import EXACT, Plan, PlanEntry
from treeopt.records.rules import option_of
from treeopt.records.rundir import RunDirectory, maker
from treeopt.records.stale import made_from
from treeopt.report.bench_table import about_rule, bench_tables, group_table, has_one_text, text_price
from treeopt.report.figures import Picture, pictures, svg_element
from treeopt.report.figures.registry import Inputs
from treeopt.report.figures.tree import TreeData, titles_of
from treeopt.report.plan_table import certainty, kinds_table, mixture, schedule, trees_table
from treeopt.report.plan_verdict import doubts, entry_doubts, not_speculating
from treeopt.report.tables import about_answers
from treeopt.report.verdict import (
    BY_DEFAULT,
    decoding_caveats,
    over,
    pace,
    slowdown,
    speedup_over,
    timing_caveats,
    weighed,
)
from treeopt.report.wording import count, timed

SHOWN = ("source", "sequences", "positions", "prompts", "max_new_tokens", "measures", "peak_bytes")
SEARCHED = ("objective", "drafter", "acceptance", "runtime", "sample")  # what a plan says of its search
BENCH_NOTES = ("prompts", "max_new_tokens", "inputs", "loop_share", "skipped", "provenance")


@dataclass(frozen=True)
class FileNotes:
    """Provenance and other notes that a file holds beside its figures."""

    skipped: list[Mapping[str, Any]] | None = None
    inputs: dict[str, str] | None = None
    provenance: Provenance | None = None
    answers: Mapping[str, Any] | None = None
    loop_share: float | None = None


@dataclass(frozen=True)
class Sources:
    """Where the report's figures come from, file by file.

    notes   : file -> what it says beside its figures
    records : file -> {what: value}, for the table of origins
    caveats : what makes the figures of a file unsure, in sentences
    """

    notes: dict[str, FileNotes] = field(default_factory=dict)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    caveats: list[str] = field(default_factory=list)

    def add(self, file: Path, info: Mapping[str, Any], caveats: Sequence[str] = (), **more: Any) -> None:
        """Add a file that was read; ``info`` is what it holds beside its figures."""
        self.notes[file.name] = notes = storage.typed(FileNotes, storage.document(info), file)
        hashes = {name: f"sha256 {sha256[:12]}" for name, sha256 in (notes.inputs or {}).items()}
        record = {**(notes.provenance.record if notes.provenance else {}), **more, "made from": hashes}
        record |= {key: info.get(key) for key in SHOWN}
        record["answers"] = " ".join(about_answers({**info, "skipped": None}))  # which the page lists
        if isinstance(rule := record.get("acceptance"), Mapping):
            record["acceptance"] = option_of(rule)
        self.records[file.name] = record
        self.caveats.extend(f"{file.name}: {caveat}" for caveat in caveats)

    def add_bench(self, file: Path, bench: Benchmark) -> None:
        info = {name: getattr(bench, name) for name in BENCH_NOTES}
        self.add(file, info, decoding_caveats(bench), dtype=bench.dtype, rounds=bench.rounds)

    def stale(self, run: RunDirectory) -> dict[str, str]:
        """A sentence on each plan or benchmark that was made from others than are here now, and the command to run again."""
        sentences: dict[str, str] = {}
        for file, notes in self.notes.items():
            if file == run.plan.name or file.startswith(run.bench.stem):
                old = made_from(run, run.path / file, notes.inputs)
                sentences |= dict.fromkeys(old, run.command(*maker(file)))
        return sentences

    @property
    def skipped(self) -> list[str]:
        """Each prompt that was left out, once."""
        rows = [_text(row) for notes in self.notes.values() for row in notes.skipped or ()]
        return list(dict.fromkeys(rows))


@dataclass(frozen=True, kw_only=True)
class Section:
    """What the page shows of one batch size.

    missing   : which command makes its benchmark, where there is none
    elsewhere : in what its latencies (there) differ from its benchmark (here); empty if in nothing
    """

    plan: Plan
    entry: PlanEntry
    bench: Benchmark | None
    missing: str | None
    elsewhere: str

    @property
    def doubts(self) -> list[str]:
        return entry_doubts(self.plan, self.entry, None if self.elsewhere else self.bench)

    @property
    def card(self) -> tuple[str, str, str]:
        """The number of the summary, its kind, and what it means; what there is against the tree stands between them."""
        chosen, against, speedup = self.entry.chosen, self.doubts, speedup_over(self.bench) if self.bench else None
        if not self.entry.speculates:
            meaning = "The plan does not speculate." if self.plan.mix else not_speculating(self.plan, self.entry)
            return "1×", "predicted", "" if against else meaning
        kind = "lost" if against else "predicted"
        tree = f"The chosen tree ({count(chosen.size, 'row')} a step)"
        if speedup and self.bench and not self.elsewhere:
            predicted = "" if chosen.speedup is None else f"; predicted {timed(chosen.speedup)}"
            meaning = f"{tree} {pace(speedup, over(self.bench))}, measured{predicted}."
            return f"{speedup:.2f}×", "lost" if against else "measured", " ".join([meaning, *weighed(self.bench)[1]])
        if chosen.speedup is None:
            meaning = f"tokens per step with {chosen.size} rows, predicted; no step was timed."
            return f"{chosen.tokens_per_step:.2f}", kind, meaning
        beside = BY_DEFAULT if EXACT in self.entry.others else "plain decoding"
        meaning = f"{tree} is predicted to decode {timed(chosen.speedup)} times as fast as {beside}"
        meaning += f", for steps timed elsewhere, with another {self.elsewhere}." if self.elsewhere else "."
        check = "It was not measured by treeopt itself."
        if speedup:
            check = f"Decoded here it is {speedup:.2f} times as fast, which is no check of that."
        return f"{chosen.speedup:.2f}×", kind, f"{meaning} {check}"


def write_report(run: RunDirectory, *, drawn: Sequence[Picture | str] | None = None) -> tuple[Path, list[str]]:
    """Write ``report.html`` from whatever files the run has: (its path, notes).

    Notes name what is missing or stale, with the command that makes it.

    drawn : pictures of this run that need not be drawn again

    Raises InvalidInput where the run has no plan.
    """
    plan, inputs, sources = run.read_plan(), Inputs(run), Sources()
    with suppress(OutOfRange):  # what the plan was made from is not at hand
        file = run.calibration if run.calibration.exists() else run.path / "calibration"
        sources.add(file, inputs.calibration.meta)
    if run.profile.exists():
        profile = inputs.profile
        sources.add(run.profile, profile.info, timing_caveats(profile), runtime=profile.runtime)
    document = plan.document()
    searched: dict[str, Any] = {key: document[key] for key in SEARCHED if key in document}
    about = {"inputs": plan.inputs, "provenance": plan.provenance}
    sources.add(run.plan, about, **searched, search_limits=document.get("constraint"))
    sections = [_section(entry, plan, inputs, sources) for entry in plan.entries]
    engines = {file: Benchmark.load(file) for file in run.engine_benches()}
    for file, bench in engines.items():
        sources.add_bench(file, bench)
    stale = sources.stale(run)
    drawn = list(pictures(run)) if drawn is None else drawn
    shown = [picture for picture in drawn if isinstance(picture, Picture)]
    elsewhere = sorted({section.elsewhere for section in sections} - {""})
    origin = origin_rows(sources.records)
    page = render(
        plan=plan,
        about_plan=[sentence for sentence in (mixture(plan), schedule(plan)) if sentence],
        sections=sections,
        engines=[(bench, _engine_notes(inputs, bench)) for bench in engines.values()],
        origin=origin,
        stale=[*stale, *map(not_a_check, elsewhere)],
        against=doubts(plan) if plan.mix else [],
        caveats=sources.caveats,
        deployment=_deployment(run, plan, inputs, list(engines.values())),
        one_text=has_one_text(plan.acceptance),
        subject={key: ", ".join(value for value, _ in values) for key, values in origin},
        pictures=[(picture, _drawing(picture, plan, f"figure-{i}-")) for i, picture in enumerate(shown)],
        skipped=sources.skipped,
    )
    writing.write_text(run.report, page)
    notes = [f"{sentence} Make it again with: {command}" for sentence, command in stale.items()]
    notes += [section.missing for section in sections if section.missing]
    return run.report, [*notes, *(picture for picture in drawn if isinstance(picture, str))]


def _drawing(picture: Picture, plan: Plan, prefix: str) -> str:
    """The SVG element of a picture; the nodes of a tree have titles."""
    titles = dict[str, str]()
    if isinstance(picture.data, TreeData):
        titles = titles_of(picture.data, {(): 1.0, **dict(plan.entry(picture.batch_size).growth_order)})
    return svg_element(picture.svg, prefix, titles)


def _section(entry: PlanEntry, plan: Plan, inputs: Inputs, sources: Sources) -> Section:
    """What the page shows of an entry; its benchmark is added to the sources."""
    run, bench, missing, elsewhere = inputs.run, None, None, ""
    try:
        bench = inputs.bench(entry.batch_size)
    except OutOfRange as reason:
        missing = str(reason) if run.can_decode else None
    else:
        file = run.bench_of(entry.batch_size)
        sources.add_bench(file if file.exists() else run.bench, bench)
        elsewhere = inputs.elsewhere(bench)
    return Section(plan=plan, entry=entry, bench=bench, missing=missing, elsewhere=elsewhere)


def _engine_notes(inputs: Inputs, bench: Benchmark) -> list[str]:
    """Sentences on what a benchmark by another runtime does not show."""
    where = inputs.elsewhere(bench)
    return [*filter(None, (bench.about_engine, not_a_check(where) if where else ""))]


def render(**content: Any) -> str:
    """The page: every text escaped by the template."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    style = (resources.files("treeopt.report") / "templates" / "report.css").read_text(encoding="utf-8")
    loader = PackageLoader("treeopt.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    shown = (trees_table, kinds_table, bench_tables, group_table, certainty, about_rule, text_price)
    environment.globals.update({function.__name__: function for function in shown})
    page = environment.get_template("report.html.j2").render(
        style=Markup(style), svg=Markup, version=__version__, **content
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
            if record.get(key) not in (None, {}, [], ""):
                values.setdefault(_text(record[key]), []).append(file)
        alone = len(values) == 1 and key != "command"
        said = [(value, "" if alone else ", ".join(files)) for value, files in values.items()]
        rows += [(key.replace("_", " "), said)] if said else []
    return rows


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{str(key).replace('_', ' ')} {_text(v)}" for key, v in value.items() if v is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _deployment(run: RunDirectory, plan: Plan, inputs: Inputs, engines: Sequence[Benchmark]) -> tuple[str, str] | None:
    """The engine that was planned for, else the first that takes the plan, and the commands that start it with the plan.

    None where no engine takes it, or where it was measured slower than plain decoding.
    """
    benches = [*inputs.benches().values(), *(bench for bench in engines if not inputs.elsewhere(bench))]
    planned = plan.constraint.engine if plan.constraint else None
    able = [planned.name] if planned else runners((plan.drafter or {}).get("kind"))
    taken = first_taking(plan, able, Names(*model_and_drafter(plan, run)))
    if taken is None or any(map(slowdown, benches)):
        return None
    engine, written = taken
    lines = [command_line("treeopt", "export", "--to", engine, "--run", str(run.path))]
    for size, part in written.items():
        folder = run.export / engine
        if size is not None:
            lines.append(f"# Batch size {size}")
            folder /= f"batch-size-{size}"
        lines.append(part.command_in(folder))
    return engine, "\n".join(lines)
