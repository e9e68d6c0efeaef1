"""Whole decoding steps whose shapes do not depend on the text, so that a CUDA graph replays them: what `gpu.py` times.

The cache is static: a pass attends to all its columns through its mask. Lengths, roots and hidden states are tensors that a step moves
on, so that drafting, verification, acceptance and commit need no word from the host. On a CPU the same steps are calls.

b rows · T nodes of a tree · D its depth · d width · V vocabulary
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from treeopt.latency.rounds import Visit, Visitor
from treeopt.runtime.cache import TreeCache
from treeopt.runtime.decode import Decoder, synchronize
from treeopt.runtime.drafters.protocol import TreeTensors
from treeopt.runtime.setup import Setup
from treeopt.runtime.stepper import PLAIN
from treeopt.trees.tree import Tree

# Largest difference of logits from treeopt's own pass, in standard deviations of these; a wrong mask or place makes it 1 or more.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.25}


class StaticCache(TreeCache):
    """The rows of a decoder that has read its prompts. A pass attends to all columns through its mask: shapes never change.

    starts, roots, hidden : (b, 1), (b,), (b, d) of every row; a step moves them on, `reset` takes them back
    """

    def __init__(self, decoder: Decoder) -> None:
        theirs, device = decoder.cache, decoder.target.device
        super().__init__(theirs.num_layers, theirs.rows, theirs.capacity)
        self.lengths, self.columns, self.is_even, self._stores = theirs.lengths, theirs.capacity, False, theirs._stores
        starts = torch.tensor(theirs.lengths, device=device)[:, None]
        self.first = (starts, decoder._roots.clone(), decoder.draft.hidden.clone())
        self.starts, self.roots, self.hidden = (part.clone() for part in self.first)
        self._rows = torch.arange(len(starts), device=device)[:, None]

    def reset(self) -> None:
        for now, then in zip((self.starts, self.roots, self.hidden), self.first, strict=True):
            now.copy_(then)

    def begin_step(self, new_tokens: int, starts: Tensor, *, after: int = 0) -> None:
        self.new_tokens, self._targets = new_tokens, starts + torch.arange(new_tokens, device=starts.device)

    def keep_paths(self, paths: Tensor) -> None:
        """Move the keys and values of (b, D + 1) nodes to where their rows go on."""
        places = self.starts + torch.arange(paths.shape[1], device=paths.device)
        for store in self._stores.values():
            store[:, :, self._rows, :, places] = store[:, :, self._rows, :, self.starts + paths]


class StaticStep:
    """A whole greedy step by operations whose shapes do not depend on the text: draft, verify, accept, commit.

    logits : (b, T, V) of the last one
    """

    def __init__(self, setup: Setup, tree: Tree, cache: StaticCache) -> None:
        self.target, self.cache = setup.target, cache
        self.plan = TreeTensors.of(tree, setup.target.device)
        self._heads = setup.drafter.first(tree.depth) if tree.depth else None
        self._parents = torch.tensor(tree.parents.clip(0), device=setup.target.device)
        to_ends = [[*path, *path[-1:] * (tree.depth + 1 - len(path))] for path in self.plan.paths]
        self._paths = torch.tensor(to_ends, device=setup.target.device)  # (T, D + 1), their last node repeated
        self.replay = self.run

    @torch.inference_mode()
    def run(self) -> Tensor:
        """(b, D + 2) how many guesses each row accepted; these, and whatever stands behind them; its next root."""
        target, plan, cache = self.target, self.plan, self.cache
        self.tokens = cache.roots[:, None].clone()  # (b, T)
        if self._heads is not None:
            guesses = self._heads(cache.hidden).float().topk(plan.width).indices  # (b, D, width)
            self.tokens = torch.cat([self.tokens, guesses[:, plan.heads, plan.ranks]], 1)
        cache.begin_step(len(plan.depths), cache.starts)
        mask = target.mask(cache, cache.starts, plan.ancestors, plan.depths)
        states = target.hidden(self.tokens, cache.starts + plan.depths, cache, mask)
        self.logits = target.logits(states)
        choices = target.scores(self.logits).argmax(-1)
        agree = (self.tokens == choices[:, self._parents]) | (plan.depths == 0)
        accepted = (agree[:, None] | ~plan.ancestors).all(-1)  # (b, T) every node on the way from the root agrees
        last = (accepted * (plan.depths + 1)).argmax(-1)  # (b,), the only one so deep
        paths, rows = self._paths[last], torch.arange(len(last), device=last.device)
        if self._heads is not None:
            cache.keep_paths(paths)
        cache.roots.copy_(choices[rows, last])
        cache.hidden.copy_(states[rows, last])
        cache.starts.add_(plan.depths[last][:, None] + 1)
        committed = self.tokens.gather(1, paths)[:, 1:]
        return torch.cat([plan.depths[last][:, None], committed, cache.roots[:, None]], 1)

    @torch.inference_mode()
    def capture(self, pool: Any) -> None:
        """Have `replay` replay the step as a CUDA graph; on a CPU it stays a call."""
        if self.target.device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # which lets libraries choose their kernels and take their memory
                    self.cache.reset()
                    self.run()
            torch.cuda.current_stream().wait_stream(stream)
            self.cache.reset()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                found = self.run()

            def replay() -> Tensor:
                graph.replay()
                return found

            self.replay = replay
        self.cache.reset()

    @torch.inference_mode()
    def difference(self, decoder: Decoder) -> float:
        """The largest of the replayed logits from those of the decoder's own pass, in standard deviations of these."""
        self.cache.reset()
        self.replay()
        ours, plan = self.logits.float(), self.plan
        theirs = self.target.logits(
            decoder._verify(self.tokens, plan.depths, plan.ancestors, plan.tree.depth)[0]
        ).float()
        self.cache.reset()
        return float((ours - theirs).abs().max() / theirs.std())


