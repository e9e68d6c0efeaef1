"""Trees under a rule that accepts several siblings: judged and grown on the steps of a probe.

The longest accepted path of a step wins. So a step emits 1 + the depth of its deepest accepted node, and a tree's
tokens per step are 1 + the sum over depths of P(some node of that depth is accepted with all its ancestors): a
coverage, in which siblings that are accepted together count once. A node adds less the more nodes there are (the sum is
monotone and submodular), so a tree is grown by marginal gain. A node may gain nothing without its children, so the
growth looks ahead: at whole paths, by gain per node.

P steps · S sequences · T nodes of the probe tree · N nodes of a family · n trees asked for at once
A accepted nodes of all steps, roots left out
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.grow import grow_products
from treeopt.records.calibration import Calibration
from treeopt.records.probe import Probe
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Choice, GrownTrees, IntArray, Tree


@dataclass(frozen=True, eq=False)
class AcceptedNodes:
    """The accepted nodes of all steps in one list: step after step, and in a step the best node first.

    A tree's winner of a step is its node with the least place in this list. The place behind the last one stands for a
    step that accepts no guess.

    steps   : (A,)    the step of each node
    guesses : (A+1,)  guesses that the step emits if the node wins
    tokens  : (A+1,)  tokens that it emits: one more, unless a guess ends the sequence
    places  : T, the places of every node of the probe tree, one for each step that accepts it
    """

    steps: IntArray
    guesses: IntArray
    tokens: IntArray
    places: list[IntArray]

    @classmethod
    def of(cls, probe: Probe) -> AcceptedNodes:
        """Longer paths win, then likelier ones, then the first in order."""
        tree = probe.tree
        steps, nodes = np.nonzero(probe.accepted[:, 1:])
        nodes += 1
        order = np.lexsort((nodes, -probe.log_likelihood, -tree.depths[nodes], steps))
        steps, nodes = steps[order], nodes[order]
        last = probe.first_end[steps, nodes]
        guesses = np.where(last > 0, last, tree.depths[nodes])
        tokens = np.where(last > 0, last, guesses + 1)
        by_node = np.argsort(nodes, kind="stable")
        places = np.split(by_node, np.searchsorted(nodes[by_node], np.arange(1, len(tree))))
        return cls(steps, np.append(guesses, 0), np.append(tokens, 1), places)

    def add(self, winner: IntArray, nodes: Iterable[int]) -> None:
        """Add nodes to a tree: update the (P,) places of its winners. A node of -1 was not probed."""
        for node in nodes:
            if node > 0:
                places = self.places[node]
                steps = self.steps[places]
                winner[steps] = np.minimum(winner[steps], places)

    def winners(self, probe: Probe, paths: tuple[Choice, ...]) -> IntArray:
        """(P,) place of the winner of each step with the tree of these nodes."""
        winner = np.full(len(probe.accepted), len(self.steps))
        self.add(winner, _places(probe, paths))
        return winner


def tokens_of_trees(probe: Probe, paths: tuple[Choice, ...], sizes: IntArray) -> IntArray:
    """(n, S) tokens that the steps of every sequence emit with each of n nested trees.

    sizes : (n,) rising; a tree of this size has the first nodes ``paths``

    Time O(A + n x P).
    """
    accepted, places = AcceptedNodes.of(probe), _places(probe, paths)
    winner = accepted.winners(probe, ())
    tokens = np.zeros((len(sizes), probe.num_sequences), dtype=np.int64)
    for i, (before, size) in enumerate(pairwise([0, *sizes.tolist()])):
        accepted.add(winner, places[before:size])
        tokens[i] = np.bincount(probe.sequence, accepted.tokens[winner], minlength=probe.num_sequences)
    return tokens


def guess_counts(probe: Probe, paths: tuple[Choice, ...]) -> IntArray:
    """(D+1,) number of steps that emit 0, 1, ... D guesses with the tree of these nodes."""
    accepted = AcceptedNodes.of(probe)
    return np.bincount(accepted.guesses[accepted.winners(probe, paths)], minlength=1 + max(map(len, paths)))


def node_visits(probe: Probe, tree: Tree) -> IntArray:
    """(n,) number of steps in which each node of ``tree`` is on the winning path; the root is on all.

    >>> tree = Tree.from_choices([[0], [0, 0]])
    >>> bits = np.array([[True, True, True], [True, True, False]])
    >>> probe = Probe(tree, tree, bits, np.zeros_like(bits), -np.ones(3), np.array([0, 2]), np.array([6]))
    >>> node_visits(probe, tree).tolist()
    [2, 2, 1]
    """
    accepted = AcceptedNodes.of(probe)
    node_at = np.zeros(len(accepted.steps) + 1, dtype=np.int64)  # node of ``tree`` at each place
    for node, place in enumerate(_places(probe, tree.paths).tolist()):
        if place > 0:
            node_at[accepted.places[place]] = node
    visits = np.bincount(node_at[accepted.winners(probe, tree.paths)], minlength=len(tree))
    for node in range(len(tree) - 1, 0, -1):
        visits[tree.parents[node]] += visits[node]
    return visits


def _places(probe: Probe, paths: tuple[Choice, ...]) -> IntArray:
    """(N,) node of the probe tree with each path; -1 for none."""
    index = {path: i for i, path in enumerate(probe.tree.paths)}
    return np.array([index.get(path, -1) for path in paths])


COVERAGE = "coverage"  # name of the growth in a plan
Words = NDArray[np.uint16]  # a bit for each step
_ONES = np.array([i.bit_count() for i in range(2**16)], dtype=np.uint8)  # number of ones in 16 bits


def probe_tree(calibration: Calibration, *, size: int, policy: Tree | None = None) -> Tree:
    """A tree of ``size`` nodes to probe, beside the nodes of ``policy``.

    It is grown by products of marginals, as if a guess of rank r were accepted if the truth has rank r or a later one:
    a guess that is likelier than the truth is likely enough itself. So it is wider and deeper than trees for the truth.

    >>> calibration = Calibration(np.array([[0, 9], [0, 8]]), np.array([10, 10]))  # the truth is never first
    >>> probe_tree(calibration, size=4).choices
    [[0], [1], [0, 0]]
    """
    or_later = np.cumsum(calibration.accept[:, ::-1], axis=1)[:, ::-1]
    grown = grow_products(or_later, Limits(size))
    nodes = set(grown.paths) | set(policy.paths if policy else ())
    return Tree.from_choices(nodes - {()})


def grow_coverage(probe: Probe, limits: Limits) -> GrownTrees:
    """Nested trees within the probe tree, grown by `coverage` with look-ahead.

    The path that gains most per node and still fits comes next, with the siblings of lower rank that it needs. If no path
    gains, the nodes that were accepted most often follow. Greedy growth of a submodular gain is not always best (a test
    bounds its loss against brute force). Time O(budget x T x P / 16), in table look-ups.
    """
    if not len(probe.accepted):
        raise OutOfRange("Growing needs answers of more than one token, but the probe has none.")
    useful = probe.accepted & (probe.first_end == 0)  # no guess up to it ends the sequence
    words = np.ascontiguousarray(np.pad(useful, ((0, -len(useful) % 16), (0, 0))).T)
    covers = dict(zip(probe.tree.paths, np.packbits(words, axis=1).view(np.uint16), strict=True))
    often = dict(zip(probe.tree.paths, probe.accepted.sum(0).tolist(), strict=True))
    every_step = ~np.zeros_like(covers[()])
    left = dict.fromkeys(range(1, probe.tree.depth + 1), every_step)
    nodes, gains = [Choice()], [len(probe.accepted)]
    while path := _best_path(nodes, covers, left, often, limits):
        for node in path:
            gains.append(_count(covers[node] & left[len(node)]))
            left[len(node)] = left[len(node)] & ~covers[node]
        nodes += path
    return GrownTrees.nested(tuple(nodes), np.array(gains) / len(probe.accepted))


def _best_path(
    nodes: list[Choice],
    covers: Mapping[Choice, Words],
    left: Mapping[int, Words],
    often: Mapping[Choice, int],
    limits: Limits,
) -> list[Choice]:
    """The nodes that come next in a tree: a path with the siblings that it needs. Empty if none fits.

    covers : nodes of the probe tree in order, with a bit for each step that accepts the node
    left   : depths with a bit for each step in which the tree accepts nothing there
    often  : nodes with the number of steps that accept them
    """
    # Gain and nodes of a candidate with all nodes that it needs; then its steps and nodes at its own depth alone.
    gain, missing = dict.fromkeys(nodes, 0), {node: list[Choice]() for node in nodes}
    new, siblings = dict[Choice, Words](), dict[Choice, list[Choice]]()
    for node in covers:
        if node in gain or len(node) > limits.depth(len(left)) or node[-1] >= limits.num_ranks:
            continue
        parent, before = node[:-1], (*node[:-1], node[-1] - 1)
        if parent in gain and (before in gain or not node[-1]):
            new[node] = covers[node] & left[len(node)]
            if before in new:  # steps that accept both siblings count once
                new[node] = new[node] | new[before]
            siblings[node] = [*siblings.get(before, ()), node]
            gain[node] = gain[parent] + _count(new[node])
            missing[node] = missing[parent] + siblings[node]
    fitting = [node for node in new if len(missing[node]) <= limits.budget - len(nodes)]
    if not fitting:
        return []
    return missing[min(fitting, key=lambda n: (-gain[n] / len(missing[n]), len(missing[n]), -often[n]))]


def _count(words: Words) -> int:
    """Number of bits that are set."""
    return int(_ONES[words].sum(dtype=np.int64))
