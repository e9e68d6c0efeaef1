"""The calibration: how often each head had the true token at each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Required, TypedDict  # pydantic takes none of typing's before Python 3.12

from treeopt.errors import InvalidInput
from treeopt.files import storage
from treeopt.files.fields import Count, Finite, Positive, Share
from treeopt.records.estimate import Estimate, Estimated
from treeopt.records.figure import EstimatedRate
from treeopt.records.origins import JsonRecord, Origins, Provenance
from treeopt.records.trace import NO_TRIAL, RankTrace
from treeopt.trees.tree import IntArray, read_only

ENGINE_LOG = "engine log"  # the source of a calibration by an engine's counters
STEPS_WITHOUT = (
    "Steps for which the drafter found nothing were not counted, so tokens per step and speedups are upper bounds. To count them: "
    "treeopt import --tokens, with how many tokens were generated meanwhile."
)
EstimatedShare = Annotated[Estimate, Estimated(Share, Finite)]
DERIVED = ("schema", "num_heads", "top_k", "hits", "trials")  # keys that are not among a calibration's notes
LEAST_RIGHT = 0.05  # share of the first guesses of a drafter that works


class Counted(TypedDict, total=False):
    """Hits and trials of all sequences, or of a group of them.

    hits      : [head][rank]: states at which the head had the true token at exactly this rank (not cumulative)
    trials    : [head]: states at which the head had something to guess; 0 at a depth that none of an engine's
                drafts came to
    sequences : answers
    positions : states
    """

    hits: Required[list[list[Count]]]
    trials: Required[list[Count]]
    sequences: Positive | None
    positions: Count | None


class GroupCounts(Counted, total=False):
    """Counts of a group.

    tokens_per_step : held out, of one tree of 64 rows
    """

    tokens_per_step: EstimatedRate | None


class CalibrationFile(Counted, Origins, total=False):
    """How often each head had the true token at each rank.

    accept                        : [head][rank]: hits / trials, with errors over conversations; without them
                                    binomial errors are shown
    survival                      : [depth]: states at which the best candidates down to it were all right; of an
                                    engine's log with errors, bootstrapped over requests
    survival_stderr_is_optimistic : whether requests are not told apart, so that drafts count as independent and
                                    these errors are too small
    loop_share                    : answers that ended in a loop
    target_agreement              : of given answers: states at which the target's own first choice is the given
                                    token
    drafts                        : of an engine's log: drafts that were verified
    requests                      : that they were of
    served_model                  : the model, as the server names it
    draft_length                  : tokens of a draft; null where there were several lengths
    draft_lengths                 : length to drafts; {} where only their sum is known, or the drafter ended its
                                    drafts
    ends_are_misses               : whether the end of a draft counts as a miss, since the drafter chose it
    by_length                     : length to the counts of its drafts, where a file tells them apart
    steps_without_draft           : steps for which the drafter found nothing
    groups                        : the counts of each group
    notes                         : of an import: what was done to the numbers, and what had to be assumed
    """

    survival: list[EstimatedShare] | None
    survival_stderr_is_optimistic: bool | None
    loop_share: Share | None
    target_agreement: Share | None
    drafts: Positive | None
    requests: Count | None
    served_model: str | None
    draft_length: Positive | None
    draft_lengths: dict[str, Count] | None
    ends_are_misses: bool | None
    notes: list[str] | None
    groups: dict[str, GroupCounts] | None
    accept: list[list[EstimatedShare]] | None
    by_length: dict[str, Counted] | None
    steps_without_draft: Count | None


@dataclass(frozen=True, eq=False, repr=False)
class Calibration(JsonRecord):
    """Marginal counts of a drafter on a data set: ``calibration.json``.

    hits   : (K, top_k) int  states at which head k had the true token at rank i
    trials : (K,)       int  states at which head k had something to guess; 0 where an engine's drafts were never so long
    accept : (K, top_k)      hits / trials, the marginal accuracies a_k^(i) of Medusa, section 2.3.3; 0 without a trial

    >>> calibration = Calibration(np.array([[60, 20], [40, 10]]), np.array([100, 100]))
    >>> calibration.accept.tolist()
    [[0.6, 0.2], [0.4, 0.1]]
    """

    file_kind = "calibration"
    hits: IntArray
    trials: IntArray
    meta: dict[str, Any] = field(default_factory=dict)  # the file's other keys

    def __post_init__(self) -> None:
        for name in ("hits", "trials"):
            value = np.asarray(getattr(self, name))
            if value.dtype.kind not in "iu":
                raise InvalidInput(f"{name} must be counts (whole numbers), but got {value.dtype}.")
            object.__setattr__(self, name, read_only(value, np.int64))
        hits, trials = self.hits, self.trials
        if hits.ndim != 2 or trials.shape != hits.shape[:1] or 0 in hits.shape:
            raise InvalidInput(
                "hits must be a heads x ranks table and trials one count per head, but their shapes are "
                f"{hits.shape} and {trials.shape}."
            )
        if min(hits.min(), trials.min()) < 0 or trials[0] < 1:
            raise InvalidInput("hits and trials must be at least 0, and the first head's trials at least 1.")
        for k in np.flatnonzero(hits.sum(1) > trials)[:1]:
            raise InvalidInput(
                f"The hits of one head may not exceed its trials, but head {k + 1} has {hits[k].sum()} of {trials[k]}: its "
                "counts look cumulative (top-1, top-2, ...); subtract neighbours first."
            )

    @property
    def num_heads(self) -> int:
        return len(self.hits)

    @property
    def top_k(self) -> int:
        return int(self.hits.shape[1])

    @property
    def accept(self) -> NDArray[np.float64]:
        """(K, top_k) share of the trials in which head k had the true token at rank i."""
        rates: NDArray[np.float64] = self.hits / np.maximum(self.trials, 1)[:, None]
        return rates

    @property
    def stderr(self) -> NDArray[np.float64]:
        """(K, top_k) standard errors of `accept`: over conversations where the file has them, else binomial."""
        variance: NDArray[np.float64] = self.accept * (1 - self.accept) / np.maximum(self.trials, 1)[:, None]
        if accept := self.meta.get("accept"):
            errors = np.array([[share.stderr for share in shares] for shares in accept], dtype=np.float64)
            return np.where(np.isnan(errors), np.sqrt(variance), errors)
        return np.sqrt(variance)

    @property
    def independent(self) -> NDArray[np.float64]:
        """(K,) effective sample size of each head's first rank, as a share of its trials; 1 if they are independent."""
        first, error = self.accept[:, 0], self.stderr[:, 0]
        variance = first * (1 - first) / np.maximum(self.trials, 1)
        return np.asarray(np.where(error > 0, np.minimum(variance / np.maximum(error, 1e-12) ** 2, 1.0), 1.0))

    @property
    def survival(self) -> NDArray[np.float64]:
        """(K,) share of chains that are right up to each depth; the product of accuracies where the file has none."""
        survival = self.meta.get("survival") or np.cumprod(self.accept[:, 0])
        return np.minimum.accumulate(np.asarray(survival, dtype=np.float64))[: self.num_heads]

    @property
    def survival_stderr(self) -> NDArray[np.float64] | None:
        """(K,) standard errors of the survival that an engine counted; None where they are not known."""
        errors = [getattr(share, "stderr", None) for share in self.meta.get("survival") or ()]
        return None if None in errors or not errors else np.array(errors, dtype=np.float64)

    def of_length(self, length: int) -> Calibration:
        """The counts of an engine's drafts of one length where lengths are told apart, else of all drafts."""
        counts = (self.meta.get("by_length") or {}).get(str(length))
        return Calibration(np.array(counts["hits"]), np.array(counts["trials"])) if counts else self

    @property
    def drafted(self) -> float:
        """Share of an engine's steps that had a draft; 1 where others were not counted."""
        drafts = int(self.trials[0])
        return drafts / (drafts + (self.meta.get("steps_without_draft") or 0))

    @classmethod
    def from_trace(cls, trace: RankTrace, provenance: Provenance | None = None) -> Calibration:
        """Count hits and trials over all states with a step, and for each group."""
        ranks = trace.ranks[trace.has_step]
        hits, trials = count_hits(ranks, trace.top_k)
        if trials.min() < 1:
            raise InvalidInput(
                f"Head {int(trials.argmin()) + 1} never had a token to guess: "
                "the sequences are too short. Use a larger `max_new_tokens`."
            )
        shares, errors = hits / trials[:, None], accept_stderr(trace).round(6)
        meta = {
            "positions": int(trace.has_step.sum()),
            "sequences": trace.num_sequences,
            "accept": [list(map(Estimate, *head)) for head in zip(shares.tolist(), errors.tolist(), strict=True)],
            "survival": [*map(Estimate, np.logical_and.accumulate(ranks == 0, axis=1).mean(0).tolist())],  # of chains
            "loop_share": trace.loop_share(),
            "source": "measured",
            **{key: trace.meta.get(key) for key in ("drafter", "acceptance", "answers", "skipped")},
            "provenance": provenance.record if provenance else trace.meta.get("provenance"),
        }
        if trace.target_rank is not None:
            meta["target_agreement"] = float(np.mean(trace.target_rank == 0))
        if trace.group_names:
            meta["groups"] = group_counts(trace)
        return cls(hits, trials, meta)

    def document(self) -> dict[str, object]:
        keys: dict[str, object] = {
            "num_heads": self.num_heads,
            "top_k": self.top_k,
            "hits": self.hits,
            "trials": self.trials,
            **self.meta,
        }
        return {"schema": storage.schema("calibration"), **storage.document(keys)}

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        document = storage.read_json(path, "calibration")
        checked = storage.typed(CalibrationFile, document, path)
        estimates = {key: value for key, value in checked.items() if key in ("accept", "survival", "groups")}
        meta = {key: value for key, value in {**document, **estimates}.items() if key not in DERIVED}
        hits = document["hits"]
        if meta.get("accept") and [*map(len, meta["accept"])] != [*map(len, hits)]:
            raise InvalidInput(f"{path} must have an accuracy for each of its hits in 'accept'.")
        try:
            return cls(np.array(hits), np.array(document["trials"]), meta)
        except ValueError as error:
            raise InvalidInput(f"{path} is not a calibration: {error}") from None


