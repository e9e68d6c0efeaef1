"""Which steps a profile times: sizes beside the edges of tiles, every depth, and what is likely to be chosen.

What a step costs depends on size and depth, hardly on the shape. Over rows = batch size x size it is a
staircase whose steps are as wide as the hardware's tiles, so sizes are placed where a tile is just full (an edge) and
one row further on. Depth costs by the head: all sizes are timed at the full depth, three at each other one.
"""

import itertools
import math
from collections.abc import Collection, Sequence

import numpy as np

from treeopt.growth.grow import grow_products
from treeopt.growth.source import Source
from treeopt.records.trace import RankTrace
from treeopt.trees.draft import MOST_ROWS, DDTree, Draft, DynamicTree, pool_size, product_size
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import MAX_RANK, GrownTrees, Tree

NUM_HEADS = 4  # deepest tree where nothing says how deep
TILES = (8, 16, 32, 64, 128)  # rows that matrix products are computed by, on one machine or another
ALWAYS = (2, 3, 4)  # sizes below the first tile
TARGETS, MOST_PLACED = 6, 14  # edges wanted, evenly in the logarithm; sizes of a batch size
DYNAMIC_ROWS = 12  # of the dynamic trees that are timed: what more rows cost is known from the fixed ones
CHAINS = (1, 2, 3, 4, 5, 6, 8)  # lengths that are timed in an engine
LEVELS, ROWS = (1, 2, 3, 4, 6, 8), (4, 8, 16, 32, 64)  # of dynamic trees in an engine
NEAR = 1.25  # a larger tile's edge is taken for a smaller one's so near by
# Shape of published Medusa-1 accuracies, used to make trees for timing where nothing was calibrated.
TYPICAL_ACCEPT = np.outer(0.55 * 0.6 ** np.arange(8), 0.45 ** np.arange(MAX_RANK + 1))


def placed_sizes(batch_size: int, budget: int) -> tuple[int, ...]:
    """About 14 sizes up to ``budget``, ascending: 2, 3, 4, edges of tiles and one above each, the largest.

    >>> placed_sizes(1, 64)
    (2, 3, 4, 6, 8, 9, 16, 17, 24, 25, 32, 33, 48, 64)
    >>> placed_sizes(16, 8)
    (2, 3, 4, 5, 6, 7, 8)
    """
    edges: dict[int, int] = {}  # to the largest tile that ends there
    for tile in TILES:
        for rows in range(tile, batch_size * budget + 1, tile):
            if rows // batch_size > 1:
                edges[rows // batch_size] = tile
    sizes = {size for size in (*ALWAYS, budget) if 2 <= size <= budget}
    for target in np.geomspace(min(5, budget), budget, TARGETS).tolist() if edges else ():
        near = [edge for edge in edges if max(edge / target, target / edge) <= NEAR] or list(edges)
        best = min(near, key=lambda edge: (-edges[edge] if len(near) < len(edges) else 0, abs(edge - target)))
        sizes |= {size for size in (best, best + 1) if 2 <= size <= budget}
    while len(sizes) < min(MOST_PLACED, budget - 1):  # the widest gap, at an edge if there is one
        ordered = sorted({1, *sizes})
        gaps = [(b / a, a, b) for a, b in itertools.pairwise(ordered) if b > a + 1]
        _, low, high = max(gaps)
        inside = [edge for edge in edges if low * NEAR < edge < high / NEAR] or range(low + 1, high)
        sizes.add(min(inside, key=lambda size: abs(math.log(size * size / (low * high)))))
    return tuple(sorted(sizes))


def tree_families(
    source: Source | None, num_heads: int, budget: int, *, ranks: int = MAX_RANK + 1
) -> tuple[GrownTrees, ...]:
    """The best trees under depth limits 1, 2, ...: grown on ``source``, or on typical accuracies without one.

    ranks : how many the drafter tells apart
    """
    known, max_rank = source.num_heads if source else len(TYPICAL_ACCEPT), min(MAX_RANK, ranks - 1)
    limits = [Limits(budget, depth, max_rank) for depth in range(1, min(num_heads, known) + 1)]
    if source is None:
        return tuple(grow_products(TYPICAL_ACCEPT, limit) for limit in limits)
    return tuple(source.grow(limit) for limit in limits)


def timing_trees(families: Sequence[GrownTrees], sizes: Collection[int], *, given: bool = False) -> list[Tree]:
    """Trees of all sizes at the full depth, and of three sizes at each smaller one, by (size, depth).

    With ``given`` sizes no others are timed; else each depth also begins with its chain, the smallest tree
    so deep, and ends with the largest that there is of it.
    """
    found: set[tuple[int, int]] = set()
    for depth, family in enumerate(families, 1):
        here = {size for size in sizes if depth < size <= len(family)}
        if not given:
            here |= {depth + 1, min(max(sizes), len(family))} & set(range(depth + 1, max(sizes) + 1))
        if depth < len(families) and len(here) > 3:
            low, high = min(here), max(here)
            here = {low, high, min(here - {low, high}, key=lambda s: abs(math.log(s * s / (low * high))))}
        found |= {(size, depth) for size in here}
    return [shaped(families[depth - 1], size, depth) for size, depth in sorted(found)]


def shaped(grown: GrownTrees, size: int, depth: int) -> Tree:
    """The best tree of ``size`` rows, with the chain of best guesses down to ``depth`` in it."""
    tree = grown.tree(size)
    chain = Tree.chain(depth).paths[1:]
    others = [path for path in grown.family(size).paths[1:size] if path not in chain]
    return tree if tree.depth == depth else Tree.from_choices([*chain, *others[: size - 1 - depth]])


def engine_trees(source: Source, budget: int, *, dynamic: bool) -> list[Draft]:
    """The chains that are timed in an engine and, where it takes them and pools were recorded, dynamic trees."""
    found: list[Draft] = [Tree.chain(n) for n in CHAINS if n <= source.num_heads and n < budget]
    pools = source.pooled.pools if dynamic and source.pooled is not None else None
    for topk, levels, rows in itertools.product(pools.topks if pools else (), LEVELS, ROWS):
        if topk > 1 and pools and levels <= pools.levels and levels < rows <= min(budget, pool_size(levels, topk) + 1):
            found.append(DynamicTree(levels, topk, rows))
    return found


def anew_trees(trace: RankTrace | None, budget: int) -> list[Draft]:
    """Two dynamic trees of each topk that was recorded, shallow and deep: between them a level costs the same.

    Likewise two trees over marginals, of few rows and of many.
    """
    pools, found = trace.pools if trace else None, list[Draft]()
    for topk in pools.topks if pools else ():
        for levels in sorted({min(2, pools.levels), pools.levels} if pools and topk > 1 else ()):
            rows = min(DYNAMIC_ROWS, budget, pool_size(levels, topk) + 1)
            found += [DynamicTree(levels, topk, rows)] if rows > levels else []
    if trace and (known := trace.marginals):
        depth, width = known.levels, known.topks[-1]
        most = min(budget, MOST_ROWS, product_size(depth, width) + 1)
        found += [DDTree(depth, width, rows) for rows in sorted({min(DYNAMIC_ROWS, most), most}) if rows > depth]
    return found