def read_prompts(setup: Setup, prompts: Sequence[Sequence[int]], trees: Sequence[Tree]) -> Decoder:
    """A decoder that has read the prompts, with room for steps by any of the trees."""
    decoder = Decoder(setup)
    decoder.prepare(prompts, trees, len(prompts))
    decoder.start(enumerate(prompts))
    next(decoder.passes())
    return decoder


def graph_pool(setup: Setup) -> Any:
    """Memory that the graphs of one setting share, since only one of them runs at a time."""
    return torch.cuda.graph_pool_handle() if setup.target.device.type == "cuda" else None


def static_texts(
    setup: Setup, prompts: Sequence[Sequence[int]], tree: Tree, batch_size: int
) -> list[tuple[list[int], int]]:
    """The tokens of every answer, all of the most that there may be, by replayed steps; and their number."""
    found, most = list[tuple[list[int], int]](), setup.stop.max_new_tokens
    for first in range(0, len(prompts), batch_size):
        decoder = read_prompts(setup, prompts[first : first + batch_size], [tree])
        cache = StaticCache(decoder)
        step, texts, steps = (
            StaticStep(setup, tree, cache),
            [row.tokens[:] for row in decoder.live],
            [0] * len(decoder.live),
        )
        step.capture(graph_pool(setup))
        while min(map(len, texts)) < most:
            for i, (accepted, *tokens) in enumerate(step.replay().tolist()):
                if len(texts[i]) < most:
                    texts[i] += [*tokens[:accepted], tokens[-1]]
                    steps[i] += 1
                if len(texts[i]) >= most:  # it goes on beside the others, from where there is room
                    cache.starts[i] = cache.first[0][i]
        found += [(text[:most], n) for text, n in zip(texts, steps, strict=True)]
    return found


class StaticVisits(Visitor):
    """Visits to replayed steps, each from the same texts; ``difference`` is the largest of their logits.

    Raises RuntimeError where one is not what the decoder's own pass computes.
    """

    def __init__(self, setup: Setup, prompts: Sequence[Sequence[int]], trees: Sequence[Tree]) -> None:
        super().__init__(trees, len(prompts))
        decoder = read_prompts(setup, prompts, trees)
        self.device, self.cache, self.difference = setup.target.device, StaticCache(decoder), 0.0
        self.steps, pool = [StaticStep(setup, tree, self.cache) for tree in (*trees, PLAIN)], graph_pool(setup)
        tolerance = TOLERANCE[str(setup.target.dtype).removeprefix("torch.")]
        for step in self.steps:
            step.capture(pool)
            self.difference = max(self.difference, step.difference(decoder))
            if not self.difference <= tolerance:
                raise RuntimeError(
                    f"Logits of a replayed step must be within {tolerance} standard deviations of those of treeopt's own pass, "
                    f"but with {step.plan.tree.name} they are {self.difference:.3g} off: nothing was timed."
                )
            del step.logits, step.tokens  # whose memory the next graph may take

    def warm_up(self) -> tuple[list[float], float]:
        began = time.perf_counter()
        found = [min(self.visit(place, (1, 2), 0).step_ms) / 1e3 for place in range(len(self.steps))]
        return found, time.perf_counter() - began

    @torch.inference_mode()
    def visit(self, place: int, steps: tuple[int, int], number: int) -> Visit:
        (untimed, timed), began, step_ms = steps, time.perf_counter(), []
        for _ in range(untimed + timed):
            self.cache.reset()
            synchronize(self.device)
            started = time.perf_counter()
            self.steps[place].replay().tolist()  # which waits for the device, and is what a server would read
            step_ms.append(round(1e3 * (time.perf_counter() - started), 5))
        return Visit(place=place, seconds=time.perf_counter() - began, step_ms=step_ms[untimed:])
