"""Steps of recorded requests with a drafter that copies text: exact, since greedy answers do not depend on the draft.

A drafter may keep text of one request for the next ones. Requests of a server may run at once, so the truth lies between two
replays: one that keeps nothing, and one that keeps all in order.

R requests · S steps
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from treeopt.records.requestlog import Request
from treeopt.text.rules import MANY, NO_GUESSES, TextDrafter

State = Literal["cold", "serial"]  # what a drafter keeps from request to request
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
    """Replay requests with a new drafter for each ("cold"), or with one for all in order ("serial").

    >>> from treeopt.text.prompt_lookup import Lookup
    >>> counts = replay([Request([1, 2, 3], [1, 2, 3, 1, 2])], lambda: Lookup(2, longest=2))
    >>> counts.drafted.tolist(), counts.accepted.tolist(), counts.emitted.tolist()
    ([2, 2], [2, 1], [3, 1])
    """
    drafter, steps, starts = make(), array("i"), [0]
    for request in requests:
        drafter = make() if state == "cold" else drafter
        _append_steps(drafter, request, steps)
        starts.append(len(steps) // 4)
    return Replay(np.array(starts), *np.array(steps, np.int32).reshape(-1, 4).T)


def _append_steps(drafter: TextDrafter, request: Request, steps: array[int]) -> None:
    """Append the steps of one request, four numbers each."""
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
