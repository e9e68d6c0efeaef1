"""Rounds of a timing: which step has its turn, when there are enough rounds, and the timings that they make.

visit  a turn of one kind of step: its samples
round  a visit to every kind that is compared, in random order, so that a slow minute of the machine falls on all alike
block  a part of a round: a few trees with a plain visit in their middle, so that a slow second falls on these alike

No sample is thrown away: `treeopt.latency.measurements` compares within a block. A profile calls a block a round: what is
compared has the same number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
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

    place       : of the kind's tree among the trees; that of plain steps is behind the last tree
    block       : number of the block, or of the launch where launches differ
    seconds     : time of the whole visit
    processor_s : time in which this process computed; None where others did
    lengths     : of the rows before each step [tokens]
    """

    place: int
    seconds: float
    step_ms: list[float]
    block: int = 0
    processor_s: float | None = None
    lengths: list[int] = field(default_factory=list)


Round = tuple[Visit, ...]  # the visits in the order of their turns


@dataclass(frozen=True)
class TimingPlan:
    """What a time limit has room for.

    places    : of the trees that are timed
    whole_s   : what the fewest rounds would take with all trees
    least_s   : what they take with the trees that are timed
    warm_up_s : what it took to find this out
    """

    places: list[int]
    whole_s: float
    least_s: float
    warm_up_s: float = 0.0


class Visitor(ABC):
    """A decoder or an engine that takes steps to be timed.

    A lone root among the trees is the engine's default decoding; the plain step behind them is that of the exact engine.

    visit_steps : untimed and timed steps of a visit
    contexts    : number of lists of texts of other lengths, which rounds take in turn
    per_launch  : rounds at each context by one launch of an engine; they count as one, since launches differ
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
    """All rounds of some trees and plain steps at one batch size; ``plan`` says which of the trees are timed."""

    trees: Sequence[Draft]
    batch_size: int
    plan: TimingPlan
    rounds: Sequence[Round]
    contexts: int = 1
    per_launch: int = 1

    @property
    def seconds(self) -> float:
        return self.plan.warm_up_s + sum(visit.seconds for visit in self.visits)

    @property
    def visits(self) -> list[Visit]:
        return [visit for round_ in self.rounds for visit in round_]

    def is_enough(self, time_limit_s: float, precision: float) -> bool:
        """Whether the time has no room for another round, or every latency is known to ``precision``.

        The spread of a few rounds is small by chance every so often, so it has to be in the last rounds each.
        """
        at_each = len(self.rounds) // self.contexts
        if at_each < FEWEST_ROUNDS * self.per_launch or len(self.rounds) % (self.contexts * self.per_launch):
            return False
        seconds = self.seconds - self.plan.warm_up_s
        if seconds + seconds / len(self.rounds) > time_limit_s - self.plan.warm_up_s:
            return True
        return at_each >= FEWEST_SAMPLES * self.per_launch and all(
            margin_of_error(timing, plain) <= precision
            for count in range(at_each - IN_A_ROW + 1, at_each + 1)
            for timings, plain in replace(self, rounds=self.rounds[: count * self.contexts]).timings(1)
            for timing in (plain, *timings)
        )

    def timings(self, context_tokens: int | None = None) -> list[tuple[list[StepTiming], StepTiming]]:
        """The trees' timings and the plain one, at ``context_tokens``, or else at each median length of the rows."""
        timings = []
        for i in range(self.contexts):
            visits = [visit for round_ in self.rounds[i :: self.contexts] for visit in round_]
            context = context_tokens
            if context is None:
                context = int(median([length for visit in visits for length in visit.lengths]))
            plain = self._timing(visits, len(self.trees), Tree.chain(0), context)
            trees = [self._timing(visits, place, self.trees[place], context) for place in self.plan.places]
            timings.append((trees, plain))
        return timings

    def _timing(self, visits: Sequence[Visit], place: int, tree: Draft, context: int) -> StepTiming:
        visits = [visit for visit in visits if visit.place == place]
        return StepTiming(
            self.batch_size,
            context,
            len(tree),
            tree.depth,
            step_ms=tuple(ms for visit in visits for ms in visit.step_ms),
            round=tuple(visit.block for visit in visits for _ in visit.step_ms),
            topk=tree.topk,
            over_marginals=tree.cost.family == OVER_MARGINALS or None,
            as_it_comes=(len(tree) == 1 and place < len(self.trees)) or None,
        )


