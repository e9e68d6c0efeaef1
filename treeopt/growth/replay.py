"""Replay: how many steps real greedy decoding takes with a draft, from the trace alone, exactly.

Greedy output does not depend on the draft, so decoding visits states t <- t + 1 + a(t), where a(t) is
the number of guesses accepted at t (Hydra, section 4, simulates the same with the model). A dynamic tree's three numbers
are not fitted to the answers one by one, so that its replay is held-out as a chain's is.

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
from treeopt.records.trace import NO_TRIAL, RankTrace
from treeopt.trees.draft import MOST_BLOCK, MOST_ROWS, DDTree, Draft, DynamicLimits, DynamicTree, product_size
from treeopt.trees.tree import Choice, IntArray, Tree

AT_ONCE = 2**20  # states whose ranks are looked up together
PLACES = np.arange(256)[:, None]  # among nodes, from 0
AnyDraft = TypeVar("AnyDraft", bound=Draft)


def replay(trace: RankTrace, draft: Draft) -> Rates:
    """Decode every sequence of the trace with a draft, without the model: steps and tokens of every sequence.

    >>> trace = RankTrace(np.array([[0], [3], [0], [-2]]), np.array([0, 4]))
    >>> replay(trace, Tree.chain(1)).steps.tolist()
    [2]
    """
    return Rates(replay_lengths(trace, accepted_lengths(trace, draft)), trace.lengths - 1)


def tells(trace: RankTrace, draft: Draft) -> bool:
    """Whether a trace has what it takes to replay a draft: of a dynamic tree its topk, as deep."""
    return isinstance(draft, Tree) or places_of(trace, draft) is not None


def places_of(trace: RankTrace, draft: Draft) -> NDArray[np.uint8] | None:
    """(P, D) places of the true path among the nodes of a draft that is built anew, best first; None where it is not told.

    Widths of at least rows - 1 make the same tree, so one of them tells the others.
    """
    if isinstance(draft, DynamicTree) and (pools := trace.pools) is not None:
        known = [topk for topk in pools.topks if topk == draft.topk]
    elif isinstance(draft, DDTree) and (pools := trace.marginals) is not None:
        most = draft.rows - 1
        known = [width for width in pools.topks if min(width, most) == min(draft.width, most)]
    else:
        return None
    return pools.places_in(draft.depth, known[0]) if known and draft.depth <= pools.levels else None


def record_for(drafts: Iterable[Draft], ranks: int = 1) -> Counts:
    """Ranks and pools to record so that a trace `tells` some drafts, and at least so many ranks.

    Ranks beyond those told apart would be misses in replay, but decoding accepts them.
    """
    drafts = list(drafts)
    dynamic = [draft for draft in drafts if isinstance(draft, DynamicTree)]
    products = [draft for draft in drafts if isinstance(draft, DDTree)]
    told = max([ranks, 1, *(1 + draft.max_rank for draft in drafts if isinstance(draft, Tree))])
    levels, depth = (max((tree.depth for tree in some), default=0) for some in (dynamic, products))
    topks, widths = {tree.topk for tree in dynamic}, {tree.width for tree in products}
    return Counts(told, levels, tuple(sorted(topks)), depth, tuple(sorted(widths)))


def accepted_lengths(trace: RankTrace, draft: Draft) -> NDArray[Any]:
    """(P,) guesses that a step at each state accepts; OutOfRange where the trace does not tell that."""
    if isinstance(draft, Tree):
        parts = np.array_split(trace.ranks, -(-len(trace.ranks) // AT_ONCE))
        found = [(growth_index(part, draft.paths) < len(draft)).sum(1) for part in parts]
        return np.concatenate(found)
    if (places := places_of(trace, draft)) is None:
        raise OutOfRange(f"The trace does not tell what {draft.name} would accept.")
    return np.asarray((places <= len(draft) - 2).sum(1))


def replay_lengths(trace: RankTrace, accepted: NDArray[Any]) -> IntArray:
    """(S,) steps of every sequence where a step at each state accepts so many guesses."""
    return np.bincount(sequence_of(trace, visited(trace, accepted)), minlength=trace.num_sequences)


def sequence_of(trace: RankTrace, states: IntArray) -> IntArray:
    """(n,) number of the sequence that each of some states is of."""
    return np.asarray(np.searchsorted(trace.starts, states, side="right") - 1)


def length_counts(trace: RankTrace, accepted: NDArray[Any], depth: int) -> IntArray:
    """(D+1,) how many steps of that replay emit 0, 1, ... D accepted guesses.

    >>> trace = RankTrace(np.array([[0], [3], [0], [-2]]), np.array([0, 4]))
    >>> length_counts(trace, accepted_lengths(trace, Tree.chain(1)), 1).tolist()
    [0, 2]
    """
    return np.bincount(accepted[visited(trace, accepted)], minlength=1 + depth)


def chain_survival(trace: RankTrace, depth: int) -> list[list[float]]:
    """Survival of the chains of 1, 2, ... D guesses: (K,) share of the steps of each one's replay that accept 1, ... K.

    Where a sequence's end leaves no guess is no trial, so it is Kaplan and Meier's product over the steps that had one.

    >>> chain_survival(RankTrace(np.array([[3], [0], [3], [-2]]), np.array([0, 4])), 1)
    [[0.5]]
    """
    reach, found = accepted_lengths(trace, Tree.chain(depth)), list[list[float]]()
    for k in range(1, depth + 1):
        states, places = visited(trace, np.minimum(reach, k)), np.arange(k)
        right = reach[states, None]  # (n, 1)
        tried = ((right >= places) & (trace.ranks[states, :k] != NO_TRIAL)).sum(0)
        found.append(np.cumprod((right > places).sum(0) / np.maximum(tried, 1)).tolist())
    return found


def count_visits(trace: RankTrace, tree: Tree) -> IntArray:
    """(n,) steps of the replay in which each node is accepted; the root is in all.

    >>> count_visits(RankTrace(np.array([[0], [1], [3], [-2]]), np.array([0, 4])), Tree.chain(1)).tolist()
    [2, 1]
    """
    nodes = growth_index(trace.ranks, tree.paths)  # (P, D)
    states = visited(trace, (nodes < len(tree)).sum(1))
    visits = np.bincount(nodes[states].ravel(), minlength=len(tree) + 1)  # the last is of what is no node
    visits[0] = len(states)
    return visits[:-1]


def visited(trace: RankTrace, accepted: NDArray[Any]) -> IntArray:
    """The states at which the steps of a replay are taken that accepts (P,) guesses at each, of all sequences at once."""
    t, last = trace.starts[:-1], trace.starts[1:] - 1
    found = [t[:0]]
    while (alive := t < last).any():
        t, last = t[alive], last[alive]
        found.append(t)
        t = t + 1 + accepted[t]
    return np.concatenate(found)


def replay_trees(trace: RankTrace, paths: tuple[Choice, ...], sizes: IntArray) -> IntArray:
    """(n, S) steps of every sequence with each of n nested trees, of the first ``sizes`` of the nodes ``paths``.

    >>> trace = RankTrace(np.array([[0], [1], [0], [-2]]), np.array([0, 4]))
    >>> replay_trees(trace, ((), (1,)), np.array([1, 2])).tolist()
    [[3], [2]]
    """
    known = Paths.of_ranks(
        trace.ranks[:, : max(map(len, paths))], 1 + max(rank for path in paths for rank in (0, *path))
    )
    has = np.arange(len(paths) + 1)[:, None] < np.minimum(sizes, len(paths))
    return steps_of(trace, lanes_of(trace, known.of), growth_index(known.ranks.T, paths), has)


def replay_dynamic(trace: RankTrace, levels: int, topk: int, rows: Sequence[int]) -> IntArray:
    """(n, S) steps of every sequence with dynamic trees of n numbers of rows, of the same levels and topk."""
    assert trace.pools is not None, "the trace must have pools"
    return _steps_by_place(trace, trace.pools.places_in(levels, topk), rows)


def _steps_by_place(trace: RankTrace, places: NDArray[np.uint8], rows: Sequence[int]) -> IntArray:
    """(n, S) steps with trees of n numbers of rows, by the (P, D) places of the true path among the nodes, best first."""
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
    """What every setting reaches within the limits that a trace tells, of more rows than levels; nothing without pools.

    Chains are told by the ranks where no pools of topk 1 were recorded.
    """
    if trace.pools is None:
        return {}
    deepest = min(trace.pools.levels, limits.levels)
    trees, steps = list[DynamicTree](), list[IntArray]()
    longest = min(deepest, trace.num_heads, limits.rows - 1)
    if limits.chains and 1 not in trace.pools.topks and longest > 0:
        trees += [DynamicTree(levels, 1, levels + 1) for levels in range(1, longest + 1)]
        steps.append(replay_trees(trace, Tree.chain(longest).paths, np.arange(2, longest + 2)))
    topks = [topk for topk in trace.pools.topks if topk > 1 or limits.chains]
    for topk, levels in product(topks, range(1, deepest + 1)):
        if rows := range(levels + 1, limits.most_rows(levels, topk) + 1):
            trees += [DynamicTree(levels, topk, n) for n in rows]
            steps.append(replay_dynamic(trace, levels, topk, rows))
    return _by_draft(trace, trees, steps)


def marginal_rates(trace: RankTrace, *, depth: int = MOST_BLOCK, rows: int = MOST_ROWS) -> dict[DDTree, Rates]:
    """What every tree over marginals reaches that a trace tells, of more rows than depths; nothing where none was recorded.

    Widths that make the same tree are there once, as the least of them.
    """
    if (known := trace.marginals) is None:
        return {}
    trees, steps = list[DDTree](), list[IntArray]()
    for (narrower, width), levels in product(pairwise((0, *known.topks)), range(1, min(depth, known.levels) + 1)):
        most = min(product_size(levels, width) + 1, rows)
        if some := range(max(levels + 1, narrower + 2), most + 1):
            trees += [DDTree(levels, width, n) for n in some]
            steps.append(_steps_by_place(trace, known.places_in(levels, width), some))
    return _by_draft(trace, trees, steps)


def _by_draft(trace: RankTrace, drafts: Sequence[AnyDraft], steps: Sequence[IntArray]) -> dict[AnyDraft, Rates]:
    """The rates of each draft, by the steps of every sequence: an (n, S) array of the first n drafts, of the next ones, ..."""
    tokens = by_conversation(trace, trace.lengths - 1)
    rows = (row for block in steps for row in by_conversation(trace, block))
    return {draft: Rates(row, tokens) for draft, row in zip(drafts, rows, strict=True)}
