"""The report: one HTML file with the tables, the pictures, the engines' files and where it all comes from.

What is shown is computed here as small records; templates/report.html.j2 lays it out and escapes every
text. Drawings that answer to the pointer are Marks on a Canvas, in pixels from the upper left; the page's
script writes what a mark says, as text. The page loads nothing, and its own policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from treeopt import __version__, console, storage
from treeopt.bench_table import CONTENDERS, PUBLISHED
from treeopt.benchmark import Benchmark, Ratio
from treeopt.errors import OutOfRange, TreeoptError
from treeopt.export import export_plan, runners
from treeopt.figures import FIGURES, pictures, to_svg, tree_data
from treeopt.figures.registry import Inputs
from treeopt.figures.style import SEQUENTIAL, Z95
from treeopt.figures.tree import RAREST, columns, node_gid
from treeopt.plan import Plan, PlanEntry
from treeopt.rundir import RunDirectory
from treeopt.tree import Choice

INTERACTIVE = ("tree", "throughput")  # figures that the page draws itself
SHOWN = ("source", "sequences", "positions", "target_agreement", "prompts", "max_new_tokens", "measures",
         "peak_bytes")  # fmt: skip
COLUMN, MOST_COLUMN, TREE_WIDTH, LEVEL = 20.0, 64.0, 1040.0, 60.0  # pixels of the tree's layout


@dataclass(frozen=True)
class Mark:
    """A node of a tree or a point of a curve at (x, y), and what it says.

    rows     : (name, value)
    examples : (text that came before, accepted guesses)
    kind     : root, never (accepted), chosen, tied, or nothing
    look     : CSS custom properties with its colours
    parent   : id of the mark above it
    hit      : left end and width of the strip in which the pointer finds it
    """

    id: str
    x: float
    y: float
    title: str
    rows: list[tuple[str, str]]
    examples: list[tuple[str, str]] = field(default_factory=list)
    text: str = ""
    kind: str = ""
    look: str = ""
    parent: str | None = None
    hit: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Canvas:
    """A drawing of ``width`` x ``height`` pixels.

    lines  : (SVG path, stroke width); radius: of the marks
    across : (x, label) of the ticks below; down: (y, label) of those at the left
    plain  : y of plain decoding
    error  : x, upper and lower end of the 95 % interval of the chosen size
    shades : (look, label) of the colours
    """

    title: str
    caption: str
    width: float
    height: float
    marks: list[Mark]
    lines: list[tuple[str, float]]
    down: list[tuple[float, str]]
    across: list[tuple[float, str]] = field(default_factory=list)
    shades: list[tuple[str, str]] = field(default_factory=list)
    unit: str = ""
    radius: float = 0.0
    plain: float | None = None
    error: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class CurvePoint:
    """What is drawn of a point of a plan's curve."""

    size: int
    depth: int
    tokens_per_step: float
    step_ms: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class Example:
    """Real texts in which a path was accepted: (what came before, accepted guesses)."""

    path: tuple[int, ...]
    texts: list[tuple[str, str]]


@dataclass(frozen=True)
class Told:
    """What a file tells beside its figures."""

    examples: list[Example] | None = None
    skipped: list[dict[str, Any]] | None = None
    inputs: dict[str, str] | None = None
    provenance: dict[str, Any] | None = None
    answers: dict[str, Any] | None = None
    loop_share: float | None = None


