"""Survival along a chain, from what an engine counted while it served.

D drafts · K guesses of a draft, perhaps not of every draft the same · T guesses of all drafts · R requests
a         : 0...K       guesses of a draft that the target took; its own token is not counted
c         : (K,)        drafts with a >= j, "accepted at position j - 1" of the engines; c_0 = D
d         : (K,)        drafts that had a guess j
histogram : (K + 1,)    drafts with exactly a; c_j = sum of histogram[j:]
tried     : (R, K)      drafts that had a guess j, and whose guesses before it were all taken
passed    : (R, K)      of these, the drafts whose guess j was taken
survival  : (K,)        S_j, the product of passed / tried up to j

What engines print by position are survivals c_j / D, not rates of a guess given those before it. A draft
of two guesses cannot have three taken: where lengths are mixed c_j / D is too low, and S_j is Kaplan and
Meier's product over those at risk (JASA 53, 1958). With one length the two are the same. Where only T is
known of the lengths, it bounds d_j, and S_j = c_j / d_j.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treeopt.engines.measured.files import Found
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
UNSURE = 0.02  # of survival, that lengths which were not told apart may hide

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


@dataclass(frozen=True)
class Summed:
    """Drafts of several lengths, of which only sums are known.

    reached      : (K,)  c
    fewest, most : (K,)  bounds of d, which are equal where it is known; d_1 is D, since an empty draft is a miss

    >>> drafts = Summed.of(1000, [800, 600, 420], 2900)
    >>> drafts.fewest.tolist(), drafts.most.tolist()
    ([1000, 950, 900], [1000, 1000, 966])
    """

    reached: IntArray
    fewest: IntArray
    most: IntArray

    @classmethod
    def of(cls, drafts: int, reached: Sequence[int], drafted: int, off: int = 0, slack: int = 0) -> Summed:
        """Bounds by the guesses of all drafts, which may be off by ``slack``, and the drafts by ``off``.

        The drafts that really had a guess j never rise with j, are c_j at least and sum to ``drafted``.
        """
        fewest, most, total = [drafts], [drafts], drafts + off
        accepted = np.cumsum([0, *reached], dtype=np.int64)
        for j, count in enumerate(reached[1:], 2):
            least = -((total * (j - 1) - (drafted - slack)) // (len(reached) - j + 1))
            fewest.append(min(max(count, least), drafts))
            # As many as at j had each guess before, or those accepted; those accepted had the guesses behind.
            left = drafted + slack - (accepted[-1] - accepted[j]) - accepted[:j]
            most.append(min(drafts, int((left // np.arange(j, 0, -1)).min())))
        return cls(*(np.array(counts, dtype=np.int64) for counts in (reached, fewest, most)))

    def tried(self, share: float) -> Floats:
        """(K,) tried, if d is at that ``share`` of the way from the fewest to the most."""
        had = self.fewest + share * (self.most - self.fewest)
        survival = np.divide(self.reached, had, out=np.zeros(len(had)), where=had > 0)
        before = np.minimum.accumulate(np.concatenate([[1.0], survival[:-1]]))
        counts: Floats = np.maximum(before * had, self.reached)
        return counts

    @property
    def lengths(self) -> dict[int, int]:
        """Drafts of each length; empty where it is not known."""
        if (self.fewest != self.most).any():
            return {}
        return {k: int(n) for k, n in enumerate(self.most - np.append(self.most[1:], 0), 1) if n}


Group = Histograms | Summed


@dataclass(frozen=True)
class Drafts:
    """How many drafts reached each depth and how many passed it, a row for each request or one for all.

    >>> drafts = Drafts.of([{3: [200, 200, 180, 420]}])
    >>> drafts.tried.tolist(), drafts.passed.tolist()
    ([[1000.0, 800.0, 600.0]], [[800, 600, 420]])
    """

    tried: Floats  # whole, but for drafts of which only sums are known
    passed: IntArray
    lengths: Mapping[int, int]  # drafts of each length; empty where that is not known of all

    @classmethod
    def of(cls, groups: Sequence[Group], share: float = 0.5) -> Drafts:
        """The counts of groups, a row for each; ``share`` as `Summed.tried` has it."""
        depth = longest(groups)
        if len(groups) * depth > MOST_COUNTS:
            raise InvalidInput(
                f"There may be {MOST_COUNTS:,} counts in all, but {len(groups):,} requests of {depth} guesses have more: "
                "import a part of them."
            )
        tried = np.zeros((len(groups), depth))
        passed = np.zeros((len(groups), depth), dtype=np.int64)
        lengths: Counter[int] = Counter()
        for g, group in enumerate(groups):
            if isinstance(group, Summed):
                k = len(group.reached)
                tried[g, :k], passed[g, :k] = group.tried(share), group.reached
                lengths.update(group.lengths)
                continue
            for k, histogram in group.items():
                reached = np.cumsum(histogram[::-1], dtype=np.int64)[::-1]  # (k + 1,) c_0 ... c_k
                tried[g, :k] += reached[:-1]
                passed[g, :k] += reached[1:]
                lengths[k] += int(reached[0])
        is_known = all(group.lengths for group in groups if isinstance(group, Summed))
        return cls(tried, passed, {k: n for k, n in sorted(lengths.items()) if n and is_known})

    @property
    def survival(self) -> Floats:
        """(K,) over all rows; 0 beyond what was tried."""
        tried, passed = self.tried.sum(0), self.passed.sum(0)
        product: Floats = np.cumprod(np.divide(passed, tried, out=np.zeros(len(tried)), where=tried > 0))
        return product


def longest(groups: Sequence[Group]) -> int:
    """Guesses of the longest draft; 0 without any."""
    lengths = (len(group.reached) if isinstance(group, Summed) else max(group, default=0) for group in groups)
    return max(lengths, default=0)


def chain_histogram(drafts: int, reached: Sequence[int], where: object, accepted: int | None = None) -> Histograms:
    """Drafts by how many of their guesses were taken, from the drafts that reached each depth.

    Raises InvalidInput where the counts cannot be those of a chain, or do not sum to the ``accepted`` tokens.

    >>> chain_histogram(1000, [800, 600, 420], "x")
    {3: [200, 200, 180, 420]}
    """
    if not 1 <= len(reached) <= MOST_LENGTH:
        raise InvalidInput(f"{where} must have counts for 1 to {MOST_LENGTH} positions, but has {len(reached)}.")
    if min(drafts, *reached) < 0 or max(drafts, *reached) > MOST_DRAFTS:
        raise InvalidInput(f"{where} must have counts from 0 to {MOST_DRAFTS}, but has others.")
    counts = [upper - lower for upper, lower in pairwise([drafts, *reached, 0])]
    if min(counts) < 0:
        raise InvalidInput(
            f"{where} must have counts by position that never rise, the drafts first, but has {list(reached)} of {drafts}."
        )
    if accepted is not None and sum(reached) != accepted:
        raise InvalidInput(
            f"{where} must have counts by position that sum to the accepted tokens, but they sum to {sum(reached)}, "
            f"and {accepted} were accepted."
        )
    return {len(reached): counts}


def group_of(
    drafts: int,
    reached: Sequence[int],
    drafted: int | None,
    where: object,
    accepted: int | None = None,
    *,
    off: int = 0,
    slack: int = 0,
) -> Group:
    """Drafts of one length, where the guesses of all of them show that it was one; else their sums.

    Raises InvalidInput as `chain_histogram` does, and where more was accepted than drafted.

    >>> group_of(1000, [800, 600, 0], 2000, "x")
    {2: [200, 200, 600]}
    """
    (histogram,) = chain_histogram(drafts, reached, where, accepted).values()
    if drafted is None or drafted >= drafts * len(reached):
        return {len(reached): histogram}
    if sum(reached) > drafted:
        raise InvalidInput(f"{where} must accept at most what was drafted, but has {sum(reached)} of {drafted}.")
    length, left = divmod(drafted, drafts)
    if length and not left and not any(reached[length:]):
        return {length: histogram[: length + 1]}
    return Summed.of(drafts, reached, drafted, off, slack)


@dataclass(frozen=True)
class CountedDrafts:
    """Drafts that an engine counted, before their lengths are made one survival.

    are_requests   : whether a group is a request
    may_leave_out  : whether groups are stretches of time, of which those with mixed lengths may be left out
    way            : how else to measure, so that lengths are told apart
    off            : share of the drafts by which their number may be off
    """

    groups: Sequence[Group]
    path: Path
    notes: Sequence[str] = ()
    are_requests: bool = False
    may_leave_out: bool = False
    way: str = ""
    off: float = 0.0

    def calibration(self, drafter: str | None = None) -> Found:
        """Counts conditional on the guesses before being right, with the survival that they multiply to.

        drafter : the kind that made the drafts

        Raises InvalidInput where lengths hide too much of survival.
        """
        about = COUNTED.get(drafter or "")
        groups = self.groups
        has_ends = about is not None and about.ends_itself
        if has_ends:  # the end of a draft is a miss
            groups = [_with_ends_missed(group, longest(groups)) for group in groups]
        groups, unsure, said = self._sure(groups)
        drafts = Drafts.of(groups)
        passed = drafts.passed.sum(0)
        tried = np.maximum(np.rint(drafts.tried.sum(0)).astype(np.int64), passed)
        if not tried.size or tried[0] < 1:
            raise InvalidInput(NONE.format(self.path))
        reached = int((tried > 0).sum())  # never rises
        calibration = counted(passed[:reached, None], tried[:reached].tolist(), self.path)
        rows = drafts.tried[:, 0] > 0
        clustered = self.are_requests and rows.sum() > 1
        errors = greenwood(tried[:reached], passed[:reached])
        if clustered:
            errors = _bootstrapped(drafts.tried[rows, :reached], drafts.passed[rows, :reached])
        survival = np.cumprod(calibration.accept[:, 0])
        lengths = {} if has_ends else dict(drafts.lengths)
        calibration.meta.update(
            source=ENGINE_LOG,
            drafts=int(tried[0]),
            requests=int(rows.sum()) if self.are_requests else None,
            draft_length=next(iter(lengths)) if len(lengths) == 1 else None,
            draft_lengths={str(k): n for k, n in lengths.items()},
            ends_are_misses=has_ends,
            survival=survival.tolist(),
            survival_stderr=np.hypot(errors, unsure[:reached] + survival * self.off).tolist(),
            survival_stderr_is_optimistic=not clustered,
        )
        notes = [MIXED] * (len(lengths) != 1 and not has_ends) + [*self.notes, *said]
        notes += [about.note] if about and about.note else []
        served = ", ".join(map(str, lengths)) or f"up to {longest(groups)}"
        start = (
            f"Survival was measured with drafts of {served} tokens. For any other length it is an estimate, "
            f"since steps of decoding then start at other places. Beyond depth {reached} nothing is known."
        )
        return Found(calibration, tuple(dict.fromkeys([*notes, start, CHAIN, *[OPTIMISTIC] * (not clustered)])))

    def _sure(self, groups: Sequence[Group]) -> tuple[Sequence[Group], Floats, list[str]]:
        """Groups whose lengths are known well enough, (K,) what survival may be off by, and notes."""
        if not any(isinstance(group, Summed) for group in groups):
            return groups, np.zeros(longest(groups)), []
        low, high, unsure = _bounds(groups)
        kept, notes = groups, []
        if self.may_leave_out and unsure.max() > UNSURE:
            kept = [group for group in groups if _bounds([group])[2].max() <= UNSURE] or groups
            low, high, unsure = _bounds(kept)
        if left := len(groups) - len(kept):
            notes.append(
                f"{left} of {len(groups)} stretches of time have drafts of mixed lengths, which leave survival too unsure. "
                "They were left out."
            )
        if unsure.max() > UNSURE:
            j = int(unsure.argmax())
            raise InvalidInput(
                f"{self.path} sums drafts of several lengths and does not say how many had each: survival at depth {j + 1} "
                f"may be anything from {low[j]:.2f} to {high[j]:.2f}. Measure with one length{self.way}. If the drafter itself "
                f"ends its drafts, name it by `drafter`: {', '.join(name for name, one in COUNTED.items() if one.ends_itself)}."
            )
        if unsure.any():
            notes.append(
                "Drafts had several lengths, but the file has only their sum. It leaves survival unsure by up to "
                f"{unsure.max():.3f}, which is in the standard errors."
            )
        return kept, unsure, notes


def _bounds(groups: Sequence[Group]) -> tuple[Floats, Floats, Floats]:
    """(K,) low and high survival, and what that in the middle may be off by.

    d is at its most, or its fewest, in all groups at once. With several groups that is not quite the extreme:
    some at the one and some at the other may be beyond it by a thousandth.
    """
    low, middle, high = (Drafts.of(groups, share).survival for share in (1.0, 0.5, 0.0))
    return low, high, np.maximum(high - middle, middle - low)


def _with_ends_missed(group: Group, depth: int) -> Histograms:
    """The drafts of a group as if each had ``depth`` guesses, and those beyond its end were wrong."""
    if isinstance(group, Summed):
        return chain_histogram(int(group.most[0]), [*group.reached.tolist(), *[0] * (depth - len(group.reached))], "")
    rows = [[*row, *[0] * (depth + 1 - len(row))] for row in group.values()]
    return {depth: [sum(column) for column in zip(*rows, strict=True)]}


def greenwood(tried: IntArray, passed: IntArray) -> Floats:
    """(K,) standard errors of survival if drafts were independent: Greenwood's, binomial for one length.

    Half a draft that passed and half a one that did not are added to each depth, so that none or all of a few
    are not taken for certain.

    >>> greenwood(np.array([100, 50]), np.array([50, 25])).round(3).tolist()
    [0.05, 0.043]
    """
    tries, passes = np.add(tried, 1.0), np.add(passed, 0.5)
    failed = (tries - passes) / (tries * passes)
    errors: Floats = np.cumprod(passes / tries) * np.sqrt(np.cumsum(failed))
    return errors


def _bootstrapped(tried: Floats, passed: IntArray) -> Floats:
    """(K,) standard errors of survival over requests drawn again; a depth without a try has the pooled rate."""
    n = len(tried)
    draws = conversation_draws(n)
    drawn, pooled = draws @ tried, passed.sum(0) / np.maximum(tried.sum(0), 1)
    survival = np.cumprod(np.where(drawn > 0, (draws @ passed) / np.maximum(drawn, 1e-9), pooled), axis=1)  # (B, K)
    return np.array([stderr(samples, n) for samples in survival.T])
