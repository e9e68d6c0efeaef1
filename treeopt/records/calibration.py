"""How often each head had the true token at each rank: counts first, rates and errors from them.

hits   : (K, top_k) int  states at which head k had the true token at rank i
trials : (K,)       int  states at which head k had something to guess
accept : (K, top_k)      hits / trials, the marginal accuracies a_k^(i) of Medusa, section 2.3.3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput
from treeopt.files import storage
from treeopt.records.agreement import SUMS, agree, at_place, rounding, within
from treeopt.records.display import Drawn
from treeopt.records.origins import check_origins
from treeopt.records.trace import NO_TRIAL, RankTrace
from treeopt.trees.tree import Choice, IntArray, read_only

KEPT_PREFIXES = 1024  # most frequent rank prefixes that calibration.json lists
ENGINE_LOG = "engine log"  # the source that calibrations of engines' counters name


@dataclass(frozen=True, eq=False)
class Calibration(Drawn):
    """Marginal counts of a drafter on a data set: ``calibration.json``.

    Raises InvalidInput for counts that cannot be: negative, more hits than trials, no trials.

    >>> calibration = Calibration(np.array([[60, 20], [40, 10]]), np.array([100, 100]))
    >>> calibration.accept.tolist()
    [[0.6, 0.2], [0.4, 0.1]]
    """

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
        if self.hits.ndim != 2 or self.trials.shape != self.hits.shape[:1] or 0 in self.hits.shape:
            raise InvalidInput(
                "hits must be a heads x ranks table and trials one count per head, but their shapes "
                f"are {self.hits.shape} and {self.trials.shape}."
            )
        if self.hits.min() < 0 or self.trials.min() < 1:
            raise InvalidInput("hits must be at least 0 and trials at least 1.")
        over = np.flatnonzero(self.hits.sum(1) > self.trials)
        if len(over):
            k = int(over[0])
            raise InvalidInput(
                f"The hits of one head may not exceed its trials, but head {k + 1} has "
                f"{self.hits[k].sum()} of {self.trials[k]}: its counts look cumulative (top-1, top-2, "
                "...); subtract neighbours first."
            )

    @property
    def num_heads(self) -> int:
        return int(self.hits.shape[0])

    @property
    def top_k(self) -> int:
        return int(self.hits.shape[1])

    @property
    def accept(self) -> NDArray[np.float64]:
        """(K, top_k) share of the trials in which head k had the true token at rank i."""
        rates: NDArray[np.float64] = self.hits / self.trials[:, None]
        return rates

    @property
    def stderr(self) -> NDArray[np.float64]:
        """(K, top_k) binomial standard errors of `accept`."""
        accept = self.accept
        errors: NDArray[np.float64] = np.sqrt(accept * (1 - accept) / self.trials[:, None])
        return errors

    @classmethod
    def from_trace(cls, trace: RankTrace, provenance: dict[str, Any] | None = None) -> Calibration:
        """Count hits and trials over all states at which a step can be taken, and for each group."""
        ranks = trace.ranks[trace.has_step]
        hits, trials = count_hits(ranks, trace.top_k)
        if trials.min() < 1:
            raise InvalidInput(
                f"Head {int(trials.argmin()) + 1} never had a token to guess: "
                "the sequences are too short. Use a larger --max-new-tokens."
            )
        paths, counts, visited = prefix_counts(ranks)
        meta = {
            "positions": int(trace.has_step.sum()),
            "sequences": trace.num_sequences,
            "survival": chain_survival(ranks).tolist(),
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

    def document(self) -> dict[str, Any]:
        """What ``calibration.json`` says."""
        return {
            "schema": storage.schema("calibration"),
            "num_heads": self.num_heads,
            "top_k": self.top_k,
            "hits": self.hits,
            "trials": self.trials,
            **self.meta,
            "prefix_counts": self.prefix_counts,
        }

    def save(self, path: str | Path) -> None:
        storage.write_json(path, "calibration", self.document())

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        required = ("num_heads", "top_k", "hits", "trials")
        document = storage.read_json(path, "calibration", required)
        check_origins(document, path)
        try:
            calibration = cls(
                np.array(document["hits"]),
                np.array(document["trials"]),
                document.get("prefix_counts"),
                {k: v for k, v in document.items() if k not in (*required, "prefix_counts", "schema")},
            )
        except (InvalidInput, ValueError, TypeError) as error:
            raise InvalidInput(f"{path} is not a calibration: {error}") from None
        shape = (document["num_heads"], document["top_k"])
        if shape != calibration.hits.shape:
            raise InvalidInput(f"{path} says {shape} heads x ranks, but hits has {calibration.hits.shape}.")
        storage.typed(Counted, {**calibration.meta, "prefix_counts": calibration.prefix_counts}, path).check(
            path, calibration.hits, calibration.trials
        )
        return calibration


@dataclass(frozen=True, kw_only=True)
class Prefixes:
    """The most frequent rank prefixes: how often each came, and how often its parent did with a trial."""

    paths: list[Choice]
    counts: list[int]
    visited: list[int]

    def check(self, hits: IntArray, trials: IntArray) -> None:
        """Raise InvalidInput where the counts contradict one another, or the (K, top_k) hits and (K,) trials."""
        agree("counts", len(self.counts), len(self.paths), "one for each path")
        agree("visited", len(self.visited), len(self.paths), "one for each path")
        count = dict(zip(self.paths, self.counts, strict=True))
        sums: dict[Choice, int] = {}
        found = np.zeros_like(hits)
        for path, visited in zip(self.paths, self.visited, strict=True):
            if not 1 <= len(path) <= len(hits) or not 0 <= min(path) <= max(path) < hits.shape[1]:
                raise InvalidInput(
                    f"paths must be ranks below {hits.shape[1]} of 1 to {len(hits)} heads, but one is {path}."
                )
            sums[path[:-1]] = sums.get(path[:-1], 0) + count[path]
            found[len(path) - 1, path[-1]] += count[path]
            within(1, visited, **{f"the count of {list(path)}": count[path]})
            if len(path) == 1:
                agree(f"visited of {list(path)}", visited, int(trials[0]), "the trials of head 1")
                agree(f"the count of {list(path)}", count[path], int(hits[0, path[0]]), "the hits of head 1")
            elif path[:-1] in count:
                within(0, count[path[:-1]], **{f"visited of {list(path)}": visited})
        for path, visited in zip(self.paths, self.visited, strict=True):
            within(0, visited, **{f"the counts of the children of {list(path[:-1])}": sums[path[:-1]]})
        for k, rank in np.argwhere(found > hits).tolist():
            within(found[k, rank], **{f"the hits of head {k + 1} at rank {rank}": int(hits[k, rank])})


@dataclass(frozen=True, kw_only=True)
class Group:
    """The counts of a group of sequences."""

    hits: list[list[int]]
    trials: list[int]
    sequences: int | None = None
    positions: int | None = None
    tokens_per_step: float | None = None
    tokens_per_step_stderr: float | None = None

    def check(self) -> None:
        """Raise InvalidInput where the numbers contradict one another."""
        within(0, sequences=self.sequences, tokens_per_step_stderr=self.tokens_per_step_stderr)
        within(1, 1 + len(self.hits), tokens_per_step=self.tokens_per_step)
        within(0, hits=min((count for hits in self.hits for count in hits), default=0))
        for k, (hits, trials) in enumerate(zip(self.hits, self.trials, strict=False), 1):
            within(0, trials, **{f"the hits of head {k}": sum(hits)})
            within(0, inf if self.positions is None else self.positions, **{f"the trials of head {k}": trials})


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What a file says beside hits and trials that can be checked against them."""

    positions: int | None = None
    sequences: int | None = None
    survival: list[float] | None = None
    survival_stderr: list[float] | None = None
    loop_share: float | None = None
    target_agreement: float | None = None
    drafts: int | None = None
    requests: int | None = None
    draft_lengths: dict[str, int] | None = None
    groups: dict[str, Group] | None = None
    prefix_counts: Prefixes | None = None
    source: str | None = None

    def check(self, source: str | Path, hits: IntArray, trials: IntArray) -> None:
        """Raise InvalidInput, with the place in the file ``source``, for what contradicts (K, top_k) hits, (K,) trials."""
        with at_place(source, "the top"):
            within(1, positions=self.positions, sequences=self.sequences, drafts=self.drafts)
            within(0, 1, loop_share=self.loop_share, target_agreement=self.target_agreement)
            if self.positions is not None:
                within(0, self.positions, trials=int(trials.max()))
            within(0, survival_stderr=min(self.survival_stderr or [0.0]))
            self._check_survival(hits, trials)
        if self.prefix_counts:
            with at_place(source, "prefix_counts"):
                self.prefix_counts.check(hits, trials)
        for name, group in (self.groups or {}).items():
            with at_place(source, f"groups.{name}"):
                group.check()
        if self.groups:
            with at_place(source, "groups"):
                self._check_groups(hits, trials)

    def _check_survival(self, hits: IntArray, trials: IntArray) -> None:
        """What an engine counted is the product of the rates; what was measured is counted over all positions."""
        if self.draft_lengths:
            agree("drafts", self.drafts, sum(self.draft_lengths.values()), "those of draft_lengths")
        if self.drafts is not None:
            within(int(trials[0]), drafts=self.drafts)
        if self.survival is None:
            return
        agree("survival", len(self.survival), len(hits), "one for each head")
        if self.source == ENGINE_LOG:
            for k, rate in enumerate(np.cumprod(hits[:, 0] / trials).tolist()):
                agree(f"survival at depth {k + 1}", self.survival[k], rate, "the product of hits / trials")
        of = self.prefix_counts
        prefixes = dict(zip(of.paths, of.counts, strict=False)) if of else {}
        for k, share in enumerate(self.survival):
            before = self.survival[k - 1] if k else 1.0
            within(0, before + rounding(before) + rounding(share), **{f"survival at depth {k + 1}": share})
            if self.positions and self.source != ENGINE_LOG:
                most = int(hits[k, 0]) / self.positions
                slack = rounding(share) + SUMS * most
                within(most - slack if k == 0 else 0, most + slack, **{f"survival at depth {k + 1}": share})
                if (counted := prefixes.get((0,) * (k + 1))) is not None:
                    agree(
                        f"survival at depth {k + 1}", share, counted / self.positions, "its prefix's count / positions"
                    )

    def _check_groups(self, hits: IntArray, trials: IntArray) -> None:
        """The groups are all of it: their counts sum to the whole's."""
        groups = list((self.groups or {}).values())
        shapes = {(len(g.hits), len(g.trials), *map(len, g.hits)) for g in groups}
        if shapes != {(len(hits), len(hits), *[hits.shape[1]] * len(hits))}:
            raise InvalidInput(f"every group must have {len(hits)} heads of {hits.shape[1]} ranks, as the whole has.")
        for what in ("sequences", "positions"):
            own, whole = [getattr(group, what) for group in groups], getattr(self, what)
            if whole is not None and None not in own:
                agree(f"the groups' {what}", sum(own), whole, "those of the whole")
        sums = np.sum([g.hits for g in groups], axis=0)
        for k, rank in np.argwhere(sums != hits).tolist():
            agree(
                f"the groups' hits of head {k + 1} at rank {rank}",
                int(sums[k, rank]),
                int(hits[k, rank]),
                "the whole's",
            )
        for k, own in enumerate(np.sum([g.trials for g in groups], axis=0).tolist()):
            agree(f"the groups' trials of head {k + 1}", own, int(trials[k]), "the whole's")


