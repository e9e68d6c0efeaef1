"""Grow families of speculation trees, the best of every size, by one of three objectives.

independent   gain of a node = product of the marginal accuracies along its path (Medusa, section 2.3.3)
joint         gain of a node = share of all states whose ranks begin with its path; the N most frequent
              prefixes are the best N-node tree, since events of distinct paths are nested or disjoint
replay        gain of a node = tokens per step it adds at the states that decoding with the current
              tree really visits (Hydra, section 4); decoding jumps over the easy runs

Counts of rare paths are noise: `joint` and `replay` mix them with those of commoner ones (`shrinkage`).

Under `independent` and `joint` nodes have values that add up (`worth`). Siblings come in order of rank, so that the
trees have no gaps. Families that are grown by `replay` on most of the same answers have the same trees for a long
while, and these are decoded once.

accept : (K, R)  P(head k has the true token at rank r)
ranks  : (P, K)  rank of the true token at every state
N nodes of a tree · F parts of the answers · R ranks told apart
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput, OutOfRange, meant
from treeopt.growth.paths import Paths, of_trace
from treeopt.growth.shrinkage import NONE, PathCounts, Strengths, mixed, strengths_of
from treeopt.growth.walk import Walk, WalkState
from treeopt.growth.worth import by_frequencies, by_products
from treeopt.records.calibration import Calibration
from treeopt.records.trace import RankTrace
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Choice, IntArray, TreeFamily

SAVINGS = 0.1  # strength for the mean saving of a node, as a share of that for its children


@dataclass
class GrowingFamily:
    """A family while it grows.

    known    : chances of ranks after paths, on the answers that it is grown on
    left_out : the part of the answers that it is not grown on; None for none
    paths    : its nodes; parents, above, index : of each its parent, its children's chances, and of a path which it is
    steps    : what decoding takes on the answers that it is grown on, by size
    """

    known: PathCounts
    limits: Limits
    left_out: int | None = None
    paths: list[Choice] = field(default_factory=lambda: [()])
    parents: list[int] = field(default_factory=lambda: [0])
    index: dict[Choice, int] = field(default_factory=lambda: {(): 0})
    above: list[NDArray[np.float64]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.above.append(self.known.chances(()))
        self.joint = by_frequencies(self.known, self.limits.budget).paths

    def seen(self, counts: IntArray) -> IntArray:
        return np.asarray(counts.sum(0) - (0 if self.left_out is None else counts[self.left_out]))

    def next_path(self, decoded: WalkState) -> Choice:
        """The node that saves the most steps; where nothing would be saved, what `grow_joint` would add."""
        saved = _saved(self, *_ends(self, decoded))
        saved[~_addable(self)] = -1.0
        if saved.max() <= 0:
            return next(p for p in self.joint if p not in self.index)
        parent, rank = divmod(int(saved.argmax()), self.known.top)
        return *self.paths[parent], rank

    def add(self, path: Choice) -> None:
        self.known.open(path[:-1], path[-1])
        self.parents.append(self.index[path[:-1]])
        self.index[path] = len(self.paths)
        self.paths.append(path)
        behind = len(path) < self.known.depth
        self.above.append(self.known.chances(path) if behind else np.zeros(self.known.top))

    def family(self, tokens: int) -> TreeFamily:
        """Its trees, by the tokens of the answers that it was grown on."""
        curve = tokens / np.maximum(self.steps, 1)
        return TreeFamily(tuple(self.paths), np.diff(curve, prepend=0.0))


def grow_together(walk: Walk, growing: list[GrowingFamily]) -> Iterator[list[WalkState]]:
    """Grow families of as many nodes each; for every size what decoding with the tree of each visits."""
    decoded = [walk.alone()] * len(growing)
    while True:
        for one, now in zip(growing, decoded, strict=True):
            one.steps.append(int(one.seen(now.counts).sum()))
        yield decoded
        if len(growing[0].paths) == len(growing[0].joint):
            return
        wanted: dict[frozenset[Choice], tuple[WalkState, Choice]] = {}
        for one, now in zip(growing, decoded, strict=True):
            one.add(path := one.next_path(now))
            wanted.setdefault(frozenset(one.paths), (now, path))
        found = dict(zip(wanted, walk.added(list(wanted.values())), strict=True))
        decoded = [found[frozenset(one.paths)] for one in growing]


def _ends(one: GrowingFamily, decoded: WalkState) -> tuple[IntArray, NDArray[np.float64]]:
    """(N, R+2) how many visited states end at each node by the rank they wanted, and
    (N,) what one more accepted guess saves at them on average [steps].

    One more guess at state t, where a were accepted, saves to_go[t+1+a] - to_go[t+2+a]. Of the mean over all nodes so many
    states are mixed into that of each.
    """
    order, top = [decoded.nodes[path] for path in one.paths], one.known.top
    strength = SAVINGS * one.known.strengths.path
    counts, saved = one.seen(decoded.counts)[order], one.seen(decoded.saved)[order]
    tried, total = counts[:, : top + 1].sum(1), saved[:, : top + 1].sum(1)
    mean = total.sum() / max(tried.sum(), 1)
    return counts, (total + strength * mean) / np.maximum(tried + strength, 1e-9)


def _addable(one: GrowingFamily) -> NDArray[np.bool_]:
    """(N, R) which children may be added next: of each node that of the next rank."""
    next_rank = np.bincount(one.parents[1:], minlength=len(one.paths))
    return np.asarray(np.arange(one.known.top) == next_rank[:, None])


def _saved(one: GrowingFamily, counts: IntArray, saving: NDArray[np.float64]) -> NDArray[np.float64]:
    """(N, R) steps that each child of each node would save at the states now visited; counts and saving are of `_ends`."""
    top, paths, parents = one.known.top, one.paths, one.parents
    reached = counts.sum(1)  # visited states at which each node is accepted, its descendants' too
    for node in range(len(paths) - 1, 0, -1):
        counts[parents[node], paths[node][-1]] = reached[node]
        reached[parents[node]] += reached[node]
    tried = counts[:, : top + 1].sum(1)
    chances = mixed(np.column_stack([counts[:, :top], tried]), one.known.strengths.path, np.array(one.above))
    share = np.where(reached > 0, tried / np.maximum(reached, 1), 1.0)
    expected = np.zeros(len(paths))  # the same as reached, by the mixed chances
    expected[0] = reached[0]
    for node in range(1, len(paths)):
        parent = parents[node]
        expected[node] = expected[parent] * share[parent] * chances[parent, paths[node][-1]]
    return np.asarray((expected * share * saving)[:, None] * chances)


OBJECTIVES = ("independent", "joint", "replay")
NO_STEP = "Growing needs answers of more than one token, but the trace has none: calibrate on others."


def grow(trace: RankTrace, limits: Limits, *, objective: str) -> TreeFamily:
    """The family of one of `OBJECTIVES` on the whole trace (in-sample; see `heldout.crossfit`).

    Rare paths are shrunk as much as held-out conversations of the trace ask for.
    """
    check_objective(objective)
    if not trace.has_step.any():
        raise OutOfRange(NO_STEP)
    if objective == "independent":
        return grow_independent(Calibration.from_trace(trace).accept, limits)
    strengths = strengths_of(trace, min(limits.max_rank + 1, trace.top_k), limits.max_depth)
    return (grow_joint if objective == "joint" else grow_replay)(trace, limits, strengths=strengths)


def check_objective(objective: str) -> None:
    """Raise InvalidInput for a name that is not one of `OBJECTIVES`."""
    if objective not in OBJECTIVES:
        raise InvalidInput(
            f"`objective` must be one of {', '.join(OBJECTIVES)}, but got {objective!r}.{meant(objective, OBJECTIVES)}"
        )


def grow_independent(accept: NDArray[np.float64], limits: Limits) -> TreeFamily:
    """The trees that maximise expected tokens per step if heads erred independently.

    The product never rises along a path, so taking the largest products one by one is optimal for
    every size where accuracies fall with rank.

    >>> grow_independent(np.array([[0.6, 0.2], [0.5, 0.1]]), Limits(4)).paths
    ((), (0,), (0, 0), (1,))
    """
    return by_products(accept, limits)


def grow_joint(trace: RankTrace, limits: Limits, *, strengths: Strengths = NONE) -> TreeFamily:
    """The trees that maximise tokens of a step averaged over all states of the trace.

    Without ``strengths`` plain counts, and the trees are optimal for every size where counts fall with
    rank; paths that are equally frequent (never seen, for one) go by the product of marginals. With them
    rare paths are shrunk towards common ones (`treeopt.growth.shrinkage`), which is better on answers not seen.
    Time O(P x K + budget x ranks), memory O(P).
    """
    _, known = _counted(trace, limits, strengths)
    return by_frequencies(known, limits.budget)


def grow_replay(trace: RankTrace, limits: Limits, *, strengths: Strengths = NONE) -> TreeFamily:
    """Trees grown node by node, each saving the most steps at the states visited with the tree so far.

    How often a child is accepted there is counted, and with ``strengths`` mixed with its chance over all
    states; what an accepted guess saves is a mean over its parent. Where nothing would be
    saved, nodes are added as `grow_joint` would. Nested by construction; the best trees of every
    size are not nested in general, so this is a heuristic (a test bounds its loss against brute force).
    Time O(budget x P) at most, memory O(P).
    """
    paths, known = _counted(trace, limits, strengths)
    everyone = np.zeros(trace.num_sequences, dtype=np.int64)
    one = GrowingFamily(known, limits)
    for _ in grow_together(Walk(trace, paths, paths.depth, everyone, len(one.joint)), [one]):
        pass
    return one.family(int((trace.lengths - 1).sum()))


def _counted(trace: RankTrace, limits: Limits, strengths: Strengths) -> tuple[Paths, PathCounts]:
    """The paths of a trace's states within the limits, and their chances."""
    paths = Paths.of_ranks(trace.ranks[:, : limits.max_depth], min(limits.num_ranks, trace.top_k))
    everyone = np.zeros((1, trace.num_sequences), dtype=np.int64)
    return paths, PathCounts(of_trace(trace, paths, everyone)[0], strengths)
