"""What decodes answers, and an answer while it is decoded.

d width
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.records.trace import End
from treeopt.runtime.acceptance.rules import Greedy
from treeopt.runtime.drafters.protocol import Drafter, GivenText
from treeopt.runtime.stop import SequenceEnd, StopRule
from treeopt.runtime.target import Target


@dataclass(frozen=True)
class Setup:
    """The parts that decode answers: the target, its drafter (None for plain steps only), a rule, and where they end."""

    target: Target
    drafter: Drafter | None
    stop: StopRule
    acceptance: Greedy = field(default_factory=Greedy)

    def capacity(self, prompts: Iterable[Sequence[int]]) -> int:
        """Tokens of the longest sequence, prompt and answer, that can come of the prompts.

        Raises InvalidInput for an empty prompt or one that leaves no room in the context.
        """
        longest, context = 0, self.target.context
        for i, prompt in enumerate(prompts):
            if not 1 <= len(prompt) < context:
                raise InvalidInput(
                    f"Every prompt must have 1 to {context - 1} tokens (the context is {context}), but prompt {i + 1} "
                    f"has {len(prompt)}."
                )
            longest = max(longest, len(prompt))
        return min(longest + self.stop.max_new_tokens, context)

    def row(self, place: int, prompt: Sequence[int], tokens: Iterable[int] = ()) -> AnswerRow:
        """A row of a prompt that has emitted some tokens, up to where they end."""
        row = AnswerRow(place, prompt, SequenceEnd(self.stop, self.target.context - len(prompt)))
        row.emit(*tokens)
        return row


@dataclass
class AnswerRow:
    """One sequence while it is decoded, and its record afterwards."""

    id: int  # place among the prompts
    prompt: Sequence[int]
    watch: SequenceEnd
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # guesses emitted by each step
    # Where the hidden state of each state is: the pass's (b, d) tensor and the row in it.
    states: list[tuple[Tensor, int]] = field(default_factory=list)
    prompt_states: Tensor | None = None  # (P - 1, d) of the prompt's tokens but the last
    found: dict[str, NDArray[Any]] = field(default_factory=dict)  # what was counted of it: see `RankCounter`

    @property
    def steps(self) -> int:
        return len(self.accepted)

    @property
    def end(self) -> End | None:
        return self.watch.reason

    def emit(self, *tokens: int) -> None:
        """Append tokens, up to where the answer ends."""
        self.tokens += self.watch.take(tokens)

    def text(self) -> GivenText:
        """The ended row with its hidden states, which it keeps no longer."""
        hidden = torch.stack([states[i] for states, i in self.states])  # (N, d)
        assert self.end is not None
        if self.prompt_states is not None:
            hidden = torch.cat([self.prompt_states, hidden])
        self.states, self.prompt_states = [], None
        return GivenText(self.prompt, self.tokens, self.end, hidden)