def count_hits(ranks: NDArray[np.int16], top_k: int) -> tuple[IntArray, IntArray]:
    """(K, top_k) hits and (K,) trials of (P, K) ranks.

    >>> hits, trials = count_hits(np.array([[0], [1], [-1], [-2]], np.int16), 2)
    >>> hits.tolist(), trials.tolist()
    ([[1, 1]], [3])
    """
    hits = np.stack([np.bincount(r[r >= 0], minlength=top_k)[:top_k] for r in ranks.T])
    return hits, (ranks != NO_TRIAL).sum(0)


def group_counts(trace: RankTrace) -> dict[str, dict[str, Any]]:
    """Hits, trials, sequences and states of each group of sequences."""
    assert trace.group is not None
    found = {}
    for g, name in enumerate(trace.group_names):
        if (trace.group == g).any():
            part = trace.select(np.flatnonzero(trace.group == g))
            states = part.ranks[part.has_step]
            hits, trials = count_hits(states, trace.top_k)
            found[name] = {"sequences": part.num_sequences, "positions": len(states), "hits": hits, "trials": trials}
    return found


def chain_survival(ranks: NDArray[np.int16]) -> NDArray[np.float64]:
    """(K,) share of the states at which the top-1 guesses of heads 1...d were all right.

    >>> chain_survival(np.array([[0, 0], [0, 1], [2, 0], [0, 0]], np.int16)).tolist()
    [0.75, 0.5]
    """
    shares: NDArray[np.float64] = np.logical_and.accumulate(ranks == 0, axis=1).mean(0)
    return shares


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
                found.append((len(following[(*path, rank)]), (*path, rank), visited))
        alive = following
    found.sort(key=lambda item: (-item[0], len(item[1]), item[1]))
    del found[most:]
    return [p for _, p, _ in found], [n for n, _, _ in found], [v for _, _, v in found]


def prefix_states(trace: RankTrace, paths: Sequence[Choice], *, most: int = 3) -> dict[Choice, list[int]]:
    """States at which each path is the beginning of the ranks, at most a few, from different sequences first.

    >>> trace = RankTrace(np.array([[0, 1], [0, -1], [-2, -2]]), np.array([0, 3]))
    >>> prefix_states(trace, [(0,), (0, 1), (2,)])
    {(0,): [0, 1], (0, 1): [0], (2,): []}
    """
    sequence = np.repeat(np.arange(trace.num_sequences), trace.lengths)
    found = {}
    for path in paths:
        states = np.flatnonzero((trace.ranks[:, : len(path)] == path).all(1) & trace.has_step)
        first = np.unique(sequence[states], return_index=True)[1]
        found[path] = [*states[first], *np.delete(states, first)][:most]
    return {path: [int(state) for state in states] for path, states in found.items()}
