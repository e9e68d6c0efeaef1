"""Rounds of a timing: who has a turn, when there are enough of them, and the timings that they make.

visit  a turn of one kind of step: its samples
round  a visit to every kind that is compared, in random order, so that a slow minute of the machine falls on all alike
block  a part of a round: a few trees with a plain visit in their middle, so that a slow second falls on these alike

No sample is thrown away: `treeopt.latency.measurements` compares within a block. A profile calls both rounds: what is compared
has the same number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import log
from statistics import median

import numpy as np

from treeopt.files.journal import Journal
from treeopt.latency.measurements import median_latency, paired_latency
from treeopt.records.profile import StepTiming
from treeopt.trees.draft import OVER_MARGINALS, Draft
from treeopt.trees.tree import Tree

FEWEST_ROUNDS = 3  # however short the time
FEWEST_SAMPLES, IN_A_ROW = 5, 3  # rounds before a spread is believed, and in how many it has to be small
LEAST_SHARE = 0.8  # of the time that is measured, in which this process has the processor
PRECISION = 0.02  # margin of error that is small enough

# Untimed and timed steps of a visit. The first step finds the caches full of what the step before needed, which is no part of
# what a step costs. A machine is slow for seconds at a time, so more rounds tell much and more steps of a visit little:
# per second of timing, a ratio has 4.6 times the variance with visits of four and six steps, and 23 times with whole answers.
STEPS = (1, 1)
PLAIN_VISITS = 3  # turns of the plain step in a round: every speedup is against it
# Trees that share a plain visit, where a round has more than three of these: seconds later a machine can be half as fast.
BLOCK = 4
LEAST_TREES = 2  # that are timed however short the time


@dataclass(frozen=True, kw_only=True)
class Visit:
    """Samples of one kind of step, taken one after the other.

    place       : of the kind: its tree's, plain steps stand behind the last tree
    seconds     : of the whole visit · processor_s : of them those that this process computed, None where others did
    lengths     : of the rows before each step [tokens]
    parts_ms    : of one step more, part by part
    """

    place: int
    seconds: float
    step_ms: list[float]
    processor_s: float | None = None
    lengths: list[int] = field(default_factory=list)
    parts_ms: dict[str, float] = field(default_factory=dict)


Round = tuple[Visit, ...]  # the visits in the order of their turns


@dataclass(frozen=True)
class Planned:
    """What a time limit has room for.

    kept      : places of the trees that are timed
    whole_s   : what the fewest rounds would take with all trees
    least_s   : what they take as planned
    warm_up_s : what it took to find this out
    """

    kept: list[int]
    whole_s: float
    least_s: float
    warm_up_s: float = 0.0


class Visitor(ABC):
    """What takes steps to be timed: a decoder or an engine.

    A lone root among the trees is plain decoding of an engine as it comes, where the plain step is of an exact one.

    visit_steps: untimed and timed steps of a visit
    contexts   : lengths of texts that rounds take in turn, so that a slow minute falls on all alike
    per_launch : rounds at each context by one launch of what takes the steps; they count as one, since launches differ
    """

    visit_steps: tuple[int, int] = STEPS
    contexts = 1
    per_launch = 1

    def __init__(self, trees: Sequence[Draft], batch_size: int) -> None:
        self.trees, self.batch_size = trees, batch_size

    @abstractmethod
    def warm_up(self) -> tuple[list[float], float]:
        """Seconds of a step with each tree and of a plain one, and what it took to find them."""

    @abstractmethod
    def visit(self, place: int, steps: tuple[int, int], number: int) -> Visit:
        """Some untimed and some timed steps with the tree of that place, in the round of that number."""


@dataclass(frozen=True)
class Rounds:
    """All rounds of some trees and plain steps at one batch size, and those of the trees that there was time for."""

    all_trees: Sequence[Draft]
    batch_size: int
    planned: Planned
    rounds: Sequence[Round]
    contexts: int = 1
    per_launch: int = 1

    @property
    def trees(self) -> list[Draft]:
        return [self.all_trees[place] for place in self.planned.kept]

    @property
    def seconds(self) -> float:
        return self.planned.warm_up_s + sum(visit.seconds for visit in self.visits)

    def is_enough(self, time_limit_s: float, precision: float) -> bool:
        """Whether the time has no room for another round, or every latency is known to ``precision``.

        The spread of a few rounds is small by chance every so often, so it has to be in the last rounds each.
        """
        each = len(self.rounds) // self.contexts
        if each < FEWEST_ROUNDS * self.per_launch or len(self.rounds) % (self.contexts * self.per_launch):
            return False
        seconds = self.seconds - self.planned.warm_up_s
        if seconds + seconds / len(self.rounds) > time_limit_s - self.planned.warm_up_s:
            return True
        return each >= FEWEST_SAMPLES * self.per_launch and all(
            margin_of_error(point, plain) <= precision
            for n in range(each - IN_A_ROW + 1, each + 1)
            for points, plain in replace(self, rounds=self.rounds[: n * self.contexts]).timings(1)
            for point in (plain, *points)
        )

    @property
    def visits(self) -> list[Visit]:
        return [visit for round_ in self.rounds for visit in round_]

    def followed_by(self, other: Rounds) -> Rounds:
        """These rounds and then those of other trees, as one measurement."""
        first, whole = len(self.all_trees), len(self.all_trees) + len(other.all_trees)
        mine = [tuple(replace(v, place=whole if v.place == first else v.place) for v in r) for r in self.rounds]
        theirs = [tuple(replace(v, place=first + v.place) for v in r) for r in other.rounds]
        kept = [*self.planned.kept, *(first + place for place in other.planned.kept)]
        warm_up_s = self.planned.warm_up_s + other.planned.warm_up_s
        planned = replace(self.planned, kept=kept, warm_up_s=warm_up_s)
        return Rounds([*self.all_trees, *other.all_trees], self.batch_size, planned, [*mine, *theirs])

    def timings(self, context_tokens: int | None = None) -> list[tuple[list[StepTiming], StepTiming]]:
        """The trees' timings and the plain one, at ``context_tokens``, or else at each median length of the rows."""
        found = []
        for rounds in (self.rounds[i :: self.contexts] for i in range(self.contexts)):
            context = context_tokens
            if context is None:
                context = int(median([length for round_ in rounds for visit in round_ for length in visit.lengths]))
            visits = self._numbered(rounds)
            plain = self._timing(visits, len(self.all_trees), Tree.chain(0), context)
            found.append(([self._timing(visits, i, self.all_trees[i], context) for i in self.planned.kept], plain))
        return found

    def _timing(self, visits: Sequence[tuple[int, Visit]], place: int, tree: Draft, context: int) -> StepTiming:
        turns = [one for one in visits if one[1].place == place]
        parts = turns[0][1].parts_ms
        return StepTiming(
            self.batch_size,
            context,
            len(tree),
            tree.depth,
            step_ms=tuple(ms for _, visit in turns for ms in visit.step_ms),
            round=tuple(n for n, visit in turns for _ in visit.step_ms),
            parts_ms={part: tuple(visit.parts_ms[part] for _, visit in turns) for part in parts} or None,
            expanding=tuple(tree.expanding()) if "draft 0" in parts else None,
            topk=tree.topk,
            over_marginals=tree.cost.family == OVER_MARGINALS or None,
            as_it_comes=(len(tree) == 1 and place < len(self.all_trees)) or None,
        )

    def _numbered(self, rounds: Sequence[Round]) -> list[tuple[int, Visit]]:
        """Every visit with the number of its block, as `turns` makes blocks, or of its launch."""
        found, blocks = list[tuple[int, Visit]](), 0
        for n, round_ in enumerate(rounds):
            plain = sum(visit.place == len(self.all_trees) for visit in round_)
            if self.per_launch > 1:
                found += [(n // self.per_launch, visit) for visit in round_]
            else:
                parts = np.array_split(np.arange(len(round_) - plain), plain)
                numbers = np.repeat(np.arange(plain), [1 + len(part) for part in parts])
                found += zip((blocks + numbers).tolist(), round_, strict=True)
            blocks += plain
        return found


def time_rounds(
    visitor: Visitor,
    *,
    time_limit_s: float,
    precision: float = PRECISION,
    journal: Journal | None = None,
    progress: Callable[[Planned | Visit], None] = lambda event: None,
) -> Rounds:
    """Rounds of visits to every tree and to plain steps, until their latencies are known or the time is over.

    Rounds go on until every latency is known to ``precision`` (at least five), or until the time limit (at least three).
    Where these would take longer, trees are left out. Visits of the journal come first, and new ones go there;
    ``progress`` is called with what is planned before the first round, and with every visit.
    """
    blocks, is_warm = journal.documents() if journal else [], False
    rounds = [tuple(Visit(**visit) for visit in block["visits"]) for block in blocks[1:]]
    for round_ in rounds:
        for visit in round_:
            progress(visit)
    if blocks:
        planned = Planned(**blocks[0])
    else:
        (step_s, warm_up_s), is_warm = visitor.warm_up(), True
        planned = plan_rounds(visitor.trees, step_s, time_limit_s - warm_up_s, visitor.visit_steps)
        planned = replace(planned, warm_up_s=warm_up_s)
        progress(planned)
        if journal:
            journal.append(asdict(planned))
    while True:
        found = Rounds(visitor.trees, visitor.batch_size, planned, rounds, visitor.contexts, visitor.per_launch)
        if found.is_enough(time_limit_s, precision):
            return found
        if not is_warm:
            visitor.warm_up()
            is_warm = True
        visits = []
        for place in turns(planned.kept, len(visitor.trees), len(rounds)):
            visits.append(visitor.visit(place, visitor.visit_steps, len(rounds)))
            progress(visits[-1])
        rounds.append(tuple(visits))
        if journal:
            journal.append({"visits": [asdict(visit) for visit in visits]})


def turns(kept: Sequence[int], plain: int, number: int = 0) -> list[int]:
    """Places in the order of the round of that number: trees in random order, plain visits among them.

    >>> turns([0, 1, 2, 3, 4, 5], 9)
    [3, 9, 2, 5, 9, 4, 0, 9, 1]
    """
    count = max(PLAIN_VISITS, -(-len(kept) // BLOCK))
    order = np.random.default_rng([0, number]).permutation(np.asarray(kept, np.int64))
    parts = [part.tolist() for part in np.array_split(order, count)]
    return [place for part in parts for place in (*part[: len(part) // 2], plain, *part[len(part) // 2 :])]


def plan_rounds(
    trees: Sequence[Draft], step_s: Sequence[float], time_limit_s: float, steps: tuple[int, int] = STEPS
) -> Planned:
    """The trees of which the fewest rounds fit into the time.

    step_s : seconds of a step with each tree, and of a plain step

    >>> plan_rounds([Tree.chain(1), Tree.chain(2), Tree.chain(3)], [1.0, 1.0, 1.0, 1.0], 30.0).kept
    [0, 2]
    """

    def seconds(kept: Sequence[int]) -> float:
        return FEWEST_ROUNDS * sum(steps) * sum(step_s[i] for i in turns(kept, len(trees)))

    whole_s, kept = seconds(range(len(trees))), [i for i in range(len(trees)) if len(trees[i]) == 1]
    least = LEAST_TREES + len(kept)
    for i in far_apart(trees):
        if i not in kept and (len(kept) < least or seconds([*kept, i]) <= time_limit_s):
            kept.append(i)
    return Planned(sorted(kept), whole_s, seconds(kept))


def far_apart(trees: Sequence[Draft]) -> list[int]:
    """Places of the trees: the largest and the smallest of the deepest, between which most sizes lie, then always the
    one that is least like those before it.

    >>> far_apart([Tree.chain(1), Tree.chain(2), Tree.chain(7)])
    [2, 0, 1]
    """
    deepest = max((tree.depth for tree in trees), default=0)
    ends = sorted((len(tree), i) for i, tree in enumerate(trees) if tree.depth == deepest)
    order = list(dict.fromkeys(i for _, i in (ends[-1:] + ends[:1])))
    left = [i for i in range(len(trees)) if i not in order]

    def apart(i: int, j: int) -> float:
        one, other = trees[i], trees[j]
        families = one.cost.family != other.cost.family
        return abs(log(len(one) / len(other))) + abs(one.depth - other.depth) / 4 + families / 4

    while left:
        order.append(max(left, key=lambda i: min(apart(i, j) for j in order)))
        left.remove(order[-1])
    return order


def margin_of_error(timing: StepTiming, plain: StepTiming) -> float:
    """Half of the 95 % interval of a latency, as a share of it; of the ratio to plain for a tree.

    >>> timing = StepTiming(1, 9, size=1, depth=0, step_ms=(2.0, 2.0, 2.0))
    >>> margin_of_error(timing, timing)
    0.0
    """
    is_paired = timing.size > 1 or timing.as_it_comes
    latency = paired_latency(timing, plain) if is_paired else median_latency(timing.step_ms)
    return 1.96 * latency.stderr_ms / latency.ms


def processor_share(measured: Sequence[tuple[float, float | None]]) -> float | None:
    """Processor time of this process over the time that measuring took, at most 1; None where others computed.

    measured : seconds that something took, and those of them that this process computed

    At least one thread computes all the time, so on a CPU less than 1 means that other programs had the processor.

    >>> processor_share([(4.0, 1.0)])
    0.25
    """
    computed = [processor_s for _, processor_s in measured if processor_s is not None]
    seconds = sum(took for took, _ in measured)
    return round(min(sum(computed) / seconds, 1.0), 3) if seconds and len(computed) == len(measured) else None


def busy(share: float | None) -> str | None:
    """Says so where a machine was too busy for its times to be believed, by its `processor_share`.

    >>> busy(0.97), busy(0.5)[:65]
    (None, 'The machine is busy: other programs had the processor for 50% of ')
    """
    if share is None or share >= LEAST_SHARE:
        return None
    return (
        f"The machine is busy: other programs had the processor for {1 - share:.0%} of the time that was measured, so "
        "times are too long and uncertain. Measure again when nothing else runs."
    )


def drift(plain: StepTiming) -> float:
    """How much slower plain steps became from the first to the last third of the rounds, 0.1 for 10 %.

    >>> drift(StepTiming(1, 128, size=1, depth=0, step_ms=(2.0, 2.0, 3.0), round=(0, 1, 2)))
    0.5
    """
    medians = list(plain.by_round().values())
    third = max(1, len(medians) // 3)
    return float(np.median(medians[-third:]) / np.median(medians[:third])) - 1 if medians else 0.0
