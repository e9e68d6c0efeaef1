"""What trees are expected to reach, and what real decoding said of them: the parts of a plan's entry.

Each class is an object of ``plan.json``, its fields are the object's keys; None stands for unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, log, sqrt

from treeopt.errors import InvalidInput
from treeopt.records.agreement import SUMS, agree, rounding, within
from treeopt.records.benchmark import Ratio
from treeopt.records.contender import Predicted, check_rows
from treeopt.trees.dynamic import AdaptiveTree, DynamicTree


@dataclass(frozen=True, kw_only=True)
class PlannedEngine:
    """The engine and its method that a plan's limits are."""

    name: str
    method: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The conversations that a plan was made from: so many ``of`` all, drawn at random by ``seed``."""

    conversations: int
    of: int
    seed: int

    @property
    def wider(self) -> float:
        """How many times as wide error bars over conversations are as with all of them."""
        return sqrt(self.of / self.conversations)


@dataclass(frozen=True, kw_only=True)
class PlanPredicted(Predicted):
    """The predictions of an entry, and how many sequences, conversations and steps they rest on."""

    sequences: int | None = None
    conversations: int | None = None
    steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Interval95:
    """95 % intervals, [low, high], of an entry's figures and of the size that would be fastest."""

    tokens_per_step: list[float] | None = None
    tokens_per_s: list[float] | None = None
    speedup: list[float] | None = None
    size: list[float] | None = None

    def check(self) -> None:
        """Raise InvalidInput for ends that are not above 0, or not in order."""
        check_ends(**{f"interval95.{name}": ends for name, ends in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class TreeFigures:
    """What a tree is expected to reach; tokens_per_s is None where there was no profile."""

    size: int
    depth: int
    tokens_per_step: float
    tokens_per_s: float | None = None

    @property
    def rate(self) -> float:
        """What trees are compared by: tokens per second, or per step where no latency is known."""
        return self.tokens_per_s or self.tokens_per_step

    def check(self, batch_size: int) -> None:
        """Raise InvalidInput where the figures contradict one another."""
        within(1, size=self.size)
        within(min(self.size - 1, 1), self.size - 1, depth=self.depth)
        step_ms = vars(self).get("step_ms")  # of the kinds that have one
        check_speed(self.size, self.tokens_per_step, step_ms, self.tokens_per_s, batch_size)


@dataclass(frozen=True, kw_only=True)
class BestChain(TreeFigures):
    """The fastest chain of top-1 guesses."""

    step_ms: float | None = None

    def check(self, batch_size: int) -> None:
        super().check(batch_size)
        agree("size", self.size, self.depth + 1, "a chain of that depth and its root")


@dataclass(frozen=True, kw_only=True)
class CurvePoint(TreeFigures):
    """The best tree of one size."""

    step_ms: float | None = None
    tokens_per_s_stderr: float | None = None

    def check(self, batch_size: int) -> None:
        super().check(batch_size)
        within(0, tokens_per_s_stderr=self.tokens_per_s_stderr)


@dataclass(frozen=True, kw_only=True)
class DynamicFigures(TreeFigures):
    """The fastest dynamic tree: ``depth`` levels, ``topk`` nodes expanded on each (1 for a chain), ``size`` rows verified.

    over_fixed : its tokens per second (per step where no latency is known) over those of the chosen fixed tree, with its
                 95 % interval
    elsewhere  : batch size of the plan -> share of the throughput that it loses there against the fastest of that size's
                 dynamic trees and plain decoding
    """

    topk: int
    tokens_per_step_stderr: float | None = None
    step_ms: float | None = None
    speedup: float | None = None
    speedup_stderr: float | None = None
    over_fixed: float | None = None
    over_fixed95: list[float] | None = None
    elsewhere: dict[int, float] = field(default_factory=dict)

    @property
    def tree(self) -> DynamicTree:
        return DynamicTree(self.depth, self.topk, self.size)

    def check(self, batch_size: int) -> None:
        super().check(batch_size)
        within(0, tokens_per_step_stderr=self.tokens_per_step_stderr, speedup_stderr=self.speedup_stderr)
        within(0, speedup=self.speedup, over_fixed=self.over_fixed)
        within(1, self.tree.levels + 1, tokens_per_step=self.tokens_per_step)
        within(-inf, 1, **{f"elsewhere.{size}": loss for size, loss in self.elsewhere.items()})
        check_ends(over_fixed95=self.over_fixed95)


@dataclass(frozen=True, kw_only=True)
class AdaptiveFigures(DynamicFigures):
    """The fastest adaptive tree: at each step it takes some of ``rows``, on average ``mean_rows``; ``size`` is the most.

    intercepts, slopes : of P(accepted >= d), for each depth, see `treeopt.growth.adaptive`
    cost_ms            : latency of a step with each of ``rows`` · tokens_per_ms : what a millisecond has to bring the batch
    """

    rows: list[int]
    mean_rows: float
    intercepts: list[float]
    slopes: list[float]
    cost_ms: list[float]
    tokens_per_ms: float

    @property
    def adaptive(self) -> AdaptiveTree:
        fit = tuple(self.intercepts), tuple(self.slopes)
        return AdaptiveTree(self.tree, tuple(self.rows), *fit, tuple(self.cost_ms), self.tokens_per_ms)

    def check(self, batch_size: int) -> None:
        super().check(batch_size)
        check_rows(self.rows, self.size)
        within(self.rows[0], self.size, mean_rows=self.mean_rows)
        if len(self.cost_ms) != len(self.rows) or min(self.cost_ms) <= 0:
            raise InvalidInput(f"cost_ms must be above 0 and one for each of rows, but is {self.cost_ms[:8]}.")
        if not len(self.intercepts) == len(self.slopes) == self.depth or not self.tokens_per_ms > 0:
            raise InvalidInput("intercepts and slopes must be one for each level, and tokens_per_ms above 0.")


@dataclass(frozen=True, kw_only=True)
class RunnerUp:
    """The fastest tree of another size.

    behind : log of the chosen tree's tokens per second over this one's, with its standard error
    prompts_to_separate : conversations that would tell the two apart, above 100,000 at least so many; None where more
                          would not, or conversations are not known
    """

    size: int
    depth: int
    tokens_per_s: float
    behind: float
    behind_stderr: float
    prompts_to_separate: int | None = None

    def check(self, tokens_per_s: float | None) -> None:
        """Raise InvalidInput where the figures contradict one another, or the chosen tree's ``tokens_per_s``."""
        within(1, size=self.size, prompts_to_separate=self.prompts_to_separate)
        within(min(self.size - 1, 1), self.size - 1, depth=self.depth)
        within(0, tokens_per_s=self.tokens_per_s, behind_stderr=self.behind_stderr)
        if tokens_per_s and self.tokens_per_s:
            speeds = tokens_per_s, self.tokens_per_s
            behind, slack = log(speeds[0] / speeds[1]), sum(rounding(speed) / speed for speed in speeds)
            slack += rounding(self.behind) + SUMS
            within(behind - slack, behind + slack, behind=self.behind)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """What one tree for several batch sizes reaches over all of them, each for its share of the time.

    tokens_per_s     : of the mean second; speedup is over plain decoding in the same mix
    own_tokens_per_s : the same where every batch size has its own best tree
    tied_sizes, runner_up : as of an entry, but over the mix
    """

    tokens_per_s: float
    speedup: float
    own_tokens_per_s: float
    tokens_per_s_stderr: float | None = None
    speedup_stderr: float | None = None
    tied_sizes: list[int] = field(default_factory=list)
    runner_up: RunnerUp | None = None

    @property
    def price(self) -> float:
        """Share of the throughput that sharing one tree costs."""
        return 1 - self.tokens_per_s / self.own_tokens_per_s

    def check(self, shares: Sequence[float], speeds: Sequence[tuple[float, float, float]]) -> None:
        """Raise InvalidInput where the figures are not those of all batch sizes together.

        speeds : of each batch size tokens per second with the tree, by plain decoding, and with its own tree
        """
        within(0, tokens_per_s_stderr=self.tokens_per_s_stderr, speedup_stderr=self.speedup_stderr)
        whole = sum(shares)
        ours, plain, own = (
            sum(share * speed for share, speed in zip(shares, column, strict=True)) / whole
            for column in zip(*speeds, strict=True)
        )
        of = [speed for row in speeds for speed in row]
        agree("total.tokens_per_s", self.tokens_per_s, ours, "the sum of the shares x tokens_per_s", *of)
        agree("total.own_tokens_per_s", self.own_tokens_per_s, own, "the sum of the shares x own.tokens_per_s", *of)
        agree("total.speedup", self.speedup, ours / plain, "total.tokens_per_s over that of plain decoding", *of)
        if self.runner_up:
            self.runner_up.check(self.tokens_per_s)


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """What real decoding with a tree reached; speedup is over plain decoding, None where nothing was timed."""

    name: str
    size: int
    tokens_per_step: float
    tokens_per_s: float | None
    speedup: Ratio | None


@dataclass(frozen=True, kw_only=True)
class DecodedAfresh(Decoded):
    """What the winner reached on prompts that it was not chosen by."""

    prompts: int


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A choice by real decoding: all that decoded the same ``prompts``, plain decoding among them, and the winner."""

    size: int
    depth: int
    finalists: list[Decoded]
    prompts: int
    afresh: DecodedAfresh

    def check(self, size: int, depth: int, batch_size: int) -> None:
        """Raise InvalidInput where the winner is not the tree of that size and depth, or another one was faster."""
        agree("verified.size", self.size, size, "the entry's")
        agree("verified.depth", self.depth, depth, "the entry's")
        agree("verified.afresh.size", self.afresh.size, self.size, "the winner's")
        agree("verified.afresh.prompts", self.afresh.prompts, self.prompts, "as many as it was chosen by")
        for one in (*self.finalists, self.afresh):
            check_speed(one.size, one.tokens_per_step, None, one.tokens_per_s, batch_size)
            if one.speedup:
                one.speedup.check()
        known = {one.name: one for one in self.finalists}
        if self.afresh.name not in known:
            raise InvalidInput(f"verified.afresh must be one of the finalists, but is {self.afresh.name!r}.")
        agree("verified.afresh.size", self.afresh.size, known[self.afresh.name].size, "that of the finalist")
        speeds = {one.name: one.speedup.value for one in self.finalists if one.speedup}
        if speeds:
            agree(
                "the winner's speedup", speeds.get(self.afresh.name, 0.0), max(speeds.values()), "the finalists' best"
            )


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """What the chosen tree is expected to reach on a group of prompts."""

    tokens_per_step: float | None = None
    tokens_per_step_stderr: float | None = None
    speedup: float | None = None

    def check(self, size: int, tokens_per_step: float, speedup: float | None) -> None:
        """Raise InvalidInput where the figures contradict those of the chosen tree on all prompts."""
        within(1, size, tokens_per_step=self.tokens_per_step)
        within(0, tokens_per_step_stderr=self.tokens_per_step_stderr)
        if self.tokens_per_step is not None and speedup is not None:
            whole = speedup, tokens_per_step
            follows = self.tokens_per_step * whole[0] / whole[1]
            agree("speedup", self.speedup, follows, "as much as its tokens_per_step", self.tokens_per_step, *whole)


def check_ends(**intervals: list[float] | None) -> None:
    """Raise InvalidInput for an interval whose ends are not above 0, or not in order."""
    for name, ends in intervals.items():
        if ends is not None and (len(ends) != 2 or not 0 < ends[0] <= ends[1]):
            raise InvalidInput(f"{name} must be two ends above 0, the lower one first, but is {ends[:3]}.")


def check_speed(
    size: int, tokens_per_step: float, step_ms: float | None, tokens_per_s: float | None, batch_size: int
) -> None:
    """Raise InvalidInput where a tree emits more than it has rows, or the speed is not what the step makes of it."""
    within(1, size, tokens_per_step=tokens_per_step)
    within(0, tokens_per_s=tokens_per_s)
    for name, figure in (("step_ms", step_ms), ("tokens_per_s", tokens_per_s)):
        if figure is not None and not figure > 0:
            raise InvalidInput(f"{name} must be above 0, but is {figure:.6g}.")
    if step_ms is not None:
        of = tokens_per_step, step_ms
        agree(
            "tokens_per_s",
            tokens_per_s,
            1e3 * batch_size * of[0] / of[1],
            "batch_size x tokens_per_step / step_ms",
            *of,
        )
