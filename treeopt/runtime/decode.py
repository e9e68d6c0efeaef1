"""The decoding step: propose from the heads, verify the tree in one pass, accept, commit.

One engine for collecting traces, timing and bench. A row holds one sequence; rows have lengths of
their own, stop on their own, and are refilled with the next prompt.

b live rows · T nodes of the tree · D its depth · K heads · d width · V vocabulary
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.runtime.cache import TreeCache
from treeopt.runtime.drafters.medusa import MedusaHeads
from treeopt.runtime.target import Target
from treeopt.trace import End, SequenceEnd
from treeopt.tree import IntArray, Tree

PREFILL_TOKENS = 8192  # most tokens, padding included, of one prefill pass


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device, before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class StopRule:
    """Where a sequence ends, whatever it is decoded with."""

    eos_ids: frozenset[int]
    max_new_tokens: int
    at_loops: bool = True


@dataclass
class Row:
    """One sequence while it is decoded, and its record afterwards."""

    id: int  # place among the prompts
    prompt_tokens: int
    watch: SequenceEnd
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # guesses emitted by each step
    end: End | None = None
    # Where the hidden state of each state is: the pass's (b, d) tensor and the row in it.
    states: list[tuple[Tensor, int]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return len(self.accepted)

    def emit(self, token: int) -> bool:
        """Append a token; whether the sequence goes on."""
        self.tokens.append(token)
        self.end = self.watch.push(token)
        return self.end is None


@dataclass(frozen=True, eq=False)
class TreeTensors:
    """What a step needs of a tree, on the device."""

    tree: Tree
    width: int  # candidates taken from each head
    token_index: Tensor  # (T,) place of each node's token among root and candidates
    depths: Tensor  # (T,)
    ancestors: Tensor  # (T, T) bool
    paths: IntArray  # (T, D+1) nodes from the root to each node; column j holds j beyond it

    @classmethod
    def of(cls, tree: Tree, device: torch.device) -> TreeTensors:
        width = int(tree.ranks.max()) + 1
        token_index = np.where(tree.depths == 0, 0, 1 + (tree.depths - 1) * width + tree.ranks)
        paths = np.tile(np.arange(tree.depth + 1), (len(tree), 1))
        for node in range(1, len(tree)):
            depth = tree.depths[node]
            paths[node, :depth] = paths[tree.parents[node], :depth]
            paths[node, depth] = node
        return cls(
            tree,
            width,
            torch.tensor(token_index, device=device),
            torch.tensor(tree.depths, device=device),
            torch.tensor(tree.mask, device=device),
            paths,
        )


def top_candidates(logits: Tensor, width: int) -> Tensor:
    """Ids of the ``width`` best tokens by (float32 logit descending, id ascending): (..., V) to (..., width).

    Half precision is full of ties, which ``topk`` breaks as it likes; the trace counts ranks by this
    same order.

    >>> top_candidates(torch.tensor([1.0, 3.0, 3.0, 2.0]), 3).tolist()
    [1, 2, 3]
    """
    logits = logits.float()
    if width == 1:
        return logits.argmax(-1, keepdim=True)  # the first of equal maxima
    values, ids = logits.topk(min(width + 1, logits.shape[-1]), dim=-1)
    if (values[..., 1:] == values[..., :-1]).any():
        ids = logits.sort(dim=-1, descending=True, stable=True).indices
    return ids[..., :width]


def accept_greedy(
    tree: Tree, tokens: NDArray[np.int64], choices: NDArray[np.int64]
) -> tuple[IntArray, IntArray]:
    """The acceptance rule: follow the target's own choices down the tree as far as they were guessed.

    tokens  : (b, T)  token of every node, the root's first
    choices : (b, T)  the target's argmax after every node
    returns : (b,) the last accepted node (0 for none), (b,) how many guesses were accepted
    """
    parents = tree.parents[1:]
    accepted = np.ones(tokens.shape, dtype=bool)
    accepted[:, 1:] = tokens[:, 1:] == choices[:, parents]
    for _ in range(tree.depth - 1):  # a node needs its parent, and so all its ancestors
        accepted[:, 1:] &= accepted[:, parents]
    # Siblings have distinct tokens, so one path is accepted and its end is the last node in order.
    last = len(tree) - 1 - accepted[:, ::-1].argmax(1)
    return last, tree.depths[last]


# An acceptance rule: tree, tokens and choices to the last accepted node and the guesses accepted of each row.
Accept = Callable[[Tree, NDArray[np.int64], NDArray[np.int64]], tuple[IntArray, IntArray]]


class Decoder:
    """Decodes prompts with up to ``batch_size`` live rows; the tree may change from step to step.

    capacity is the longest sequence, prompt and answer, that rows have room for. With
    ``keep_states`` the hidden state of every state is kept for calibration (plain steps only).
    ``accept`` replaces the verdict over a tree, for timing a model whose guesses mean nothing.

    Use: ``start(prompts)``, then ``refill()`` and ``step(tree)`` while ``live`` or ``waiting``.
    """

    def __init__(
        self,
        target: Target,
        heads: MedusaHeads | None,
        *,
        batch_size: int,
        capacity: int,
        stop: StopRule,
        keep_states: bool = False,
        most_nodes: int = 64,
        accept: Accept = accept_greedy,
    ) -> None:
        self.target, self.heads, self.stop, self.keep_states = target, heads, stop, keep_states
        self.accept = accept
        self.cache = TreeCache(target.num_layers, batch_size, capacity + most_nodes, target.layer_devices)
        self.batch_size, self.most_nodes = batch_size, most_nodes
        self.waiting: deque[tuple[int, Sequence[int]]] = deque()
        self.live: list[Row] = []
        self.finished: list[Row] = []
        self.emitted = 0  # tokens that steps have emitted since `start`
        self._hidden = self._roots = torch.empty(0)  # (b, d) of the last committed token; (b,)
        self.parts: list[tuple[str, float]] | None = None  # a list takes (part, time when it ended)
        self._tensors: dict[Tree, TreeTensors] = {}
        self._one = torch.ones((1, 1), dtype=torch.bool, device=target.device)
        self._zero = torch.zeros(1, dtype=torch.long, device=target.device)

    def start(self, prompts: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Take (id, tokens) of the prompts to decode; forget everything before."""
        self.cache.clear()
        self.waiting, self.live, self.finished, self.emitted = deque(prompts), [], [], 0

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
        tokens = torch.zeros((len(prompts), max(lengths)), dtype=torch.long)
        for row, (_, prompt) in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        positions = torch.arange(max(lengths), device=device).expand(len(prompts), -1)
        self.cache.begin_prefill(rows, lengths, device)
        hidden = target.hidden(tokens.to(device), positions, self.cache, None)
        last = torch.tensor(lengths, device=device) - 1
        hidden = hidden[torch.arange(len(prompts), device=device), last]  # (rows, d)
        roots = target.logits(hidden).argmax(-1)
        self._hidden = torch.cat([self._hidden, hidden]) if self.live else hidden
        self._roots = torch.cat([self._roots, roots]) if self.live else roots
        for i, (id_, prompt) in enumerate(prompts):
            watch = SequenceEnd(
                self.stop.eos_ids,
                self.stop.max_new_tokens,
                target.context - len(prompt),
                stop_at_loops=self.stop.at_loops,
            )
            self.live.append(Row(id_, len(prompt), watch))
            if self.keep_states:
                self.live[-1].states.append((hidden, i))
        goes_on = [True] * rows[0] + [
            row.emit(root) for row, root in zip(self.live[rows[0] :], roots.tolist(), strict=True)
        ]
        self._drop_finished(goes_on)

    @torch.inference_mode()
    def step(self, tree: Tree | None = None) -> IntArray:
        """One decoding step of every live row: (b,) guesses accepted. Without a tree, or with a lone
        root, it is a plain autoregressive step."""
        return self._plain_step() if tree is None or len(tree) == 1 else self._tree_step(tree)

    def _mark(self, part: str) -> None:
        if self.parts is not None:
            synchronize(self.target.device)
            self.parts.append((part, time.perf_counter()))

    def _plain_step(self) -> IntArray:
        cache, target = self.cache, self.target
        starts = torch.tensor(cache.lengths, device=target.device)[:, None]  # (b, 1)
        cache.begin_step(1, starts)
        mask = target.mask(cache, starts, self._one, self._zero)
        hidden = target.hidden(self._roots[:, None], starts, cache, mask)[:, 0]  # (b, d)
        choices = target.logits(hidden).argmax(-1)  # (b,)
        self._mark("target")
        for i in range(len(cache.lengths)):
            cache.lengths[i] += 1
        goes_on = []
        for i, (row, token) in enumerate(zip(self.live, choices.tolist(), strict=True)):
            row.accepted.append(0)
            if self.keep_states:
                row.states.append((hidden, i))
            goes_on.append(row.emit(token))
        self.emitted += len(self.live)
        self._hidden, self._roots = hidden, choices
        accepted = np.zeros(len(self.live), dtype=np.int64)
        self._drop_finished(goes_on)
        self._mark("commit")
        return accepted

    def _tree_step(self, tree: Tree) -> IntArray:
        cache, target = self.cache, self.target
        plan = self._prepared(tree)
        tokens = self._propose(plan)  # (b, T)
        self._mark("draft")
        starts = torch.tensor(cache.lengths, device=target.device)[:, None]  # (b, 1)
        positions = starts + plan.depths  # (b, T)
        if max(cache.lengths) + tree.depth >= target.context:
            positions = positions.clamp_max(target.context - 1)  # such nodes are never accepted
        cache.begin_step(len(tree), starts)
        mask = target.mask(cache, starts, plan.ancestors, plan.depths)
        hidden = target.hidden(tokens, positions, cache, mask)  # (b, T, d)
        choices = target.logits(hidden).argmax(-1)  # (b, T)
        self._mark("target")
        known, chosen = torch.stack([tokens, choices]).cpu().numpy()
        last, accepted = self.accept(tree, known, chosen)
        self._mark("verify")
        paths = plan.paths[last]  # (b, D+1)
        cache.commit(paths, accepted)
        goes_on = []
        for i, row in enumerate(self.live):
            guesses, before = known[i, paths[i, 1 : 1 + accepted[i]]].tolist(), len(row.tokens)
            goes_on.append(all(row.emit(token) for token in (*guesses, int(chosen[i, last[i]]))))
            row.accepted.append(min(int(accepted[i]), len(row.tokens) - before))
            self.emitted += len(row.tokens) - before
        ends = torch.from_numpy(last).to(target.device)
        rows = torch.arange(len(ends), device=target.device)
        self._hidden, self._roots = hidden[rows, ends], choices[rows, ends]
        self._drop_finished(goes_on)
        self._mark("commit")
        return accepted

    def _propose(self, plan: TreeTensors) -> Tensor:
        """(b, T) the token of every node: the root's, and the candidates of heads 1...D."""
        assert self.heads is not None, "a tree step needs heads"
        logits = self.heads.first_logits(self._hidden, plan.tree.depth)  # (b, D, Vt)
        candidates = top_candidates(logits, plan.width).flatten(1)  # (b, D * width)
        if self.heads.token_ids is not None:  # heads that know a part of the vocabulary
            candidates = self.heads.token_ids[candidates]
        return torch.cat([self._roots[:, None], candidates], 1)[:, plan.token_index]

    def _prepared(self, tree: Tree) -> TreeTensors:
        if tree not in self._tensors:
            heads = self.heads.num_heads if self.heads else 0
            if tree.depth > heads:
                raise InvalidInput(
                    f"A tree may be as deep as there are heads, {heads}, but its depth is {tree.depth}."
                )
            known = self.heads.draft_vocab_size if self.heads else 0
            if max(tree.ranks) >= known:
                raise InvalidInput(
                    f"A rank must be below the tokens that the heads know, {known}, but the tree has "
                    f"{max(tree.ranks)}."
                )
            if len(tree) > self.most_nodes:
                raise InvalidInput(
                    f"This decoder has room for trees of {self.most_nodes} rows, but got {len(tree)}."
                )
            self._tensors[tree] = TreeTensors.of(tree, self.target.device)
        return self._tensors[tree]

    def _drop_finished(self, goes_on: list[bool]) -> None:
        """Move ended rows to ``finished``; the last live rows take their places."""
        if all(goes_on):
            return
        order = list(range(len(self.live)))
        for i in reversed(range(len(goes_on))):
            if not goes_on[i]:
                self.finished.append(self.live[i])
                self.cache.drop_row(i)
                order[i] = order[-1]
                order.pop()
                self.live[i] = self.live[-1]
                self.live.pop()
        index = torch.tensor(order, dtype=torch.long, device=self.target.device)
        self._hidden, self._roots = self._hidden[index], self._roots[index]


