"""Steps of recorded requests with a drafter that copies text: exact, since greedy answers do not depend on the draft.

A drafter may keep text of one request for the next ones. Where it is not known which requests ran at once, the truth lies
between two replays: one that keeps nothing, and one that keeps all in order.

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

State = Literal["cold", "serial", "overlapped"]  # what a drafter keeps from request to request
Counts = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Replay:
    """Guesses, rows and tokens of every step of every request.

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


def replay(requests: Iterable[Request], make: Callable[[], TextDrafter], *, state: State = "serial") -> Replay:
    """Replay requests with a new drafter for each ("cold"), with one in order ("serial"), or as they overlapped by their times.

    Of requests that overlap each emits its tokens evenly between its two times. What a drafter keeps of one is there for the
    others.

    >>> from treeopt.text.prompt_lookup import Lookup
    >>> counts = replay([Request([1, 2, 3], [1, 2, 3, 1, 2])], lambda: Lookup(2, longest=2))
    >>> counts.drafted.tolist(), counts.accepted.tolist(), counts.emitted.tolist()
    ([2, 2], [2, 1], [3, 1])
    """
    if state == "overlapped":
        requests_steps = _overlapped(requests, make())
    else:
        drafter, requests_steps = make(), []
        for request in requests:
            drafter = make() if state == "cold" else drafter
            requests_steps.append(steps := array("i"))
            for _ in _steps(drafter, request, steps):
                pass
    starts = np.cumsum([0, *(len(steps) // 4 for steps in requests_steps)])
    counts = np.concatenate([np.frombuffer(steps, np.int32) for steps in requests_steps] or [np.zeros(0, np.int32)])
    return Replay(starts, *counts.reshape(-1, 4).T)


def _overlapped(requests: Iterable[Request], drafter: TextDrafter) -> list[array[int]]:
    """The steps of each request, taken in the order of their times. Requests come in the order in which they begin.

    Of steps at the same time that of the earlier request comes first.
    """
    requests_steps: list[array[int]] = []
    running, times = dict[int, tuple[Request, Iterator[int]]](), list[tuple[float, int]]()  # by the request's number
    for new in chain(requests, [None]):
        while times and times[0][0] <= (new.begin_s if new else inf):
            _, number = heappop(times)
            request, steps = running[number]
            if (emitted := next(steps, None)) is None:
                del running[number]
            else:
                seconds = (request.end_s - request.begin_s) * emitted / len(request.answer)
                heappush(times, (request.begin_s + seconds, number))
        if new:
            requests_steps.append(array("i"))
            number = len(requests_steps) - 1
            running[number] = new, _steps(drafter, new, requests_steps[number])
            heappush(times, (new.begin_s, number))
    return requests_steps


def _steps(drafter: TextDrafter, request: Request, steps: array[int]) -> Iterator[int]:
    """Append the steps of one request, four numbers each. Yields after every step how many tokens of the answer there are."""
    answer, limit, place = request.answer, request.limit or MANY, 0
    state = drafter.start(request.prompt)
    while place < len(answer):
        draft = drafter.draft(state, limit - place) if place or drafter.first != "no draft" else NO_GUESSES
        guesses = len(draft.tokens)
        accepted = draft.accepted(answer[place : place + guesses])
        emitted = answer[place : place + accepted + 1]
        if place or drafter.first == "step":
            steps.extend((guesses, draft.rows, accepted, len(emitted)))
        drafter.commit(state, emitted, accepted)
        place += len(emitted)
        yield place
    drafter.stop(state)
