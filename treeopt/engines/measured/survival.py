"""Survival along a chain, from an engine's counts of drafts.

D drafts · K guesses of the longest draft · T guesses of all drafts · R requests
a         : 0...K       guesses of a draft that the target took; its own token is not counted
c         : (K,)        drafts with a >= j, "accepted at position j - 1" of the engines; c_0 = D
d         : (K,)        drafts that had a guess j
histogram : (K + 1,)    drafts with exactly a; c_j = sum of histogram[j:]
tried     : (3, R, K)   drafts that had a guess j, and whose guesses before it were all taken
passed    : (R, K)      of these, the drafts whose guess j was taken
survival  : (K,)        S_j, the product of passed / tried up to j

Engines print survivals c_j / D by position, not the rates of a guess given those before it. A draft of two
guesses cannot have three taken. So c_j / D is too low where lengths are mixed, and S_j is Kaplan and Meier's
product over those at risk (JASA 53, 1958). With one length the two are the same. If nothing but T is known of
the lengths, T bounds d_j, and S_j = c_j / d_j. That is why tried has three rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treeopt.engines.measured.files import Measurement
from treeopt.engines.measured.rates import counted
from treeopt.errors import InvalidInput
from treeopt.records.bootstrap import conversation_draws, stderr
from treeopt.records.calibration import ENGINE_LOG
from treeopt.records.drafters import COUNTED
from treeopt.trees.tree import MOST_DEPTH, IntArray

Histograms = Mapping[int, Sequence[int]]  # by the length of the draft
Floats = NDArray[np.float64]
MOST_LENGTH = MOST_DEPTH  # guesses of a draft
MOST_DRAFTS = 2**45  # of one count
MOST_COUNTS = 2**22  # requests, by the guesses of a draft
UNSURE = 0.02  # by which survival may be off where lengths are not told apart

CHAIN = (
    "Only the first guess at each depth was counted, so only chains can be planned from this file: "
    "treeopt search --shape chain."
)
OPTIMISTIC = (
    "The file does not tell requests apart. Drafts of one request depend on one another but are "
    "counted as independent, so the standard errors are too small."
)
NONE = "{} must hold drafts, but none was verified while it was measured."
MIXED = (
    "Drafts had several lengths. Each depth counts only the drafts that reached it. That is wrong if "
    "the drafter chose the lengths by its own confidence, or a grammar cut them."
)


@dataclass(frozen=True, eq=False)
class Drafts:
    """Numbers of drafts that reached each depth, and that passed it: a row for each request, or one for all.

    tried   : (3, R, K)  by the most drafts that can have had a guess j, by the middle, and by the fewest; the three are the
                         same where lengths are known
    passed  : (R, K)
    lengths : number of drafts of each length; None if it is not known of all

    >>> drafts = Drafts.of({3: [200, 200, 180, 420]})
    >>> drafts.tried[1].tolist(), drafts.passed.tolist()
    ([[1000.0, 800.0, 600.0]], [[800, 600, 420]])
    """

    tried: Floats
    passed: IntArray
    lengths: Mapping[int, int] | None

    @classmethod
    def of(cls, histograms: Histograms) -> Drafts:
        """One row of drafts whose lengths are known."""
        tried, passed = np.zeros((2, max(histograms)))
        for k, histogram in histograms.items():
            reached = np.cumsum(histogram[::-1], dtype=np.int64)[::-1]  # (k + 1,) c_0 ... c_k
            tried[:k] += reached[:-1]
            passed[:k] += reached[1:]
        lengths = {k: sum(histogram) for k, histogram in histograms.items()}
        return cls(np.array(3 * [[tried]]), passed[None].astype(np.int64), lengths)

    @classmethod
    def between(cls, reached: Sequence[int], fewest: IntArray, most: IntArray) -> Drafts:
        """One row of drafts with c and bounds of d. Depths at which no draft had a guess are left out."""
        depth = int(np.count_nonzero(most))
        reached, fewest, most = reached[:depth], fewest[:depth], most[:depth]
        tried = []
        for had in (most, (fewest + most) / 2, fewest):
            survival = np.divide(reached, had, out=np.zeros(len(had)), where=had > 0)
            before = np.minimum.accumulate(np.concatenate([[1.0], survival[:-1]]))
            tried.append([np.maximum(before * had, reached)])
        lengths = {k: int(n) for k, n in enumerate(most - np.append(most[1:], 0), 1) if n}
        return cls(np.array(tried), np.array([reached], dtype=np.int64), lengths if (fewest == most).all() else None)

    @classmethod
    def joined(cls, groups: Sequence[Drafts]) -> Drafts:
        depth = max((group.passed.shape[1] for group in groups), default=0)
        if len(groups) * depth > MOST_COUNTS:
            raise InvalidInput(
                f"There may be {MOST_COUNTS:,} counts in all, but {len(groups):,} requests of {depth} guesses have more: "
                "import a part of them."
            )
        tried, passed = np.zeros((3, len(groups), depth)), np.zeros((len(groups), depth), dtype=np.int64)
        lengths: Counter[int] = Counter()
        for g, group in enumerate(groups):
            k = group.passed.shape[1]
            tried[:, g, :k], passed[g, :k] = group.tried[:, 0], group.passed[0]
            lengths.update(group.lengths or {})
        is_known = all(group.lengths is not None for group in groups)
        return cls(tried, passed, {k: n for k, n in sorted(lengths.items()) if n} if is_known else None)

    @property
    def with_ends_missed(self) -> Drafts:
        """The drafts as if each were as long as the longest and its guesses beyond its end were wrong."""
        tried = np.concatenate([self.tried[1, :, :1], self.passed[:, :-1]], axis=1)
        return Drafts(np.stack(3 * [tried]), self.passed, None)

    @property
    def survival(self) -> Floats:
        """(3, K) over all rows, the lowest first; 0 beyond what was tried."""
        tried, passed = self.tried.sum(1), self.passed.sum(0)
        product: Floats = np.cumprod(np.divide(passed, tried, out=np.zeros(tried.shape), where=tried > 0), axis=1)
        return product

    @property
    def unsure(self) -> Floats:
        """(K,) by how much survival may be off.

        The bounds take d at its most, or at its fewest, in all rows at once. Some rows at the one and some at the other may
        be beyond these bounds by a thousandth.
        """
        low, middle, high = self.survival
        off: Floats = np.maximum(high - middle, middle - low)
        return off


def bounds(
    drafts: int, reached: Sequence[int], drafted: int, off: int = 0, slack: int = 0
) -> tuple[IntArray, IntArray]:
    """(K,) fewest and most drafts that can have had a guess j.

    off, slack : by how much the drafts and the ``drafted`` guesses may be off

    The numbers d_j never rise with j and sum to ``drafted``, so that j d_j is at most ``drafted``. A draft that lacks guess j lacks
    those behind it too, so that the missing guesses are at least K - j + 1 for each such draft. d_1 is D: an empty draft is a
    miss.

    >>> [bound.tolist() for bound in bounds(1000, [800, 600, 420], 2900)]
    [[1000, 950, 900], [1000, 1000, 966]]
    """
    places = np.arange(1, len(reached) + 1)
    missing = (drafts + off) * len(reached) - (drafted - slack)
    fewest = np.clip(drafts + off - missing // places[::-1], reached, drafts)
    most = np.minimum(drafts, (drafted + slack) // places)
    fewest[0] = most[0] = drafts
    return fewest, most


def chain(drafts: int, reached: Sequence[int], where: object, accepted: int | None = None) -> Drafts:
    """Drafts of one length, from the numbers of drafts that reached each depth.

    Raises InvalidInput if the counts cannot be those of a chain, or do not sum to the ``accepted`` tokens.

    >>> chain(1000, [800, 600, 420], "x").lengths
    {3: 1000}
    """
    if not 1 <= len(reached) <= MOST_LENGTH:
        raise InvalidInput(f"{where} must have counts for 1 to {MOST_LENGTH} positions, but has {len(reached)}.")
    if min(drafts, *reached) < 0 or max(drafts, *reached) > MOST_DRAFTS:
        raise InvalidInput(f"{where} must have counts from 0 to {MOST_DRAFTS}, but has others.")
    if any(lower > upper for upper, lower in pairwise([drafts, *reached])):
        raise InvalidInput(
            f"{where} must have counts by position that never rise, the drafts first, but has {list(reached)} of {drafts}."
        )
    if accepted is not None and sum(reached) != accepted:
        raise InvalidInput(
            f"{where} must have counts by position that sum to the accepted tokens, but they sum to {sum(reached)}, "
            f"and {accepted} were accepted."
        )
    return Drafts.between(reached, *2 * [np.full(len(reached), drafts)])


def group_of(
    drafts: int,
    reached: Sequence[int],
    drafted: int | None,
    where: object,
    accepted: int | None = None,
    *,
    off: int = 0,
    slack: int = 0,
) -> Drafts:
    """Drafts of one length if the number of ``drafted`` guesses shows that, else drafts between bounds.

    Raises InvalidInput as `chain` does, and if more was accepted than drafted.

    >>> group_of(1000, [800, 600, 0], 2000, "x").lengths
    {2: 1000}
    """
    full = chain(drafts, reached, where, accepted)
    if drafted is None or drafted >= drafts * len(reached):
        return full
    if sum(reached) > drafted:
        raise InvalidInput(f"{where} must accept at most what was drafted, but has {sum(reached)} of {drafted}.")
    length, left = divmod(drafted, drafts)
    if length and not left and not any(reached[length:]):
        return chain(drafts, reached[:length], where)
    return Drafts.between(reached, *bounds(drafts, reached, drafted, off, slack))


@dataclass(frozen=True)
class CountedDrafts:
    """Drafts that an engine counted, before their lengths are made one survival.

    are_requests   : whether a group is a request
    may_leave_out  : whether groups are stretches of time; those with mixed lengths may be left out
    remedy         : another way to measure, which tells lengths apart, as the end of a sentence
    off            : share of the drafts by which their number may be off
    drafters       : kinds of drafter that the file's name for it may mean, the usual one first; none if the file names none
    """

    groups: Sequence[Drafts]
    path: Path
    notes: Sequence[str] = ()
    are_requests: bool = False
    may_leave_out: bool = False
    remedy: str = ""
    off: float = 0.0
    drafters: tuple[str, ...] = ()

    def calibration(self, drafter: str | None = None) -> Measurement:
        """For each depth the drafts that reached it as trials, and those that passed it as hits. They multiply to survival.

        drafter : the kind that made the drafts; by default the one that the file names

        Raises InvalidInput if lengths hide too much of survival, or the file names another drafter.
        """
        if drafter is not None and self.drafters and drafter not in self.drafters:
            raise InvalidInput(
                f"{self.path} has drafts of {self.drafters[0]}, as it says, but `drafter` is {drafter}: leave `drafter` out."
            )
        drafter = drafter or next(iter(self.drafters), None)
        kind = COUNTED.get(drafter or "")
        drafts, doubts = Drafts.joined(self.groups), list[str]()
        ends_itself = kind is not None and kind.ends_itself
        if ends_itself:
            drafts = drafts.with_ends_missed
        elif drafts.lengths is None:
            drafts, doubts = self._sure(drafts)
        passed = drafts.passed.sum(0)
        tried = np.maximum(np.rint(drafts.tried[1].sum(0)).astype(np.int64), passed)
        if not tried.size or tried[0] < 1:
            raise InvalidInput(NONE.format(self.path))
        calibration = counted(passed[:, None], tried.tolist(), self.path)
        rows = drafts.tried[1, :, 0] > 0
        clustered = self.are_requests and rows.sum() > 1
        errors = _bootstrapped(drafts.tried[1, rows], drafts.passed[rows]) if clustered else greenwood(tried, passed)
        survival = np.cumprod(calibration.accept[:, 0])
        lengths = drafts.lengths or {}
        calibration.meta.update(
            source=ENGINE_LOG,
            drafts=int(tried[0]),
            requests=int(rows.sum()) if self.are_requests else None,
            draft_length=next(iter(lengths)) if len(lengths) == 1 else None,
            draft_lengths={str(k): n for k, n in lengths.items()},
            ends_are_misses=ends_itself,
            survival=survival.tolist(),
            survival_stderr=np.hypot(errors, drafts.unsure + survival * self.off).tolist(),
            survival_stderr_is_optimistic=not clustered,
        )
        notes = [] if len(lengths) == 1 or ends_itself else [MIXED]
        notes += [*self.notes, *doubts]
        if kind and kind.note:
            notes.append(kind.note)
        notes += [_on_length(lengths, len(passed)), CHAIN]
        if not clustered:
            notes.append(OPTIMISTIC)
        return Measurement(calibration, tuple(dict.fromkeys(notes)), drafter=drafter)

    def _sure(self, drafts: Drafts) -> tuple[Drafts, list[str]]:
        """The drafts whose lengths are known well enough, and notes on those that were left out."""
        groups, notes = self.groups, list[str]()
        if self.may_leave_out and drafts.unsure.max() > UNSURE:
            groups = [group for group in groups if group.unsure.max() <= UNSURE] or groups
            drafts = Drafts.joined(groups)
        if left := len(self.groups) - len(groups):
            notes.append(
                f"{left} of {len(self.groups)} stretches of time have drafts of mixed lengths, which leave survival too unsure. "
                "They were left out."
            )
        unsure, (low, _, high) = drafts.unsure, drafts.survival
        if unsure.max() > UNSURE:
            j = int(unsure.argmax())
            raise InvalidInput(
                f"{self.path} sums drafts of several lengths and does not say how many had each: survival at depth {j + 1} "
                f"may be anything from {low[j]:.2f} to {high[j]:.2f}. Measure with one length{self.remedy}. If the drafter itself "
                f"ends its drafts, name it by `drafter`: {', '.join(name for name, kind in COUNTED.items() if kind.ends_itself)}."
            )
        if unsure.any():
            notes.append(
                "Drafts had several lengths, but the file has only their sum. It leaves survival unsure by up to "
                f"{unsure.max():.3f}, which is in the standard errors."
            )
        return drafts, notes


def _on_length(lengths: Mapping[int, int], depth: int) -> str:
    """A note on the lengths for which survival was measured."""
    served = ", ".join(map(str, lengths)) or f"up to {depth}"
    return (
        f"Survival was measured with drafts of {served} tokens. For any other length it is an estimate, "
        f"since steps of decoding then start at other places. Beyond depth {depth} nothing is known."
    )


def greenwood(tried: IntArray, passed: IntArray) -> Floats:
    """(K,) standard errors of survival if drafts were independent: Greenwood's, binomial for one length.

    Half a draft that passed and half a one that failed are added to each depth. Otherwise none or all of a few drafts would
    count as certain.

    >>> greenwood(np.array([100, 50]), np.array([50, 25])).round(3).tolist()
    [0.05, 0.043]
    """
    tries, passes = np.add(tried, 1.0), np.add(passed, 0.5)
    failed = (tries - passes) / (tries * passes)
    errors: Floats = np.cumprod(passes / tries) * np.sqrt(np.cumsum(failed))
    return errors


def _bootstrapped(tried: Floats, passed: IntArray) -> Floats:
    """(K,) standard errors of survival, bootstrapped over requests. A depth without a try has the pooled rate."""
    n = len(tried)
    draws = conversation_draws(n)
    drawn, pooled = draws @ tried, passed.sum(0) / np.maximum(tried.sum(0), 1)
    survival = np.cumprod(np.where(drawn > 0, (draws @ passed) / np.maximum(drawn, 1e-9), pooled), axis=1)  # (B, K)
    return np.array([stderr(samples, n) for samples in survival.T])
