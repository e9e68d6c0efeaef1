"""Measure decoding: step latencies for a profile, whole answers for a benchmark.

Both run the same `Decoder` as calibration, on real prompts, and time whole steps (propose, verify,
accept, commit) with the device synchronised around each. What is compared is interleaved in random
order, so that a slow minute of the machine falls on all alike.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch

from treeopt.benchmark import Benchmark, Block, Contender
from treeopt.errors import InvalidInput
from treeopt.latency import StepTiming
from treeopt.replay import Replay, replay, tokens_per_step
from treeopt.runtime.cache import TreeCache
from treeopt.runtime.decode import Decoder, Row, StopRule, capacity_for
from treeopt.runtime.drafters.medusa import MedusaHeads
from treeopt.runtime.prompts import Prompt
from treeopt.runtime.target import Target
from treeopt.trace import RankTrace
from treeopt.tree import Tree

STEPS_PER_VISIT = 3  # timed steps each time a point has its turn, after one that is not
PLAIN_VISITS = 3  # turns of the plain step per round: every speedup is against it
FEWEST_ROUNDS = 3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_step(decoder: Decoder, tree: Tree | None) -> tuple[float, Any]:
    """Seconds of one decoding step, and the guesses it accepted."""
    synchronize(decoder.target.device)
    started = time.perf_counter()
    accepted = decoder.step(tree)
    synchronize(decoder.target.device)
    return time.perf_counter() - started, accepted


@dataclass
class _Samples:
    step_ms: list[float] = field(default_factory=list)
    round: list[int] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)


def measure_steps(
    target: Target,
    heads: MedusaHeads,
    prompts: Sequence[Prompt],
    trees: Sequence[Tree],
    *,
    batch_size: int,
    stop: StopRule,
    time_limit_s: float,
    most_rounds: int = 30,
    seed: int = 0,
    progress: Callable[[float], None] = lambda seconds: None,
) -> tuple[list[StepTiming], StepTiming]:
    """Time steps with each tree, and plain ones, at one batch size: (trees' timings, plain timing).

    Every round visits all trees in a new random order; rounds go on until the time limit, but at
    least three. Rows that end are refilled between steps, so all are live in every timed step. The
    context is the median length of the rows over all steps. ``progress`` is called with the
    seconds of every round.

    Raises InvalidInput where no answer is longer than its first token.
    """
    rng = np.random.default_rng(seed)
    most_nodes = max(map(len, trees), default=1)
    tokens = [prompt.tokens for prompt in prompts]
    decoder = Decoder(target, heads, batch_size=batch_size, capacity=capacity_for(tokens, stop, target),
                      stop=stop, most_nodes=most_nodes)  # fmt: skip
    decoder.start([])
    supply = enumerate(itertools.cycle(tokens))
    samples = {i: _Samples() for i in range(-1, len(trees))}
    lengths: list[int] = []
    started = time.perf_counter()
    for round_ in range(most_rounds):
        round_started = time.perf_counter()
        if round_ >= FEWEST_ROUNDS and round_started - started > time_limit_s:
            break
        for i in rng.permutation([*range(len(trees)), *[-1] * PLAIN_VISITS]).tolist():
            tree = trees[i] if i >= 0 else None
            for n in range(1 + STEPS_PER_VISIT):
                refill_all(decoder, supply, tries=len(tokens))
                decoder.finished.clear()
                lengths.append(sum(decoder.cache.lengths) // batch_size)
                seconds, accepted = timed_step(decoder, tree)
                if n:
                    samples[i].step_ms.append(1e3 * seconds)
                    samples[i].round.append(round_)
                    samples[i].accepted.append(float(accepted.mean()))
        progress(time.perf_counter() - round_started)
    context = int(median(lengths))

    def timing(i: int, size: int, depth: int) -> StepTiming:
        s = samples[i]
        return StepTiming(batch_size, context, size, depth, tuple(round(ms, 5) for ms in s.step_ms),
                          round(sum(s.accepted) / len(s.accepted), 4), tuple(s.round))  # fmt: skip

    return [timing(i, len(t), t.depth) for i, t in enumerate(trees)], timing(-1, 1, 0)


def refill_all(decoder: Decoder, supply: Iterator[tuple[int, Sequence[int]]], tries: int) -> None:
    """Make all rows live; a prompt whose answer is one token leaves its row free, so try on."""
    for _ in range(tries + 1):
        if len(decoder.live) == decoder.batch_size:
            return
        decoder.waiting.extend(itertools.islice(supply, decoder.batch_size - len(decoder.live)))
        decoder.refill()
    raise InvalidInput(
        f"Timing needs answers of more than one token, but {tries} prompts in a row gave none: they may "
        "be as long as the context, or end at once."
    )


def run_benchmark(
    target: Target,
    heads: MedusaHeads,
    prompts: Sequence[Prompt],
    trees: Mapping[str, Tree | None],
    reference: RankTrace,
    *,
    batch_size: int,
    stop: StopRule,
    rounds: int,
    predicted: Mapping[str, float | None],
    info: dict[str, Any] | None = None,
    seed: int = 0,
    progress: Callable[[int], None] = lambda prompts: None,
) -> Benchmark:
    """Decode all prompts with every contender in every round, blocks in random order of contenders.

    trees      name to tree; None is plain decoding
    reference  the trace of these very prompts: plain decoding's tokens, to compare with and to replay
    predicted  name to the tokens per step expected before this run
    ``progress`` is called with the number of prompts of every decoded block.
    """
    if reference.tokens is None or reference.num_sequences != len(prompts):
        raise InvalidInput("The benchmark's reference must be the trace of its own prompts, with tokens.")
    rng = np.random.default_rng(seed)
    tokens = [prompt.tokens for prompt in prompts]
    decoder = Decoder(target, heads, batch_size=batch_size, capacity=capacity_for(tokens, stop, target),
                      stop=stop, most_nodes=max(len(t) if t else 1 for t in trees.values()))  # fmt: skip
    # Only steps with all rows live are timed, so a block is long enough to refill them.
    block_prompts = 1 if batch_size == 1 else 2 * batch_size
    starts = range(0, len(prompts), block_prompts)
    blocks = [range(i, min(i + block_prompts, len(prompts))) for i in starts]
    runs = {name: _Run() for name in trees}
    for tree in trees.values():  # warm up
        _decode_block(decoder, tree, blocks[0], tokens, _Run(), round_=0)
    for round_ in range(rounds):
        for block in blocks:
            for name in rng.permutation(list(trees)).tolist():
                _decode_block(decoder, trees[name], block, tokens, runs[name], round_)
                progress(len(block))
    expected = np.split(reference.tokens, reference.starts[1:-1])
    return Benchmark(
        contenders=tuple(
            _contender(name, tree, runs[name], target, prompts, expected, batch_size,
                       replay(reference, tree or Tree.chain(0)), predicted.get(name))
            for name, tree in trees.items()
        ),
        dtype=str(target.dtype).removeprefix("torch."),
        rounds=rounds,
        info=info or {},
    )  # fmt: skip


@dataclass
class _Run:
    """What one contender has done so far; rows and passes of its first round only."""

    rows: list[Row] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    passes: int = 0
    prefill_s: float = 0.0


def _decode_block(
    decoder: Decoder, tree: Tree | None, block: range, tokens: Sequence[Sequence[int]], run: _Run, round_: int
) -> None:
    decoder.start((i, tokens[i]) for i in block)
    passes = decoder.target.passes
    timed_s, timed_tokens, timed_steps = 0.0, 0, 0
    while not decoder.is_done:
        synchronize(decoder.target.device)
        started = time.perf_counter()
        decoder.refill()
        synchronize(decoder.target.device)
        run.prefill_s += time.perf_counter() - started
        if decoder.live:
            live, emitted = len(decoder.live), decoder.emitted
            seconds, _ = timed_step(decoder, tree)
            if live == decoder.batch_size:
                timed_s += seconds
                timed_tokens += decoder.emitted - emitted
                timed_steps += live
    run.blocks.append(Block(round=round_, prompts=list(block), tokens=timed_tokens,
                            steps=timed_steps, decode_s=timed_s))  # fmt: skip
    if round_ == 0:
        run.rows += decoder.finished
        run.passes += decoder.target.passes - passes


def _contender(
    name: str,
    tree: Tree | None,
    run: _Run,
    target: Target,
    prompts: Sequence[Prompt],
    expected: list[Any],
    batch_size: int,
    replayed: Replay,
    predicted: float | None,
) -> Contender:
    rows = sorted(run.rows, key=lambda row: row.id)
    sequences = []
    for row in rows:
        answer = expected[row.id].tolist()
        same = row.tokens == answer
        record: dict[str, Any] = {"id": prompts[row.id].sha256, "steps": row.steps, "tokens": len(row.tokens),
                                  "replayed_steps": int(replayed.steps[row.id]), "identical": same}  # fmt: skip
        if not same:
            pairs = itertools.zip_longest(row.tokens, answer)
            at = next(i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
            record["first_difference"] = at
            record["logit_gap"] = logit_gap(target, prompts[row.id].tokens, row.tokens, answer, at)
        sequences.append(record)
    steps, emitted = sum(r.steps for r in rows), sum(len(r.tokens) - 1 for r in rows)
    decode_s = sum(block.decode_s for block in run.blocks)
    rounds = sorted({block.round for block in run.blocks})
    return Contender(
        name=name,
        batch_size=batch_size,
        size=len(tree) if tree else 1,
        medusa_choices=tree.choices if tree else [],
        steps=steps,
        passes=run.passes,
        tokens=emitted,
        tokens_per_step=tokens_per_step(emitted, steps),
        tokens_per_s=sum(b.tokens for b in run.blocks) / decode_s if decode_s else None,
        identical=sum(s["identical"] for s in sequences),
        compared=len(sequences),
        decode_s=[sum(b.decode_s for b in run.blocks if b.round == r) for r in rounds],
        prefill_s=run.prefill_s,
        predicted_tokens_per_step=predicted,
        replayed_steps=int(replayed.steps.sum()),
        replayed_tokens_per_step=replayed.tokens_per_step,
        sequences=sequences,
        blocks=run.blocks,
    )


@torch.inference_mode()
def logit_gap(
    target: Target, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int], at: int
) -> float | None:
    """How far apart the target's logits of the two answers' tokens are at their first difference.

    A tiny gap is a tie broken otherwise by rounding; None where one answer merely ended.
    """
    if at >= min(len(ours), len(theirs)):
        return None
    tokens = torch.tensor([[*prompt, *theirs[:at]]], device=target.device)
    cache = TreeCache(target.num_layers, 1, tokens.shape[1])
    cache.begin_prefill([0], [tokens.shape[1]], target.device)
    positions = torch.arange(tokens.shape[1], device=target.device)[None]
    logits = target.logits(target.hidden(tokens, positions, cache, None)[0, -1]).float()
    return float((logits[theirs[at]] - logits[ours[at]]).abs())