def write_report(run: RunDirectory) -> Path:
    """Write ``report.html`` from whatever files the run has, and return its path.

    Raises InvalidInput where the run has no plan.
    """
    plan, inputs = run.read_plan(), Inputs(run)
    told: dict[str, Told] = {}
    records: dict[str, dict[str, Any]] = {}

    def add(file: Path, info: dict[str, Any], **more: Any) -> None:
        told[file.name] = this = storage.typed(Told, info, file)
        records[file.name] = {**(this.provenance or {}), **{key: info.get(key) for key in SHOWN}, **more}
        if this.answers:
            records[file.name]["answers"] = _answers(this.answers)
        if this.loop_share is not None:
            records[file.name]["ended in a loop"] = f"{this.loop_share:.0%} of the answers, cut there"

    num_heads = (plan.drafter or {}).get("num_heads")
    try:
        file = run.calibration if run.calibration.exists() else run.path / "calibration"
        add(file, inputs.calibration.info)
        num_heads = num_heads if isinstance(num_heads, int) else inputs.calibration.num_heads
    except OutOfRange:
        pass  # what the plan was made from is not at hand
    if isinstance(num_heads, int):
        plan = replace(plan, drafter={**(plan.drafter or {}), "num_heads": num_heads})
    if run.profile.exists():
        add(run.profile, inputs.profile.info, runtime=inputs.profile.runtime)
    add(run.plan, {"inputs": plan.inputs}, objective=plan.objective, constraint=plan.constraint,
        drafter=plan.drafter, acceptance=plan.acceptance, runtime=plan.runtime, inputs=plan.inputs)  # fmt: skip
    examples = {e.path: e.texts for t in told.values() for e in t.examples or ()}
    sections: list[dict[str, Any]] = []
    for i, entry in enumerate(plan.entries):
        bench, missing = None, None
        try:
            bench, own = inputs.bench(entry.batch_size), run.bench_of(entry.batch_size)
            add(own if own.exists() else run.bench, bench.info, dtype=bench.dtype, rounds=bench.rounds)
        except OutOfRange as reason:
            missing = str(reason)
        sections.append({
            "entry": entry, "bench": bench, "missing": missing,
            "speedup": _speedup(bench, "plain"), "over_published": _speedup(bench, PUBLISHED),
            "tree": _tree(inputs, entry, examples, f"tree-{i}"), "curve": _curve(run, entry, f"curve-{i}"),
            "groups": _groups(entry, bench), "exports": list(_exports(run, plan, entry)),
        })  # fmt: skip
    origin = origin_rows(records)
    drawn = list(pictures(run, names=[name for name in FIGURES if name not in INTERACTIVE]))
    page = render(
        plan=plan, sections=sections, origin=origin, stale=list(_stale(run, told)),
        subject={key: ", ".join(value for value, _ in values) for key, values in origin},
        pictures=[(p, to_svg(p.drawing, f"figure-{i}-")) for i, p in enumerate(drawn) if not isinstance(p, str)],
        left_out=[p for p in drawn if isinstance(p, str)],
        skipped=list(dict.fromkeys(_text(s) for t in told.values() for s in t.skipped or ())),
        marks=[m for s in sections for c in (s["tree"], s["curve"]) if c is not None for m in c.marks],
    )  # fmt: skip
    storage.write_text(run.report, page)
    return run.report


