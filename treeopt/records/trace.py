"""The rank trace: at which rank each head had the token that really came, at every state.

A sequence of N emitted tokens y1...yN has states t = 0...N-1. At state t the last committed token is
y_t, the target's own head gives the root y_{t+1}, and head k guesses y_{t+1+k}. A step is taken at t
only if t <= N-2. Greedy output does not depend on the tree, so the trace alone tells how many steps
decoding takes with any tree (see `treeopt.growth.replay`).

P states of all sequences · S sequences · K heads
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from io import BytesIO
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from treeopt.errors import InvalidInput, quoted
from treeopt.files import npz, storage
from treeopt.files.fields import within
from treeopt.records.display import Drawn
from treeopt.records.origins import Origins, ShardRecord
from treeopt.records.pools import Marginals, Pools
from treeopt.trees.tree import MOST_RANK, BoolArray, IntArray, read_only

MISS, NO_TRIAL = -1, -2  # instead of a rank: beyond the recorded ranks; nothing to guess
FOLDS = 5  # of cross-validation
SCHEMA = storage.schema("trace")


class End(IntEnum):
    LIMIT = 0
    EOS = 1
    CONTEXT = 2
    LOOP = 3


class Meta(TypedDict, total=False):
    """What the commands read of a file's meta, besides its `Origins`."""

    top_k: int | None
    source: dict[str, Any] | None
    prompt_sha256: list[str] | None
    max_new_tokens: int | None
    num_heads: int | None
    eos_ids: list[int] | None
    batch_sizes: list[int] | None
    group_names: list[Any] | None
    skipped: list[dict[str, Any]] | None
    shard: ShardRecord | None


