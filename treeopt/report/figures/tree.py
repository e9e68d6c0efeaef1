"""The picture of a tree: where its nodes stand, and how often each is accepted.

The root is at the top; every parent stands over its first child and the most probable child comes
first, so that decoding mostly runs down the left side. Subtrees are pushed together as far as they go
without overlapping at any depth.

n nodes of the tree
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.grow import product_values
from treeopt.growth.source import source_of
from treeopt.records.calibration import ENGINE_LOG
from treeopt.records.drafters import depth_noun
from treeopt.records.inputs import Accuracies
from treeopt.report.figures import style
from treeopt.report.wording import count
from treeopt.trees.tree import Choice, IntArray, Tree, read_only

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARGIN, MOST_WIDTH = 1.1, 14.0  # inches left for axis and colour bar; of the widest figure
COLUMN = 0.12  # inches that a column of the layout has at least, up to the widest figure
LEAST_FONT = 4.0  # points; smaller ranks are left out
RAREST = 1e-3  # least probability that has a colour of its own; one scale for all trees
BETWEEN = 0.35  # columns of extra room between two subtrees


@dataclass(frozen=True, eq=False)
class TreeData:
    """A tree, laid out, with the probability that each node is accepted in a step.

    columns       : (n,)  horizontal place; the vertical one is ``tree.depths``
    probabilities : (n,)  steps in which the node is accepted / steps; 1 for the root
    visits        : (n,)  steps in which the node was accepted; None where they were not counted
    guesser       : what guesses at each depth, head or depth

    The probabilities add up to a little more than the tokens per step: a step that accepts the last token
    of an answer has no next root to emit.
    """

    tree: Tree
    columns: NDArray[np.float64]
    probabilities: NDArray[np.float64]
    tokens_per_step: float
    visits: IntArray | None
    steps: int | None
    caption: str
    guesser: str


def tree_data(tree: Tree, record: Accuracies, *, in_sample: bool = False) -> TreeData:
    """Replay the trace or the probe with the tree; from a calibration, the products of its marginals.

    ``in_sample`` says that the tree was grown on this trace, which the caption then tells.
    Raises OutOfRange for a calibration that lacks the tree's heads or ranks.
    """
    source = source_of(record)
    about, who = source.meta, depth_noun(source.meta.get("drafter"))
    visits, steps = source.visits(tree), None
    if visits is not None and source.answers is not None:
        steps = int(visits[0])
        probabilities = visits / steps if steps else np.eye(len(tree))[0]
        said = f"{'replay' if source.is_exact else source.kind} of {count(source.answers.num_sequences, 'sequence')}"
        said += f", {count(steps, 'step')}" + (", in-sample" if in_sample else "")
        rate = source.rates(tree).tokens_per_step
    elif source.calibration is None or not source.knows(tree):
        raise OutOfRange(
            f"The calibration has {source.num_heads} heads and {source.num_ranks} ranks, but the tree needs "
            f"{tree.depth} and {1 + tree.max_rank}."
        )
    else:
        probabilities = product_values(source.calibration.accept, tree.paths)
        said = f"products of accuracies by {who} over {count(*source.observed)}, as if {who}s erred independently"
        if about.get("source") == ENGINE_LOG:
            said = f"survival over {count(*source.observed)} that an engine counted"
        rate = float(probabilities.sum())
    places = columns(tree, probabilities)
    return TreeData(tree, places, probabilities, rate, visits, steps, style.about(about, said), who)


def columns(tree: Tree, probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n,) horizontal place of every node; nodes of one depth are at least 1 apart.

    >>> columns(Tree.from_choices([[0], [1], [1, 0], [1, 1]]), np.array([1, 0.2, 0.6, 0.3, 0.1])).tolist()
    [0.0, 1.0, 0.0, 0.0, 1.0]
    """
    shift = np.zeros(len(tree))  # from the parent
    left: dict[int, list[float]] = {}  # outline of the subtree, depth by depth
    right: dict[int, list[float]] = {}
    for node in reversed(range(len(tree))):
        near: list[float] = []  # outline of the children that have their place
        far: list[float] = []
        children = np.flatnonzero(tree.parents[1:] == node) + 1
        for child in sorted(children.tolist(), key=lambda c: (-probabilities[c], tree.ranks[c])):
            room = [f - n for f, n in zip(far, left[child], strict=False)]
            x = max([*(r + 1.0 for r in room[:1]), *(r + 1.0 + BETWEEN for r in room[1:])], default=0.0)
            shift[child] = x
            near += [x + n for n in left[child][len(near) :]]
            far = [x + f for f in right[child]] + far[len(right[child]) :]
        left[node], right[node] = [0.0, *near], [0.0, *far]
    for node in range(1, len(tree)):
        shift[node] += shift[tree.parents[node]]
    return read_only(shift, np.float64)