def render(*, marks: list[Mark], **content: Any) -> str:
    """The page: every text escaped by the template; what marks say goes to the script as JSON."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    folder = resources.files("treeopt") / "templates"
    style, script = ((folder / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(loader=PackageLoader("treeopt"), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    environment.filters["pm"] = console.pm
    environment.globals["certainty"] = console.certainty
    return environment.get_template("report.html.j2").render(
        tips={m.id: {"title": m.title, "rows": m.rows, "examples": m.examples} for m in marks},
        style=Markup(style), script=Markup(script), script_hash=f"sha256-{digest}", svg=Markup,
        contenders=CONTENDERS, version=__version__, **content,
    )  # fmt: skip


def _speedup(bench: Benchmark | None, baseline: str) -> Ratio | None:
    """Of the chosen tree, where both were measured."""
    known = {contender.name for contender in bench.contenders} if bench else set()
    return bench.speedup("chosen", baseline) if bench and {"chosen", baseline} <= known else None


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
    estimate, sampled = (
        "an estimate for greedy decoding",
        f"sampled at temperature {answers.get('temperature')}",
    )
    return f"given with the prompts: {estimate if answers.get('is_estimate') else sampled}"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')} {_text(v)}" for key, v in value.items() if v is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _stale(run: RunDirectory, told: Mapping[str, Told]) -> Iterator[str]:
    """Files that were made from others than those that are here now."""
    files = (run.trace, run.probe, run.calibration, run.profile, run.plan)
    now = {file.name: storage.sha256_of(file) for file in files if file.exists()}
    for file, this in told.items():
        command = "search" if file == run.plan.name else "bench"
        for name, sha256 in (this.inputs or {}).items():
            if now.get(name, sha256) != sha256:
                yield f"{file} was made from another {name} than the one here now: run treeopt {command} again."


def _groups(entry: PlanEntry, bench: Benchmark | None) -> list[dict[str, Any]]:
    """The chosen tree on each group of prompts: predicted and measured."""
    chosen = bench if bench and "chosen" in {c.name for c in bench.contenders} else None
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys([*entry.groups, *(chosen.groups if chosen else [])]):
        rows.append({"name": name or "(no group)", "predicted": entry.groups.get(name, {}), "answers": 0})
        if chosen:
            rows[-1]["rate"], rows[-1]["answers"] = chosen.tokens_per_step("chosen", name)
            rows[-1]["speedup"] = chosen.speedup("chosen", group=name)
    return rows


def _exports(run: RunDirectory, plan: Plan, entry: PlanEntry) -> Iterator[dict[str, Any]]:
    """The files of each engine that can run the drafter, or why there are none."""
    for name in runners((plan.drafter or {}).get("kind")):
        words = ["treeopt", "export", "--to", name, "--run", str(run.path)]
        words += ["--batch-size", str(entry.batch_size)] if len(plan.entries) > 1 else []
        export: dict[str, Any] = {"engine": name, "command": shlex.join(words), "refused": None}
        try:
            export["made"] = export_plan(plan, name, batch_size=entry.batch_size)
        except TreeoptError as reason:
            export["refused"] = str(reason)
        yield export


# Drawings


def _tree(
    inputs: Inputs, entry: PlanEntry, examples: Mapping[Choice, list[tuple[str, str]]], prefix: str
) -> Canvas | None:
    """The chosen tree, its nodes shaded by how often they are accepted; None for a lone root."""
    tree = entry.tree
    if len(tree) == 1:
        return None
    order = storage.typed(list[tuple[Choice, float]], entry.growth_order, inputs.run.plan)
    gains: dict[Choice, float] = {(): 1.0, **dict(order)}
    data, shades = None, []
    try:
        data = tree_data(tree, inputs.source, in_sample=inputs.grown_on is not None)
        places, caption = data.columns, data.caption
        shades = [(_shade(p), f"{p:g}") for p in (RAREST, 0.01, 0.1, 1.0)]
    except OutOfRange as reason:
        places = columns(tree, np.array([gains.get(path, 0.0) for path in tree.paths]))
        caption = f"How often nodes are accepted is not known. {reason}"
    span = float(places.max()) + 1
    step = min(max(COLUMN, TREE_WIDTH / span), MOST_COLUMN)
    x, y = (80 + step * places).tolist(), (30 + LEVEL * tree.depths).tolist()
    marks, lines = [], []
    for i, path in enumerate(tree.paths):
        name, parent = f"{prefix}-{node_gid(path)}", int(tree.parents[i])
        rows: list[tuple[str, str]] = []
        look, kind, thick = "", "" if path else "root", 1.0
        if data is not None:
            p = float(data.probabilities[i])
            rows.append(("accepted in", f"{p:.2%} of steps"))
            look, kind, thick = _shade(p), kind if p else "never", 0.6 + 5 * math.sqrt(p)
            if data.visits is not None:
                rows.append(("visits", f"{data.visits[i]:,} of {data.steps:,} steps"))
        if path in gains:
            rows.append(("gain", f"{gains[path]:+.4f} tokens per step"))
        marks.append(Mark(
            name, x[i], y[i], f"path {list(path)}" if path else "root: the target's own token", rows,
            examples.get(path, []), str(path[-1]) if path else "", kind, look,
            parent=f"{prefix}-{node_gid(path[:-1])}" if path else None,
        ))  # fmt: skip
        if path:
            middle = (y[parent] + y[i]) / 2
            bend = f"C{x[parent]:.1f} {middle} {x[i]:.1f} {middle} {x[i]:.1f} {y[i]}"
            lines.append((f"M{x[parent]:.1f} {y[parent]}{bend}", thick))
    marks.sort(key=lambda mark: (mark.y, mark.x))  # as the eye goes
    depths = [(30 + LEVEL * d, f"depth {d}" if d else "root") for d in range(tree.depth + 1)]
    shape = f"{len(tree)} rows, depth {tree.depth}, widths {' '.join(map(str, tree.widths()))}"
    return Canvas(f"The chosen tree: {shape}", caption, 110 + step * (span - 1), 60 + LEVEL * tree.depth,
                  marks, lines, depths, shades=shades, radius=min(11, 0.43 * step))  # fmt: skip


def _shade(p: float) -> str:
    """Colours of a probability on a light and on a dark page, each with that of the text on it."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    level = min(max(1 - math.log(max(p, RAREST)) / math.log(RAREST), 0.0), 1.0)
    found = []
    for name, place in (("light", level), ("dark", 1 - level)):
        colour = colormaps[SEQUENTIAL](place)[:3]
        ink = "#fff" if np.dot(np.power(colour, 2.2), (0.2126, 0.7152, 0.0722)) < 0.18 else "#000"
        found.append(f"--{name}:{to_hex(colour)};--{name}-ink:{ink}")
    return ";".join(found)


