"""A log of the requests that a server answered, as tokens, for drafters that copy text.

R requests · P tokens of all of them
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput
from treeopt.files import npz, storage
from treeopt.records.trace import OF_SEQUENCES, Answers
from treeopt.trees.tree import IntArray

FORMS = {name: form for name, form in OF_SEQUENCES.items() if name != "end"} | {
    "tokens": npz.Form(np.int32, "tokens", least=0),
    "limit": npz.Form(np.int32, "sequences"),
}


class Request(NamedTuple):
    """One recorded request.

    prompt, answer : token ids
    limit : most tokens that the answer may have; None where unknown
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    limit: int | None = None


@dataclass(frozen=True, eq=False, repr=False)
class RequestLog(Answers):
    """The requests and their answers, in the order in which they were sent: ``requests.npz``.

    tokens        : (P,)   int32    each request's prompt and, behind it, its answer
    starts        : (R+1,) int64    request r is tokens[starts[r] : starts[r+1]]
    prompt_tokens : (R,)   int32    of them, the prompt
    group         : (R,)   int16    index into meta["group_names"]
    cluster       : (R,)   int32    conversation of each request; absent: each is its own
    limit         : (R,)   int32    most tokens that the answer may have; 0 where unknown
    meta          : tokenizer, file, numbers of skipped and re-tokenised requests, provenance

    >>> log = RequestLog(np.array([5, 6, 5, 6, 7]), np.array([0, 5]), np.array([2]))
    >>> next(log.requests()).answer
    [5, 6, 7]
    """

    file_kind, title, forms = "requests", "log of requests", FORMS
    required = ("tokens", "starts", "prompt_tokens")
    tokens: NDArray[np.int32]
    starts: IntArray
    prompt_tokens: NDArray[np.int32]
    group: NDArray[np.int16] | None = None
    cluster: NDArray[np.int32] | None = None
    limit: NDArray[np.int32] | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._take_forms()
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

    def counts(self) -> dict[str, dict[str, int]]:
        """Numbers of requests, conversations and tokens of each group; those of the whole log under ""."""
        groups = {"": np.arange(self.num_sequences)}
        groups |= {name: np.flatnonzero(self.group == i) for i, name in enumerate(self.group_names)}
        return {
            name: {
                "requests": len(requests),
                "conversations": len(np.unique(self.clusters[requests])),
                "prompt_tokens": int(self.prompt_tokens[requests].sum(dtype=np.int64)),
                "answer_tokens": int(self.answer_tokens[requests].sum()),
            }
            for name, requests in groups.items()
        }

    def document(self) -> dict[str, object]:
        groups = self.counts()
        return {"schema": storage.schema(self.file_kind), **groups.pop(""), "groups": groups, **self.meta}

    @classmethod
    def of(cls, requests: Iterable[Request]) -> RequestLog:
        """The log of some requests. Each is a conversation of its own.

        >>> RequestLog.of([Request([5, 6], [7], 9)]).limit.tolist()
        [9]
        """
        tokens, starts, lengths, limits = array("i"), [0], list[int](), list[int]()
        for request in requests:
            tokens.extend(request.prompt)
            tokens.extend(request.answer)
            starts.append(len(tokens))
            lengths.append(len(request.prompt))
            limits.append(request.limit or 0)
        return cls(np.array(tokens), np.array(starts), np.array(lengths), limit=np.array(limits))

    @cached_property
    def texts(self) -> list[Sequence[int]]:
        """The tokens of each answer."""
        return [request.answer for request in self.requests()]

    def requests(self) -> Iterator[Request]:
        limits = np.zeros(self.num_sequences, np.int32) if self.limit is None else self.limit
        for r, prompt_tokens in enumerate(self.prompt_tokens.tolist()):
            text = self.tokens[self.starts[r] : self.starts[r + 1]].tolist()
            yield Request(text[:prompt_tokens], text[prompt_tokens:], int(limits[r]) or None)

    def select(self, requests: IntArray) -> RequestLog:
        """The log of some of the requests, in the given order."""
        return RequestLog(**self._chosen(requests), meta=self.meta)
