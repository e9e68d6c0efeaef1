"""What the marks of the report's pictures say under the pointer: the nodes of a tree, the sizes of a curve.

A picture names the element of its marks in the SVG; each mark gets a title, which the browser shows.
"""

from collections.abc import Mapping

from treeopt.records.figure import Figure
from treeopt.records.plan import Plan, PlanEntry
from treeopt.report.figures.registry import Picture
from treeopt.report.figures.tree import TreeData, node_gid
from treeopt.report.wording import pm
from treeopt.trees.tree import Choice


def titles_of(picture: Picture, plan: Plan) -> dict[str, list[str]]:
    """Id of an element of a picture -> the titles of the marks in it."""
    data = picture.data
    if isinstance(data, TreeData):
        gains = {(): 1.0, **dict(plan.entry(picture.batch_size).growth_order)}
        return {node_gid(path): [_node(data, i, gains)] for i, path in enumerate(data.tree.paths)}
    named = [series for row in data.panels for panel in row for series in panel.series if "gid" in series.look]
    return {s.look["gid"]: size_titles(plan[int(s.label)], is_part=plan.part is not None) for s in named}


def _node(data: TreeData, i: int, gains: Mapping[Choice, float]) -> str:
    path = data.tree.paths[i]
    lines = [f"path {list(path)}" if path else "root: the target's own token"]
    lines.append(f"accepted in {data.probabilities[i]:.2%} of steps")
    if data.visits is not None:
        lines.append(f"visits {data.visits[i]:,} of {data.steps:,} steps")
    if path in gains:
        lines.append(f"gain {gains[path]:+.4f} tokens per step")
    return "\n".join(lines)


def size_titles(entry: PlanEntry, *, is_part: bool) -> list[str]:
    """The sizes of an entry's curve that have a rate, as they are drawn.

    is_part : the latencies are of a part of the steps, so only ratios to plain decoding mean something
    """
    timed = [point for point in entry.curve if point.tokens_per_s]
    return [_size(point, entry, is_part) for point in sorted(timed, key=lambda point: (point.size, point.rate))]


def _size(point: Figure, entry: PlanEntry, is_part: bool) -> str:
    rate, plain = point.tokens_per_s, entry.plain.tokens_per_s
    lines = [f"size {point.size}, depth {point.depth}", f"tokens/step {point.tokens_per_step:.3f}"]
    if point.size == entry.chosen.size and not entry.draft.topk:
        lines[0] += "; chosen"
    elif point.size in entry.tied_sizes:
        lines[0] += "; tied: as good, inside the noise"
    if not is_part:
        lines += [f"step ms {pm(point.step_ms, 3)}", f"tokens/s {rate:,.1f}"]
    if rate and plain:
        lines.append(f"over plain {rate / plain:.2f}")
    return "\n".join(lines)