def _curve(run: RunDirectory, entry: PlanEntry, prefix: str) -> Canvas | None:
    """Throughput over size, or tokens per step where no latency was measured; None without a curve."""
    from matplotlib.ticker import MaxNLocator

    curve = storage.typed(list[CurvePoint], entry.curve, run.plan)
    timed = [point for point in curve if point.tokens_per_s]
    points = [p for _, p in sorted({p.size: p for p in timed or curve if p.size >= 1}.items())]
    if len(points) < 2:
        return None
    values = [p.tokens_per_s or p.tokens_per_step for p in points]
    spread = Z95 * ((entry.tokens_per_s_stderr if timed else entry.tokens_per_step_stderr) or 0.0)
    left, right, top, bottom = 76.0, 840.0, 16.0, 274.0  # as the template has them
    down = list(MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(0, max(*values, 1e-9) + spread))
    logs = [math.log2(p.size) for p in points]
    scale = (right - left) / ((logs[-1] - logs[0]) or 1.0)

    def at(value: float) -> float:
        return float(bottom - (bottom - top) * value / down[-1])

    x = [left + scale * (log - logs[0]) for log in logs]
    edges = [left - 6, *((a + b) / 2 for a, b in itertools.pairwise(x)), right + 6]
    plain = values[0] if points[0].size == 1 else None
    marks, error = [], None
    for i, (point, value) in enumerate(zip(points, values, strict=True)):
        kind = "tied" if point.size in entry.tied_sizes else ""
        if point.size == entry.size:
            kind, error = "chosen", (x[i], at(value + spread), at(value - spread))
        rows = [("tokens/step", f"{point.tokens_per_step:.3f}")]
        if point.step_ms is not None:
            rows.append(("step ms", f"{point.step_ms:.3f}"))
        if timed:
            rows += [
                ("tokens/s", f"{value:,.1f}"),
                *([("over plain", f"{value / plain:.2f}")] if plain else []),
            ]
        said = {"chosen": "; chosen", "tied": "; as good, inside the noise", "": ""}[kind]
        marks.append(Mark(
            f"{prefix}-size-{point.size}", x[i], at(value), f"size {point.size}, depth {point.depth}{said}",
            rows, kind=kind, hit=(edges[i], edges[i + 1] - edges[i]),
        ))  # fmt: skip
    path = "M" + "L".join(f"{mark.x:.1f} {mark.y:.1f}" for mark in marks)
    powers = range(math.ceil(logs[0]), math.floor(logs[-1]) + 1)
    across = [(left + scale * (power - logs[0]), str(2**power)) for power in powers]
    title = f"Predicted {'throughput' if timed else 'tokens per step'} of the best tree of every size"
    signs = ["★ chosen" + (", with its 95 % interval" if spread else "")]
    signs += ["○ as good, inside the noise"] if any(m.kind == "tied" for m in marks) else []
    signs += ["dashed: plain decoding"] if plain else []
    return Canvas(title, " · ".join(signs), 860, 320, marks, [(path, 2.0)],
                  [(at(v), f"{v:,.6g}") for v in down], across,
                  unit="tokens per second" if timed else "tokens per step",
                  plain=at(plain) if plain else None, error=error if spread else None)  # fmt: skip
