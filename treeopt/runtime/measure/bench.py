"""Benchmark: decode whole answers with every contender, interleaved, and compare texts and times.

A block of prompts is decoded by all contenders one after the other, in random order; a block in one
round is a block of the benchmark's journal.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from treeopt.errors import InvalidInput
from treeopt.files.journal import Journal
from treeopt.growth.dynamic import lengths_with
from treeopt.growth.replay import length_counts, replay_lengths, tokens_per_step
from treeopt.records.benchmark import Benchmark
from treeopt.records.contender import Answer, Block, Contender, Drafted, Predicted
from treeopt.records.stopping import LOOKS, loses_by_far
from treeopt.records.trace import POOLS, RankTrace
from treeopt.runtime.decode import Decoder, synchronize
from treeopt.runtime.engines import Engine
from treeopt.runtime.measure.ranks import Prompt
from treeopt.runtime.measure.steps import timed_step
from treeopt.runtime.stop import SequenceEnd, StopRule
from treeopt.runtime.target import Target
from treeopt.trees.dynamic import AdaptiveTree, AnyTree, DynamicTree
from treeopt.trees.tree import IntArray, Tree

Run = dict[str, Any]  # what `decode_block` and `ask_engine` return
Visit = dict[str, Any]  # {"round", "prompts", "runs": {contender: Run}}, as JSON
Prompts = Sequence[tuple[int, Sequence[int]]]  # (place, tokens)


@dataclass(frozen=True)
class Entrant:
    """What is decoded, and what the calibration predicts for it.

    tree               : None is plain decoding
    predicted          : tokens per step by several estimates
    predicted_accepted : share of the steps that emit 0, 1, ... guesses
    is_replayable      : whether its guesses are all of the tree's nodes, and those that the reference ranks
    is_own             : whether an engine decodes it by its own settings, which may guess less than the tree
    """

    tree: AnyTree | None
    predicted: Predicted = field(default_factory=Predicted)
    predicted_accepted: list[float] = field(default_factory=list)
    is_replayable: bool = True
    is_own: bool = False


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
    decode: Callable[[str, Prompts], Run],
    prompts: Sequence[Prompt],
    contenders: Collection[str],
    *,
    batch_size: int,
    rounds: int,
    journal: Journal | None = None,
    progress: Callable[[int], None] = lambda answers: None,
) -> list[Visit]:
    """Decode all prompts with every contender in every round, but for those that stop since they lose by far (`slower`).

    decode  : decodes some prompts with a contender, by its name
    journal : visits of an earlier run of the same benchmark, and where every new one goes

    ``progress`` is called with the number of answers of every visit.
    """
    visits = journal.documents() if journal else []
    began = len(visits)
    blocks = [[(i, prompts[i].tokens) for i in block] for block in blocks_of(prompts, batch_size)]
    mixed = np.random.default_rng(0).permutation(len(blocks)).tolist()  # the first of them are of all groups
    order = list(itertools.product(range(rounds), mixed))
    looks = {len(order) * look // (LOOKS + 1) for look in range(1, LOOKS + 1)}
    for visit in visits:
        progress(len(visit["prompts"]) * len(contenders))
    going = list(contenders)
    for n, (round_, b) in enumerate(order):
        if n in looks:
            lost = slower(visits[:n])
            going = [name for name in going if name not in lost]
        if n < len(visits):
            continue
        if n == began:  # warm up
            for name in going:
                decode(name, blocks[b])
        runs = {}
        for name in np.random.default_rng([0, round_, b]).permutation(going).tolist():
            runs[name] = decode(name, blocks[b])
        progress(len(blocks[b]) * len(contenders))
        visits.append({"round": round_, "prompts": [i for i, _ in blocks[b]], "runs": runs})
        if journal:
            journal.append(visits[-1])
    return visits


def slower(visits: Sequence[Visit]) -> set[str]:
    """Contenders that are shown to be slower than the chosen tree by what was decoded; never plain decoding."""
    totals: dict[str, dict[tuple[int, ...], list[float]]] = {}
    for visit in visits:
        for name, run in visit["runs"].items():
            row = totals.setdefault(name, {}).setdefault(tuple(visit["prompts"]), [0.0, 0.0])
            row[0] += run["tokens"]
            row[1] += run["decode_s"]
    ours = totals.get("chosen", {})
    rivals = {
        name: rows for name, rows in totals.items() if name not in ("plain", "chosen") and rows.keys() == ours.keys()
    }
    return {name for name, rows in rivals.items() if loses_by_far([[*rows[block], *ours[block]] for block in ours])}


def decode_block(decoder: Decoder, tree: AnyTree | None, prompts: Prompts) -> Run:
    """Decode some prompts to their ends; times and counts cover the steps with all rows live."""
    decoder.start(prompts)
    began, worked = time.perf_counter(), time.process_time()
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
        "seconds": time.perf_counter() - began,
        "processor_s": time.process_time() - worked,
        "passes": decoder.target.passes - passes,
        "rows": [{"id": row.id, "tokens": row.tokens, "accepted": row.accepted} for row in rows],
    }


def ask_engine(engine: Engine, tree: AnyTree | None, stop: StopRule, prompts: Prompts, batch_size: int = 1) -> Run:
    """The same by another runtime; passes that read a prompt are no steps."""
    began, worked = time.perf_counter(), time.process_time()
    rows: list[dict[str, Any]] = [{"id": i, "tokens": [], "prefilled": 0, "accepted": []} for i, _ in prompts]
    ends = [SequenceEnd(stop) for _ in prompts]
    ended: set[int] = set()
    timed_s, timed_tokens, timed_steps, prefill_s, passes = 0.0, 0, 0, 0.0, 0
    for one in engine.answer([prompt for _, prompt in prompts], tree, batch_size):
        live = [place for place, tokens in one.emitted.items() if tokens and place not in ended]
        counts = []
        for place in live:
            emitted, row = one.emitted[place], rows[place]
            kept = next((n for n, token in enumerate(emitted, 1) if ends[place].push(token) is not None), None)
            if kept is not None:
                ended.add(place)
            counts.append(len(emitted) if kept is None else kept)
            if row["tokens"]:
                row["accepted"].append(counts[-1] - 1)
            else:
                row["prefilled"] = counts[-1]
            row["tokens"] += emitted[: counts[-1]]
        passes += bool(live)
        prefill_s += one.seconds * one.reads_prompt
        if len(live) == batch_size and not one.reads_prompt:
            timed_s += one.seconds
            timed_tokens += sum(counts)
            timed_steps += len(live)
    return {
        "tokens": timed_tokens,
        "steps": timed_steps,
        "decode_s": timed_s,
        "prefill_s": prefill_s,
        "seconds": time.perf_counter() - began,
        "processor_s": time.process_time() - worked,
        "passes": passes,
        "rows": rows,
    }


@dataclass(frozen=True)
class Contest:
    """The prompts that all contenders decode, and the plain answers that theirs are compared with.

    reference    : the trace of these very prompts: plain answers, to compare with and to replay
    has_one_text : whether the text is the same with every tree, so that the reference can be replayed
    """

    target: Target
    prompts: Sequence[Prompt]
    reference: RankTrace
    batch_size: int
    has_one_text: bool = True

    def __post_init__(self) -> None:
        if self.reference.tokens is None or self.reference.num_sequences != len(self.prompts):
            raise InvalidInput("The benchmark's reference must be the trace of its own prompts, with tokens.")

    def result(self, visits: Sequence[Visit], entrants: Mapping[str, Entrant]) -> Benchmark:
        """The benchmark of all visits."""
        return Benchmark(
            contenders=tuple(self._contender(name, entrant, visits) for name, entrant in entrants.items()),
            dtype=str(self.target.dtype).removeprefix("torch."),
            rounds=1 + max(visit["round"] for visit in visits),
        )

    def _contender(self, name: str, entrant: Entrant, visits: Sequence[Visit]) -> Contender:
        tree, whole = entrant.tree or Tree.chain(0), len(visits)
        visits = [visit for visit in visits if name in visit["runs"]]
        runs = [visit["runs"][name] for visit in visits]
        first = [run for visit, run in zip(visits, runs, strict=True) if visit["round"] == 0]
        blocks = [self._block(visit, run) for visit, run in zip(visits, runs, strict=True)]
        rows = sorted((row for run in first for row in run["rows"]), key=lambda row: row["id"])
        prefilled = [row.get("prefilled", 1) for row in rows]
        if (
            len(tree) > 1 and not entrant.is_replayable
        ):  # guesses that are split into tokens again may be more than were told
            all_rows = [row for run in runs for row in run["rows"]]
            most = max(n for row in all_rows for n in (row.get("prefilled", 1) - 1, *row["accepted"]))
            tree = tree if most <= tree.depth else Tree.chain(most)
        answered = self.reference.select(np.array([row["id"] for row in rows]))
        recorded = behind(answered, np.array(prefilled) - 1)
        can_replay = self.has_one_text and entrant.is_replayable
        can_replay &= not isinstance(tree, AdaptiveTree) or self.batch_size == 1
        lengths = lengths_with(recorded, tree) if can_replay else None
        replayed = None if lengths is None else replay_lengths(recorded, lengths)
        sequences = [self._sequence(row, int(replayed.steps[i]) if replayed else None) for i, row in enumerate(rows)]
        steps = sum(s.steps for s in sequences)
        emitted = sum(s.emitted for s in sequences)
        decode_s = sum(block.decode_s for block in blocks)
        return Contender(
            name=name,
            batch_size=self.batch_size,
            size=len(tree),
            medusa_choices=tree.choices if isinstance(tree, Tree) else [],
            dynamic=drafted(tree),
            steps=steps,
            passes=sum(run["passes"] for run in first),
            tokens=emitted,
            tokens_per_step=tokens_per_step(emitted, steps),
            tokens_per_s=sum(block.tokens for block in blocks) / decode_s if decode_s else None,
            identical=sum(s.identical for s in sequences),
            compared=len(sequences),
            decode_s=[sum(block.decode_s for block in same) for same in by_round(blocks)],
            prefill_s=sum(run["prefill_s"] for run in runs),
            predicted=entrant.predicted,
            predicted_tokens_per_step=entrant.predicted.replayed,
            replayed_steps=int(replayed.steps.sum()) if replayed else None,
            replayed_tokens_per_step=replayed.tokens_per_step if replayed else None,
            accepted=np.bincount([a for row in rows for a in row["accepted"]]).tolist(),
            replayed_accepted=[] if lengths is None else length_counts(recorded, lengths, tree.depth).tolist(),
            predicted_accepted=entrant.predicted_accepted,
            sequences=sequences,
            blocks=blocks,
            stopped_after=len(visits) if len(visits) < whole else None,
        )

    def _block(self, visit: Visit, run: dict[str, Any]) -> Block:
        return Block(
            round=visit["round"],
            prompts=visit["prompts"],
            tokens=run["tokens"],
            steps=run["steps"],
            decode_s=run["decode_s"],
            group=self.prompts[visit["prompts"][0]].group,
        )

    def _sequence(self, row: dict[str, Any], replayed_steps: int | None) -> Answer:
        """One answer beside the plain one to the same prompt."""
        prompt, ours, theirs = self.prompts[row["id"]], row["tokens"], self.reference.texts[row["id"]]
        at = gap = None
        if ours != theirs:
            pairs = itertools.zip_longest(ours, theirs)
            at = next(i for i, (mine, other) in enumerate(pairs) if mine != other)
            gap = logit_gap(self.target, prompt.tokens, ours, theirs, at)
        return Answer(
            id=prompt.sha256,
            steps=len(row["accepted"]),
            tokens=len(ours),
            prefilled=row.get("prefilled", 1),
            identical=at is None,
            replayed_steps=replayed_steps,
            group=prompt.group,
            first_difference=at,
            logit_gap=gap,
        )


def drafted(tree: AnyTree) -> Drafted | None:
    """How a tree that is not fixed is drafted, for the record."""
    if isinstance(tree, Tree):
        return None
    if isinstance(tree, DynamicTree):
        return Drafted(levels=tree.levels, topk=tree.topk)
    return Drafted(levels=tree.most.levels, topk=tree.most.topk, rows=list(tree.choices))


def behind(trace: RankTrace, states: IntArray) -> RankTrace:
    """The ranks of a trace without the first so many states of each sequence; its last state stays."""
    begins = np.minimum(trace.starts[:-1] + states, trace.starts[1:] - 1)
    kept = np.arange(len(trace.ranks)) >= np.repeat(begins, trace.lengths)
    starts = np.concatenate([[0], np.cumsum(trace.starts[1:] - begins)])
    pools = {name: array[kept] for name in POOLS if (array := getattr(trace, name)) is not None}
    return RankTrace(trace.ranks[kept], starts, meta=trace.meta, **pools)


def by_round(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks of each round; blocks of a round stand together."""
    return [list(same) for _, same in itertools.groupby(blocks, key=lambda block: block.round)]


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
