"""Survival along a chain: what an engine's counts of drafts come to.

D drafts · K guesses of the longest draft · T guesses of all drafts
c : (K,)  drafts whose first j guesses were all taken; c_0 = D
d : (K,)  drafts that had a guess j
S : (K,)  survival, c_j / d_j

Engines print survivals c_j / D by position, not the rates of a guess given those before it. A draft of two guesses cannot have
three taken, so c_j / D is too low where drafts of several lengths are summed: T bounds d then. Drafts whose lengths are told
apart have a survival of their own for each length, since steps of decoding with another length start at other places. Together
they have Kaplan and Meier's product over those at risk (JASA 53, 1958), an estimate for lengths that were not served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from treeopt.engines.measured.files import Measurement, counted
from treeopt.errors import InvalidInput
from treeopt.records.bootstrap import conversation_draws, stderr
from treeopt.records.calibration import ENGINE_LOG, STEPS_WITHOUT
from treeopt.records.drafters import COUNTED
from treeopt.records.estimate import Estimate
from treeopt.trees.tree import MOST_DEPTH, IntArray

Floats = NDArray[np.float64]
MOST_LENGTH = MOST_DEPTH  # guesses of a draft
MOST_DRAFTS = 2**45  # of one count
MOST_COUNTS = 2**22  # requests, by the guesses of a draft
UNSURE = 0.03  # by which survival may be off where lengths are not told apart
FEW_WITHOUT = 0.02  # share of the steps: fewer without a draft are the last ones of answers, which are cut

CHAIN = (
    "Only the first guess at each depth was counted, so only chains can be planned from this file: "
    "treeopt search --shape chain."
)
OPTIMISTIC = (
    "The file does not tell requests apart. Drafts of one request depend on one another but are "
    "counted as independent, so the standard errors are too small."
)
NO_COUNTS = "The file has no counts, so errors are not known, and it is compared as if 10,000 drafts were behind it: pass their number as `trials`."
ON_LENGTH = (
    "Survival was measured with drafts of {} tokens. For any other length it is an estimate, since steps of decoding then start "
    "at other places. Beyond depth {} nothing is known."
)
NONE = "{} must hold drafts, but none was verified while it was measured."
MIXED = (
    "Drafts had several lengths. Each length has its own survival; for lengths that were not served, each depth counts the drafts "
    "that reached it. That is wrong if the drafter chose the lengths by its own confidence, or a grammar cut them."
)


@dataclass(frozen=True, eq=False)
class Drafts:
    """Drafts of one request, or of a stretch of time.

    drafts  : D
    reached : (K,) c
    had     : (K,) d, in the middle of its bounds
    unsure  : (K,) by how much survival may be off
    lengths : number of drafts of each length; None where it is not known
    request : number of the request; all drafts of a request are drawn together
    group   : name of the prompts, to report by
    """

    drafts: int
    reached: IntArray
    had: Floats
    unsure: Floats
    lengths: Mapping[int, int] | None
    request: int = 0
    group: str = ""

    @classmethod
    def of(
        cls,
        drafts: int,
        reached: Sequence[int],
        drafted: int | None,
        where: object,
        *,
        off: float = 0,
        request: int = 0,
    ) -> Drafts:
        """Drafts of one length if the number of ``drafted`` guesses T shows that, else of unknown lengths.

        A draft that lacks guess j lacks those behind it too, so that at most (D K - T) / (K - j + 1) drafts lack it.

        off : by how much D may be off

        Raises InvalidInput if the counts cannot be those of chains.

        >>> Drafts.of(1000, [800, 600, 0], 2000, "x").lengths, Drafts.of(1000, [800, 600, 420], 2900, "x").had.tolist()
        ({2: 1000}, [1000.0, 975.0, 950.0])
        """
        check_counts(drafts, reached, where)
        if drafted is not None and sum(reached) > drafted:
            raise InvalidInput(f"{where} must accept at most what was drafted, but has {sum(reached)} of {drafted}.")
        length, left = divmod(drafted or 0, max(drafts, 1))
        if length and not left and not any(reached[length:]):
            reached = reached[:length]
        c, k = np.array(reached, dtype=np.int64), len(reached)
        missing = float(max(drafts * k - drafted, 0)) if drafted is not None else 0.0
        fewest = np.maximum(drafts - missing / np.arange(k, 0, -1), np.maximum(c, 1))
        fewest[0] = max(drafts, 1)
        had = (fewest + max(drafts, 1)) / 2
        unsure = c / fewest - c / had + off * c / max(drafts, 1) ** 2
        return cls(drafts, c, had, unsure, None if missing else {k: drafts}, request)

    @property
    def tried(self) -> Floats:
        """(K,) drafts that had a guess j, and whose guesses before it were all taken: d_j S_(j-1)."""
        before = np.minimum.accumulate(np.append(1.0, self.reached[:-1] / self.had[:-1]))
        return np.asarray(np.maximum(before * self.had, self.reached))


def check_counts(drafts: int, reached: Sequence[int], where: object) -> None:
    """Raise InvalidInput if the numbers of drafts that reached each depth cannot be those of chains."""
    if not 1 <= len(reached) <= MOST_LENGTH:
        raise InvalidInput(f"{where} must have counts for 1 to {MOST_LENGTH} positions, but has {len(reached)}.")
    if min(drafts, *reached) < 0 or max(drafts, *reached) > MOST_DRAFTS:
        raise InvalidInput(f"{where} must have counts from 0 to {MOST_DRAFTS}, but has others.")
    if any(lower > upper for upper, lower in pairwise([drafts, *reached])):
        raise InvalidInput(
            f"{where} must have counts by position that never rise, the drafts first, but has {list(reached)} of {drafts}."
        )


@dataclass(frozen=True)
class CountedDrafts:
    """Drafts that an engine counted, before they are made one survival.

    are_requests : whether `Drafts.request` tells requests apart; else each of them is a stretch of time
    remedy       : another way to measure, which tells lengths apart, as the end of a sentence
    drafters     : kinds of drafter that the file's name for it may mean, the usual one first; none if the file names none
    are_counted  : whether the numbers of drafts are real; else they stand for rates, and errors are not known
    tokens       : emitted by all steps, with a draft and without; None where the file does not say it
    requests     : how many there were, where the file says it without telling them apart
    model        : as the server names it
    """

    groups: Sequence[Drafts]
    path: Path
    notes: Sequence[str] = ()
    are_requests: bool = False
    remedy: str = ""
    drafters: tuple[str, ...] = ()
    are_counted: bool = True
    tokens: int | None = None
    requests: int | None = None
    model: str | None = None
    options: ClassVar = ("tokens",)  # of `measurement`

    def measurement(self, drafter: str | None = None, tokens: int | None = None) -> Measurement:
        """For each depth the drafts that reached it as trials, and those that passed it as hits. They multiply to survival.

        drafter : the kind that made the drafts; by default the one that the file names
        tokens  : as the user knows them

        Raises InvalidInput if lengths hide too much of survival, or the file names another drafter.
        """
        if drafter is not None and self.drafters and drafter not in self.drafters:
            raise InvalidInput(
                f"{self.path} has drafts of {self.drafters[0]}, as it says, but `drafter` is {drafter}: leave `drafter` out."
            )
        drafter = drafter or next(iter(self.drafters), None)
        kind = COUNTED.get(drafter or "")
        ends_itself = kind is not None and kind.ends_itself
        groups = ends_as_misses(self.groups) if ends_itself else self.groups
        tried, passed, unsure = joined(groups)
        notes = self._unsure(unsure)
        if not tried.size or not tried[:, 0].any():
            raise InvalidInput(NONE.format(self.path))
        calibration = counted(*counts_of(tried, passed), self.path)
        drafts, hits = int(calibration.trials[0]), calibration.hits[:, 0]
        rows = tried[:, 0] > 0
        clustered = self.are_requests and rows.sum() > 1
        errors = bootstrapped(tried[rows], passed[rows]) if clustered else greenwood(calibration.trials, hits)
        lengths, names = lengths_of(groups), [group.group for group in groups]
        own = [str(length) for group in groups for length in group.lengths or () if len(group.lengths or ()) == 1]
        # Other drafters always draft, unless a schedule tells them not to at some batch sizes.
        if tokens is None and (kind is None or ends_itself):
            tokens = self.tokens
        known_errors = np.hypot(errors, unsure).tolist() if self.are_counted else [None] * len(hits)
        without = None if tokens is None else steps_without_draft(tokens, drafts + int(hits.sum()))
        calibration.meta.update(
            source=ENGINE_LOG,
            drafts=drafts if self.are_counted else None,
            requests=int(rows.sum()) if self.are_requests else self.requests,
            served_model=self.model,
            draft_length=next(iter(lengths)) if len(lengths) == 1 else None,
            draft_lengths={str(length): count for length, count in sorted(lengths.items())},
            by_length=parts(groups, own) if len(lengths) > 1 and len(own) == len(groups) else None,
            steps_without_draft=without,
            ends_are_misses=ends_itself,
            survival=[*map(Estimate, np.cumprod(calibration.accept[:, 0]).tolist(), known_errors)],
            survival_stderr_is_optimistic=not clustered,
            groups=parts(groups, names) if any(names) else None,
        )
        notes = [*([] if len(lengths) == 1 or ends_itself else [MIXED]), *self.notes, *notes]
        if kind and kind.note:
            notes.append(kind.note)
        if without:
            notes.append(f"{without:,} steps had no draft and emitted one token each: they count as steps.")
        elif ends_itself and without is None:
            notes.append(STEPS_WITHOUT)
        notes += [ON_LENGTH.format(", ".join(map(str, sorted(lengths))) or f"up to {len(hits)}", len(hits)), CHAIN]
        if not self.are_counted:
            notes.append(NO_COUNTS)
        elif not clustered:
            notes.append(OPTIMISTIC)
        return Measurement(calibration, tuple(dict.fromkeys(notes)), drafter=drafter)

    def _unsure(self, unsure: Floats) -> list[str]:
        """A note on how unsure mixed lengths leave survival. Raises InvalidInput where that is too much."""
        most = unsure.max(initial=0)
        if most > UNSURE:
            raise InvalidInput(
                f"{self.path} sums drafts of several lengths and does not say how many had each: survival at depth "
                f"{unsure.argmax() + 1} may be off by {most:.2f}. Measure with one length{self.remedy}. If the drafter itself "
                f"ends its drafts, name it by `drafter`: {', '.join(name for name, kind in COUNTED.items() if kind.ends_itself)}."
            )
        if most == 0:
            return []
        return [
            "Drafts had several lengths, but the file has only their sum. It leaves survival unsure by up to "
            f"{most:.3f}, which is in the standard errors."
        ]


def steps_without_draft(tokens: int, by_drafts: int) -> int:
    """Steps without a draft, which emit one token each; 0 for few. ``by_drafts`` tokens are of steps with a draft."""
    without = tokens - by_drafts
    return without if without > FEW_WITHOUT * by_drafts else 0


def depth_of(groups: Sequence[Drafts]) -> int:
    """Guesses of the longest draft. Raises InvalidInput for more counts than are read."""
    depth = max((len(group.reached) for group in groups), default=0)
    if len(groups) * depth > MOST_COUNTS:
        raise InvalidInput(
            f"There may be {MOST_COUNTS:,} counts in all, but {len(groups):,} requests of {depth} guesses have more: "
            "import a part of them."
        )
    return depth


def ends_as_misses(groups: Sequence[Drafts]) -> list[Drafts]:
    """The drafts as if each were as long as the longest, with wrong guesses beyond its end."""
    depth, longer = depth_of(groups), list[Drafts]()
    for group in groups:
        reached = np.pad(group.reached, (0, depth - len(group.reached)))
        had = np.full(depth, float(group.drafts))
        if group.drafts:
            longer.append(replace(group, reached=reached, had=had, unsure=np.zeros(depth), lengths=None))
    return longer


def joined(groups: Sequence[Drafts]) -> tuple[Floats, IntArray, Floats]:
    """Drafts that were tried and that passed each depth, (R, K) by request; and (K,) by how much survival may be off."""
    depth = depth_of(groups)
    requests = {request: row for row, request in enumerate(dict.fromkeys(group.request for group in groups))}
    tried, passed = np.zeros((len(requests), depth)), np.zeros((len(requests), depth), dtype=np.int64)
    unsure, drafts = np.zeros(depth), max(sum(group.drafts for group in groups), 1)
    for group in groups:
        row, k = requests[group.request], len(group.reached)
        passed[row, :k] += group.reached
        tried[row, :k] += group.tried
        unsure[:k] += group.unsure * group.drafts / drafts
    return tried, passed, unsure


def counts_of(tried: Floats, passed: IntArray) -> tuple[IntArray, list[int]]:
    """(K, 1) hits and K trials of all requests."""
    hits = passed.sum(0)
    return hits[:, None], np.maximum(np.rint(tried.sum(0)).astype(np.int64), hits).tolist()


def parts(groups: Sequence[Drafts], names: Sequence[str]) -> dict[str, dict[str, object]]:
    """Hits and trials of the groups of each name."""
    by_name: dict[str, list[Drafts]] = {}
    for group, name in zip(groups, names, strict=True):
        by_name.setdefault(name, []).append(group)
    counts: dict[str, dict[str, object]] = {}
    for name, some in by_name.items():
        hits, trials = counts_of(*joined(some)[:2])
        counts[name] = {"hits": hits.tolist(), "trials": trials}
    return counts


def lengths_of(groups: Sequence[Drafts]) -> Counter[int]:
    """Number of drafts of each length; empty where it is not known of all."""
    lengths = Counter[int]()
    for group in groups:
        if group.lengths is None:
            return Counter()
        lengths.update(group.lengths)
    return +lengths


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


def bootstrapped(tried: Floats, passed: IntArray) -> Floats:
    """(K,) standard errors of survival, bootstrapped over requests. A depth without a try has the pooled rate."""
    n = len(tried)
    draws = conversation_draws(n)
    drawn, pooled = draws @ tried, passed.sum(0) / np.maximum(tried.sum(0), 1)
    survival = np.cumprod(np.where(drawn > 0, (draws @ passed) / np.maximum(drawn, 1e-9), pooled), axis=1)  # (B, K)
    return np.array([stderr(samples, n) for samples in survival.T])
