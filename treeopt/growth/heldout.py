"""What trees of every size reach on answers that they were not grown on.

Trees are grown on all folds of conversations but one and replayed on that one, so that no figure is
in-sample. The trees that are delivered are grown on all of them. In a trace the text is fixed, so a tree changes
how many steps it takes; in a probe the steps are fixed, so it changes how many tokens they emit.

S sequences · C conversations, of which they are the turns · n sizes of a family · B bootstrap draws
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.coverage import grow_coverage
from treeopt.growth.objectives import grow, grow_independent
from treeopt.growth.probed import independent_tokens, replay_probe, tokens_of_trees
from treeopt.growth.replay import growth_index, replay, replay_trees, tokens_per_step
from treeopt.growth.worth import product_values
from treeopt.records.bootstrap import conversation_draws, drawn_rates, stderr
from treeopt.records.calibration import Calibration, count_hits
from treeopt.records.probe import Probe
from treeopt.records.trace import Answers, RankTrace, fold_numbers
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Choice, IntArray, Tree, TreeFamily

Paths = tuple[Choice, ...]


@dataclass(frozen=True, eq=False)
class Rates:
    """Tokens per step of a tree, predicted in three ways.

    product  : as if guesses were right or wrong independently, by the marginals
    joint    : averaged over all states; None where there is no trace
    replayed : as decoding goes, with its standard error; None where there is neither trace nor probe
    steps    : (C,) replayed steps of every conversation
    """

    product: float
    joint: float | None
    replayed: float | None
    stderr: float | None
    steps: IntArray | None

    @property
    def tokens_per_step(self) -> float:
        """The best figure at hand: replayed, or the product where nothing can be replayed."""
        return self.product if self.replayed is None else self.replayed

    def document(self) -> dict[str, float | None]:
        return {"product": self.product, "joint": self.joint, "replayed": self.replayed, "replayed_stderr": self.stderr}


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Trees of every size up to a depth limit, and what they reach on sequences they never saw.

    family  : grown on all sequences; its trees are the ones delivered
    steps   : (n, C) cross-fitted replayed steps of every conversation, None without a trace or a probe
    tokens  : (C,)   tokens emitted by them; of a probe (n, C), and the steps are the same for all trees
    product : (n,)   tokens per step by held-out marginals
    joint   : (n,)   tokens per step averaged over all held-out states, None without a trace
    grown   : of every fold the sequences held out, and the trees grown on the others
    """

    family: TreeFamily
    steps: IntArray | None
    tokens: IntArray | None
    product: NDArray[np.float64]
    joint: NDArray[np.float64] | None
    grown: tuple[tuple[IntArray, TreeFamily], ...] = ()

    @property
    def tokens_per_step(self) -> NDArray[np.float64]:
        """(n,) the best figure at hand: replayed, or the product where nothing can be replayed."""
        if self.steps is None or self.tokens is None:
            return self.product
        rates: NDArray[np.float64] = self.tokens.sum(-1) / np.maximum(self.steps.sum(1), 1)
        return rates

    @property
    def conversations(self) -> int:
        """How many there are to draw again; 0 where nothing can be replayed."""
        return 0 if self.tokens is None else self.tokens.shape[-1]

    @cached_property
    def draws(self) -> NDArray[np.float64]:
        """(n, B) tokens per step of resampled sets of conversations; (n, 1) where nothing can be replayed."""
        if self.steps is None or self.tokens is None:
            return self.product[:, None]
        return drawn_rates(self.tokens, self.steps, conversation_draws(self.conversations))

    def rates(self, size: int) -> Rates:
        """The held-out figures of one size."""
        i = self.family.index(size)
        if self.steps is None:
            return Rates(float(self.product[i]), None, None, None, None)
        return Rates(
            product=float(self.product[i]),
            joint=None if self.joint is None else float(self.joint[i]),
            replayed=float(self.tokens_per_step[i]),
            stderr=stderr(self.draws[i], self.conversations),
            steps=self.steps[i],
        )

    def accepted(self, size: int, count: Callable[[IntArray, Paths], IntArray] | None) -> NDArray[np.float64]:
        """(D+1,) share of the held-out steps that emit 0, 1, ... guesses.

        count : how many steps of some sequences emit so many with the tree of some nodes; by the product without
        """
        nodes, gains = self.family.nodes(size), self.family.gains_of(size)
        depth = max(map(len, nodes))
        if count is None:
            reach = np.bincount([len(path) for path in nodes], gains, minlength=depth + 1)
            shares: NDArray[np.float64] = reach - np.append(reach[1:], 0.0)
            return shares
        found = [count(test, family.nodes(size)) for test, family in self.grown]
        counts = np.zeros(max([depth + 1, *map(len, found)]), dtype=np.int64)
        for part in found:
            counts[: len(part)] += part
        return counts[: 1 + int(np.flatnonzero(counts).max(initial=depth))] / max(int(counts.sum()), 1)

    def by_group(self, size: int, trace: Answers) -> dict[str, tuple[float, float | None]]:
        """Tokens per step on the conversations of each group, and its standard error (of one: None)."""
        if self.steps is None or self.tokens is None or trace.group is None:
            return {}
        row = self.family.index(size)
        all_tokens, all_steps = np.broadcast_to(self.tokens, self.steps.shape)[row], self.steps[row]
        group = trace.group[np.unique(trace.clusters, return_index=True)[1]]
        found: dict[str, tuple[float, float | None]] = {}
        for g, name in enumerate(trace.group_names):
            among = np.flatnonzero(group == g)
            if len(among):
                tokens, steps = all_tokens[among], all_steps[among]
                samples = drawn_rates(tokens, steps, conversation_draws(len(among)))
                error = stderr(samples, len(among)) if len(among) > 1 else None
                found[name] = (tokens_per_step(tokens.sum(), steps.sum()), error)
        return found