class Answers(Drawn):
    """What every record of answers says of them: where each begins, and whose turn it is.

    starts  : (S+1,)  where the states (or steps) of each sequence begin, and the end
    group   : (S,)    index into meta["group_names"]
    cluster : (S,)    conversation that a sequence is a turn of; None: each is its own
    """

    starts: IntArray
    group: NDArray[np.int16] | None
    cluster: NDArray[np.int32] | None
    meta: dict[str, Any]

    def _arrays(self, *names: str) -> dict[str, NDArray[Any]]:
        return {name: array for name in names if (array := getattr(self, name)) is not None}

    def _take_forms(self, forms: Mapping[str, npz.Form]) -> None:
        """Make the arrays read-only and of their types; InvalidInput where their shapes do not fit together."""
        for name, array in self._arrays(*forms).items():
            object.__setattr__(self, name, read_only(array, forms[name].kind))
        npz.check_shapes(self._arrays(*forms), forms)

    @property
    def num_sequences(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def clusters(self) -> IntArray:
        """(S,) number of the conversation of each sequence, 0 ... C-1."""
        if self.cluster is None:
            return np.arange(self.num_sequences)
        return np.unique(self.cluster, return_inverse=True)[1].astype(np.int64)

    @property
    def num_conversations(self) -> int:
        return int(self.clusters.max()) + 1

    @property
    def group_names(self) -> list[str]:
        """Names that ``group`` indexes; empty where the sequences are not grouped."""
        names = [str(name) for name in self.meta.get("group_names") or []]
        return names if self.group is not None and any(names) else []

    def conversation_groups(self) -> list[str]:
        """(C,) name of the group of each conversation; empty where they are not grouped."""
        if self.group is None or not self.group_names:
            return []
        firsts = np.unique(self.clusters, return_index=True)[1]
        return [self.group_names[group] for group in self.group[firsts].tolist()]


@dataclass(frozen=True, eq=False, repr=False)
class RankTrace(Answers):
    """What calibration records: ``trace.npz``.

    ranks         : (P, K) int16  rank of the true token at head k; -1 beyond top_k, -2 no trial
    starts        : (S+1,) int64  sequence s has the states starts[s]...starts[s+1]-1
    tokens        : (P,)   int32  the token emitted at each state (the root there)
    prompt_tokens : (S,)   int32  length of each prompt
    end           : (S,)   uint8  why each sequence ended (`End`)
    group         : (S,)   int16  index into meta["group_names"]
    cluster       : (S,)   int32  conversation that a sequence is a turn of; absent: each is its own
    target_rank   : (P,)   int16  of given answers: rank of each token at the target itself
    pool_places   : (P, n, L (L + 1) / 2) uint8  of dynamic trees, as meta["pools"] says: see `Pools`
    marginal_places : (P, n, L (L + 1) / 2) uint8  of trees over marginals, as meta["marginals"] says
    meta          : num_heads, top_k, drafter, acceptance, EOS ids, prompt hashes, provenance, ...

    Only ``ranks`` and ``starts`` are required of a file.

    >>> trace = RankTrace(np.array([[0], [3], [-2]]), np.array([0, 3]))
    >>> trace.num_heads, trace.num_sequences, trace.has_step.tolist()
    (1, 1, [True, True, False])
    """

    ranks: NDArray[np.int16]
    starts: IntArray
    tokens: NDArray[np.int32] | None = None
    prompt_tokens: NDArray[np.int32] | None = None
    end: NDArray[np.uint8] | None = None
    group: NDArray[np.int16] | None = None
    cluster: NDArray[np.int32] | None = None
    target_rank: NDArray[np.int16] | None = None
    pool_places: NDArray[np.uint8] | None = None
    marginal_places: NDArray[np.uint8] | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._take_forms(FORMS)
        if 0 in self.ranks.shape or self.ranks.min() < NO_TRIAL:
            raise InvalidInput(
                f"ranks must be a (states, heads) table of ranks, -1 or -2, but has shape "
                f"{self.ranks.shape} and least value {self.ranks.min(initial=0)}."
            )
        starts, states = self.starts, len(self.ranks)
        rises = len(starts) > 1 and (np.diff(starts) >= 1).all()
        if not rises or starts[0] != 0 or starts[-1] != states:
            raise InvalidInput(f"starts must rise from 0 to the number of states, {states}.")
        if self.ranks.max(initial=0) >= self.top_k:
            raise InvalidInput(f"ranks must be below top_k, {self.top_k}, but reach {self.ranks.max()}.")
        if self.top_k > MOST_RANK + 1:
            raise InvalidInput(f"top_k must be at most {MOST_RANK + 1}, as ranks have 16 bits, but is {self.top_k}.")

    def check(self) -> None:
        """Raise InvalidInput where what a file says of its sequences contradicts them."""
        check_answers(self, self.lengths)
        _ = self.pools, self.marginals  # which raise where they do not fit together
        left = np.repeat(self.starts[1:], self.lengths) - np.arange(len(self.ranks))  # (P,) tokens from a state on
        ended = np.arange(1, self.num_heads + 1) >= left[:, None]  # (P, K) no token is left to guess
        for state, head in np.argwhere((self.ranks >= 0) & ended)[:1].tolist():
            raise InvalidInput(
                f"ranks must be -1 or -2 where a sequence has no token to guess, but state {state}, {left[state]} before "
                f"the end, has rank {self.ranks[state, head]} at head {head + 1}."
            )
        for name, low in (("tokens", 0), ("target_rank", MISS)):
            for array in self._arrays(name).values():
                within(low, **{name: int(array.min())})

    @property
    def num_heads(self) -> int:
        return int(self.ranks.shape[1])

    @property
    def top_k(self) -> int:
        """Ranks 0...top_k-1 were told apart; a token beyond them has rank -1."""
        return int(self.meta.get("top_k", self.ranks.max(initial=0) + 1))

    @property
    def lengths(self) -> IntArray:
        """(S,) tokens emitted by each sequence."""
        return np.diff(self.starts)

    @cached_property
    def pools(self) -> Pools | None:
        """The pools of dynamic trees, where they were recorded. Raises InvalidInput where they do not fit together."""
        return None if self.pool_places is None else Pools.of(self.meta.get("pools"), self.pool_places)

    @cached_property
    def marginals(self) -> Marginals | None:
        """What was recorded of trees over marginals, likewise."""
        return None if self.marginal_places is None else Marginals.of(self.meta.get("marginals"), self.marginal_places)

    @cached_property
    def has_step(self) -> BoolArray:
        """(P,) whether a step can be taken at the state: its root is not the last token."""
        has_step = np.ones(len(self.ranks), dtype=bool)
        has_step[self.starts[1:] - 1] = False
        return read_only(has_step, np.bool_)

    @cached_property
    def texts(self) -> list[list[int]]:
        """The tokens of each sequence; a trace that was collected has them."""
        assert self.tokens is not None
        return [text.tolist() for text in np.split(self.tokens, self.starts[1:-1])]

    def select(self, sequences: IntArray) -> RankTrace:
        """The trace of some of the sequences, in the given order."""
        states = np.concatenate([np.arange(self.starts[s], self.starts[s + 1]) for s in sequences])
        meta, hashes = self.meta, self.meta.get("prompt_sha256")
        if hashes is not None:
            meta = {**meta, "prompt_sha256": [hashes[s] for s in sequences.tolist()]}
        own = {name: array[states] for name, array in self._arrays(*PER_STATE).items()}
        own |= {name: array[sequences] for name, array in self._arrays(*PER_SEQUENCE).items()}
        return RankTrace(starts=np.cumsum([0, *self.lengths[sequences]]), **own, meta=meta)

    @classmethod
    def concatenate(cls, traces: Sequence[RankTrace], meta: dict[str, Any]) -> RankTrace:
        """All sequences of several traces of the same kind; their conversations stay apart.

        >>> one = RankTrace(np.array([[0], [-2]]), np.array([0, 2]))
        >>> RankTrace.concatenate([one, one], {}).starts.tolist()
        [0, 2, 4]
        """
        every = [trace._arrays(*PER_STATE, *PER_SEQUENCE) for trace in traces]
        names = set.intersection(*map(set, every))
        own = {name: np.concatenate([arrays[name] for arrays in every]) for name in names}
        firsts = np.cumsum([0, *(trace.num_conversations for trace in traces)])
        own["cluster"] = np.concatenate([trace.clusters + n for trace, n in zip(traces, firsts, strict=False)])
        starts = np.cumsum([0, *np.concatenate([trace.lengths for trace in traces])])
        return cls(starts=starts, **own, meta=meta)

    def loop_share(self) -> float | None:
        """Share of the sequences that ended in a loop; None where the file does not say."""
        return None if self.end is None else float(np.mean(self.end == End.LOOP))

    def save(self, path: str | Path | BytesIO) -> None:
        meta = {"schema": SCHEMA, **self.meta, "num_heads": self.num_heads, "top_k": self.top_k}
        text = np.array(json.dumps(meta, allow_nan=False))
        npz.write(path, {**self._arrays(*FORMS), "meta": text})

    @classmethod
    def load(cls, path: str | Path) -> RankTrace:
        arrays = npz.read(path, ("ranks", "starts"), (*FORMS, "meta", "weight"))
        if "weight" in arrays:
            raise InvalidInput(
                f"{path} weighs its conversations, which this version does not: calibrate on the traffic itself."
            )
        meta = read_meta(path, arrays, SCHEMA)
        try:
            trace = cls(**npz.fitting(arrays, FORMS), meta=meta)
            trace.check()
        except InvalidInput as error:
            raise InvalidInput(f"{path} is not a rank trace: {error}") from None
        return trace


def read_meta(path: str | Path, arrays: dict[str, NDArray[Any]], schema: str) -> dict[str, Any]:
    """The JSON under "meta" of a file's arrays, its schema name and kinds checked; a key of `Meta` without value is left out."""
    meta = npz.json_of(arrays["meta"], f"'meta' of {path}") if "meta" in arrays else {}
    if not isinstance(meta, dict) or meta.get("schema", schema) != schema:
        found = meta.get("schema") if isinstance(meta, dict) else meta
        raise InvalidInput(f"{path} must have the schema {schema}, but has {quoted(found)}.")
    storage.typed(Meta, meta, path)
    storage.typed(Origins, meta, path)
    return {key: value for key, value in meta.items() if value is not None or key not in Meta.__annotations__}


def check_answers(record: Answers, lengths: NDArray[Any]) -> None:
    """Raise InvalidInput where what a trace or a probe says of its sequences contradicts them.

    lengths : (S,) tokens of each
    """
    sequences, meta = record.num_sequences, record.meta
    names, limit, hashes = (meta.get(key) for key in ("group_names", "max_new_tokens", "prompt_sha256"))
    most = {"end": max(End), "group": inf if names is None else len(names) - 1}
    for name in ("prompt_tokens", "cluster", "end", "group"):
        values = getattr(record, name, None)  # a log of requests has no ends
        for value in () if values is None or not sequences else (values.min(), values.max()):
            within(0, most.get(name, inf), **{name: int(value)})
    if hashes is not None and len(hashes) != sequences:
        raise InvalidInput(f"prompt_sha256 must be one for each of {sequences} sequences, but are {len(hashes)}.")
    if limit is not None and sequences:
        within(0, limit, **{"tokens of a sequence": int(lengths.max())})
    if meta.get("batch_sizes"):
        within(1, batch_sizes=min(meta["batch_sizes"]))


def fold_numbers(trace: Answers) -> IntArray:
    """(S,) which of five folds each sequence belongs to; conversations stay whole.

    >>> trace = RankTrace(np.array([[0], [-2]] * 10), np.arange(0, 22, 2))
    >>> sorted(np.bincount(fold_numbers(trace)).tolist())
    [2, 2, 2, 2, 2]
    """
    return folds_of(trace.clusters)


def folds_of(clusters: IntArray) -> IntArray:
    """(S,) the same by the conversation 0 ... C-1 of each sequence."""
    return (np.random.default_rng(0).permutation(int(clusters.max()) + 1) % FOLDS)[clusters]


FORMS = {
    "ranks": npz.Form(np.int16, "states heads"),
    "starts": npz.Form(np.int64, "sequences+1"),
    "tokens": npz.Form(np.int32, "states"),
    "prompt_tokens": npz.Form(np.int32, "sequences"),
    "end": npz.Form(np.uint8, "sequences"),
    "group": npz.Form(np.int16, "sequences"),
    "cluster": npz.Form(np.int32, "sequences"),
    "target_rank": npz.Form(np.int16, "states"),
    "pool_places": npz.Form(np.uint8, "states topks places"),
    "marginal_places": npz.Form(np.uint8, "states widths marginal-places"),
}
OF_GUESSES = ("ranks", "pool_places", "marginal_places")  # what is recorded of a drafter's guesses
PER_STATE = tuple(name for name, form in FORMS.items() if form.axes.startswith("states"))
PER_SEQUENCE = tuple(name for name, form in FORMS.items() if form.axes == "sequences")