def count_hits(ranks: NDArray[np.int16], top_k: int) -> tuple[IntArray, IntArray]:
    """(K, top_k) hits and (K,) trials of (P, K) ranks.

    >>> hits, trials = count_hits(np.array([[0], [1], [-1], [-2]], np.int16), 2)
    >>> hits.tolist(), trials.tolist()
    ([[1, 1]], [3])
    """
    hits = np.stack([np.bincount(r[r >= 0], minlength=top_k)[:top_k] for r in ranks.T])
    return hits, (ranks != NO_TRIAL).sum(0)


def group_counts(trace: RankTrace) -> Mapping[str, Mapping[str, object]]:
    """The counts of each group, by its name."""
    counts, group = {}, np.repeat(np.asarray(trace.group), trace.lengths)
    for g in np.unique(group).tolist():
        ranks = trace.ranks[trace.has_step & (group == g)]
        hits, trials = count_hits(ranks, trace.top_k)
        sequences = int((trace.group == g).sum())
        counts[trace.group_names[g]] = {"sequences": sequences, "positions": len(ranks), "hits": hits, "trials": trials}
    return counts


def accept_stderr(trace: RankTrace) -> NDArray[np.float64]:
    """(K, top_k) standard errors of the accuracies over conversations.

    States of one conversation are alike, so they do not count as independent. The error is the linearised one of a ratio of
    sums: it comes from the difference between the hits of a conversation and the average hits of as many trials.

    >>> ranks = np.array([[0], [0], [-2], [1], [1], [-2]], np.int16)  # one conversation is easy, the other hard
    >>> accept_stderr(RankTrace(ranks, np.array([0, 3, 6]), meta={"top_k": 2})).tolist()
    [[0.5, 0.5]]
    """
    states, top, count = np.flatnonzero(trace.has_step), trace.top_k, trace.num_conversations
    conversation = np.repeat(trace.clusters, trace.lengths)[states]
    errors = np.empty((trace.num_heads, top))
    for head, ranks in enumerate(trace.ranks[states].T):
        cells = conversation * (top + 2) + np.where((ranks < 0) | (ranks >= top), top + (ranks == NO_TRIAL), ranks)
        counts = np.bincount(cells, minlength=count * (top + 2)).reshape(count, -1)[:, : top + 1]  # (C, top_k + 1)
        hits, trials = counts[:, :top], counts.sum(1)
        difference = hits - hits.sum(0) / max(trials.sum(), 1) * trials[:, None]
        errors[head] = np.sqrt(np.square(difference).sum(0) * count / max(count - 1, 1)) / max(trials.sum(), 1)
    return errors
