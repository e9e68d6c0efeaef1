"""What `gpu.py` measured, as shipped profiles with their rows in the table, and as docs/gpu.md."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from treeopt.files import storage
from treeopt.files.places import folder_name
from treeopt.files.writing import write_text
from treeopt.latency.hardware import device_of, shape_of
from treeopt.latency.measurements import median_latency, paired_latency
from treeopt.latency.roofline import Step, step_ms
from treeopt.records.profile import LatencyProfile, StepTiming

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("eager", "graphs")
Figures = list[dict[str, Any]]


def write_page(measured: Path, root: Path) -> None:
    """The profiles, their table, the page and its place in the navigation, below ``root``; nothing where nothing was measured."""
    known: dict[str, Figures] = {file.stem: storage.load_json(file) for file in sorted(measured.glob("*.json"))}
    profiles = {}
    for file in sorted(measured.glob("*/profile.json")):
        shape, _, way = file.parent.name.rpartition("-")
        roofs = next(figure for figure in known.get(shape, []) if figure.get("kind") == "roofs")
        profiles[shape, way] = (
            f"{shape}--{folder_name(roofs['device']).lower()}-bfloat16-{way}",
            LatencyProfile.load(file),
            roofs,
        )
    if not profiles:
        return
    rows = [write_profile(root, name, profile) for name, profile, _ in profiles.values()]
    lines = (ROOT / "profiles" / "README.md").read_text("utf-8").split("\n")
    names = tuple(row.split(" | ")[0] for row in rows)
    lines = [line for line in lines if not line.startswith(names)]
    last = max(n for n, line in enumerate(lines) if line.startswith("|"))
    write_text(root / "profiles" / "README.md", "\n".join([*lines[: last + 1], *rows, *lines[last + 1 :]]))
    write_text(root / "docs" / "gpu.md", "\n".join(page(measured, known, profiles)) + "\n")
    nav, before = (ROOT / "mkdocs.yml").read_text("utf-8"), "      - Gallery: gallery.md\n"
    if "gpu.md" not in nav:
        nav = nav.replace(before, "      - Steps on a GPU: gpu.md\n" + before)
    write_text(root / "mkdocs.yml", nav)


def failures(measured: Path) -> list[str]:
    """A sentence on every figure that is not as it should be."""
    known = [(file.stem, figure) for file in sorted(measured.glob("*.json")) for figure in storage.load_json(file)]
    names = ("model", "dtype", "way", "rows", "batch_size", "context_tokens")
    return [
        f"{part}, {', '.join(f'{name} {figure[name]}' for name in names if name in figure)}: {figure['failed'].rstrip('.')}."
        for part, figure in known
        if "failed" in figure
    ]


def tests_said(measured: Path) -> str:
    file = measured / "tests.xml"
    if not file.exists():
        return "not run"
    suite = ElementTree.parse(file).getroot().find("testsuite")
    return ", ".join(f"{suite.get(name)} {name}" for name in ("tests", "failures", "errors", "skipped"))


def write_profile(root: Path, name: str, profile: LatencyProfile) -> str:
    """Write it; its row of the table."""
    made = {**profile.info["provenance"], "command": "make gpu"}
    info = {**profile.info, "provenance": made}
    replace(profile, info=info).save(root / "profiles" / f"{name}.json")
    return f"| `{name}` | measured | {made['device']} | {made['time'][:10]} | `{made['command']}` |"


def table(titles: str, rows: Iterable[Iterable[object]]) -> list[str]:
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return (
        [f"| {titles} |", "|" + "---|" * (titles.count("|") + 1), *lines, ""]
        if lines
        else ["Nothing was measured.", ""]
    )


def page(measured: Path, known: Mapping[str, Figures], profiles: Mapping[tuple[str, str], Any]) -> list[str]:
    """The lines of docs/gpu.md."""
    _, profile, roofs = next(iter(profiles.values()))
    made = profile.info["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items() if version)
    lines = [
        "# Steps on a GPU", "",
        f"`make gpu` wrote this page and the profiles that it names, on {roofs['device']} ({made['machine']}), {made['time'][:10]}: {versions}.",
        "What was cut off is missing. Models have random weights: what a step costs depends on shapes. Of each number of rows the deepest tree is shown;",
        "the profiles have all.", "",
        f"The tests that need a GPU: {tests_said(measured)}.", "",
        "## Texts", "",
        "Answers that are those of plain decoding, one row at a time. `graphs` are whole steps replayed as CUDA graphs.", "",
    ]  # fmt: skip
    exact = [figure for figure in known.get("exactness", []) if "way" in figure]
    ways = list(dict.fromkeys(figure["way"] for figure in exact))
    cases: dict[tuple[object, ...], dict[str, dict[str, Any]]] = {}
    for figure in exact:
        case = tuple(figure[name] for name in ("model", "dtype", "rows", "batch_size"))
        cases.setdefault(case, {})[figure["way"]] = figure
    lines += table(
        f"model | dtype | rows | batch size | {' | '.join(f'equal, {way}' for way in ways)} | tokens per step",
        (
            (
                *case,
                *(f"{by_way[way]['equal']} of {by_way[way]['compared']}" if way in by_way else "–" for way in ways),
                ", ".join(dict.fromkeys(f"{figure['tokens_per_step']:.2f}" for figure in by_way.values())),
            )
            for case, by_way in cases.items()
        ),
    )
    for shape in dict.fromkeys(shape for shape, _ in profiles):
        lines += shape_lines(
            measured, shape, known, {way: found for (of, way), found in profiles.items() if of == shape}
        )
    return lines


def shape_lines(measured: Path, shape: str, known: Mapping[str, Figures], profiles: Mapping[str, Any]) -> list[str]:
    """A section: the deepest step of each size in every way beside the roofline, then memory and what went wrong."""
    roofs = next(iter(profiles.values()))[2]
    model, device = shape_of(str(measured / "configs" / f"{shape}.json"))[0], device_of(roofs["roofline"])
    ways = [way for way in WAYS if way in profiles]
    timed = {way: {key(t): t for t in (*found[1].points, *found[1].autoregressive)} for way, found in profiles.items()}

    def cells(at: tuple[int, ...]) -> list[str]:
        batch_size, context, *_ = at
        least, plain = (step_ms(model, device, step) for step in (Step(*at), Step(batch_size, context)))
        found = [f"{least:.2f}", f"{least / plain:.2f}"]
        for way in ways:
            one, reference = timed[way].get(at), timed[way].get((batch_size, context, 1, 0))
            ms = (
                (median_latency(one.step_ms) if one == reference else paired_latency(one, reference)).ms
                if one
                else None
            )
            found += ["–", "–"] if ms is None else [f"{ms:.2f}", f"{ms / median_latency(reference.step_ms).ms:.2f}"]
        return found

    figures = [f for f in known.get(shape, []) if f.get("way") in ways and f["batch_size"]]
    weights = figures[0]["weight_bytes"]
    return [
        f"## {shape}", "",
        f"In bfloat16, {weights / 1e9:.1f} GB. Roofline of {device.name}; measured were {roofs['tflops']:.3g} TFLOP/s of a product and "
        f"{roofs['tb_per_s']:.3g} TB/s of a copy. x is over the plain step of the same column. Profiles: "
        + ", ".join(f"`{profiles[way][0]}`" for way in ways) + ".", "",
        *table(
            "batch size | context | rows | depth | roofline ms | x | " + " | ".join(f"{way} ms | x" for way in ways),
            ((*at, *cells(at)) for at in deepest(set().union(*timed.values()))),
        ),
        *table(
            "batch size | context | steps | most memory | logits off by, in standard deviations",
            (
                (
                    f["batch_size"], f["context_tokens"], f["way"],
                    f["failed"] if "failed" in f else "–" if f["peak_bytes"] is None else f"{f['peak_bytes'] / 1e9:.1f} GB",
                    f"{f['difference']:.2g}" if "difference" in f else "–",
                )
                for f in figures
            ),
        ),
    ]  # fmt: skip


def deepest(steps: Collection[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Of steps (batch size, context, rows, depth) those that are the deepest with their rows, sorted."""
    return sorted({step[:3]: step for step in sorted(steps)}.values())


def key(timing: StepTiming) -> tuple[int, ...]:
    return (*timing.setting, timing.size, timing.depth)
