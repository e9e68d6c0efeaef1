"""Requests that a server answered, as tokens: all that drafters which copy text need.

R requests · P tokens of all of them
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput
from treeopt.files import npz, storage
from treeopt.records.trace import Answers, check_answers, read_meta
from treeopt.trees.tree import IntArray

SCHEMA = storage.schema("requests")


class Request(NamedTuple):
    """One recorded request.

    prompt, answer : token ids
    limit : most tokens of the answer that were asked for; None where unknown
    begin_s, end_s : when it was asked and when answered [s], on one clock; NaN where unknown
    """

    prompt: list[int]
    answer: list[int]
    limit: int | None = None
    begin_s: float = float("nan")
    end_s: float = float("nan")


@dataclass(frozen=True, eq=False, repr=False)
class RequestLog(Answers):
    """What was asked and answered, in the order in which it was asked: ``requests.npz``.

    tokens        : (P,)   int32    each request's prompt and, behind it, its answer
    starts        : (R+1,) int64    request r is tokens[starts[r] : starts[r+1]]
    prompt_tokens : (R,)   int32    of them, the prompt
    group         : (R,)   int16    index into meta["group_names"]
    cluster       : (R,)   int32    conversation of each request; absent: each is its own
    limit         : (R,)   int32    most tokens of the answer that were asked for; 0 where unknown
    begin_s, end_s : (R,)  float64  when it was asked and when answered [s]; NaN where unknown
    meta          : tokenizer, file, what was skipped and re-tokenised, provenance

    >>> log = RequestLog(np.array([5, 6, 5, 6, 7]), np.array([0, 5]), np.array([2]))
    >>> next(log.requests()).answer
    [5, 6, 7]
    """

    tokens: NDArray[np.int32]
    starts: IntArray
    prompt_tokens: NDArray[np.int32]
    group: NDArray[np.int16] | None = None
    cluster: NDArray[np.int32] | None = None
    limit: NDArray[np.int32] | None = None
    begin_s: NDArray[np.float64] | None = None
    end_s: NDArray[np.float64] | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._take_forms(FORMS)
        starts = self.starts
        if len(starts) < 2 or (np.diff(starts) < 2).any() or starts[0] != 0:
            raise InvalidInput("starts must rise from 0, by 2 or more for a prompt and an answer.")
        if starts[-1] != len(self.tokens):
            raise InvalidInput(f"starts must end at the number of tokens, {len(self.tokens)}, but end at {starts[-1]}.")
        if not ((self.prompt_tokens >= 1) & (self.answer_tokens >= 1)).all():
            raise InvalidInput(
                "prompt_tokens must leave a token or more to the prompt and to the answer of each request."
            )

    @property
    def answer_tokens(self) -> IntArray:
        """(R,) tokens of each answer."""
        return np.asarray(np.diff(self.starts) - self.prompt_tokens, np.int64)

    @property
    def usual_context(self) -> int:
        """Tokens of a request in the middle of its answer, on average."""
        return int(np.mean(self.prompt_tokens + self.answer_tokens / 2))

    @property
    def has_times(self) -> bool:
        """Whether it is known of every request when it was asked and when answered."""
        return all(times is not None and np.isfinite(times).all() for times in (self.begin_s, self.end_s))

    def counts(self) -> dict[str, dict[str, int]]:
        """Requests, conversations and tokens of each group, under "" of all."""
        rows = {"": np.arange(self.num_sequences)}
        rows |= {name: np.flatnonzero(self.group == i) for i, name in enumerate(self.group_names)}
        return {
            name: {
                "requests": len(own),
                "conversations": len(np.unique(self.clusters[own])),
                "prompt_tokens": int(self.prompt_tokens[own].sum(dtype=np.int64)),
                "answer_tokens": int(self.answer_tokens[own].sum()),
            }
            for name, own in rows.items()
        }

    def document(self) -> dict[str, object]:
        groups = self.counts()
        return {"schema": SCHEMA, **groups.pop(""), "groups": groups, "has_times": self.has_times, **self.meta}

    @classmethod
    def of(cls, requests: Iterable[Request]) -> RequestLog:
        """The log of some requests, each its own conversation, without times.

        >>> RequestLog.of([Request([5, 6], [7], 9)]).limit.tolist()
        [9]
        """
        every = list(requests)
        tokens = [token for one in every for token in (*one.prompt, *one.answer)]
        starts = np.cumsum([0, *(len(one.prompt) + len(one.answer) for one in every)])
        lengths, limits = np.array([(len(one.prompt), one.limit or 0) for one in every]).T
        return cls(np.array(tokens, np.int32), starts, lengths, limit=limits)

    @cached_property
    def texts(self) -> list[list[int]]:
        return [one.answer for one in self.requests()]

    def requests(self) -> Iterator[Request]:
        unknown = np.full(self.num_sequences, np.nan)
        begins = unknown if self.begin_s is None else self.begin_s
        ends = unknown if self.end_s is None else self.end_s
        limits = np.zeros(self.num_sequences, np.int32) if self.limit is None else self.limit
        for r, prompt_tokens in enumerate(self.prompt_tokens.tolist()):
            text = self.tokens[self.starts[r] : self.starts[r + 1]].tolist()
            times = float(begins[r]), float(ends[r])
            yield Request(text[:prompt_tokens], text[prompt_tokens:], int(limits[r]) or None, *times)

    def select(self, requests: IntArray) -> RequestLog:
        """The log of some requests, by ascending place."""
        lengths = np.diff(self.starts)
        kept = np.repeat(np.isin(np.arange(self.num_sequences), requests), lengths)
        own = {name: a[requests] for name, a in self._arrays(*PER_REQUEST).items()}
        starts = np.concatenate([[0], np.cumsum(lengths[requests])])
        return RequestLog(self.tokens[kept], starts, **own, meta=self.meta)

    def save(self, path: str | Path | BytesIO) -> None:
        text = np.array(json.dumps({"schema": SCHEMA, **self.meta}, allow_nan=False))
        # Requests that are alike would unpack to more times the file than is read.
        npz.write(path, {**self._arrays(*FORMS), "meta": text}, compressed=False)

    @classmethod
    def load(cls, path: str | Path) -> RequestLog:
        arrays = npz.read(path, ("tokens", "starts", "prompt_tokens"), (*FORMS, "meta"))
        meta = read_meta(path, arrays, SCHEMA)
        try:
            log = cls(**npz.fitting(arrays, FORMS), meta=meta)
            check_answers(log, log.answer_tokens)
            if log.tokens.min() < 0:
                raise InvalidInput(f"tokens must be ids from 0 on, but one is {log.tokens.min()}.")
            return log
        except InvalidInput as error:
            raise InvalidInput(f"{path} is not a log of requests: {error}") from None


def is_log(path: str | Path) -> bool:
    """Whether an .npz file holds a log of requests, by the names of its arrays; not where it cannot be read."""
    try:
        names = npz.names(path)
    except InvalidInput:
        return False
    return {"tokens", "starts", "prompt_tokens"} <= names and "ranks" not in names


FORMS = {
    "tokens": npz.Form(np.int32, "tokens"),
    "starts": npz.Form(np.int64, "requests+1"),
    "prompt_tokens": npz.Form(np.int32, "requests"),
    "group": npz.Form(np.int16, "requests"),
    "cluster": npz.Form(np.int32, "requests"),
    "limit": npz.Form(np.int32, "requests"),
    "begin_s": npz.Form(np.float64, "requests"),
    "end_s": npz.Form(np.float64, "requests"),
}
PER_REQUEST = tuple(name for name, form in FORMS.items() if form.axes == "requests")
