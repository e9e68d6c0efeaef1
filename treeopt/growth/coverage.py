"""What trees reach under a rule that accepts several siblings, from a probe; and the trees that reach most.

The longest accepted path of a step wins. So a step emits 1 + the depth of its deepest accepted node, and a tree's
tokens per step are 1 + the sum over depths of P(some node of that depth is accepted with all its ancestors): a
coverage, in which siblings that pass together count once. Each node adds less the more of the tree is there
(the sum is monotone and submodular), so a tree is grown by marginal gain. A node may gain nothing until its
children are in, hence the growth looks ahead: at whole paths, by gain per node.

P steps · S sequences · T nodes of the probe tree · N nodes of a family · n trees asked for at once
A accepted nodes of all steps, roots left out
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.growth.objectives import grow_independent
from treeopt.growth.replay import Replay
from treeopt.records.calibration import Calibration
from treeopt.records.probe import Probe
from treeopt.records.trace import RankTrace
from treeopt.trees.shapes import check_shape
from treeopt.trees.tree import MAX_RANK, BoolArray, Choice, IntArray, Tree, TreeFamily

COVERAGE = "coverage"  # the objective that a plan names
SHAPES = ("any", "sibling-closed", "chain")
_ONES = np.array([i.bit_count() for i in range(2**16)], dtype=np.uint8)  # bits that are set in 16 of them


@dataclass(frozen=True, eq=False)
class Ballot:
    """The accepted nodes of all steps, those of a step in the order in which they win.

    steps   : (A,)    whose step each is
    guesses : (A+1,)  how many guesses the step emits where the node wins; last where nothing but the root is left
    tokens  : (A+1,)  how many tokens: one more, unless a guess ends the sequence
    of      : of every node of the probe tree its places (steps at which it is accepted,) in these
    """

    steps: IntArray
    guesses: IntArray
    tokens: IntArray
    of: list[IntArray]

    @classmethod
    def cast(cls, probe: Probe) -> Ballot:
        """Longer paths win over shorter ones, then likelier ones, then the first in order."""
        tree = probe.tree
        steps, nodes = np.nonzero(probe.accepted[:, 1:])
        nodes += 1
        order = np.lexsort((nodes, -probe.log_likelihood, -tree.depths[nodes], steps))
        steps, nodes = steps[order], nodes[order]
        last = probe.first_end[steps, nodes]
        guesses = np.where(last > 0, last, tree.depths[nodes])
        tokens = np.where(last > 0, last, guesses + 1)
        by_node = np.argsort(nodes, kind="stable")
        of = np.split(by_node, np.searchsorted(nodes[by_node], np.arange(1, len(tree))))
        return cls(steps, np.append(guesses, 0), np.append(tokens, 1), of)

    def add(self, winner: IntArray, nodes: Iterable[int]) -> None:
        """Let nodes take part, -1 for one that was not probed: update the (P,) places of the winners so far."""
        for node in nodes:
            if node > 0:
                places = self.of[node]
                steps = self.steps[places]
                winner[steps] = np.minimum(winner[steps], places)

    def nobody(self, steps: int) -> IntArray:
        """(P,) places of the winners where there are no guesses."""
        return np.full(steps, len(self.steps))


def replay_probe(probe: Probe, tree: Tree) -> Replay:
    """What each sequence's steps emit with ``tree``, guesses that were not probed never being accepted.

    Exact for the probe's policy; for other trees approximate, as their steps would begin elsewhere.

    >>> tree, two = Tree.from_choices([[0], [1], [1, 0]]), Tree.from_choices([[0], [1]])
    >>> bits = np.array([[True, True, False, False], [True, False, True, True]])
    >>> probe = Probe(tree, two, bits, np.zeros_like(bits), -np.ones(3), np.array([0, 2]), np.array([5]))
    >>> replay_probe(probe, two).tokens.tolist(), replay_probe(probe, tree).tokens.tolist()
    ([4], [5])
    """
    tokens = tokens_of_trees(probe, tree.paths, np.ones((1, len(tree)), dtype=bool))[0]
    return Replay(np.diff(probe.starts), tokens)


def tokens_of_trees(probe: Probe, paths: tuple[Choice, ...], members: BoolArray) -> IntArray:
    """(n, S) tokens that the steps of every sequence emit with each of n trees over the nodes ``paths``.

    members : (n, N)  which of the nodes each tree has; the parent of each too

    Time O(A + n x P) for nested trees.
    """
    ballot, places = Ballot.cast(probe), _places(probe, paths)
    winner = ballot.nobody(len(probe.accepted))
    before = np.zeros(len(paths), dtype=bool)
    found = np.zeros((len(members), probe.num_sequences), dtype=np.int64)
    for i, row in enumerate(members):
        if (before & ~row).any():
            winner, before = ballot.nobody(len(winner)), np.zeros_like(row)
        ballot.add(winner, places[row & ~before])
        before = row
        found[i] = np.bincount(probe.sequence, ballot.tokens[winner], minlength=probe.num_sequences)
    return found


def guess_counts(probe: Probe, paths: tuple[Choice, ...]) -> IntArray:
    """(D+1,) how many steps emit 0, 1, ... D guesses with the tree of these nodes."""
    ballot = Ballot.cast(probe)
    winner = ballot.nobody(len(probe.accepted))
    ballot.add(winner, _places(probe, paths))
    return np.bincount(ballot.guesses[winner], minlength=1 + max(map(len, paths)))


def node_visits(probe: Probe, tree: Tree) -> IntArray:
    """(T,) steps at which each node of ``tree`` is on the path that wins; the root is on all.

    >>> tree = Tree.from_choices([[0], [0, 0]])
    >>> bits = np.array([[True, True, True], [True, True, False]])
    >>> probe = Probe(tree, tree, bits, np.zeros_like(bits), -np.ones(3), np.array([0, 2]), np.array([6]))
    >>> node_visits(probe, tree).tolist()
    [2, 2, 1]
    """
    ballot, places = Ballot.cast(probe), _places(probe, tree.paths)
    winner = ballot.nobody(len(probe.accepted))
    ballot.add(winner, places)
    at = np.zeros(len(ballot.steps) + 1, dtype=np.int64)  # the node of ``tree`` that each place is of
    for node, place in enumerate(places.tolist()):
        if place > 0:
            at[ballot.of[place]] = node
    visits = np.bincount(at[winner], minlength=len(tree))
    for node in range(len(tree) - 1, 0, -1):
        visits[tree.parents[node]] += visits[node]
    return visits


def _places(probe: Probe, paths: tuple[Choice, ...]) -> IntArray:
    """(N,) which node of the probe tree each path is; -1 for none."""
    index = {path: i for i, path in enumerate(probe.tree.paths)}
    return np.array([index.get(path, -1) for path in paths])


def independent_tokens(probe: Probe, paths: tuple[Choice, ...], members: BoolArray) -> NDArray[np.float64]:
    """(n,) tokens per step if guesses passed independently of one another, by depth and rank alone.

    Of each depth and rank the share of the probed guesses that passed, their ancestors having passed. A depth is
    reached where not all branches fail: 1 - prod over children (1 - P(child) x P(reached below it)).
    """
    tree = probe.tree
    passed, tried = np.zeros((2, tree.depth + 1, tree.max_rank + 1))
    counts = probe.accepted.sum(0)
    np.add.at(passed, (tree.depths[1:], tree.ranks[1:]), counts[1:])
    np.add.at(tried, (tree.depths[1:], tree.ranks[1:]), counts[tree.parents[1:]])
    share = passed / np.maximum(tried, 1)
    index = {path: i for i, path in enumerate(paths)}
    deepest = max(map(len, paths))
    chance = np.zeros(len(paths))
    for path, i in index.items():
        if 0 < len(path) <= tree.depth and path[-1] < share.shape[1]:
            chance[i] = share[len(path), path[-1]]
    found = np.ones(len(members))
    for depth in range(1, deepest + 1):
        fails = np.ones((len(paths), len(members)))  # of every node all that is below it down to the depth
        for path, i in reversed(index.items()):
            reached = np.ones(len(members)) if len(path) == depth else 1 - fails[i]
            if path:
                fails[index[path[:-1]]] *= 1 - chance[i] * reached * members[:, i]
            else:
                found += reached
    return found


def coverage(probe: Probe, tree: Tree) -> float:
    """1 + mean depth of the deepest accepted node of ``tree``, nodes after the end of an answer left out.

    What `grow_coverage` maximises. `replay_probe` may find a little less at an answer's last step: the longest
    path wins, and where a token in its middle ends the answer, less of it may be emitted than of a shorter one.
    """
    nodes = _places(probe, tree.paths)
    nodes = nodes[nodes >= 0]
    depths = np.where(useful(probe)[:, nodes], probe.tree.depths[nodes], 0).max(1)
    return 1 + float(depths.mean()) if len(depths) else 1.0


def probe_tree(
    source: Calibration | RankTrace, *, size: int = 256, max_rank: int = MAX_RANK, policy: Tree | None = None
) -> Tree:
    """A tree of ``size`` nodes to probe, from ranks counted on given or greedy answers; besides those of ``policy``.

    Grown by products of marginals, as if a guess of rank r passed wherever the truth has rank r or a later one:
    a likelier guess than the truth is likely enough itself. That is wider and deeper than the trees for the truth.

    >>> calibration = Calibration(np.array([[0, 9], [0, 8]]), np.array([10, 10]))  # the truth is never first
    >>> probe_tree(calibration, size=4).choices
    [[0], [1], [0, 0]]
    """
    calibration = source if isinstance(source, Calibration) else Calibration.from_trace(source)
    or_later = np.cumsum(calibration.accept[:, ::-1], axis=1)[:, ::-1]
    grown = grow_independent(or_later, budget=size, max_rank=max_rank, shape="sibling-closed")
    nodes = set(grown.paths) | set(policy.paths if policy else ())
    return Tree.from_choices(nodes - {()})


def useful(probe: Probe) -> BoolArray:
    """(P, T) accepted nodes up to which, themselves included, no guess ends the sequence."""
    found: BoolArray = probe.accepted & (probe.first_end == 0)
    return found


def grow_coverage(
    probe: Probe, *, budget: int, max_depth: int | None = None, max_rank: int = MAX_RANK, shape: str = "any"
) -> TreeFamily:
    """Nested trees within the probe tree, grown by `coverage` with look-ahead.

    Of all nodes that are not in, the next is the one whose path, with what the shape needs besides, gains most per
    node and still fits; all of it is added. Where nothing gains any more, the nodes that were accepted most often
    follow. Greedy growth of a submodular gain is not always best (a test bounds its loss against brute force).
    Time O(budget x T x P / 16) at most, in table look-ups.
    """
    _check(budget, shape)
    if not len(probe.accepted):
        raise OutOfRange("Growing needs answers of more than one token, but the probe has none.")
    growth = _Growth(probe, _allowed(probe.tree, max_depth, max_rank, shape), closed=shape != "any")
    while len(growth.nodes) < budget and growth.grow(budget - len(growth.nodes)):
        pass
    paths = tuple(probe.tree.paths[node] for node in growth.nodes)
    return TreeFamily(paths, np.array(growth.gains) / len(probe.accepted))


class _Growth:
    """A tree that grows. ``left[v]`` are the steps at which node v would be the first accepted one of its depth."""

    def __init__(self, probe: Probe, allowed: BoolArray, *, closed: bool) -> None:
        self.tree = tree = probe.tree
        bits = np.packbits(useful(probe).T, axis=1)
        self.left = np.zeros((len(tree), -(-bits.shape[1] // 2) * 2), dtype=np.uint8)  # whole words of 16 bits
        self.left[:, : bits.shape[1]] = bits
        self.left = self.left.view(np.uint16)  # (T, words)
        self.often = probe.accepted.sum(0)
        self.inside = ~allowed
        self.inside[0] = True
        self.allowed = allowed
        # The sibling that must be in before a node: of the rank before, where the shape asks for it.
        index = {path: i for i, path in enumerate(tree.paths)}
        self.before = np.array(
            [
                index[(*path[:-1], path[-1] - 1)] if closed and path and path[-1] > 0 and allowed[i] else 0
                for i, path in enumerate(tree.paths)
            ]
        )
        # Counted again only where a depth has changed: gain and nodes of the siblings missing up to a node.
        self.gain, self.cost = np.zeros((2, len(tree)), dtype=np.int64)
        for depth in range(1, tree.depth + 1):
            self._count(depth)
        self.nodes, self.gains = [0], [len(probe.accepted)]

    def _count(self, depth: int) -> None:
        """Gain and cost of every node of a depth, with its missing siblings of lower rank."""
        at = self.tree.depths == depth
        together: dict[int, NDArray[np.uint16]] = {}
        for node in np.flatnonzero(at & ~self.inside).tolist():
            before = int(self.before[node])
            missing = not self.inside[before]
            together[node] = self.left[node] | together[before] if missing else self.left[node]
            self.cost[node] = 1 + (self.cost[before] if missing else 0)
        if together:
            self.gain[list(together)] = _ONES[np.stack(list(together.values()))].sum(1, dtype=np.int64)

    def grow(self, room: int) -> bool:
        """Add the best path of at most ``room`` nodes; False where there is none."""
        tree, gain, cost = self.tree, self.gain.copy(), self.cost.copy()
        for depth in range(2, tree.depth + 1):  # with the ancestors that are missing
            nodes = np.flatnonzero((tree.depths == depth) & ~self.inside[tree.parents])
            gain[nodes] += gain[tree.parents[nodes]]
            cost[nodes] += cost[tree.parents[nodes]]
        nodes = np.flatnonzero(~self.inside & (cost <= room))
        if not len(nodes):
            return False
        per_node = gain[nodes] / cost[nodes]
        best = int(nodes[np.lexsort((-self.often[nodes], cost[nodes], -per_node))[0]])
        changed = set()
        for node in self._path(best):
            depth = int(tree.depths[node])
            new = self.left[node].copy()
            self.left[tree.depths == depth] &= ~new
            self.inside[node] = True
            self.nodes.append(node)
            self.gains.append(int(_ONES[new].sum(dtype=np.int64)))
            changed.add(depth)
        for depth in changed:
            self._count(depth)
        return True

    def _path(self, node: int) -> list[int]:
        """What is missing for a node, itself last."""
        found: list[int] = []
        while not self.inside[node]:
            siblings = [node]
            while not self.inside[before := int(self.before[siblings[0]])]:
                siblings.insert(0, before)
            found = siblings + found
            node = int(self.tree.parents[node])
        return found


def _check(budget: int, shape: str) -> None:
    check_shape(shape)
    if budget < 1:
        raise InvalidInput(f"--budget must be at least 1, but got {budget}.")
    if shape not in SHAPES:
        raise InvalidInput(
            f"From a probe trees of --shape {', '.join(SHAPES)} can be grown, but not {shape}: take sibling-closed, "
            "and an engine that takes it."
        )


def _allowed(tree: Tree, max_depth: int | None, max_rank: int, shape: str) -> BoolArray:
    """(T,) nodes that a tree within these limits can have."""
    known: set[Choice] = {()}
    top = 0 if shape == "chain" else max_rank
    for path in tree.paths[1:]:
        complete = shape == "any" or path[-1] == 0 or (*path[:-1], path[-1] - 1) in known
        if path[:-1] in known and complete and path[-1] <= top and len(path) <= (max_depth or tree.depth):
            known.add(path)
    return np.array([path in known for path in tree.paths])
