"""How others build trees, written anew from their descriptions: what ours is compared with, and tested against.

explore_graph   Medusa, medusa/eval/gen_results.py, commit e2a5d20: greedy growth of a frontier
sequoia         Sequoia, paper, Algorithm 4: dynamic programme, an acceptance matrix by depth, numpy
sequoia_loops   Sequoia, tree_search.py, commit 0ff3ff7: the same for one vector, in loops over tensors
literal_table   Medusa, gen_results.py: hits over 16100, whatever was measured

All maximise what `treeopt.growth.grow.grow_products` does: the sum over the nodes of the product of
acceptances along their paths. Sizes count the root. Their two quirks are kept: siblings come without gaps,
and the first node is (0,).

accept : (D, R)  chance of rank r at depth d + 1
N rows · M rows of a subtree · d depth of its root · b children that it has
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Choice = tuple[int, ...]
Table = NDArray[np.float64]
LITERAL = 16100  # rows of head 1 for 805 prompts of 20 steps


def expected(accept: Table, choices: Sequence[Choice]) -> float:
    """Tokens per step of a tree by the product of acceptances, its root's token counted."""
    return 1.0 + sum(float(np.prod([accept[d, rank] for d, rank in enumerate(path)])) for path in choices)


def literal_table(hits: NDArray[Any]) -> Table:
    """(D, R) counts over the literal that assumes 805 prompts of 20 steps."""
    return np.asarray(hits) / LITERAL


def explore_graph(accept: Table, size: int, max_child: Sequence[int] | None = None) -> list[Choice]:
    """Medusa's choices for a tree of ``size`` rows, in their order of growth; fewer where the table ends.

    Every step lists the next sibling and the first child of all nodes anew and looks each up in the list of
    nodes, so N rows cost O(N^3). Where nothing is left that is worth more than nothing, the original fails.
    """
    table, widths = accept.tolist(), list(max_child or [accept.shape[1]] * len(accept))
    nodes: list[Choice] = [(0,)]
    worth: dict[Choice, float] = {}
    while len(nodes) < size - 1:
        frontier: list[Choice] = []
        for node in nodes:
            if node[-1] + 1 < widths[len(node) - 1]:
                frontier.append((*node[:-1], node[-1] + 1))
            if len(node) < len(table):
                frontier.append((*node, 0))
        best, best_worth = None, 0.0
        for path in frontier:
            if path in nodes:
                continue
            if path not in worth:
                product = 1.0
                for depth, rank in enumerate(path):
                    product *= table[depth][rank]
                worth[path] = product
            if worth[path] > best_worth:
                best, best_worth = path, worth[path]
        if best is None:
            break
        nodes.append(best)
    return nodes if size > 1 else []


def sequoia(accept: Table, size: int) -> tuple[float, list[Choice]]:
    """The best tree of exactly ``size`` rows whose siblings have no gaps: its value, and its choices.

    value[d][m, b]: most expected tokens of a subtree of m rows, its root at depth d with b children. The b-th
    child takes m - y rows of the m, the root and the children before it y: O(N^2 D R) time.
    """
    depths, ranks = accept.shape
    value = np.full((depths + 1, size + 1, ranks + 1), -np.inf)
    split = np.zeros((depths + 1, size + 1, ranks + 1), dtype=np.int64)
    value[:, 1, 0] = 1.0
    m, y = np.arange(size + 1)[:, None], np.arange(size + 1)
    rest = np.where(m >= y, m - y, 0)  # (N, N) rows left for the b-th child; 0 is none, and worth -inf
    for d in range(depths - 1, -1, -1):
        child = value[d + 1].max(1)[rest]
        for b in range(1, ranks + 1):
            with np.errstate(invalid="ignore"):  # a child that cannot be, accepted never: -inf x 0
                ways = value[d, :, b - 1] + np.where(np.isinf(child), -np.inf, accept[d, b - 1] * child)
            split[d, :, b] = ways.argmax(1)
            value[d, :, b] = ways.max(1)
    return float(value[0, size].max()), _choices(value, split, 0, size)


def _choices(value: NDArray[Any], split: NDArray[Any], depth: int, rows: int) -> list[Choice]:
    """Paths below a node at ``depth`` whose subtree has so many rows."""
    found: list[Choice] = []
    for b in range(int(value[depth, rows].argmax()), 0, -1):
        before = int(split[depth, rows, b])
        below = _choices(value, split, depth + 1, rows - before)
        found += [(b - 1,), *((b - 1, *path) for path in below)]
        rows = before
    return found


def sequoia_loops(vector: Any, size: int, depth: int) -> float:
    """The value of the best tree of ``size`` rows for one vector, in four nested loops as it was released.

    vector : tensor (R + 1,), of which entry 0 is not used · depth : most levels, root included

    The branches that the original copies beside are left out, so this takes a little less time than it does.
    """
    import torch

    branch = vector.shape[0] - 1
    table = torch.full((size + 1, depth + 1, branch + 1), -torch.inf)
    table[1, 1:, 0] = 1.0
    for m in range(2, size + 1):
        for l in range(2, depth + 1):  # noqa: E741  # levels, as in the paper
            table[m][l][1] = 1 + vector[1] * table[m - 1][l - 1].max()
            for b in range(2, branch + 1):
                best = -torch.inf
                for y in range(1, m):
                    new = table[y][l][b - 1] + vector[b] * table[m - y][l - 1].max()
                    if new > best:
                        best = new
                table[m][l][b] = best
    return float(table[size, depth].max())
