"""What comparing comes to: two sources of accuracies, the groups of one, or runs of several drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import log
from typing import Any

from treeopt.growth.drift import Shift
from treeopt.planning.groups import GroupLoss
from treeopt.planning.regret import Loss, PlanLoss
from treeopt.records.benchmark import Ratio
from treeopt.records.bootstrap import LEVEL
from treeopt.records.display import Displayed

PLAN_ANEW = 3  # exit status


def is_lost(loss: Loss, tolerance: float) -> bool:
    """Whether more is lost than may be, beyond noise."""
    return loss.interval95[0] > tolerance


@dataclass(frozen=True, kw_only=True)
class Compared(Displayed):
    """Two sources, A and B: the depths that moved, and what A's plan loses on B.

    measure   : what `Shift` compares, top-1 or survival; shifts are empty where A's accuracies are not at hand
    tolerance : share of the throughput that a plan may lose
    """

    names: tuple[str, str]
    measure: str
    shifts: tuple[Shift, ...]
    losses: tuple[PlanLoss, ...]
    tolerance: float
    notes: tuple[str, ...] = ()

    @property
    def moved(self) -> tuple[Shift, ...]:
        """The depths that differ beyond noise."""
        return tuple(shift for shift in self.shifts if shift.moved)

    @property
    def worst(self) -> PlanLoss:
        """The batch size at which the plan loses most for certain."""
        return max(self.losses, key=lambda one: (one.loss.interval95[0] > self.tolerance, one.loss.share))

    @property
    def keep(self) -> bool:
        """Whether the plan is not shown to lose more than it may."""
        return not any(is_lost(one.loss, self.tolerance) for one in self.losses)

    @property
    def status(self) -> int:
        """The exit status: 0, or 3 where it is time to plan anew."""
        return 0 if self.keep else PLAN_ANEW

    def document(self) -> dict[str, Any]:
        """What ``treeopt compare --json`` says."""
        return {**asdict(self), "different": bool(self.moved), "keep": self.keep, "status": self.status}


@dataclass(frozen=True, kw_only=True)
class GroupsCompared(Displayed):
    """The groups of a run, each with what it loses by sharing a plan; ``tolerance`` is the share that it may lose."""

    name: str
    groups: tuple[GroupLoss, ...]
    tolerance: float
    status: int = 0

    @property
    def gainers(self) -> tuple[GroupLoss, ...]:
        """The groups that would gain by a plan of their own, beyond noise and more than the tolerance."""
        return tuple(group for group in self.groups if is_lost(group.shared, self.tolerance))

    def document(self) -> dict[str, Any]:
        """What ``treeopt compare --json`` says."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a drafter reaches at a batch size with the tree, or the engine's setting, that was chosen for it.

    setting     : of another runtime what it was asked for; empty for a tree
    speedup     : over plain decoding of the same run, with its 95 % interval
    is_measured : by real decoding; else the plan's prediction
    """

    drafter: str
    batch_size: int
    size: int
    depth: int
    medusa_choices: list[list[int]]
    setting: str
    tokens_per_step: float
    tokens_per_step_stderr: float | None
    step_ms: float | None
    speedup: Ratio
    is_measured: bool

    @property
    def log_stderr(self) -> float | None:
        """Standard error of the logarithm of the speedup; None where there is no interval."""
        low, high = self.speedup.low, self.speedup.high
        return None if low is None or high is None or low <= 0 else log(high / low) / (2 * 1.959964)


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The fastest at a batch size; ``tied`` are those that the intervals do not tell from it.

    pays : whether it is shown to be faster than plain decoding; None where there is no interval
    """

    batch_size: int
    drafter: str
    tied: tuple[str, ...]
    pays: bool | None


@dataclass(frozen=True, kw_only=True)
class DraftersCompared(Displayed):
    """Runs of several drafters for one model on one machine, in the order of batch sizes."""

    settings: tuple[Setting, ...]
    about: str
    notes: tuple[str, ...] = ()
    status: int = 0

    @property
    def winners(self) -> tuple[Winner, ...]:
        """Of every batch size."""
        sizes = sorted({one.batch_size for one in self.settings})
        return tuple(winner([one for one in self.settings if one.batch_size == size]) for size in sizes)

    def document(self) -> dict[str, Any]:
        """What ``treeopt compare --json`` says."""
        return {**asdict(self), "winners": [asdict(one) for one in self.winners]}


def winner(settings: Sequence[Setting]) -> Winner:
    """The fastest of one batch size, and what is tied with it.

    Speedups are ratios to plain decoding of their own run, so that runs at other times can be compared. All pairs with the
    fastest are tested together (Bonferroni).

    >>> choices = [[0]]
    >>> def setting(name, low, high):
    ...     ratio = Ratio(value=(low * high) ** 0.5, low=low, high=high)
    ...     return Setting(drafter=name, batch_size=1, size=2, depth=1, medusa_choices=choices, setting="", tokens_per_step=1.5,
    ...                    tokens_per_step_stderr=None, step_ms=None, speedup=ratio, is_measured=True)
    >>> winner([setting("a", 1.9, 2.1), setting("b", 1.8, 2.0), setting("c", 1.2, 1.3)])
    Winner(batch_size=1, drafter='a', tied=('b',), pays=True)
    """
    from scipy.stats import norm

    best = max(settings, key=lambda one: one.speedup.value)
    others = [one for one in settings if one is not best]
    z = float(norm.isf((1 - LEVEL) / 2 / max(len(others), 1)))
    tied = []
    for one in others:
        errors = best.log_stderr, one.log_stderr
        apart = log(best.speedup.value / one.speedup.value)
        if None in errors or apart <= z * sum((e or 0.0) ** 2 for e in errors) ** 0.5:
            tied.append(one.drafter)
    low = best.speedup.low
    return Winner(
        batch_size=best.batch_size, drafter=best.drafter, tied=tuple(tied), pays=None if low is None else low > 1
    )