def decode(
    target: Target,
    heads: MedusaHeads | None,
    prompts: Sequence[Sequence[int]],
    tree: Tree | None = None,
    *,
    batch_size: int,
    stop: StopRule,
    **options: Any,
) -> list[Row]:
    """Decode every prompt to its end, with one tree or plainly; the records in the prompts' order."""
    capacity = capacity_for(prompts, stop, target)
    most_nodes = len(tree) if tree else 1
    decoder = Decoder(target, heads, batch_size=batch_size, capacity=capacity, stop=stop,
                      most_nodes=most_nodes, **options)  # fmt: skip
    decoder.start(enumerate(prompts))
    while not decoder.is_done:
        decoder.refill()
        if decoder.live:
            decoder.step(tree)
    return sorted(decoder.finished, key=lambda row: row.id)


def capacity_for(prompts: Iterable[Sequence[int]], stop: StopRule, target: Target) -> int:
    """Tokens of the longest sequence that can come of the prompts.

    Raises InvalidInput for an empty prompt or one that leaves no room in the context.
    """
    longest = 0
    for i, prompt in enumerate(prompts):
        if not 1 <= len(prompt) < target.context:
            raise InvalidInput(
                f"Every prompt must have 1 to {target.context - 1} tokens (the context is "
                f"{target.context}), but prompt {i + 1} has {len(prompt)}."
            )
        longest = max(longest, len(prompt))
    return min(longest + stop.max_new_tokens, target.context)
