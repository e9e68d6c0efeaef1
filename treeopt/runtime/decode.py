"""treeopt's own decoder: propose from the drafter, verify the tree in one pass, accept, commit.

Collecting traces, timing and bench all run it. A row holds one sequence; rows have lengths of their own, stop on their own,
and are refilled with the next prompt.

b live rows · T nodes of the tree · d width · V vocabulary
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from treeopt import __version__
from treeopt.errors import InvalidInput
from treeopt.runtime.acceptance.rules import Greedy, sequence_key
from treeopt.runtime.cache import TreeCache
from treeopt.runtime.drafters.levels import Drafting, drafting_of
from treeopt.runtime.drafters.protocol import Drafter, DrafterState
from treeopt.runtime.setup import AnswerRow, Setup
from treeopt.runtime.stepper import Pass, Passes, Stepper
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target
from treeopt.trees.draft import Draft

PREFILL_TOKENS = 8192  # most tokens, padding included, of one prefill pass


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device, before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Decoder(Stepper):
    """Decodes prompts with any draft, another one at every step, and as many live rows as memory holds.

    records  : whether the hidden states that a drafter's ranks are counted on are kept instead of drafting
    live     : rows that are decoded, in the order of the cache's
    finished : rows that have ended, whoever hears may clear them
    """

    name, version, takes_trees = "treeopt", __version__, True
    cache: TreeCache
    setup: Setup

    def __init__(self, setup: Setup, *, records: bool = False) -> None:
        self.setup, self.target, self.records = setup, setup.target, records
        self.drafter = None if records else setup.drafter
        self.draft: DrafterState | None = None
        self.batch_size = 0  # rows that there is room for
        self.waiting: deque[tuple[int, Sequence[int]]] = deque()
        self.live: list[AnswerRow] = []
        self.finished: list[AnswerRow] = []
        self._roots = self._keys = torch.empty(0)  # (b,) of every live row
        self._drafting: dict[Draft, Drafting] = {}
        self._one = torch.ones((1, 1), dtype=torch.bool, device=setup.target.device)  # of a lone root
        self._zero = torch.zeros(1, dtype=torch.long, device=setup.target.device)

    def prepare(self, prompts: Sequence[Sequence[int]], drafts: Iterable[Draft], rows: int) -> None:
        """Make room for these prompts, their answers, and the largest of these drafts."""
        self._drafting, self.draft = {}, None  # what they hold is free before more is taken
        room = self._room(prompts, drafts)
        self.cache = TreeCache(self.target.num_layers, rows, room, self.target.layer_devices)
        self.draft = None if self.drafter is None else self.drafter.start(rows, room)
        self.batch_size = rows

    def _room(self, prompts: Sequence[Sequence[int]], drafts: Iterable[Draft]) -> int:
        """Tokens of a row: the longest text, and behind it the rows that are verified, or those that nodes are drafted from."""
        held = [max(len(draft), 1 + (draft.topk or 1) * (draft.depth - 1)) for draft in drafts]
        return self.setup.capacity(prompts) + max(held, default=1)

    def start(self, prompts: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Take (id, tokens) of the prompts to decode; forget everything before."""
        self.cache.clear()
        if self.draft is not None:
            self.draft.clear()
        self.waiting, self.live, self.finished = deque(prompts), [], []

    def answer(self, prompts: Sequence[Sequence[int]], draft: Draft | None, rows: int = 1) -> Passes:
        """The passes; reading prompts is one of its own."""
        drafts = [draft] if draft else []
        if self.batch_size != rows or self.cache.capacity < self._room(prompts, drafts):
            self.prepare(prompts, drafts, rows)
        self.start(enumerate(prompts))
        yield from self.passes(draft)

    def passes(self, draft: Draft | None = None) -> Passes:
        """Decode what has begun to its end; a draft that is sent is that of the steps to come."""
        while self.live or self.waiting:
            if self.waiting and len(self.live) < self.batch_size:
                draft = (yield self._pass(self._refill, reads_prompt=True)) or draft
            if self.live:
                draft = (yield self._pass(partial(self._step, draft), reads_prompt=False)) or draft

    def _pass(self, work: Callable[[], list[AnswerRow]], *, reads_prompt: bool) -> Pass:
        """Time some work, with all that it starts on a device; it returns the rows that got tokens."""
        before, forwards = {row.id: len(row.tokens) for row in self.live}, self.target.passes
        synchronize(self.target.device)
        began = time.perf_counter()
        rows = work()
        synchronize(self.target.device)
        return Pass(
            {row.id: row.tokens[before.get(row.id, 0) :] for row in rows},
            time.perf_counter() - began,
            reads_prompt,
            accepted={row.id: row.accepted[-1] for row in rows if row.accepted},
            forwards=self.target.passes - forwards,
        )

    @torch.inference_mode()
    def _refill(self) -> list[AnswerRow]:
        """Prefill waiting prompts into free rows; each yields its first root."""
        rows: list[AnswerRow] = []
        while self.waiting and len(self.live) < self.batch_size:
            taken = [self.waiting.popleft()]
            longest = len(taken[0][1])
            while self.waiting and len(self.live) + len(taken) < self.batch_size:
                longest = max(longest, len(self.waiting[0][1]))
                if (len(taken) + 1) * longest > PREFILL_TOKENS:
                    break
                taken.append(self.waiting.popleft())
            rows += self._prefill([self.setup.row(place, prompt) for place, prompt in taken])
        return rows

    def _prefill(self, rows: list[AnswerRow]) -> list[AnswerRow]:
        target, device, prompts = self.target, self.target.device, [row.prompt for row in rows]
        hidden = target.read(prompts, self.cache)  # (rows, longest, d)
        if self.draft is not None:
            self.draft.prefill(prompts, hidden)
        ends = torch.tensor(list(map(len, prompts)), device=device)
        last = hidden[torch.arange(len(prompts), device=device), ends - 1]  # (rows, d)
        keys = torch.tensor([sequence_key(prompt) for prompt in prompts], device=device)
        roots = self.setup.acceptance.choose(target.scored(last), keys, ends)
        self._roots = torch.cat([self._roots, roots]) if self.live else roots
        self._keys = torch.cat([self._keys, keys]) if self.live else keys
        for i, (row, root) in enumerate(zip(rows, roots.tolist(), strict=True)):
            if self.records:
                row.states.append((last, i))
                if self.setup.drafter is not None and self.setup.drafter.reads_prompt:
                    row.prompt_states = hidden[i, : len(row.prompt) - 1].clone()
            row.emit(root)
        self.live += rows
        self._drop_finished()
        return rows

    @torch.inference_mode()
    def _step(self, draft: Draft | None) -> list[AnswerRow]:
        """One step of every live row; without a draft, or with a lone root, it is a plain autoregressive one."""
        target, choose, rows = self.target, self.setup.acceptance.choose, list(self.live)
        if draft is None or len(draft) == 1:
            hidden, places = self._verify(self._roots[:, None], self._zero, self._one, 0)
            last = hidden[:, 0]
            self._roots = choose(target.scored(last), self._keys, places[:, 0] + 1)
            committed, paths, roots = [row.tokens[-1:] for row in rows], [[0]] * len(rows), self._roots.tolist()
            if self.records:
                for i, row in enumerate(rows):
                    row.states.append((last, i))
        else:
            nodes = self._drafting_of(draft)(self._roots)
            hidden, places = self._verify(nodes.tokens.clamp_min(0), nodes.depths, nodes.ancestors, draft.depth)
            logits = target.scored(hidden)
            choices = choose(logits, self._keys[:, None], places + 1)
            known, chosen, paths = nodes.accepted(choices, logits)
            committed = [[of_row[node] for node in path] for of_row, path in zip(known, paths, strict=True)]
            roots = [of_row[path[-1]] for of_row, path in zip(chosen, paths, strict=True)]
            self._roots = torch.tensor(roots, device=target.device)
        self._commit(committed, roots, paths, hidden)
        return rows

    def _verify(self, tokens: Tensor, depths: Tensor, ancestors: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """One pass over (b, T) nodes: their (b, T, d) hidden states, and their (b, T) places in their sequences.

        depths : ([b,] T) · ancestors : ([b,] T, T) · depth : of the deepest node
        """
        cache, target = self.cache, self.target
        starts = torch.tensor(cache.lengths, device=target.device)[:, None]  # (b, 1)
        positions = places = starts + depths
        if max(cache.lengths) + depth >= target.context:
            positions = places.clamp_max(target.context - 1)  # such nodes are never accepted
        cache.begin_step(tokens.shape[1], starts)
        return target.hidden(tokens, positions, cache, target.mask(cache, starts, ancestors, depths)), places

    def _commit(
        self, committed: list[list[int]], roots: list[int], paths: Sequence[Sequence[int]], hidden: Tensor
    ) -> None:
        """Keep the accepted path of every row, root first: emit its guesses and the token chosen behind them."""
        self.cache.commit(paths)
        if self.draft is not None:
            self.draft.extend(committed, hidden, paths)
        for row, (_, *guesses), root in zip(self.live, committed, roots, strict=True):
            before = len(row.tokens)
            row.emit(*guesses, root)
            row.accepted.append(min(len(guesses), len(row.tokens) - before))
        self._drop_finished()

    def _drafting_of(self, tree: Draft) -> Drafting:
        """What drafts such trees; InvalidInput for one that drafter or rule cannot take."""
        if tree not in self._drafting:
            if self.drafter is None or self.draft is None:
                raise InvalidInput(f"A tree needs a drafter, but there is none for {tree.name}.")
            rule, device = self.setup.acceptance, self.target.device
            self._drafting[tree] = drafting_of(tree, self.drafter, self.draft, rule, device)
        return self._drafting[tree]

    def _drop_finished(self) -> None:
        """Move ended rows to ``finished``; the last live rows take their places."""
        order = list(range(len(self.live)))
        for i in reversed(range(len(self.live))):
            if self.live[i].end is not None:
                self.finished.append(self.live[i])
                order[i] = order[-1]
                order.pop()
        if len(order) == len(self.live):
            return
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
    acceptance: Greedy | None = None,
) -> list[AnswerRow]:
    """Decode every prompt to its end, with one tree or plainly; the records in the prompts' order."""
    decoder = Decoder(Setup(target, drafter, stop, acceptance or Greedy()))
    deque(decoder.answer(prompts, tree, batch_size), maxlen=0)
    return sorted(decoder.finished, key=lambda row: row.id)
