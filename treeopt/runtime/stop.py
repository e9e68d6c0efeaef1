"""Where an answer ends: at an end token, at a limit, or in a loop.

That depends on the answer's tokens alone, never on how they were decoded, so answers end alike with every tree.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from treeopt.records.trace import End

LOOP_PERIOD, LOOP_REPEATS = 8, 3  # longest block of tokens that makes a loop, and how often it must come in a row


@dataclass(frozen=True)
class StopRule:
    """Where answers end, whatever they are decoded with.

    eos_ids        : tokens that end an answer, and are kept as its last token
    max_new_tokens : most tokens of an answer
    at_loops       : whether an answer ends where its last tokens are the same block of at most 8 tokens for the third time
    limits         : most tokens of the answers to some prompts, by the prompt's tokens, where these have limits of their own
    """

    eos_ids: frozenset[int]
    max_new_tokens: int
    at_loops: bool = True
    limits: Mapping[tuple[int, ...], int] = field(default_factory=dict, hash=False)

    def room(self, prompt: Sequence[int], context: int) -> int:
        """Most tokens of the answer to a prompt, in a context of so many tokens."""
        return min(self.limits.get(tuple(prompt), self.max_new_tokens), context - len(prompt))


class SequenceEnd:
    """Tells which tokens an answer has, and why it ends with the last of them.

    context_left : tokens that the context, or the prompt's own limit, leaves for the answer; None for no bound
    reason       : why the answer has ended; None while it goes on

    >>> end = SequenceEnd(StopRule(frozenset({0}), max_new_tokens=9))
    >>> end.take([5, 7]), end.take([7, 7, 8]), end.reason.name
    ([5, 7], [7, 7], 'LOOP')
    """

    def __init__(self, stop: StopRule, context_left: int | None = None) -> None:
        self.reason: End | None = None
        self._eos_ids = stop.eos_ids
        self._most = stop.max_new_tokens if context_left is None else min(stop.max_new_tokens, context_left)
        self._most_reason = End.LIMIT if self._most == stop.max_new_tokens else End.CONTEXT
        self._tokens: list[int] = []
        # run[p - 1]: how many of the last tokens equal the one p places before them
        self._run = [0] * (LOOP_PERIOD if stop.at_loops else 0)

    def take(self, tokens: Iterable[int]) -> list[int]:
        """The part of the next tokens that comes before the end."""
        taken, before, run = [], self._tokens, self._run
        for token in tokens:
            if self.reason is not None:
                break
            n, looped = len(before), False
            for i in range(min(n, len(run))):
                run[i] = run[i] + 1 if before[n - 1 - i] == token else 0
                looped |= run[i] >= (LOOP_REPEATS - 1) * (i + 1)
            before.append(token)
            taken.append(token)
            if token in self._eos_ids:
                self.reason = End.EOS
            elif looped:
                self.reason = End.LOOP
            elif n + 1 >= self._most:
                self.reason = self._most_reason
        return taken
