"""The rank trace: at which rank each head had the token that really came, at every state.

A sequence of N emitted tokens y1...yN has states t = 0...N-1. At state t the last committed token is y_t, the target's own head
gives the root y_{t+1}, and head k guesses y_{t+1+k}. A step can be taken at t <= N-2. Greedy output does not depend on the
tree, so the trace alone tells how many steps decoding takes with any tree (`treeopt.growth.replay`).

P states of all sequences · S sequences · K heads
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, TypedDict

from treeopt.errors import InvalidInput, quoted
from treeopt.files import npz, storage
from treeopt.files.fields import Positive
from treeopt.records.display import Drawn
from treeopt.records.origins import Origins, ShardRecord
from treeopt.records.pools import MarginalsRecord, Pools, PoolsRecord
from treeopt.trees.tree import MOST_RANK, BoolArray, IntArray, read_only

MISS, NO_TRIAL = -1, -2  # instead of a rank: beyond the recorded ranks; nothing to guess
FOLDS = 5  # of cross-validation
PER_ROW = ("states", "steps", "tokens")  # axes along which ``starts`` counts
OF_GUESSES = ("ranks", "pool_places", "marginal_places")  # arrays of the drafter's guesses


class End(IntEnum):
    LIMIT = 0
    EOS = 1
    CONTEXT = 2
    LOOP = 3


OF_SEQUENCES = {
    "starts": npz.Form(np.int64, "sequences+1"),
    "prompt_tokens": npz.Form(np.int32, "sequences", least=0),
    "end": npz.Form(np.uint8, "sequences", most=max(End)),
    "group": npz.Form(np.int16, "sequences", least=0),
    "cluster": npz.Form(np.int32, "sequences", least=0),
}
FORMS = OF_SEQUENCES | {
    "ranks": npz.Form(np.int16, "states heads"),
    "tokens": npz.Form(np.int32, "states", least=0),
    "target_rank": npz.Form(np.int16, "states", least=MISS),
    "pool_places": npz.Form(np.uint8, "states topks places"),
    "marginal_places": npz.Form(np.uint8, "states widths marginal-places"),
}


class Meta(TypedDict, total=False):
    """What the commands read of a file's meta, besides its `Origins`."""

    top_k: int | None
    source: dict[str, Any] | None
    prompt_sha256: list[str] | None
    max_new_tokens: int | None
    num_heads: int | None
    eos_ids: list[int] | None
    batch_sizes: list[Positive] | None
    group_names: list[Any] | None
    skipped: list[dict[str, Any]] | None
    shard: ShardRecord | None
    pools: PoolsRecord | None
    marginals: MarginalsRecord | None


