"""Steps of recorded requests with a drafter that copies text: greedy answers do not depend on the draft, so they are exact.

Requests are replayed one after another, in order. Cold forgets between requests what a drafter keeps, warm keeps it; a
server that runs requests at once lies between, or aside where one request's draft comes of another that is running.

R requests · S steps
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.text.rules import MANY, TextDrafter

Counts = NDArray[np.int32]


class Request(NamedTuple):
    """One recorded request.

    prompt, answer : token ids
    limit : most tokens of the answer that were asked for; None where unknown
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    limit: int | None = None


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


def replay(requests: Iterable[Request], make: Callable[[], TextDrafter], *, warm: bool) -> Replay:
    """Replay requests in order with one drafter that ``make`` makes, or (cold) a fresh one for each.

    >>> from treeopt.text.prompt_lookup import PromptLookup
    >>> one = replay([Request([1, 2, 3], [1, 2, 3, 1, 2])], lambda: PromptLookup(2, longest=2), warm=False)
    >>> one.drafted.tolist(), one.accepted.tolist(), one.emitted.tolist()
    ([2, 2], [2, 1], [3, 1])
    """
    steps, starts, drafter = array("i"), [0], None
    for request in requests:
        drafter = drafter if drafter and warm else make()
        answer, most, at = list(request.answer), request.limit or MANY, 1
        state = drafter.start(request.prompt)
        drafter.commit(state, answer[:1], 0)
        while at < len(answer):
            draft = drafter.draft(state, most - at)
            accepted = draft.accepted(answer[at : at + len(draft.tokens)])
            emitted = answer[at : at + accepted + 1]
            steps.extend((len(draft.tokens), draft.rows, accepted, len(emitted)))
            drafter.commit(state, emitted, accepted)
            at += len(emitted)
        drafter.stop(state)
        starts.append(len(steps) // 4)
    return Replay(np.array(starts), *np.array(steps, dtype=np.int32).reshape(-1, 4).T)
