"""Benchmark: decode whole answers with every contender, interleaved, and compare texts and times.

A block of prompts is decoded by all contenders one after the other, in random order; a block in one
round is a block of the benchmark's journal.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from treeopt.errors import InvalidInput
from treeopt.growth.replay import accepted_counts, replay, tokens_per_step
from treeopt.records.benchmark import Answer, Benchmark, Block, Contender
from treeopt.records.trace import RankTrace
from treeopt.runtime.acceptance.greedy import Acceptance
from treeopt.runtime.decode import Decoder, capacity_for, synchronize
from treeopt.runtime.drafters.protocol import Drafter
from treeopt.runtime.measure.ranks import Prompt
from treeopt.runtime.measure.steps import timed_step
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target
from treeopt.trees.tree import Tree

Visit = dict[str, Any]  # {"round", "prompts", "runs": {contender: what `decode_block` returns}}, as JSON


def blocks_of(prompts: Sequence[Prompt], batch_size: int) -> list[list[int]]:
    """Places of the prompts that are decoded together: of one group, whole conversations.

    Only steps with all rows live are timed, so a block is long enough to refill them.
    """
    wanted = 1 if batch_size == 1 else 2 * batch_size
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].group)
    blocks: list[list[int]] = []
    for (group, _), turns in itertools.groupby(order, key=lambda i: (prompts[i].group, prompts[i].cluster)):
        if blocks and len(blocks[-1]) < wanted and prompts[blocks[-1][0]].group == group:
            blocks[-1].extend(turns)
        else:
            blocks.append(list(turns))
    return blocks


def decode_contenders(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    trees: Mapping[str, Tree | None],
    *,
    batch_size: int,
    stop: StopRule,
    rounds: int,
    acceptance: Acceptance | None = None,
    finished: Sequence[Visit] = (),
    keep: Callable[[Visit], None] = lambda visit: None,
    seed: int = 0,
    progress: Callable[[int], None] = lambda answers: None,
) -> list[Visit]:
    """Decode all prompts with every contender in every round.

    trees      name to tree; None is plain decoding
    finished   visits of an earlier run of the same benchmark; ``keep`` takes every new one
    ``progress`` is called with the number of answers of every visit.
    """
    tokens = [prompt.tokens for prompt in prompts]
    decoder = Decoder(
        target,
        drafter,
        batch_size=batch_size,
        capacity=capacity_for(tokens, stop, target),
        stop=stop,
        most_nodes=max(len(t) if t else 1 for t in trees.values()),
        acceptance=acceptance,
    )
    visits = list(finished)
    blocks = blocks_of(prompts, batch_size)
    order = list(itertools.product(range(rounds), range(len(blocks))))
    for visit in visits:
        progress(len(visit["prompts"]) * len(trees))
    if len(visits) < len(order):  # warm up
        for tree in trees.values():
            decode_block(decoder, tree, [(i, tokens[i]) for i in blocks[0]])
    for round_, b in order[len(visits) :]:
        runs = {}
        for name in np.random.default_rng([seed, round_, b]).permutation(list(trees)).tolist():
            runs[name] = decode_block(decoder, trees[name], [(i, tokens[i]) for i in blocks[b]])
            progress(len(blocks[b]))
        visits.append({"round": round_, "prompts": blocks[b], "runs": runs})
        keep(visits[-1])
    return visits


def decode_block(decoder: Decoder, tree: Tree | None, prompts: Sequence[tuple[int, Sequence[int]]]) -> dict[str, Any]:
    """Decode some prompts to their ends; times and counts cover the steps with all rows live."""
    decoder.start(prompts)
    passes, prefill_s = decoder.target.passes, 0.0
    timed_s, timed_tokens, timed_steps = 0.0, 0, 0
    while not decoder.is_done:
        synchronize(decoder.target.device)
        started = time.perf_counter()
        decoder.refill()
        synchronize(decoder.target.device)
        prefill_s += time.perf_counter() - started
        if decoder.live:
            live, emitted = len(decoder.live), decoder.emitted
            seconds, _ = timed_step(decoder, tree)
            if live == decoder.batch_size:
                timed_s += seconds
                timed_tokens += decoder.emitted - emitted
                timed_steps += live
    rows = sorted(decoder.finished, key=lambda row: row.id)
    return {
        "tokens": timed_tokens,
        "steps": timed_steps,
        "decode_s": timed_s,
        "prefill_s": prefill_s,
        "passes": decoder.target.passes - passes,
        "rows": [{"id": row.id, "tokens": row.tokens, "accepted": row.accepted} for row in rows],
    }


def assemble(
    visits: Sequence[Visit],
    target: Target,
    prompts: Sequence[Prompt],
    trees: Mapping[str, Tree | None],
    reference: RankTrace,
    *,
    batch_size: int,
    predicted: Mapping[str, dict[str, Any]],
    predicted_accepted: Mapping[str, list[float]],
    info: dict[str, Any],
    has_one_text: bool = True,
) -> Benchmark:
    """The benchmark of all visits.

    reference           the trace of these very prompts: plain answers, to compare with and to replay
    predicted           name to the tokens per step expected before this run: product, joint, replayed, ...
    predicted_accepted  name to the share of steps expected to emit 0, 1, ... guesses
    has_one_text         whether the text is the same with every tree, so that the reference can be replayed
    """
    if reference.tokens is None or reference.num_sequences != len(prompts):
        raise InvalidInput("The benchmark's reference must be the trace of its own prompts, with tokens.")
    answers = [answer.tolist() for answer in np.split(reference.tokens, reference.starts[1:-1])]
    contenders = []
    for name, tree in trees.items():
        blocks, first = [], []
        for visit in visits:
            run = visit["runs"][name]
            blocks.append(
                Block(
                    round=visit["round"],
                    prompts=visit["prompts"],
                    tokens=run["tokens"],
                    steps=run["steps"],
                    decode_s=run["decode_s"],
                    group=prompts[visit["prompts"][0]].group,
                )
            )
            first += [run] if visit["round"] == 0 else []
        rows = sorted((row for run in first for row in run["rows"]), key=lambda row: row["id"])
        fixed = tree or Tree.chain(0)
        replayed = replay(reference, fixed) if has_one_text else None
        sequences = [
            _sequence(target, prompts[i], row, answers[i], int(replayed.steps[i]) if replayed else None)
            for i, row in enumerate(rows)
        ]
        steps = sum(s.steps for s in sequences)
        emitted = sum(s.tokens - 1 for s in sequences)
        decode_s = sum(block.decode_s for block in blocks)
        contenders.append(
            Contender(
                name=name,
                batch_size=batch_size,
                size=len(tree) if tree else 1,
                medusa_choices=tree.choices if tree else [],
                steps=steps,
                passes=sum(run["passes"] for run in first),
                tokens=emitted,
                tokens_per_step=tokens_per_step(emitted, steps),
                tokens_per_s=sum(b.tokens for b in blocks) / decode_s if decode_s else None,
                identical=sum(s.identical for s in sequences),
                compared=len(sequences),
                decode_s=[sum(b.decode_s for b in same) for _, same in by_round(blocks)],
                prefill_s=sum(visit["runs"][name]["prefill_s"] for visit in visits),
                predicted=predicted.get(name, {}),
                predicted_tokens_per_step=predicted.get(name, {}).get("replayed"),
                replayed_steps=int(replayed.steps.sum()) if replayed else None,
                replayed_tokens_per_step=replayed.tokens_per_step if replayed else None,
                accepted=np.bincount([a for row in rows for a in row["accepted"]]).tolist(),
                replayed_accepted=accepted_counts(reference, fixed.paths).tolist() if replayed else [],
                predicted_accepted=predicted_accepted.get(name, []),
                sequences=sequences,
                blocks=blocks,
            )
        )
    return Benchmark(
        contenders=tuple(contenders),
        dtype=str(target.dtype).removeprefix("torch."),
        rounds=1 + max(visit["round"] for visit in visits),
        info=info,
    )


def by_round(blocks: Sequence[Block]) -> Iterator[tuple[int, list[Block]]]:
    for round_, same in itertools.groupby(blocks, key=lambda block: block.round):
        yield round_, list(same)


def _sequence(
    target: Target, prompt: Prompt, row: dict[str, Any], answer: list[int], replayed_steps: int | None
) -> Answer:
    ours, at, gap = row["tokens"], None, None
    if ours != answer:
        pairs = itertools.zip_longest(ours, answer)
        at = next(i for i, (mine, theirs) in enumerate(pairs) if mine != theirs)
        gap = logit_gap(target, prompt.tokens, ours, answer, at)
    return Answer(
        id=prompt.sha256,
        steps=len(row["accepted"]),
        tokens=len(ours),
        identical=at is None,
        replayed_steps=replayed_steps,
        group=prompt.group,
        first_difference=at,
        logit_gap=gap,
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
    hidden = target.read([[*prompt, *theirs[:at]]])
    logits = target.scores(target.logits(hidden[0, -1])).float()
    return float((logits[theirs[at]] - logits[ours[at]]).abs())
