"""The picture of a tree: where its nodes stand, and how often each is accepted.

The root is at the left; every parent stands beside its likeliest child, so that decoding mostly runs along the top. Every
leaf has a row of its own, which leaves room for numbers, and which a phone shows without scrolling sideways.

n nodes of the tree
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

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

INCHES = (0.15, 0.3)  # of a leaf's row, in a large and in a small tree
COLUMN, MARGIN = 0.45, 0.5  # inches of a depth at least; of what stands at the left of the root


@dataclass(frozen=True, eq=False)
class TreeData:
    """A tree, laid out, with the probability that each node is accepted in a step.

    places        : (n,)  row of each node, from the top; its column is its depth
    probabilities : (n,)  steps in which the node is accepted / steps; 1 for the root
    visits        : (n,)  steps in which the node was accepted; None where they were not counted
    guesser       : what guesses at each depth, head or depth

    The probabilities add up to a little more than the tokens per step: a step that accepts the last token
    of an answer has no next root to emit.
    """

    tree: Tree
    places: NDArray[np.float64]
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
    return TreeData(
        tree, places(tree, probabilities), probabilities, rate, visits, steps, style.about(about, said), who
    )


def places(tree: Tree, probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n,) row of every node: that of its likeliest child; of a leaf the one below the leaf before it.

    >>> places(Tree.from_choices([[0], [1], [1, 0], [1, 1]]), np.array([1, 0.2, 0.6, 0.3, 0.1])).tolist()
    [0.0, 2.0, 0.0, 0.0, 1.0]
    """
    children: dict[int, list[int]] = {node: [] for node in range(len(tree))}
    for node in sorted(range(1, len(tree)), key=lambda node: (-probabilities[node], tree.ranks[node])):
        children[int(tree.parents[node])].append(node)
    rows, leaves, ahead = np.zeros(len(tree)), 0, [0]
    while ahead:
        node = ahead.pop()
        rows[node] = leaves
        ahead += reversed(children[node])
        leaves += not children[node]
    return read_only(rows, np.float64)


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
    from matplotlib.collections import LineCollection

    tree, leaves = data.tree, float(data.places.max()) + 1
    inches = float(np.clip(3.0 / leaves, *INCHES))
    figure = style.blank(max(style.SIZE_INCHES[0], MARGIN + COLUMN * (1 + tree.depth)), 1.0 + inches * (leaves + 1))
    axes = figure.add_subplot()
    points = np.c_[tree.depths.astype(float), data.places]
    edges = np.stack([points[tree.parents[1:]], points[1:]], 1)
    thick = 0.3 + 3.5 * np.sqrt(data.probabilities[1:])
    axes.add_collection(LineCollection(list(edges), linewidths=thick.tolist(), colors="#B5B5B5", zorder=1))
    _draw_nodes(axes, data, 50 * inches)
    axes.set(xlim=(-0.3, max(tree.depth, 1) + 0.8), ylim=(leaves - 0.3, -0.8))
    axes.set_xticks(range(tree.depth + 1), ["root", *map(str, range(1, tree.depth + 1))])
    axes.set_xlabel("depth (= head that guesses)" if data.guesser == "head" else "depth")
    axes.yaxis.set_visible(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    title, meaning = "Do not speculate: one row, no guess", None
    if len(tree) > 1:
        title = f"{len(tree)} rows, depth {tree.depth}, widths {' '.join(map(str, tree.widths()))}"
        meaning = "in a node its rank, beside it the share of steps that accept it"
    rate = f"{data.tokens_per_step:.2f} tokens per step"
    style.heading(figure, title, style.sentence(rate, data.caption, meaning))
    return figure


def _draw_nodes(axes: Axes, data: TreeData, diameter: float) -> None:
    """One element for each node, which a page gives its title, with its rank in it and its share beside it."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm

    shade = ScalarMappable(PowerNorm(0.5, 0.0, 1.0), style.SEQUENTIAL)
    size = max(0.5 * diameter, 4.5)
    for path, row, share in zip(data.tree.paths, data.places.tolist(), data.probabilities.tolist(), strict=True):
        colour = shade.to_rgba(share)
        look: style.Look = {"marker": "o" if path else "s", "markersize": diameter, "markerfacecolor": colour}
        look |= {"markeredgecolor": "#666666", "markeredgewidth": 0.4, "zorder": 2}
        axes.plot(len(path), row, gid=node_gid(path), **look)
        if path:
            ink = "white" if np.dot(colour[:3], (0.299, 0.587, 0.114)) < 0.55 else "black"
            axes.text(len(path), row, str(path[-1]), size=size, color=ink, ha="center", va="center_baseline", zorder=3)
            beside: style.Look = {
                "xytext": (0.6 * diameter, 1.0),
                "textcoords": "offset points",
                "va": "bottom",
                "size": size,
            }
            axes.annotate(f"{share:.1%}", (len(path), row), color="#333333", **beside)