class Answers(Drawn):
    """A record of answers in arrays, and its file: a trace, a probe or a log of requests.

    file_kind : of the schema's name
    title     : what messages call the record
    forms     : the form of every array
    required  : the arrays that a file must have
    starts    : (S+1,)  where the states (or steps, or tokens) of each sequence begin, and the end
    group     : (S,)    index into meta["group_names"]
    cluster   : (S,)    conversation that a sequence is a turn of; None: each is its own
    """

    file_kind: ClassVar[str]
    title: ClassVar[str]
    forms: ClassVar[Mapping[str, npz.Form]]
    required: ClassVar[tuple[str, ...]]
    starts: IntArray
    group: NDArray[np.int16] | None
    cluster: NDArray[np.int32] | None
    meta: dict[str, Any]

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays that there are, by name."""
        return {name: array for name in self.forms if (array := getattr(self, name)) is not None}

    def _take_forms(self) -> None:
        """Make the arrays read-only and of their types. Raises InvalidInput where their shapes do not fit together."""
        for name, array in self.arrays.items():
            object.__setattr__(self, name, read_only(array, self.forms[name].kind))
        npz.check_shapes(self.arrays, self.forms)

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

    def _rows(self, sequences: IntArray) -> IntArray:
        """The states (or steps, or tokens) of some of the sequences, in the given order."""
        lengths = np.diff(self.starts)[sequences]
        before = np.cumsum(lengths) - lengths
        rows: IntArray = np.arange(lengths.sum()) + np.repeat(self.starts[:-1][sequences] - before, lengths)
        return rows

    def _chosen(self, sequences: IntArray) -> dict[str, NDArray[Any]]:
        """The arrays of some of the sequences, in the given order."""
        rows = self._rows(sequences)
        chosen = {"starts": np.append(0, np.cumsum(np.diff(self.starts)[sequences]))}
        for name, array in self.arrays.items():
            axis = self.forms[name].axes.split()[0]
            if axis == "sequences":
                chosen[name] = array[sequences]
            elif axis in PER_ROW:
                chosen[name] = array[rows]
        return chosen

    def _stored(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """The arrays and the meta that a file has."""
        return self.arrays, self.meta

    def save(self, path: str | Path | BytesIO) -> None:
        arrays, meta = self._stored()
        text = json.dumps({"schema": storage.schema(self.file_kind), **meta}, allow_nan=False)
        npz.write(path, {**arrays, "meta": np.array(text)})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        arrays = npz.read(path, cls.required, (*cls.forms, "meta"))
        meta = _read_meta(path, arrays, storage.schema(cls.file_kind))
        try:
            record = cls._of_file(arrays, meta)
            record.check()
        except InvalidInput as error:
            raise InvalidInput(f"{path} is not a {cls.title}: {error}") from None
        return record

    @classmethod
    def _of_file(cls, arrays: Mapping[str, NDArray[Any]], meta: dict[str, Any]) -> Self:
        """The record of a file's arrays and meta."""
        make: Callable[..., Self] = cls
        return make(**npz.fitting(arrays, cls.forms), meta=meta)

    def check(self) -> None:
        """Raise InvalidInput where a file contradicts itself."""
        names, hashes = self.meta.get("group_names"), self.meta.get("prompt_sha256")
        if self.group is not None and names is not None and self.group.max(initial=-1) >= len(names):
            raise InvalidInput(f"group must be a place among {len(names)} group_names, but one is {self.group.max()}.")
        if hashes is not None and len(hashes) != self.num_sequences:
            raise InvalidInput(
                f"prompt_sha256 must be one for each of {self.num_sequences} sequences, but are {len(hashes)}."
            )


