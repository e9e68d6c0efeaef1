"""What trees reach under a rule that accepts several siblings, scored on the steps of a probe.

The longest accepted path of a step wins. So a step emits 1 + the depth of its deepest accepted node, and a tree's
tokens per step are 1 + the sum over depths of P(some node of that depth is accepted with all its ancestors): a
coverage, in which siblings that pass together count once.

P steps · S sequences · T nodes of the probe tree · N nodes of a family · n trees asked for at once
A accepted nodes of all steps, roots left out
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.growth.replay import Replay
from treeopt.records.probe import Probe
from treeopt.trees.tree import BoolArray, Choice, IntArray, Tree


@dataclass(frozen=True, eq=False)
class AcceptedNodes:
    """The accepted nodes of all steps in one list: step after step, and in each the node that would win first.

    So of the nodes that a tree has, the winner of a step is the one with the least place in this list. The place
    behind the last stands for a step that accepts no guess.

    steps   : (A,)    which step each belongs to
    guesses : (A+1,)  how many guesses the step emits if the node wins
    tokens  : (A+1,)  how many tokens: one more, unless a guess ends the sequence
    places  : T, of every node of the probe tree its places in the list, one for each step that accepts it
    """

    steps: IntArray
    guesses: IntArray
    tokens: IntArray
    places: list[IntArray]

    @classmethod
    def of(cls, probe: Probe) -> AcceptedNodes:
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
        places = np.split(by_node, np.searchsorted(nodes[by_node], np.arange(1, len(tree))))
        return cls(steps, np.append(guesses, 0), np.append(tokens, 1), places)

    def add(self, winner: IntArray, nodes: Iterable[int]) -> None:
        """Let nodes take part, -1 for one that was not probed: update the (P,) places of the winners so far."""
        for node in nodes:
            if node > 0:
                mine = self.places[node]
                steps = self.steps[mine]
                winner[steps] = np.minimum(winner[steps], mine)

    def no_guess(self, steps: int) -> IntArray:
        """(P,) places of the winners where there are no guesses."""
        return np.full(steps, len(self.steps))


def replay_probe(probe: Probe, tree: Tree, accepted: AcceptedNodes | None = None) -> Replay:
    """What each sequence's steps emit with ``tree``, guesses that were not probed never being accepted.

    Exact for the probe's policy; for other trees approximate, as their steps would begin elsewhere. For many trees
    ``accepted`` is made once.

    >>> tree, two = Tree.from_choices([[0], [1], [1, 0]]), Tree.from_choices([[0], [1]])
    >>> bits = np.array([[True, True, False, False], [True, False, True, True]])
    >>> probe = Probe(tree, two, bits, np.zeros_like(bits), -np.ones(3), np.array([0, 2]), np.array([5]))
    >>> replay_probe(probe, two).tokens.tolist(), replay_probe(probe, tree).tokens.tolist()
    ([4], [5])
    """
    accepted = accepted or AcceptedNodes.of(probe)
    winner = accepted.no_guess(len(probe.accepted))
    accepted.add(winner, _places(probe, tree.paths))
    tokens = np.bincount(probe.sequence, accepted.tokens[winner], minlength=probe.num_sequences).astype(np.int64)
    return Replay(np.diff(probe.starts), tokens)


def tokens_of_trees(probe: Probe, paths: tuple[Choice, ...], members: BoolArray) -> IntArray:
    """(n, S) tokens that the steps of every sequence emit with each of n trees over the nodes ``paths``.

    members : (n, N)  which of the nodes each tree has; the parent of each too

    Time O(A + n x P) for nested trees.
    """
    accepted, places = AcceptedNodes.of(probe), _places(probe, paths)
    winner = accepted.no_guess(len(probe.accepted))
    before = np.zeros(len(paths), dtype=bool)
    found = np.zeros((len(members), probe.num_sequences), dtype=np.int64)
    for i, row in enumerate(members):
        if (before & ~row).any():
            winner, before = accepted.no_guess(len(winner)), np.zeros_like(row)
        accepted.add(winner, places[row & ~before])
        before = row
        found[i] = np.bincount(probe.sequence, accepted.tokens[winner], minlength=probe.num_sequences)
    return found


def guess_counts(probe: Probe, paths: tuple[Choice, ...]) -> IntArray:
    """(D+1,) how many steps emit 0, 1, ... D guesses with the tree of these nodes."""
    accepted = AcceptedNodes.of(probe)
    winner = accepted.no_guess(len(probe.accepted))
    accepted.add(winner, _places(probe, paths))
    return np.bincount(accepted.guesses[winner], minlength=1 + max(map(len, paths)))


def node_visits(probe: Probe, tree: Tree) -> IntArray:
    """(T,) steps at which each node of ``tree`` is on the path that wins; the root is on all.

    >>> tree = Tree.from_choices([[0], [0, 0]])
    >>> bits = np.array([[True, True, True], [True, True, False]])
    >>> probe = Probe(tree, tree, bits, np.zeros_like(bits), -np.ones(3), np.array([0, 2]), np.array([6]))
    >>> node_visits(probe, tree).tolist()
    [2, 2, 1]
    """
    accepted, places = AcceptedNodes.of(probe), _places(probe, tree.paths)
    winner = accepted.no_guess(len(probe.accepted))
    accepted.add(winner, places)
    at = np.zeros(len(accepted.steps) + 1, dtype=np.int64)  # the node of ``tree`` that each place is of
    for node, place in enumerate(places.tolist()):
        if place > 0:
            at[accepted.places[place]] = node
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


def useful(probe: Probe) -> BoolArray:
    """(P, T) accepted nodes up to which, themselves included, no guess ends the sequence."""
    found: BoolArray = probe.accepted & (probe.first_end == 0)
    return found
