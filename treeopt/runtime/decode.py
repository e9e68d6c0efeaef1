"""The decoding step: propose from the drafter, verify the tree in one pass, accept, commit.

Collecting traces, timing and bench all run this step. A row holds one sequence; rows have lengths of
their own, stop on their own, and are refilled with the next prompt.

b live rows · T nodes of the tree · D its depth · d width · V vocabulary
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.records.trace import End
from treeopt.runtime.acceptance.greedy import Acceptance, Greedy, sequence_key
from treeopt.runtime.cache import TreeCache
from treeopt.runtime.drafters.nodes import Drafting, drafting_of
from treeopt.runtime.drafters.protocol import Drafter
from treeopt.runtime.stop import SequenceEnd, StopRule
from treeopt.runtime.target import Target, padded
from treeopt.trees.draft import Draft
from treeopt.trees.tree import IntArray

PREFILL_TOKENS = 8192  # most tokens, padding included, of one prefill pass


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device, before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Setup:
    """The parts that decode answers: the target, its drafter (None for plain steps only), a rule, and where they end."""

    target: Target
    drafter: Drafter | None
    stop: StopRule
    acceptance: Acceptance = field(default_factory=Greedy)

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


@dataclass
class AnswerRow:
    """One sequence while it is decoded, and its record afterwards."""

    id: int  # place among the prompts
    prompt: Sequence[int]
    watch: SequenceEnd
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # guesses emitted by each step
    end: End | None = None
    # Where the hidden state of each state is: the pass's (b, d) tensor and the row in it.
    states: list[tuple[Tensor, int]] = field(default_factory=list)
    prompt_states: Tensor | None = None  # (P - 1, d) of the prompt's tokens but the last

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def steps(self) -> int:
        return len(self.accepted)

    def emit(self, token: int) -> bool:
        """Append a token; whether the sequence goes on."""
        self.tokens.append(token)
        self.end = self.watch.push(token)
        return self.end is None

    def state(self) -> Mapping[str, Any]:
        """A live row as plain values and tensors; `Decoder.resume` takes it."""
        states = torch.stack([hidden[i] for hidden, i in self.states]).to("cpu") if self.states else None
        return {
            "id": self.id,
            "tokens": list(self.tokens),
            "accepted": list(self.accepted),
            "states": states,
            "prompt_states": self.prompt_states,
        }


class Decoder:
    """Decodes prompts with up to ``batch_size`` live rows; the tree may change from step to step.

    capacity     : longest sequence, prompt and answer, that a row has room for [tokens]
    most_nodes   : most rows of a tree
    keep_states  : set to keep the hidden state of every state of the answers, for calibration (plain steps only)
    keep_prompts : set to keep those of the prompts too

    Use: ``start(prompts)``, then ``refill()`` and ``step(tree)`` while ``live`` or ``waiting``.
    """

    def __init__(self, setup: Setup, *, batch_size: int, capacity: int, most_nodes: int = 64) -> None:
        self.target, self.drafter = target, drafter = setup.target, setup.drafter
        self.stop, self.acceptance = setup.stop, setup.acceptance
        self.keep_states = self.keep_prompts = False
        room = capacity + most_nodes
        self.cache = TreeCache(target.num_layers, batch_size, room, target.layer_devices)
        self.draft = drafter.start(batch_size, room) if drafter is not None else None
        self.batch_size, self.most_nodes = batch_size, most_nodes
        self.waiting: deque[tuple[int, Sequence[int]]] = deque()
        self.live: list[AnswerRow] = []
        self.finished: list[AnswerRow] = []
        self.emitted = 0  # tokens that steps have emitted since `start`
        self._roots = self._keys = torch.empty(0)  # (b,) of every live row
        self.parts: list[tuple[str, float]] | None = None  # a list takes (part, time when it ended)
        self._drafting: dict[Draft, Drafting] = {}
        self._one = torch.ones((1, 1), dtype=torch.bool, device=target.device)  # ancestors and depths of a lone root
        self._zero = torch.zeros(1, dtype=torch.long, device=target.device)

    @classmethod
    def for_prompts(
        cls, setup: Setup, prompts: Iterable[Sequence[int]], trees: Iterable[Draft | None] = (), *, batch_size: int
    ) -> Decoder:
        """A decoder with room for these prompts, their answers, and the largest of these trees."""
        most_nodes = max((tree.cache_rows for tree in trees if tree is not None), default=1)
        return cls(setup, batch_size=batch_size, capacity=setup.capacity(prompts), most_nodes=most_nodes)

    def start(self, prompts: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Take (id, tokens) of the prompts to decode; forget everything before."""
        self.cache.clear()
        if self.draft is not None:
            self.draft.clear()
        self.waiting, self.live, self.finished, self.emitted = deque(prompts), [], [], 0

    def state(self) -> Mapping[str, Any]:
        """All that plain steps to come depend on, as plain values and tensors; `resume` takes it."""
        assert self.draft is None, "what drafters keep is not in it"
        return {
            "waiting": [id_ for id_, _ in self.waiting],
            "live": [row.state() for row in self.live],
            "cache": self.cache.state(),
            "roots": self._roots.to("cpu", copy=True),
            "keys": self._keys.to("cpu", copy=True),
        }

    def resume(self, state: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> None:
        """Go on where another decoder of the same prompts was, to the last bit."""
        device = self.target.device
        self.start((id_, prompts[id_]) for id_ in state["waiting"])
        for known in state["live"]:
            row = AnswerRow(known["id"], prompts[known["id"]], self._watch(prompts[known["id"]]))
            for token in known["tokens"]:
                row.emit(token)
            row.accepted = list(known["accepted"])
            if known["states"] is not None:
                states = known["states"].to(device)
                row.states = [(states, i) for i in range(len(states))]
            row.prompt_states = None if known["prompt_states"] is None else known["prompt_states"].to(device)
            self.live.append(row)
        self.cache.resume(state["cache"], device)
        self._roots, self._keys = state["roots"].to(device), state["keys"].to(device)

    def _watch(self, prompt: Sequence[int]) -> SequenceEnd:
        return SequenceEnd(self.stop, self.target.context - len(prompt))

    @property
    def is_done(self) -> bool:
        return not self.live and not self.waiting

    @torch.inference_mode()
    def refill(self) -> None:
        """Prefill waiting prompts into free rows; each yields its first root."""
        while self.waiting and len(self.live) < self.batch_size:
            taken = [self.waiting.popleft()]
            longest = len(taken[0][1])
            while self.waiting and len(self.live) + len(taken) < self.batch_size:
                longest = max(longest, len(self.waiting[0][1]))
                if (len(taken) + 1) * longest > PREFILL_TOKENS:
                    break
                taken.append(self.waiting.popleft())
            self._prefill(taken)

    def _prefill(self, prompts: list[tuple[int, Sequence[int]]]) -> None:
        target, device, lengths = self.target, self.target.device, [len(p) for _, p in prompts]
        rows = list(range(len(self.live), len(self.live) + len(prompts)))
        # Padding is on the right: causal attention keeps it from the real tokens, and the rows that
        # follow overwrite its keys.
        tokens = padded([prompt for _, prompt in prompts])
        positions = torch.arange(max(lengths), device=device).expand(len(prompts), -1)
        self.cache.begin_prefill(rows, lengths, device)
        hidden = target.hidden(tokens.to(device), positions, self.cache, None)  # (rows, longest, d)
        if self.draft is not None:
            self.draft.prefill([prompt for _, prompt in prompts], hidden)
        ends = torch.tensor(lengths, device=device)
        last = hidden[torch.arange(len(prompts), device=device), ends - 1]  # (rows, d)
        keys = torch.tensor([sequence_key(prompt) for _, prompt in prompts], device=device)
        roots = self.acceptance.choose(target.scores(target.logits(last)), keys, ends)
        self._roots = torch.cat([self._roots, roots]) if self.live else roots
        self._keys = torch.cat([self._keys, keys]) if self.live else keys
        for i, (id_, prompt) in enumerate(prompts):
            self.live.append(AnswerRow(id_, prompt, self._watch(prompt)))
            if self.keep_states:
                self.live[-1].states.append((last, i))
            if self.keep_prompts:
                self.live[-1].prompt_states = hidden[i, : len(prompt) - 1].clone()
        goes_on = [True] * rows[0] + [
            row.emit(root) for row, root in zip(self.live[rows[0] :], roots.tolist(), strict=True)
        ]
        self._drop_finished(goes_on)

    @torch.inference_mode()
    def step(self, tree: Draft | None = None) -> IntArray:
        """One decoding step of every live row: (b,) guesses accepted. Without a tree, or with a lone
        root, it is a plain autoregressive step."""
        if tree is None or len(tree) == 1:
            return self._plain_step()
        if tree not in self._drafting:
            self._drafting[tree] = self._drafting_of(tree)
        nodes = self._drafting[tree](self._roots, self._mark)
        hidden, logits, choices = self._verify(nodes.tokens, nodes.depths, nodes.ancestors, tree.depth)
        known, chosen, paths = nodes.accepted(choices, logits)
        self._mark("verify")
        self._commit(known, chosen, paths, hidden)
        return np.array([len(path) - 1 for path in paths])

    def _mark(self, part: str) -> None:
        if self.parts is not None:
            synchronize(self.target.device)
            self.parts.append((part, time.perf_counter()))

    def _plain_step(self) -> IntArray:
        cache, target = self.cache, self.target
        starts = torch.tensor(cache.lengths, device=target.device)[:, None]  # (b, 1)
        cache.begin_step(1, starts)
        mask = target.mask(cache, starts, self._one, self._zero)
        hidden = target.hidden(self._roots[:, None], starts, cache, mask)  # (b, 1, d)
        last = hidden[:, 0]
        choices = self.acceptance.choose(target.scores(target.logits(last)), self._keys, starts[:, 0] + 1)  # (b,)
        self._mark("target")
        if self.draft is not None:
            self.draft.extend([row.tokens[-1:] for row in self.live], hidden, [[0]] * len(self.live))
        cache.lengths[:] = [length + 1 for length in cache.lengths]
        goes_on = []
        for i, (row, token) in enumerate(zip(self.live, choices.tolist(), strict=True)):
            row.accepted.append(0)
            if self.keep_states:
                row.states.append((last, i))
            goes_on.append(row.emit(token))
        self.emitted += len(self.live)
        self._roots = choices
        accepted = np.zeros(len(self.live), dtype=np.int64)
        self._drop_finished(goes_on)
        self._mark("commit")
        return accepted

    def _verify(self, tokens: Tensor, depths: Tensor, ancestors: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """One pass over (b, T) nodes: (b, T, d) hidden states, (b, T, V) logits, and the (b, T) tokens chosen after each.

        depths : ([b,] T) · ancestors : ([b,] T, T) · depth : of the deepest node
        """
        cache, target = self.cache, self.target
        starts = torch.tensor(cache.lengths, device=target.device)[:, None]  # (b, 1)
        places = starts + depths  # (b, T)
        positions = places
        if max(cache.lengths) + depth >= target.context:
            positions = places.clamp_max(target.context - 1)  # such nodes are never accepted
        cache.begin_step(tokens.shape[1], starts)
        mask = target.mask(cache, starts, ancestors, depths)
        hidden = target.hidden(tokens.clamp_min(0), positions, cache, mask)
        logits = target.scores(target.logits(hidden))
        choices = self.acceptance.choose(logits, self._keys[:, None], places + 1)
        self._mark("target")
        return hidden, logits, choices

    def _commit(
        self, known: list[list[int]], chosen: list[list[int]], paths: Sequence[Sequence[int]], hidden: Tensor
    ) -> None:
        """Keep the accepted path of every row, root first: emit its guesses and the token chosen behind them."""
        committed = [[nodes[node] for node in path] for nodes, path in zip(known, paths, strict=True)]
        roots = [nodes[path[-1]] for nodes, path in zip(chosen, paths, strict=True)]
        self.cache.commit(paths)
        assert self.draft is not None
        self.draft.extend(committed, hidden, paths)
        self._roots = torch.tensor(roots, device=self.target.device)
        goes_on = []
        for row, (_, *guesses), root in zip(self.live, committed, roots, strict=True):
            before = len(row.tokens)
            goes_on.append(all(row.emit(token) for token in (*guesses, root)))
            row.accepted.append(min(len(guesses), len(row.tokens) - before))
            self.emitted += len(row.tokens) - before
        self._drop_finished(goes_on)
        self._mark("commit")

    def _drafting_of(self, tree: Draft) -> Drafting:
        """What drafts such trees; InvalidInput for one that drafter, rule or cache cannot take."""
        if self.drafter is None or self.draft is None:
            raise InvalidInput(f"A tree needs a drafter, but there is none for {tree.name}.")
        if tree.cache_rows > self.most_nodes:
            raise InvalidInput(f"This decoder has room for trees of {self.most_nodes} rows, but got {tree.cache_rows}.")
        return drafting_of(tree, self.drafter, self.draft, self.acceptance, self.target.device)

    def _drop_finished(self, goes_on: list[bool]) -> None:
        """Move ended rows to ``finished``; the last live rows take their places."""
        if all(goes_on):
            return
        order = list(range(len(self.live)))
        for i in reversed(range(len(goes_on))):
            if not goes_on[i]:
                self.finished.append(self.live[order[i]])
                order[i] = order[-1]
                order.pop()
        self.live = [self.live[i] for i in order]
        self.cache.keep(order)
        if self.draft is not None:
            self.draft.keep(order)
        index = torch.tensor(order, dtype=torch.long, device=self.target.device)
        self._roots, self._keys = self._roots[index], self._keys[index]


def decode(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    tree: Draft | None = None,
    *,
    batch_size: int,
    stop: StopRule,
    acceptance: Acceptance | None = None,
) -> list[AnswerRow]:
    """Decode every prompt to its end, with one tree or plainly; the records in the prompts' order."""
    setup = Setup(target, drafter, stop, acceptance or Greedy())
    decoder = Decoder.for_prompts(setup, prompts, [tree], batch_size=batch_size)
    decoder.start(enumerate(prompts))
    while not decoder.is_done:
        decoder.refill()
        if decoder.live:
            decoder.step(tree)
    return sorted(decoder.finished, key=lambda row: row.id)