@dataclass(frozen=True, eq=False, repr=False)
class RankTrace(Answers):
    """The record of a calibration: ``trace.npz``.

    ranks         : (P, K) int16  rank of the true token at head k; -1 beyond top_k, -2 no trial
    starts        : (S+1,) int64  sequence s has the states starts[s]...starts[s+1]-1
    tokens        : (P,)   int32  the token emitted at each state (the root there)
    prompt_tokens : (S,)   int32  length of each prompt
    end           : (S,)   uint8  why each sequence ended (`End`)
    group         : (S,)   int16  index into meta["group_names"]
    cluster       : (S,)   int32  conversation that a sequence is a turn of; absent: each is its own
    target_rank   : (P,)   int16  rank of each token at the target itself, where answers came with the prompts
    pool_places   : (P, n, L (L + 1) / 2) uint8  places of dynamic trees: see `Pools`, and meta["pools"]
    marginal_places : (P, n, L (L + 1) / 2) uint8  places of trees over marginals, and meta["marginals"]
    meta          : num_heads, top_k, drafter, acceptance, EOS ids, prompt hashes, provenance, ...

    Only ``ranks`` and ``starts`` are required of a file.

    >>> trace = RankTrace(np.array([[0], [3], [-2]]), np.array([0, 3]))
    >>> trace.num_heads, trace.num_sequences, trace.has_step.tolist()
    (1, 1, [True, True, False])
    """

    file_kind, title, forms, required = "trace", "rank trace", FORMS, ("ranks", "starts")
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
        self._take_forms()
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
        """Raise InvalidInput where a file contradicts itself."""
        super().check()
        _ = self.pools, self.marginals  # which raise where they do not fit together
        left = np.repeat(self.starts[1:], self.lengths) - np.arange(len(self.ranks))  # (P,) tokens from a state on
        ended = np.arange(1, self.num_heads + 1) >= left[:, None]  # (P, K) no token is left to guess
        for state, head in np.argwhere((self.ranks >= 0) & ended)[:1].tolist():
            raise InvalidInput(
                f"ranks must be -1 or -2 where a sequence has no token to guess, but state {state}, {left[state]} before "
                f"the end, has rank {self.ranks[state, head]} at head {head + 1}."
            )

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
        """The pools of dynamic trees; None where none were recorded. Raises InvalidInput for arrays that do not fit."""
        return Pools.of("pools", self.meta, self.pool_places)

    @cached_property
    def marginals(self) -> Pools | None:
        """The places of trees over marginals; None where none were recorded. Raises InvalidInput as `pools` does."""
        return Pools.of("marginals", self.meta, self.marginal_places)

    @cached_property
    def has_step(self) -> BoolArray:
        """(P,) whether a step can be taken at each state: its root is not the last token."""
        has_step = np.ones(len(self.ranks), dtype=bool)
        has_step[self.starts[1:] - 1] = False
        return read_only(has_step, np.bool_)

    @cached_property
    def texts(self) -> list[list[int]]:
        """The tokens of each sequence, of a trace that has ``tokens``."""
        assert self.tokens is not None
        return [text.tolist() for text in np.split(self.tokens, self.starts[1:-1])]

    def select(self, sequences: IntArray) -> RankTrace:
        """The trace of some of the sequences, in the given order."""
        meta, hashes = self.meta, self.meta.get("prompt_sha256")
        if hashes is not None:
            meta = {**meta, "prompt_sha256": [hashes[s] for s in sequences.tolist()]}
        return RankTrace(**self._chosen(sequences), meta=meta)

    @classmethod
    def concatenate(cls, traces: Sequence[RankTrace], meta: dict[str, Any]) -> RankTrace:
        """All sequences of several traces, whose conversations stay different ones.

        >>> trace = RankTrace(np.array([[0], [-2]]), np.array([0, 2]))
        >>> RankTrace.concatenate([trace, trace], {}).starts.tolist()
        [0, 2, 4]
        """
        parts = [trace.arrays for trace in traces]
        names = set.intersection(*map(set, parts)) - {"starts", "cluster"}
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in names}
        firsts = np.cumsum([0, *(trace.num_conversations for trace in traces)])
        clusters = np.concatenate([trace.clusters + n for trace, n in zip(traces, firsts, strict=False)])
        starts = np.cumsum([0, *np.concatenate([trace.lengths for trace in traces])])
        return cls(starts=starts, cluster=clusters, **arrays, meta=meta)

    def loop_share(self) -> float | None:
        """Share of the sequences that ended in a loop; None where it is unknown."""
        return None if self.end is None else float(np.mean(self.end == End.LOOP))

    def _stored(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        return self.arrays, {**self.meta, "num_heads": self.num_heads, "top_k": self.top_k}


def _read_meta(path: str | Path, arrays: Mapping[str, NDArray[Any]], schema: str) -> dict[str, Any]:
    """The document in a file's array "meta", without the keys of `Meta` that have no value.

    Raises InvalidInput for another schema, and for a value of another type.
    """
    meta = npz.json_of(arrays["meta"], f"'meta' of {path}") if "meta" in arrays else {}
    if not isinstance(meta, dict) or meta.get("schema", schema) != schema:
        name = meta.get("schema") if isinstance(meta, dict) else meta
        raise InvalidInput(f"{path} must have the schema {schema}, but has {quoted(name)}.")
    storage.typed(Meta, meta, path)
    storage.typed(Origins, meta, path)
    unknown = {key for key in Meta.__annotations__ if meta.get(key) is None}
    return {key: value for key, value in meta.items() if key != "schema" and key not in unknown}


def fold_numbers(answers: Answers) -> IntArray:
    """(S,) which of five folds each sequence belongs to; the turns of a conversation are in one fold.

    >>> trace = RankTrace(np.array([[0], [-2]] * 10), np.arange(0, 22, 2))
    >>> sorted(np.bincount(fold_numbers(trace)).tolist())
    [2, 2, 2, 2, 2]
    """
    numbers = np.random.default_rng(0).permutation(answers.num_conversations) % FOLDS
    return np.asarray(numbers[answers.clusters], np.int64)