def crossfit(trace: RankTrace, limits: Limits, *, objective: str) -> HeldOut:
    """Grow on K-1 folds of sequences and replay on the rest, for every size up to the budget."""
    family = grow(trace, limits, objective=objective)
    n, grown = len(family.sizes), []
    steps = np.zeros((n, trace.num_sequences), dtype=np.int64)
    product, joint, n_states = np.zeros(n), np.zeros(n), 0
    for train, test in folds(trace):
        held_out = trace.select(test)
        trees = grow(trace.select(train), limits, objective=objective)
        grown.append((test, trees))
        members = trees.members_of(family.sizes)
        steps[:, test] = replay_trees(held_out, trees.paths, members)
        states = held_out.has_step
        count = int(states.sum())
        nodes = np.bincount(growth_index(held_out, trees.paths)[states].ravel(), minlength=len(trees.paths))
        joint += count + members @ nodes[: len(trees.paths)]
        hits, trials = count_hits(held_out.ranks[states], trace.top_k)
        accept = hits / np.maximum(trials, 1)[:, None]
        product += count * (members @ product_values(accept, trees.paths))
        n_states += count
    clusters, tokens = trace.clusters, trace.lengths - 1
    pooled = np.stack([np.bincount(clusters, row) for row in steps]).astype(np.int64)
    return HeldOut(
        family,
        pooled,
        np.bincount(clusters, tokens).astype(np.int64),
        product / n_states,
        joint / n_states,
        tuple(grown),
    )


def crossfit_probe(probe: Probe, limits: Limits) -> HeldOut:
    """Grow by coverage on K-1 folds of sequences and score on the steps of the rest, for every size.

    Approximate for all trees but the policy (`treeopt.records.probe`).
    """
    splits = list(folds(probe))
    family = grow_coverage(probe, limits)
    tokens = np.zeros((len(family.sizes), probe.num_sequences), dtype=np.int64)
    product, grown = np.zeros(len(family.sizes)), []
    for train, test in splits:
        held_out, trees = probe.select(test), grow_coverage(probe.select(train), limits)
        grown.append((test, trees))
        members = trees.members_of(family.sizes)
        tokens[:, test] = tokens_of_trees(held_out, trees.paths, members)
        product += len(held_out.accepted) * independent_tokens(held_out, trees.paths, members)
    pooled = np.stack([np.bincount(probe.clusters, row) for row in tokens]).astype(np.int64)
    steps = np.bincount(probe.clusters, np.diff(probe.starts)).astype(np.int64)
    return HeldOut(
        family, np.broadcast_to(steps, pooled.shape), pooled, product / len(probe.accepted), None, tuple(grown)
    )


def folds(trace: Answers) -> Iterator[tuple[IntArray, IntArray]]:
    """Sequences to grow on and sequences to replay on, for every fold of conversations.

    Raises OutOfRange for a record of a single conversation, which has nothing to hold out.
    """
    fold = fold_numbers(trace)
    if fold.max() < 1:
        raise OutOfRange(
            "Held-out figures need at least 2 sequences, but there is 1. "
            "Calibrate on more: treeopt calibrate --num-prompts 64"
        )
    for f in np.unique(fold):
        yield np.flatnonzero(fold != f), np.flatnonzero(fold == f)


def from_calibration(calibration: Calibration, limits: Limits) -> HeldOut:
    """The same from marginals alone (a published table): objective `independent`, nothing held out."""
    family = grow_independent(calibration.accept, limits)
    return HeldOut(family, None, None, family.members_of(family.sizes) @ family.gains, None)


def rate_tree(trace: RankTrace, tree: Tree) -> Rates:
    """What ``tree`` reaches on a trace; nodes beyond its ranks and heads are never accepted.

    >>> trace = RankTrace(np.array([[0], [3], [0], [-2]]), np.array([0, 4]))
    >>> rate_tree(trace, Tree.chain(1)).replayed
    1.5
    """
    known = tree.cut(max_depth=trace.num_heads, max_rank=trace.top_k - 1)
    clusters = trace.clusters
    tokens = np.bincount(clusters, trace.lengths - 1)
    steps = np.bincount(clusters, replay(trace, known).steps).astype(np.int64)
    states = trace.ranks[trace.has_step]
    hits, trials = count_hits(states, trace.top_k)
    accepted = growth_index(trace, known.paths)[trace.has_step] < len(known)
    samples = drawn_rates(tokens, steps, conversation_draws(len(steps)))
    return Rates(
        product=float(product_values(hits / np.maximum(trials, 1)[:, None], known.paths).sum()),
        joint=1 + float(accepted.sum(1).mean()) if len(states) else 1.0,
        replayed=tokens_per_step(tokens.sum(), steps.sum()),
        stderr=stderr(samples, len(steps)),
        steps=steps,
    )


def rate_on_probe(probe: Probe, tree: Tree) -> Rates:
    """What ``tree`` reaches on the steps of a probe; guesses that were not probed are never accepted."""
    found, all_of_it = replay_probe(probe, tree), np.ones((1, len(tree)), dtype=bool)
    tokens, steps = (np.bincount(probe.clusters, row).astype(np.int64) for row in (found.tokens, found.steps))
    samples = drawn_rates(tokens, steps, conversation_draws(len(steps)))
    return Rates(
        product=float(independent_tokens(probe, tree.paths, all_of_it)[0]),
        joint=None,
        replayed=found.tokens_per_step,
        stderr=stderr(samples, len(steps)),
        steps=steps,
    )