def node_gid(path: Choice) -> str:
    """The id of a node's element in the SVG: node-0-2, node-root."""
    return "node-" + ("-".join(map(str, path)) or "root")


def titles_of(data: TreeData, gains: Mapping[Choice, float]) -> dict[str, str]:
    """Id of a node's element to what a browser shows under the pointer.

    gains : tokens per step that a node added when the tree was grown
    """
    titles = {}
    for path, share, i in zip(data.tree.paths, data.probabilities, range(len(data.tree)), strict=True):
        lines = [f"path {list(path)}" if path else "root: the target's own token", f"accepted in {share:.2%} of steps"]
        if data.visits is not None:
            lines.append(f"visits {data.visits[i]:,} of {data.steps:,} steps")
        if path in gains:
            lines.append(f"gain {gains[path]:+.4f} tokens per step")
        titles[node_gid(path)] = "\n".join(lines)
    return titles


@style.look()
def draw_tree(data: TreeData) -> Figure:
    """Nodes dark where they are often accepted, edges thick where decoding often goes."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LogNorm

    tree, span = data.tree, float(data.columns.max()) + 1
    figure = style.blank(min(max(style.SIZE_INCHES[0], span * COLUMN + MARGIN), MOST_WIDTH))
    axes = figure.add_subplot()
    shade = ScalarMappable(LogNorm(RAREST, 1.0, clip=True), style.SEQUENTIAL)
    places = np.c_[data.columns, tree.depths.astype(float)]
    edges = np.stack([places[tree.parents[1:]], places[1:]], 1)
    thick = 0.3 + 3.5 * np.sqrt(data.probabilities[1:])
    axes.add_collection(LineCollection(list(edges), linewidths=thick.tolist(), colors="#B5B5B5", zorder=1))
    spacing = 72 * (figure.get_figwidth() - MARGIN) / span  # points from column to column
    labelled = _draw_nodes(axes, data, shade, min(max(0.82 * spacing, 2.0), 15.0))
    axes.set(xlim=(-0.6, max(span - 0.4, 4)), ylim=(tree.depth + 0.35, -0.35))
    axes.set_yticks(range(tree.depth + 1), ["root", *map(str, range(1, tree.depth + 1))])
    axes.set_ylabel("depth (= head that guesses)" if data.guesser == "head" else "depth")
    axes.xaxis.set_visible(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.grid(visible=True, axis="y")
    if len(tree) > 1:
        bar = figure.colorbar(shade, ax=axes, fraction=0.03, pad=0.02, extend="min", format=lambda p, _: f"{p:g}")
        assert bar.solids is not None
        bar.solids.set_rasterized(False)  # a page takes no image from within an SVG
        bar.set_label("share of steps in which the node is accepted")
    title = "Do not speculate: one row, no guess"
    if len(tree) > 1:
        title = f"{len(tree)} rows, depth {tree.depth}, widths {' '.join(map(str, tree.widths()))}"
    never = "white: never accepted" if (data.probabilities == 0).any() else None
    rate = f"{data.tokens_per_step:.2f} tokens per step"
    style.heading(figure, title, style.sentence(rate, data.caption, "numbers are ranks" if labelled else None, never))
    return figure


def _draw_nodes(axes: Axes, data: TreeData, shade: Any, diameter: float) -> bool:
    """One element for each node, which a page gives its title. Returns whether ranks fit in."""
    labelled = False
    for node, path in enumerate(data.tree.paths):
        x, p = float(data.columns[node]), float(data.probabilities[node])
        colour = shade.to_rgba(p) if p else (1.0, 1.0, 1.0, 1.0)
        look: style.Look = {"marker": "o" if path else "s", "markersize": diameter, "markerfacecolor": colour}
        look |= {"markeredgecolor": "#666666", "markeredgewidth": 0.4, "zorder": 2}
        axes.plot(x, len(path), gid=node_gid(path), **look)
        label = str(path[-1]) if path else ""
        size = diameter * (0.62 if len(label) < 2 else 0.5)
        if label and size >= LEAST_FONT:
            ink = "white" if np.dot(colour[:3], (0.299, 0.587, 0.114)) < 0.55 else "black"
            axes.text(x, len(path), label, size=size, color=ink, ha="center", va="center_baseline", zorder=3)
            labelled = True
    return labelled
