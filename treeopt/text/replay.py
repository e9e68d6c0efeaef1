"""Steps of recorded requests with a drafter that copies text: greedy answers do not depend on the draft, so they are exact.

What a drafter keeps of one request may be there for the next: with nothing kept, or all in order, the truth is bracketed where
it is not known which requests ran at once.

R requests · S steps
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from treeopt.records.requestlog import Request
from treeopt.text.rules import MANY, NO_GUESSES, TextDrafter

State = Literal["cold", "serial", "overlapped"]  # of what a drafter keeps from request to request
Counts = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Replay:
    """What a drafter did at every step of every request.

    starts   : (R+1,) the steps of request r are starts[r] to starts[r+1]
    drafted  : (S,) guesses
    rows     : (S,) rows verified, the root and all padding included
    accepted : (S,) guesses accepted
    emitted  : (S,) tokens, one more unless a guess ended the answer
    """

    starts: NDArray[np.int64]
    drafted: Counts
    rows: Counts
    accepted: Counts
    emitted: Counts

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step emits on average; 1 where there is none."""
        return float(self.emitted.sum() / len(self.rows)) if len(self.rows) else 1.0


def replay(requests: Iterable[Request], make: Callable[[], TextDrafter], *, state: State = "serial") -> Replay:
    """Replay requests with a fresh drafter for each ("cold"), with one in order ("serial"), or as they overlapped by their times.

    While requests overlap, each emits its tokens evenly between its two times, and what a drafter keeps of one is there for the
    others.

    >>> from treeopt.text.prompt_lookup import Lookup
    >>> one = replay([Request([1, 2, 3], [1, 2, 3, 1, 2])], lambda: Lookup(2, longest=2))
    >>> one.drafted.tolist(), one.accepted.tolist(), one.emitted.tolist()
    ([2, 2], [2, 1], [3, 1])
    """
    if state == "overlapped":
        found = _overlapped(requests, make())
    else:
        drafter, found = make(), []
        for request in requests:
            drafter = make() if state == "cold" else drafter
            found.append(steps := array("i"))
            for _ in _steps(drafter, request, steps):
                pass
    starts = np.cumsum([0, *(len(steps) // 4 for steps in found)])
    together = np.concatenate([np.frombuffer(steps, np.int32) for steps in found] or [np.zeros(0, np.int32)])
    return Replay(starts, *together.reshape(-1, 4).T)


def _overlapped(requests: Iterable[Request], drafter: TextDrafter) -> list[array[int]]:
    """The steps of each request, which begin in order; of steps at one time those of the request that is first come first."""
    found: list[array[int]] = []
    running, times = dict[int, tuple[Request, Iterator[int]]](), list[tuple[float, int]]()
    for request in chain(requests, [None]):
        while times and times[0][0] <= (request.begin_s if request else inf):
            _, r = heappop(times)
            one, steps = running[r]
            if (at := next(steps, None)) is None:
                del running[r]
            else:
                heappush(times, (one.begin_s + (one.end_s - one.begin_s) * at / len(one.answer), r))
        if request:
            found.append(array("i"))
            running[len(found) - 1] = request, _steps(drafter, request, found[-1])
            heappush(times, (request.begin_s, len(found) - 1))
    return found


def _steps(drafter: TextDrafter, request: Request, steps: array[int]) -> Iterator[int]:
    """Take the steps of one request, four numbers each, and say after every one how many tokens of the answer there are."""
    answer, most, at = request.answer, request.limit or MANY, 0
    state = drafter.start(request.prompt)
    while at < len(answer):
        draft = drafter.draft(state, most - at) if at or drafter.first != "no draft" else NO_GUESSES
        guesses = len(draft.tokens)
        accepted = draft.accepted(answer[at : at + guesses])
        emitted = answer[at : at + accepted + 1]
        if at or drafter.first == "step":
            steps.extend((guesses, draft.rows, accepted, len(emitted)))
        drafter.commit(state, emitted, accepted)
        at += len(emitted)
        yield at
    drafter.stop(state)
