"""Replay: exactly how many steps greedy decoding takes with a draft, from the trace alone.

Greedy output does not depend on the draft, so decoding visits states t <- t + 1 + a(t), where a(t) is
the number of guesses accepted at t (Hydra, section 4, simulates the same with the model). The three numbers of a dynamic
tree are not fitted to the answers, so its replay needs no hold-out.

P states · S sequences · C conversations · D deepest node · N nodes · n trees asked for at once · B bootstrap draws
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.lanes import lanes_of, steps_of
from treeopt.growth.paths import Paths
from treeopt.growth.rates import Rates, by_conversation
from treeopt.records.pools import Counts
from treeopt.records.trace import RankTrace
from treeopt.trees.draft import MOST_BLOCK, MOST_ROWS, DDTree, Draft, DynamicLimits, DynamicTree, product_size
from treeopt.trees.tree import Choice, IntArray, Tree

AT_ONCE = 2**20  # states whose ranks are looked up together
PLACES = np.arange(256)[:, None]  # among nodes, from 0
DraftT = TypeVar("DraftT", DynamicTree, DDTree)


def replay(trace: RankTrace, draft: Draft) -> Rates:
    """Steps and tokens of every sequence when it is decoded with a draft.

    >>> trace = RankTrace(np.array([[0], [3], [0], [-2]]), np.array([0, 4]))
    >>> replay(trace, Tree.chain(1)).steps.tolist()
    [2]
    """
    return Rates(replay_lengths(trace, accepted_lengths(trace, draft)), trace.lengths - 1)


def tells(trace: RankTrace, draft: Draft) -> bool:
    """Whether the trace tells all guesses of a draft apart: a fixed tree needs its ranks, a dynamic one pools of its topk."""
    return draft.max_rank < trace.top_k if isinstance(draft, Tree) else places_of(trace, draft) is not None


def places_of(trace: RankTrace, draft: Draft) -> NDArray[np.uint8] | None:
    """(P, D) places of the true path among the nodes of a dynamic draft, best first; None where they were not recorded.

    Widths of at least rows - 1 make the same tree, so the pools of one serve the others.
    """
    if isinstance(draft, DynamicTree) and (pools := trace.pools) is not None:
        widths = [topk for topk in pools.topks if topk == draft.topk]
    elif isinstance(draft, DDTree) and (pools := trace.marginals) is not None:
        most = draft.rows - 1
        widths = [width for width in pools.topks if min(width, most) == min(draft.width, most)]
    else:
        return None
    return pools.places_in(draft.depth, widths[0]) if widths and draft.depth <= pools.levels else None


def record_for(drafts: Iterable[Draft]) -> Counts:
    """What a trace must record so that drafts can be replayed on it: ranks and pools.

    A rank that is not recorded would be a miss in replay, but decoding accepts it.
    """
    drafts = list(drafts)
    dynamic = [draft for draft in drafts if isinstance(draft, DynamicTree)]
    products = [draft for draft in drafts if isinstance(draft, DDTree)]
    ranks = max([1, *(1 + draft.max_rank for draft in drafts if isinstance(draft, Tree))])
    levels, depth = (max((tree.depth for tree in trees), default=0) for trees in (dynamic, products))
    topks, widths = {tree.topk for tree in dynamic}, {tree.width for tree in products}
    return Counts(ranks, levels, tuple(sorted(topks)), depth, tuple(sorted(widths)))


def accepted_lengths(trace: RankTrace, draft: Draft) -> NDArray[Any]:
    """(P,) guesses that a step at each state accepts. Raises OutOfRange if the trace does not tell that."""
    if isinstance(draft, Tree):
        parts = np.array_split(trace.ranks, -(-len(trace.ranks) // AT_ONCE))
        return np.concatenate([(growth_index(part, draft.paths) < len(draft)).sum(1) for part in parts])
    if (places := places_of(trace, draft)) is None:
        raise OutOfRange(f"The trace does not tell what {draft.name} would accept.")
    return np.asarray((places <= len(draft) - 2).sum(1))


def replay_lengths(trace: RankTrace, accepted: NDArray[Any]) -> IntArray:
    """(S,) steps of every sequence, by the (P,) guesses that a step at each state accepts."""
    return np.bincount(sequence_of(trace, visited(trace, accepted)), minlength=trace.num_sequences)


def sequence_of(trace: RankTrace, states: IntArray) -> IntArray:
    """(n,) number of the sequence of each state."""
    return np.asarray(np.searchsorted(trace.starts, states, side="right") - 1)


def length_counts(trace: RankTrace, accepted: NDArray[Any], depth: int) -> IntArray:
    """(D+1,) number of the replay's steps that accept 0, 1, ... D guesses.

    >>> trace = RankTrace(np.array([[0], [3], [0], [-2]]), np.array([0, 4]))
    >>> length_counts(trace, accepted_lengths(trace, Tree.chain(1)), 1).tolist()
    [0, 2]
    """
    return np.bincount(accepted[visited(trace, accepted)], minlength=1 + depth)


def count_visits(trace: RankTrace, tree: Tree) -> IntArray:
    """(n,) steps of the replay that accept each node; all accept the root.

    >>> count_visits(RankTrace(np.array([[0], [1], [3], [-2]]), np.array([0, 4])), Tree.chain(1)).tolist()
    [2, 1]
    """
    nodes = growth_index(trace.ranks, tree.paths)  # (P, D)
    states = visited(trace, (nodes < len(tree)).sum(1))
    visits = np.bincount(
        nodes[states].ravel(), minlength=len(tree) + 1
    )  # the last one counts paths that leave the tree
    visits[0] = len(states)
    return visits[:-1]


def visited(trace: RankTrace, accepted: NDArray[Any]) -> IntArray:
    """The states at which a replay takes its steps, in all sequences, by the (P,) guesses that a step at each accepts."""
    t, last = trace.starts[:-1], trace.starts[1:] - 1
    states = [t[:0]]
    while (alive := t < last).any():
        t, last = t[alive], last[alive]
        states.append(t)
        t = t + 1 + accepted[t]
    return np.concatenate(states)


def replay_trees(trace: RankTrace, paths: tuple[Choice, ...], sizes: IntArray) -> IntArray:
    """(n, S) steps of every sequence with each of n nested trees: the first ``sizes`` of the nodes ``paths``.

    >>> trace = RankTrace(np.array([[0], [1], [0], [-2]]), np.array([0, 4]))
    >>> replay_trees(trace, ((), (1,)), np.array([1, 2])).tolist()
    [[3], [2]]
    """
    depth, top = max(map(len, paths)), 1 + max(rank for path in paths for rank in (0, *path))
    states = Paths.of_ranks(trace.ranks[:, :depth], top)
    has = np.arange(len(paths) + 1)[:, None] < np.minimum(sizes, len(paths))
    return steps_of(trace, lanes_of(trace, states.of), growth_index(states.ranks.T, paths), has)


def steps_by_place(trace: RankTrace, places: NDArray[np.uint8], rows: Sequence[int]) -> IntArray:
    """(n, S) steps of every sequence with n trees, by their numbers of rows and the (P, D) places that they share."""
    return steps_of(trace, lanes_of(trace), places, np.array(rows) - 2 >= PLACES)


def growth_index(ranks: NDArray[np.int16], paths: tuple[Choice, ...]) -> NDArray[Any]:
    """(P, D) index in ``paths`` of each prefix of (P, K) ranks; len(paths) where it is no node."""
    child = child_table(paths)
    none, top = len(paths), child.shape[1] - 1
    depth = max(map(len, paths))
    kind = np.int16 if none < 2**15 else np.int32
    order = np.full((len(ranks), max(depth, 1)), none, dtype=kind)
    node = np.zeros(len(ranks), dtype=kind)
    for d in range(min(depth, ranks.shape[1])):
        rank = ranks[:, d]
        node = child[node, np.where((rank < 0) | (rank > top), top, rank)]
        order[:, d] = node
    return order


def child_table(paths: tuple[Choice, ...]) -> NDArray[np.int32]:
    """(N+1, R+1) index of each node's child at each rank; N where there is none.

    The last row and the last column stand for "no such node" and "no such rank".
    """
    none = len(paths)
    top = 1 + max((path[-1] for path in paths[1:]), default=-1)
    child = np.full((none + 1, top + 1), none, dtype=np.int32)
    index = {path: i for i, path in enumerate(paths)}
    for path, i in index.items():
        if path:
            child[index[path[:-1]], path[-1]] = i
    return child


ANY = DynamicLimits()


def dynamic_rates(trace: RankTrace, limits: DynamicLimits = ANY) -> dict[DynamicTree, Rates]:
    """The rates of all dynamic trees within limits, with a topk above 1 and more rows than levels; empty without pools."""
    rates: dict[DynamicTree, Rates] = {}
    if (pools := trace.pools) is None:
        return rates
    topks = [topk for topk in pools.topks if topk > 1]  # others are chains
    for topk, levels in product(topks, range(1, min(pools.levels, limits.levels) + 1)):
        trees = [DynamicTree(levels, topk, n) for n in range(levels + 1, limits.most_rows(levels, topk) + 1)]
        rates |= rates_by_place(trace, pools.places_in(levels, topk), trees) if trees else {}
    return rates


def marginal_rates(trace: RankTrace, *, depth: int = MOST_BLOCK, rows: int = MOST_ROWS) -> dict[DDTree, Rates]:
    """The rates of all trees over marginals with more rows than depths; empty if no marginals were recorded.

    Of widths that make the same tree the least one is there.
    """
    rates: dict[DDTree, Rates] = {}
    if (pools := trace.marginals) is None:
        return rates
    for (narrower, width), levels in product(pairwise((0, *pools.topks)), range(1, min(depth, pools.levels) + 1)):
        most = min(product_size(levels, width) + 1, rows)
        trees = [DDTree(levels, width, n) for n in range(max(levels + 1, narrower + 2), most + 1)]
        rates |= rates_by_place(trace, pools.places_in(levels, width), trees) if trees else {}
    return rates


def rates_by_place(trace: RankTrace, places: NDArray[np.uint8], trees: Sequence[DraftT]) -> dict[DraftT, Rates]:
    """The rates of trees that share the (P, D) places of the true path among their nodes."""
    steps = steps_by_place(trace, places, [tree.rows for tree in trees])
    return dict(zip(trees, rates_of(trace, steps), strict=True))


def rates_of(trace: RankTrace, steps: IntArray) -> list[Rates]:
    """The rates of n drafts, by the (n, S) steps of every sequence with each."""
    tokens = by_conversation(trace, trace.lengths - 1)
    return [Rates(taken, tokens) for taken in by_conversation(trace, steps)]
