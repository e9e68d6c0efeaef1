"""Survival along a chain, from what an engine counted while it served.

D drafts · K guesses of a draft, perhaps not of every draft the same · R requests
a         : 0...K       guesses of a draft that the target took; its own token is not counted
c         : (K,)        drafts with a >= j, "accepted at position j - 1" of the engines; c_0 = D
histogram : (K + 1,)    drafts with exactly a; c_j = sum of histogram[j:]
tried     : (R, K)      drafts that had a guess j, and whose guesses before it were all taken
passed    : (R, K)      of these, the drafts whose guess j was taken
survival  : (K,)        S_j, the product of passed / tried up to j

What engines print by position are survivals c_j / D, not rates of a guess given those before it. A draft
of two guesses cannot have three taken: where lengths are mixed c_j / D is too low, and S_j is Kaplan and
Meier's product over those at risk (JASA 53, 1958). With one length the two are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput
from treeopt.importing.files import Found
from treeopt.importing.rates import counted
from treeopt.records.bootstrap import conversation_draws, stderr
from treeopt.records.calibration import ENGINE_LOG
from treeopt.trees.tree import MOST_DEPTH, IntArray

Histograms = Mapping[int, Sequence[int]]  # by the length of the draft
MOST_LENGTH = MOST_DEPTH  # guesses of a draft
MOST_DRAFTS = 2**45  # of one count
MOST_COUNTS = 2**22  # requests, by the guesses of a draft

CHAIN = (
    "Only the first guess at each depth was counted, so only chains can be planned from this file: "
    "treeopt search --shape chain."
)
OPTIMISTIC = (
    "The file does not tell requests apart. Drafts of one request depend on one another but are "
    "counted as independent, so the standard errors are too small."
)
MIXED = (
    "Drafts had several lengths. Each depth counts only the drafts that reached it. That is wrong if "
    "the drafter chose the lengths by its own confidence."
)
BIASED = (
    "Drafts had several lengths, but the file does not say which draft had which. A short draft "
    "counts as a miss at the depths that it did not reach, so survival is too low."
)


@dataclass(frozen=True)
class Drafts:
    """How many drafts reached each depth and how many passed it, a row for each request or one for all.

    >>> drafts = Drafts.of([{3: [200, 200, 180, 420]}])
    >>> drafts.tried.tolist(), drafts.passed.tolist()
    ([[1000, 800, 600]], [[800, 600, 420]])
    """

    tried: IntArray
    passed: IntArray
    lengths: Mapping[int, int]  # drafts of each length
    are_requests: bool = False  # whether a row is a request

    @classmethod
    def of(cls, groups: Sequence[Histograms], *, are_requests: bool = False) -> Drafts:
        """The counts of histograms by draft length, a row for each group."""
        depth = max((k for group in groups for k in group), default=0)
        if len(groups) * depth > MOST_COUNTS:
            raise InvalidInput(
                f"There may be {MOST_COUNTS:,} counts in all, but {len(groups):,} requests of {depth} guesses have more: "
                "import a part of them."
            )
        tried = np.zeros((len(groups), depth), dtype=np.int64)
        passed = np.zeros_like(tried)
        lengths: dict[int, int] = {}
        for g, group in enumerate(groups):
            for k, histogram in group.items():
                reached = np.cumsum(histogram[::-1], dtype=np.int64)[::-1]  # (k + 1,) c_0 ... c_k
                tried[g, :k] += reached[:-1]
                passed[g, :k] += reached[1:]
                lengths[k] = lengths.get(k, 0) + int(reached[0])
        return cls(tried, passed, {k: n for k, n in sorted(lengths.items()) if n}, are_requests)


def chain_histogram(drafts: int, reached: Sequence[int], where: object, accepted: int | None = None) -> Histograms:
    """Drafts by how many of their guesses were taken, from the drafts that reached each depth.

    Raises InvalidInput where the counts cannot be those of a chain, or do not sum to the ``accepted`` tokens.

    >>> chain_histogram(1000, [800, 600, 420], "x")
    {3: [200, 200, 180, 420]}
    """
    if not reached or len(reached) > MOST_LENGTH:
        raise InvalidInput(f"{where} must have counts for 1 to {MOST_LENGTH} positions, but has {len(reached)}.")
    if min(drafts, *reached) < 0 or max(drafts, *reached) > MOST_DRAFTS:
        raise InvalidInput(f"{where} must have counts from 0 to {MOST_DRAFTS}, but has others.")
    if reached[0] > drafts:
        raise InvalidInput(
            f"{where} must accept no more first guesses than there were drafts, but has {reached[0]} of {drafts}."
        )
    counts = [upper - lower for upper, lower in pairwise([drafts, *reached, 0])]
    if min(counts) < 0:
        raise InvalidInput(
            f"{where} must have counts by position that never rise, since a guess counts only behind those before "
            f"it, but has {list(reached)}."
        )
    if accepted is not None and sum(reached) != accepted:
        raise InvalidInput(
            f"{where} must have counts by position that sum to the accepted tokens, but they sum to {sum(reached)}, "
            f"and {accepted} were accepted."
        )
    return {len(reached): counts}


def to_calibration(drafts: Drafts, path: Path, *, notes: Sequence[str] = ()) -> Found:
    """Counts conditional on the guesses before being right, and the survival that they multiply to."""
    tried, passed = drafts.tried.sum(0), drafts.passed.sum(0)
    if not tried.size or tried[0] < 1:
        raise InvalidInput(f"{path} must hold drafts, but none was verified while it was measured.")
    reached = int((tried > 0).sum())  # never rises
    calibration = counted(passed[:reached, None], tried[:reached].tolist(), path)
    rows = drafts.tried[:, 0] > 0
    requests = int(rows.sum()) if drafts.are_requests else None
    clustered = requests is not None and requests > 1
    errors = (
        _bootstrapped(drafts.tried[rows, :reached], drafts.passed[rows, :reached])
        if clustered
        else greenwood(tried[:reached], passed[:reached])
    )
    lengths = dict(drafts.lengths)
    calibration.meta.update(
        source=ENGINE_LOG,
        drafts=int(sum(lengths.values())),
        requests=requests,
        draft_length=next(iter(lengths)) if len(lengths) == 1 else None,
        draft_lengths={str(k): n for k, n in lengths.items()},
        survival=np.cumprod(calibration.accept[:, 0]).tolist(),
        survival_stderr=errors.tolist(),
        survival_stderr_is_optimistic=not clustered,
    )
    said = [*notes, step_start(lengths, reached), CHAIN]
    if len(lengths) > 1:
        said.insert(0, MIXED)
    if not clustered:
        said.append(OPTIMISTIC)
    return Found(calibration, tuple(dict.fromkeys(said)))


def step_start(lengths: Mapping[int, int], reached: int) -> str:
    """What survival at the lengths that were served says of other lengths."""
    served = " and ".join(filter(None, [", ".join(map(str, list(lengths)[:-1])), str(list(lengths)[-1])]))
    return (
        f"Survival was measured with drafts of {served} tokens. For any other length it is an estimate, "
        f"since steps of decoding then start at other places. Beyond depth {reached} nothing is known."
    )


def greenwood(tried: IntArray, passed: IntArray) -> NDArray[np.float64]:
    """(K,) standard errors of survival if drafts were independent: Greenwood's, binomial for one length.

    Half a draft that passed and half a one that did not are added to each depth, so that none or all of a few
    are not taken for certain.

    >>> greenwood(np.array([100, 50]), np.array([50, 25])).round(3).tolist()
    [0.05, 0.043]
    """
    tries, passes = np.add(tried, 1.0), np.add(passed, 0.5)
    failed = (tries - passes) / (tries * passes)
    errors: NDArray[np.float64] = np.cumprod(passes / tries) * np.sqrt(np.cumsum(failed))
    return errors


def _bootstrapped(tried: IntArray, passed: IntArray) -> NDArray[np.float64]:
    """(K,) standard errors of survival over requests drawn again; a depth without a try has the pooled rate."""
    n = len(tried)
    draws = conversation_draws(n)
    drawn, pooled = draws @ tried, passed.sum(0) / np.maximum(tried.sum(0), 1)
    survival = np.cumprod(np.where(drawn > 0, (draws @ passed) / np.maximum(drawn, 1), pooled), axis=1)  # (B, K)
    return np.array([stderr(samples, n) for samples in survival.T])
