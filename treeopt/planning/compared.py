"""The outcome of comparing two sources of accuracies, the groups of a run, or runs of several drafters."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, log

from treeopt.arms.gate import Gate
from treeopt.files.storage import document
from treeopt.planning.regret import Regret
from treeopt.records.bootstrap import LEVEL
from treeopt.records.display import Displayed
from treeopt.records.estimate import Estimate
from treeopt.records.figure import Figure

PLAN_ANEW = 3  # exit status
# By how much all steps with guesses cost more or less, against plain ones, when they decode at another time (standard deviation
# of the logarithm). Profiles and later benchmarks were 4 % apart (root mean square of 14; docs/log.md).
ANOTHER_TIME = 0.03


@dataclass(frozen=True, kw_only=True, repr=False)
class Compared(Displayed):
    """Two sources, A and B: what A's plan loses on B.

    tolerance : share of the throughput that a plan may lose
    """

    names: tuple[str, str]
    losses: tuple[Regret, ...]
    tolerance: float
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> Regret:
        """What the plan loses at the batch size where it loses most for certain."""
        return max(self.losses, key=lambda regret: (regret.exceeds(self.tolerance), regret.loss))

    @property
    def keep(self) -> bool:
        """Whether the plan is not shown to lose more than it may."""
        return not any(regret.exceeds(self.tolerance) for regret in self.losses)

    @property
    def status(self) -> int:
        """The exit status: 0, or 3 where it is time to plan anew."""
        return 0 if self.keep else PLAN_ANEW

    def document(self) -> dict[str, object]:
        return {**document(self), "keep": self.keep, "status": self.status}


@dataclass(frozen=True, kw_only=True, repr=False)
class GroupsCompared(Displayed):
    """The groups of a run, each with what it loses by sharing a plan.

    tolerance : share that it may lose
    """

    name: str
    groups: tuple[Regret, ...]
    tolerance: float
    notes: tuple[str, ...] = ()
    status: int = 0

    @property
    def gainers(self) -> tuple[Regret, ...]:
        """The groups that would gain by a plan of their own, beyond noise and more than the tolerance."""
        return tuple(group for group in self.groups if group.exceeds(self.tolerance))

    def document(self) -> dict[str, object]:
        return dict(document(self))


@dataclass(frozen=True, kw_only=True)
class DrafterFigure:
    """What a drafter reaches at a batch size with the draft, or the engine's setting, that was chosen for it.

    setting     : what another runtime was asked for; empty where the draft itself is decoded with
    is_measured : whether real decoding measured the figure; else the plan predicts it
    """

    drafter: str
    figure: Figure
    setting: str
    is_measured: bool

    @property
    def batch_size(self) -> int:
        return self.figure.batch_size

    @property
    def speedup(self) -> Estimate:
        """Tokens per second over those of plain decoding in the same run."""
        assert self.figure.speedup is not None
        return self.figure.speedup


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The fastest drafter at a batch size; the intervals do not tell ``tied`` from it.

    pays : whether it is shown to be faster than plain decoding; None where there is no interval
    """

    batch_size: int
    drafter: str
    tied: tuple[str, ...]
    pays: bool | None


@dataclass(frozen=True, kw_only=True, repr=False)
class DraftersCompared(Displayed):
    """Runs of several drafters for one model on one machine, in the order of batch sizes."""

    settings: tuple[DrafterFigure, ...]
    about: str
    notes: tuple[str, ...] = ()
    status: int = 0

    @property
    def winners(self) -> tuple[Winner, ...]:
        sizes = sorted({setting.batch_size for setting in self.settings})
        return tuple(winner([setting for setting in self.settings if setting.batch_size == size]) for size in sizes)

    def document(self) -> dict[str, object]:
        return {**document(self), "winners": document(self.winners)}


Comparison = Compared | GroupsCompared | DraftersCompared | Gate


def winner(settings: Sequence[DrafterFigure]) -> Winner:
    """The fastest drafter of one batch size, and those tied with it.

    A speedup is over plain decoding of the same run. So runs at other times can be compared, each with the error of another
    time. All pairs with the fastest are tested together (Bonferroni).

    >>> from treeopt.trees.tree import Tree
    >>> def setting(name, low, high):
    ...     speedup = Estimate((low * high) ** 0.5, low=low, high=high)
    ...     parts = {"tokens_per_step": Estimate(1.5), "step_ms": Estimate(1.5), "plain_ms": speedup.value, "speedup": speedup}
    ...     figure = Figure(draft=Tree.chain(1), batch_size=1, **parts)
    ...     return DrafterFigure(drafter=name, figure=figure, setting="", is_measured=True)
    >>> winner([setting("a", 1.9, 2.1), setting("b", 1.8, 2.0), setting("c", 1.2, 1.3)])
    Winner(batch_size=1, drafter='a', tied=('b',), pays=True)
    """
    from scipy.stats import norm

    best = max(settings, key=lambda setting: setting.speedup)
    others = [setting for setting in settings if setting is not best]
    z = float(norm.isf((1 - LEVEL) / 2 / max(len(others), 1)))
    tied = []
    for other in others:
        errors = best.speedup.log_stderr, other.speedup.log_stderr
        apart = log(best.speedup / other.speedup)
        if None in errors or apart <= z * hypot(*(error or 0.0 for error in errors), ANOTHER_TIME, ANOTHER_TIME):
            tied.append(other.drafter)
    low = best.speedup.low
    return Winner(
        batch_size=best.batch_size, drafter=best.drafter, tied=tuple(tied), pays=None if low is None else low > 1
    )
