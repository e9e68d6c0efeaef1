"""Rows of a drafter that attends to the text before it: a cache of its own, fed with every committed token once.

A place of the cache belongs to a state: to a committed token with its hidden state, and the token that follows
it. A state is fed when a tree step drafts: then the root, which follows the last committed token, is known. Guesses are
written behind and never kept: what was accepted is fed again with the target's own hidden states, in the pass that the
new root needs anyway.

b live rows · n states to feed · d width of the target · E nodes of a level
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from treeopt.runtime.cache import TreeCache, tree_mask
from treeopt.runtime.drafters.levels import LevelDraft
from treeopt.runtime.drafters.protocol import Frontier, GivenText
from treeopt.runtime.drafters.states import one_of_each, pad
from treeopt.runtime.target import padded


class CausalDraft(LevelDraft):
    """The base of such drafters' rows: the cache, and the states that are not yet in it.

    ahead : how many places a token lies ahead of that of the state it is fed with: 0 where places are tokens'
    """

    ahead = 1

    def __init__(self, drafter: Any, num_layers: int, batch_size: int, capacity: int, device: torch.device) -> None:
        self.drafter, self.device = drafter, device
        self.cache = TreeCache(num_layers, batch_size, capacity)
        # Of every step since the last that drafted: each row's committed tokens, and (b, n, d) their states.
        self._waiting: list[tuple[Sequence[Sequence[int]], Tensor]] = []
        self.starts = torch.empty(0)  # (b, 1) the cache's lengths since `catch_up`

    def feed(self, following: Tensor, hidden: Any, positions: Tensor, mask: Any) -> Tensor:
        """One pass over (b, n) states: (b, n, ...) whatever guesses are read from.

        following : (b, n) the token after each state; hidden : (b, n, d) the target's, or in a tree the drafter's own
        """
        return self.drafter.predict(following, hidden, positions, self.cache, mask)

    def mask(self, starts: Tensor, ancestors: Tensor, depths: Tensor) -> Any:
        """The attention mask of a pass in the form that `feed` takes; None for plain causal."""
        return tree_mask(self.cache, starts, ancestors, depths, None)

    def prefill(self, prompts: Sequence[Sequence[int]], hidden: Tensor) -> None:
        """Feed all states of new rows but the last ones, which wait for their roots."""
        tokens, last = padded(prompts).to(self.device), [len(prompt) - 1 for prompt in prompts]
        counts = [len(prompt) - self.ahead for prompt in prompts]
        if n := max(counts):
            self.cache.begin_prefill(counts)
            positions = torch.arange(n, device=self.device).expand(len(counts), -1)
            self.feed(tokens[:, self.ahead : self.ahead + n], self.drafter.fused(hidden[:, :n]), positions, None)
        else:
            self.cache.lengths += counts
        self._merge(
            [(prompt[n:], hidden[i, n : n + 1]) for i, (prompt, n) in enumerate(zip(prompts, last, strict=True))]
        )

    def extend(self, tokens: Sequence[Sequence[int]], hidden: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Committed tokens of a step; they wait for the next tree step. A plain step does no more than this."""
        if hidden.shape[1] > 1 and hidden.shape[2]:  # of a tree: without those that were not accepted
            rows = torch.arange(len(paths), device=self.device)[:, None]
            hidden = hidden[rows, padded(paths).to(self.device)]
        self._waiting.append((tokens, hidden))

    def _merge(self, new: Sequence[tuple[Sequence[int], Tensor]] = ()) -> None:
        """Join what several steps committed, and tokens and (n, d) states of new rows, padded on the right."""
        if len(self._waiting) == 1 and not new:
            return
        steps = [[(t, h[i, : len(t)]) for i, t in enumerate(tokens)] for tokens, h in self._waiting]
        rows = [([*chain(*t)], torch.cat(h)) for t, h in (zip(*of, strict=True) for of in zip(*steps, strict=True))]
        tokens, hidden = zip(*rows, *new, strict=True)
        self._waiting = [(tokens, pad(hidden))]

    def catch_up(self, roots: Tensor) -> Tensor:
        """Feed the waiting states, now that the (b,) roots are known: (b, ...) output of `feed` at each row's last state.

        A long row beside one with more to feed may lack the room for all at once: then there are several passes.
        """
        assert self._waiting, "every step commits a token, so something waits"
        self._merge()
        tokens, hidden = self._waiting.pop()
        waiting = [len(of_row) for of_row in tokens]
        following = padded([[*t[1:], root] for t, root in zip(tokens, roots.tolist(), strict=True)]).to(self.device)
        found, fed, n = None, 0, max(waiting)
        while fed < n:
            size = min(n - fed, max(self.cache.capacity - max(self.cache.lengths), 1))
            part, steps = slice(fed, fed + size), torch.arange(size, device=self.device)
            starts = torch.tensor(self.cache.lengths, device=self.device)[:, None]
            self.cache.begin_step(size, starts)
            mask = self.mask(starts, torch.ones((size, size), dtype=torch.bool, device=self.device).tril(), steps)
            made = self.feed(following[:, part], self.drafter.fused(hidden[:, part]), starts + steps, mask)
            made = one_of_each(made, [min(max(count - fed, 1), size) - 1 for count in waiting])
            if found is not None:
                made = torch.where(torch.tensor([[count > fed] for count in waiting], device=self.device), made, found)
            found = made
            for i, count in enumerate(waiting):
                self.cache.lengths[i] += min(max(count - fed, 0), size)
            fed += size
        assert found is not None
        self.starts = torch.tensor(self.cache.lengths, device=self.device)[:, None]
        return found

    def begin(self, roots: Tensor, depth: int) -> None:
        self.states = self.catch_up(roots)[:, None]  # (b, E, ...) that guesses behind the expanded nodes are read from

    def logits(self, level: Frontier, tokens: Tensor) -> Tensor:
        if level.depth:
            self.states = self.feed_level(level, tokens, level.inherit(self.states))
        return self.drafter.logits(self.states)

    def feed_level(self, level: Frontier, tokens: Tensor, hidden: Any) -> Tensor:
        """One pass over the expanding nodes of a level below the root, whose place is already the cache's: (b, E, ...).

        tokens : (b, E) theirs; hidden : (b, E, d) what the drafter has instead of the target's state before each
        """
        self.cache.begin_step(level.nodes, self.starts, after=level.first - 1)
        mask = self.mask(self.starts, level.ancestors, level.beyond)
        return self.feed(tokens, hidden, (self.starts + (level.depth - 1)).expand(-1, level.nodes), mask)

    def read(self, answer: GivenText) -> None:
        self.clear()
        text = [*answer.prompt, *answer.tokens]
        hidden = answer.hidden if self.drafter.reads_prompt else answer.hidden.new_empty((len(text), 0))
        self.prefill([text[: len(text) + self.ahead - 1]], hidden[None])
        self._sought: Sequence[int] = ()
        self._answer, self._width = answer, self._waiting[0][1].shape[-1]
        self._rooted = len(answer.prompt) - self.ahead  # places before the first state's root

    def seek(self, states: Sequence[int]) -> None:
        answer = self._answer
        if states != self._sought:  # else every row has its text still: guesses are written behind it
            self.cache.lengths = [self._rooted + states[-1]]
            self.cache.keep([0] * len(states))
            self._sought = states
        self.cache.lengths = [self._rooted + t for t in states]
        before = [*answer.prompt[-1:], *answer.tokens]  # the token of each state
        hidden = answer.state_hidden[states[0] : states[-1] + 1, None, : self._width]
        self._waiting = [([before[t : t + 1] for t in states], hidden)]

    def keep(self, order: Sequence[int]) -> None:
        self.cache.keep(order)
        index = torch.tensor(order, dtype=torch.long, device=self.device)
        self._waiting = [([tokens[i] for i in order], hidden[index]) for tokens, hidden in self._waiting]

    def clear(self) -> None:
        self.cache.clear()
        self._waiting = []
