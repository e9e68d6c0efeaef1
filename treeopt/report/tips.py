"""What the marks of the report's pictures say under the pointer: the nodes of a tree, the sizes of a curve.

A picture names the element of its marks in the SVG; templates/report.js writes what each of them says, as text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from treeopt.records.figure import Figure
from treeopt.records.plan import Plan, PlanEntry
from treeopt.report.figures.registry import Picture
from treeopt.report.figures.tree import TreeData, node_gid
from treeopt.report.wording import pm
from treeopt.trees.tree import Choice

Texts = list[tuple[str, str]]


@dataclass(frozen=True)
class Tip:
    """What a mark says.

    rows     : (name, value)
    examples : (text that came before, accepted guesses)
    above    : the element of the mark above it
    """

    title: str
    rows: Texts
    examples: Texts = field(default_factory=list)
    above: str = ""


def tips_of(
    shown: Sequence[tuple[Picture, str]], plan: Plan, examples: Mapping[Choice, Texts]
) -> dict[str, list[dict[str, object]]]:
    """What the marks of pictures say, by the element that they are in, JSON-ready.

    shown    : with the prefix of the picture's elements in the page
    examples : texts by path
    """
    found = [_of_picture(picture, prefix, plan, examples) for picture, prefix in shown]
    return {gid: list(map(asdict, tips)) for each in found for gid, tips in each.items()}


def _of_picture(picture: Picture, prefix: str, plan: Plan, examples: Mapping[Choice, Texts]) -> dict[str, list[Tip]]:
    data = picture.data
    if isinstance(data, TreeData):
        gains = {(): 1.0, **dict(plan.entry(picture.batch_size).growth_order)}
        nodes = enumerate(data.tree.paths)
        return {prefix + node_gid(path): [_node(data, i, prefix, gains, examples)] for i, path in nodes}
    named = [one for row in data.panels for panel in row for one in panel.series if "gid" in one.look]
    return {prefix + one.look["gid"]: size_tips(plan[int(one.label)], is_part=plan.part is not None) for one in named}


def _node(data: TreeData, i: int, prefix: str, gains: Mapping[Choice, float], examples: Mapping[Choice, Texts]) -> Tip:
    path, rows = data.tree.paths[i], [("accepted in", f"{data.probabilities[i]:.2%} of steps")]
    rows += [] if data.visits is None else [("visits", f"{data.visits[i]:,} of {data.steps:,} steps")]
    rows += [("gain", f"{gains[path]:+.4f} tokens per step")] if path in gains else []
    title = f"path {list(path)}" if path else "root: the target's own token"
    return Tip(title, rows, examples.get(path, []), prefix + node_gid(path[:-1]) if path else "")


def size_tips(entry: PlanEntry, *, is_part: bool) -> list[Tip]:
    """The sizes of an entry's curve that have a rate; of a part of the steps ratios to plain decoding alone mean something."""
    found = []
    for point in sorted(
        (p for p in entry.curve if p.tokens_per_s), key=lambda p: (p.size, p.rate)
    ):  # as they are drawn
        said = "; tied: as good, inside the noise" if point.size in entry.tied_sizes else ""
        said = "; chosen" if point.size == entry.chosen.size and not entry.draft.topk else said
        found.append(
            Tip(f"size {point.size}, depth {point.depth}{said}", _rates(point, entry.plain.tokens_per_s, is_part))
        )
    return found


def _rates(point: Figure, plain: float | None, is_part: bool) -> Texts:
    rate, rows = point.tokens_per_s, [("tokens/step", f"{point.tokens_per_step:.3f}")]
    if not is_part:
        rows += [("step ms", pm(point.step_ms, None, 3)), ("tokens/s", f"{rate:,.1f}")]
    return [*rows, ("over plain", f"{rate / plain:.2f}")] if rate and plain else rows