def time_steps(
    visitor: Visitor,
    *,
    time_limit_s: float,
    precision: float = PRECISION,
    journal: Journal | None = None,
    progress: Callable[[TimingPlan | Visit], None] = lambda event: None,
) -> Rounds:
    """Rounds of visits to every tree and to plain steps, until their latencies are known or the time is over.

    Rounds go on until every latency is known to ``precision`` (at least five), or until the time limit (at least three).
    Where these would take longer, trees are left out. Visits of the journal come first, and new ones go there;
    ``progress`` is called with what is planned before the first round, and with every visit.
    """
    documents = journal.documents() if journal else []
    is_warm = not documents
    if documents:
        plan = TimingPlan(**documents[0])
    else:
        step_s, warm_up_s = visitor.warm_up()
        plan = plan_rounds(visitor.trees, step_s, time_limit_s - warm_up_s, visitor.visit_steps)
        plan = replace(plan, warm_up_s=warm_up_s)
        progress(plan)
        if journal:
            journal.append(asdict(plan))
    rounds = [tuple(Visit(**visit) for visit in document["visits"]) for document in documents[1:]]
    for visit in (visit for round_ in rounds for visit in round_):
        progress(visit)
    while True:
        whole = Rounds(visitor.trees, visitor.batch_size, plan, rounds, visitor.contexts, visitor.per_launch)
        if whole.is_enough(time_limit_s, precision):
            return whole
        if not is_warm:
            visitor.warm_up()
            is_warm = True
        visits = []
        for visit in _visits(visitor, plan.places, len(rounds)):
            visits.append(visit)
            progress(visit)
        rounds.append(tuple(visits))
        if journal:
            journal.append({"visits": [asdict(visit) for visit in visits]})


def _visits(visitor: Visitor, places: Sequence[int], number: int) -> Iterator[Visit]:
    """The visits of the round of that number, in the order of their turns."""
    blocks, at_context = turns(places, len(visitor.trees), number), number // visitor.contexts
    for i, block in enumerate(blocks):
        of_launch = at_context // visitor.per_launch
        block_number = of_launch if visitor.per_launch > 1 else at_context * len(blocks) + i
        for place in block:
            yield replace(visitor.visit(place, visitor.visit_steps, number), block=block_number)


def turns(places: Sequence[int], plain: int, number: int = 0) -> list[list[int]]:
    """Blocks of the round of that number: trees in random order, a plain visit in the middle of each block.

    >>> turns([0, 1, 2, 3, 4, 5], 9)
    [[3, 9, 2], [5, 9, 4], [0, 9, 1]]
    """
    count = max(PLAIN_VISITS, -(-len(places) // BLOCK))
    order = np.random.default_rng([0, number]).permutation(np.asarray(places, np.int64))
    parts = [part.tolist() for part in np.array_split(order, count)]
    return [[*part[: len(part) // 2], plain, *part[len(part) // 2 :]] for part in parts]


def plan_rounds(
    trees: Sequence[Draft], step_s: Sequence[float], time_limit_s: float, steps: tuple[int, int] = STEPS
) -> TimingPlan:
    """The trees of which the fewest rounds fit into the time.

    step_s : seconds of a step with each tree, and of a plain step

    >>> plan_rounds([Tree.chain(1), Tree.chain(2), Tree.chain(3)], [1.0, 1.0, 1.0, 1.0], 30.0).places
    [0, 2]
    """

    def seconds(places: Sequence[int]) -> float:
        return FEWEST_ROUNDS * sum(steps) * sum(step_s[place] for block in turns(places, len(trees)) for place in block)

    places = [place for place, tree in enumerate(trees) if len(tree) == 1]
    least = LEAST_TREES + len(places)
    for place in far_apart(trees):
        if place not in places and (len(places) < least or seconds([*places, place]) <= time_limit_s):
            places.append(place)
    return TimingPlan(sorted(places), seconds(range(len(trees))), seconds(places))


def far_apart(trees: Sequence[Draft]) -> list[int]:
    """Places of the trees in the order in which they are worth timing.

    The largest and the smallest of the deepest trees come first, since most sizes lie between them. Then always the tree
    comes that is least like those before it.

    >>> far_apart([Tree.chain(1), Tree.chain(2), Tree.chain(7)])
    [2, 0, 1]
    """
    deepest = max((tree.depth for tree in trees), default=0)
    ends = sorted((len(tree), place) for place, tree in enumerate(trees) if tree.depth == deepest)
    order = list(dict.fromkeys(place for _, place in (ends[-1:] + ends[:1])))
    rest = [place for place in range(len(trees)) if place not in order]

    def distance(first: Draft, second: Draft) -> float:
        families = first.cost.family != second.cost.family
        return abs(log(len(first) / len(second))) + abs(first.depth - second.depth) / 4 + families / 4

    while rest:
        order.append(max(rest, key=lambda place: min(distance(trees[place], trees[other]) for other in order)))
        rest.remove(order[-1])
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


def processor_share(times: Sequence[tuple[float, float | None]]) -> float | None:
    """Processor time of this process over the time that measuring took, at most 1; None where others computed.

    times : seconds that something took, and those of them that this process computed

    At least one thread computes all the time, so on a CPU less than 1 means that other programs had the processor.

    >>> processor_share([(4.0, 1.0)])
    0.25
    """
    computed = [processor_s for _, processor_s in times if processor_s is not None]
    seconds = sum(taken_s for taken_s, _ in times)
    return round(min(sum(computed) / seconds, 1.0), 3) if seconds and len(computed) == len(times) else None


def busy(share: float | None) -> str | None:
    """A sentence where the machine was too busy for its times to be believed, by its `processor_share`.

    >>> busy(0.97), busy(0.5)[:65]
    (None, 'The machine is busy: other programs had the processor for 50% of ')
    """
    if share is None or share >= LEAST_SHARE:
        return None
    return (
        f"The machine is busy: other programs had the processor for {1 - share:.0%} of the time that was measured, so "
        "times are too long and uncertain. Measure again when nothing else runs."
    )
