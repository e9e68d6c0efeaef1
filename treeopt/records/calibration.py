"""How often each head had the true token at each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Required, TypedDict  # pydantic takes none of typing's before Python 3.12

from treeopt.errors import InvalidInput
from treeopt.files import storage
from treeopt.files.fields import Count, NotNegative, Positive, Share
from treeopt.records.figure import Rate
from treeopt.records.origins import Kept, Origins, ProvenanceRecord
from treeopt.records.trace import NO_TRIAL, RankTrace
from treeopt.trees.tree import Choice, IntArray, read_only

KEPT_PREFIXES = 1024  # most frequent rank prefixes that calibration.json lists
ENGINE_LOG = "engine log"  # the source that calibrations of engines' counters name


class PrefixCounts(TypedDict):
    """The most frequent rank prefixes: how often each came, and how often its parent did with a trial."""

    paths: list[Choice]
    counts: list[Count]
    visited: list[Count]


class Counted(TypedDict, total=False):
    """Hits and trials of all sequences, or of a group of them."""

    hits: Required[list[list[Count]]]
    trials: Required[list[Count]]
    sequences: Positive | None
    positions: Count | None


class GroupCounts(Counted, total=False):
    tokens_per_step: Rate | None
    tokens_per_step_stderr: NotNegative | None


class CalibrationFile(Counted, Origins, total=False):
    """Types of what a file says."""

    survival: list[Share] | None
    survival_stderr: list[NotNegative] | None
    loop_share: Share | None
    target_agreement: Share | None
    drafts: Positive | None
    requests: Count | None
    draft_lengths: dict[str, Count] | None
    groups: dict[str, GroupCounts] | None
    prefix_counts: PrefixCounts | None


@dataclass(frozen=True, eq=False, repr=False)
class Calibration(Kept):
    """Marginal counts of a drafter on a data set: ``calibration.json``.

    hits   : (K, top_k) int  states at which head k had the true token at rank i
    trials : (K,)       int  states at which head k had something to guess; 0 of an engine's drafts that never came so far
    accept : (K, top_k)      hits / trials, the marginal accuracies a_k^(i) of Medusa, section 2.3.3; 0 without a trial

    >>> calibration = Calibration(np.array([[60, 20], [40, 10]]), np.array([100, 100]))
    >>> calibration.accept.tolist()
    [[0.6, 0.2], [0.4, 0.1]]
    """

    file_kind = "calibration"
    hits: IntArray
    trials: IntArray
    prefix_counts: dict[str, Any] | None = None
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
        """(K, top_k) binomial standard errors of `accept`."""
        errors: NDArray[np.float64] = np.sqrt(self.accept * (1 - self.accept) / np.maximum(self.trials, 1)[:, None])
        return errors

    @property
    def survival(self) -> NDArray[np.float64]:
        """(K,) share of chains that are right up to each depth; as if heads were independent where the file does not say."""
        told = self.meta.get("survival") or np.cumprod(self.accept[:, 0])
        return np.minimum.accumulate(np.asarray(told, dtype=np.float64))[: self.num_heads]

    @classmethod
    def from_trace(cls, trace: RankTrace, provenance: ProvenanceRecord | None = None) -> Calibration:
        """Count hits and trials over all states at which a step can be taken, and for each group."""
        ranks = trace.ranks[trace.has_step]
        hits, trials = count_hits(ranks, trace.top_k)
        if trials.min() < 1:
            raise InvalidInput(
                f"Head {int(trials.argmin()) + 1} never had a token to guess: "
                "the sequences are too short. Use a larger `max_new_tokens`."
            )
        paths, counts, visited = prefix_counts(ranks)
        meta = {
            "positions": int(trace.has_step.sum()),
            "sequences": trace.num_sequences,
            "survival": np.logical_and.accumulate(ranks == 0, axis=1).mean(0).tolist(),  # of chains
            "loop_share": trace.loop_share(),
            "source": "measured",
            **{key: trace.meta.get(key) for key in ("drafter", "acceptance", "answers", "skipped")},
            "provenance": provenance or trace.meta.get("provenance"),
        }
        if trace.target_rank is not None:
            meta["target_agreement"] = float(np.mean(trace.target_rank == 0))
        if trace.group_names:
            meta["groups"] = group_counts(trace)
        prefixes = {"paths": [list(p) for p in paths], "counts": counts, "visited": visited}
        return cls(hits, trials, prefixes, meta)

    def document(self) -> dict[str, object]:
        prefixes = {} if self.prefix_counts is None else {"prefix_counts": self.prefix_counts}
        return {
            "schema": storage.schema("calibration"),
            "hits": self.hits,
            "trials": self.trials,
            **self.meta,
            **prefixes,
            "shown": {"num_heads": self.num_heads, "top_k": self.top_k},
        }

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        rest = storage.read_json(path, "calibration")
        storage.typed(CalibrationFile, rest, path)
        hits, trials, prefixes = rest.pop("hits"), rest.pop("trials"), rest.pop("prefix_counts", None)
        meta = {key: value for key, value in rest.items() if key not in ("schema", "shown")}
        try:
            return cls(np.array(hits), np.array(trials), prefixes, meta)
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
    found, group = {}, np.repeat(np.asarray(trace.group), trace.lengths)
    for g in np.unique(group).tolist():
        states = trace.ranks[trace.has_step & (group == g)]
        counts = {"sequences": int((trace.group == g).sum()), "positions": len(states)}
        found[trace.group_names[g]] = counts | dict(
            zip(("hits", "trials"), count_hits(states, trace.top_k), strict=True)
        )
    return found


def prefix_counts(ranks: NDArray[np.int16], *, most: int = KEPT_PREFIXES) -> tuple[list[Choice], list[int], list[int]]:
    """The most frequent rank prefixes, how often each came, and how often its parent did with a trial.

    >>> prefix_counts(np.array([[0, 1], [0, -1], [0, -2]], np.int16))
    ([(0,), (0, 1)], [3, 1], [3, 2])
    """
    found: list[tuple[int, Choice, int]] = []
    alive: dict[Choice, IntArray] = {(): np.arange(len(ranks))}
    for column in ranks.T:
        following: dict[Choice, IntArray] = {}
        for path, states in alive.items():
            here = column[states]
            visited = int((here != NO_TRIAL).sum())
            for rank in np.unique(here[here >= 0]).tolist():
                following[(*path, rank)] = states[here == rank]
                found.append((-len(following[(*path, rank)]), (*path, rank), visited))
        alive = following
    found = sorted(found, key=lambda item: (item[0], len(item[1]), item[1]))[:most]
    return [p for _, p, _ in found], [-n for n, _, _ in found], [v for _, _, v in found]
