"""Real decoding: contenders decode the same prompts, interleaved, block by block through journals, and are told as a benchmark."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treeopt.files.journal import Journal
from treeopt.growth.replay import accepted_lengths, length_counts, record_for, replay_lengths, tells
from treeopt.latency.rounds import processor_share
from treeopt.pipeline.calibrate import collect
from treeopt.pipeline.entrants import Entrant
from treeopt.pipeline.logged import copied_steps, prompts_of
from treeopt.records.benchmark import LOOKS, Benchmark
from treeopt.records.contender import Answer, Block, Contender, Predicted, Quality
from treeopt.records.origins import Provenance, Runtime
from treeopt.records.pools import Counts
from treeopt.records.requestlog import Request, RequestLog
from treeopt.records.rules import SAME_TEXT
from treeopt.records.trace import OF_GUESSES, Answers, RankTrace
from treeopt.report.terminal import note, progress
from treeopt.trees.draft import Draft
from treeopt.trees.tree import IntArray, Tree

if TYPE_CHECKING:
    from treeopt.runtime.measure.bench import BlockVisit
    from treeopt.runtime.measure.ranks import Prompt
    from treeopt.runtime.prompts.sets import Conversation
    from treeopt.runtime.session import Session
    from treeopt.runtime.stepper import AnswerRun, BlockRun, Stepper
    from treeopt.runtime.target import Target

ANSWERED_AT_ONCE = 16  # prompts, where plain answers are wanted alone


@dataclass(frozen=True)
class Decoding:
    """Who decodes, and how.

    source   : what the entrants were predicted from
    entrants : name to its draft, and what is predicted of it
    folder   : of the journals
    engine   : another runtime that decodes; None for treeopt's own decoder
    """

    session: Session
    source: Answers
    entrants: Mapping[str, Entrant]
    batch_size: int
    rounds: int
    max_new_tokens: int
    folder: Path
    engine: Stepper | None = None

    @property
    def rule(self) -> Mapping[str, Any]:
        return self.session.acceptance.record

    @property
    def origin(self) -> Provenance:
        known, engine = self.session.provenance(seed=0), self.engine
        if engine is None:
            return known
        about, launches = engine.about or None, engine.is_launched or None
        runtime: Runtime = {"name": engine.name, "version": engine.version, "about": about, "launches": launches}
        return replace(known, engine=runtime)

    @property
    def counts(self) -> Counts:
        """Ranks and pools to record of the plain answers, so that every contender can be replayed that is to be."""
        drafts = [entrant.draft for entrant in self.entrants.values() if entrant.is_replayable]
        return record_for(drafts, self.source.meta.get("top_k") or 1)


def decode(decoding: Decoding, conversations: Sequence[Conversation] | RequestLog) -> Benchmark:
    """Have all contenders answer some conversations, or requests: a benchmark."""
    from treeopt.runtime.memory import with_less_memory

    session = decoding.session
    if isinstance(conversations, RequestLog):
        prompts, reference = prompts_of(conversations), None
    else:
        prompts, reference = _asked(decoding, conversations)
    visits, rows = with_less_memory(lambda rows: _visits(decoding, prompts, rows), decoding.batch_size, note)
    has_one_text, quality = decoding.rule["rule"] in SAME_TEXT, None
    if not has_one_text and reference:
        quality, _ = with_less_memory(lambda n: _quality(decoding, visits, prompts, reference, n), rows, note)
    compared = reference if reference and not decoding.engine else _engine_answers(decoding, prompts, visits)
    skipped: Any = reference.meta.get("skipped") if reference else [vars(one) for one in session.prompts.skipped]
    decoded = [(run.seconds, run.processor_s) for visit in visits for run in visit.runs.values()]
    contest = Contest(session.target, prompts, compared, rows, has_one_text)
    return Benchmark(
        contenders=tuple(contest.contender(name, entrant, visits) for name, entrant in decoding.entrants.items()),
        dtype=str(session.target.dtype).removeprefix("torch."),
        quality=quality,
        max_new_tokens=decoding.max_new_tokens,
        loop_share=None if isinstance(compared, RequestLog) else compared.loop_share(),
        skipped=skipped or None,
        provenance=decoding.origin,
        processor_share=processor_share(decoded) if session.target.device.type == "cpu" else None,
    )


def _asked(decoding: Decoding, conversations: Sequence[Conversation]) -> tuple[list[Prompt], RankTrace | None]:
    """The prompts of all turns, and treeopt's own plain answers: an engine answers by itself, but later turns follow them."""
    from treeopt.runtime.measure.ranks import Prompt, turn_prompts

    answered = [c for c in conversations if decoding.engine is None or c.num_turns > 1]
    reference = _plain_answers(decoding, answered) if answered else None
    single = [c for c in conversations if decoding.engine and c.num_turns == 1]
    prompts = [Prompt(tuple(c.first), c.sha256, c.group, 0) for c in single]
    prompts += turn_prompts(decoding.session.prompts, reference) if reference else []
    places = {c.sha256: i for i, c in enumerate(conversations)}
    return sorted((replace(one, cluster=places[one.sha256]) for one in prompts), key=lambda one: one.cluster), reference


def _plain_answers(decoding: Decoding, conversations: Sequence[Conversation]) -> RankTrace:
    from treeopt.runtime.acceptance.rules import Greedy

    session = replace(decoding.session, given=False)
    if decoding.rule["rule"] == "typical":
        session = replace(session, acceptance=Greedy())
    return collect(
        session,
        conversations,
        decoding.folder / "answers",
        max_new_tokens=decoding.max_new_tokens,
        batch_size=ANSWERED_AT_ONCE,
        counts=Counts(1) if decoding.engine else decoding.counts,  # of an engine's answers ranks are counted afterwards
        title="Plain answers of the bench prompts",
    )


def _engine_answers(
    decoding: Decoding, prompts: Sequence[Prompt], visits: Sequence[BlockVisit]
) -> RankTrace | RequestLog:
    """The plain answers of another runtime, with the drafter's ranks; those to requests of a log as a log."""
    from treeopt.runtime.measure.ranks import rank_answers

    rows = [row for visit in visits if visit.round == 0 for row in visit.runs["plain"].rows]
    answers = [row.tokens for row in sorted(rows, key=lambda row: row.id)]
    setup, tokens = decoding.session.setup(decoding.max_new_tokens), [prompt.tokens for prompt in prompts]
    if isinstance(decoding.source, RequestLog):
        room, context = setup.stop.room, setup.target.context
        return RequestLog.of(Request([*p], a, room(p, context)) for p, a in zip(tokens, answers, strict=True))
    return rank_answers(setup, tokens, answers, batch_size=ANSWERED_AT_ONCE, counts=decoding.counts)


def _visits(decoding: Decoding, prompts: Sequence[Prompt], rows: int) -> list[BlockVisit]:
    """Every block of prompts decoded by every contender in every round, ``rows`` at once, through a journal."""
    from treeopt.runtime.engines import open_stepper
    from treeopt.runtime.measure.bench import decode_contenders
    from treeopt.runtime.stepper import decode_block

    session, entrants = decoding.session, decoding.entrants
    setup = session.setup(decoding.max_new_tokens)
    stepper = decoding.engine or open_stepper(None, setup)
    stepper.prepare([prompt.tokens for prompt in prompts], [entrant.draft for entrant in entrants.values()], rows)
    key = {
        **decoding.origin.record,
        "time": None,
        "command": None,
        "rounds": decoding.rounds,
        "trees": {name: entrant.draft.record for name, entrant in entrants.items()},
        "prompts": [prompt.sha256 for prompt in prompts],
        "max_new_tokens": decoding.max_new_tokens,
        "batch_size": rows,
        "looks": LOOKS,
    }
    journal = Journal(decoding.folder / f"batch-size-{rows}", key)
    drafts = {name: entrant.draft for name, entrant in entrants.items()}

    def decode_with(name: str, asked: Sequence[tuple[int, Sequence[int]]]) -> BlockRun:
        own = (entrants[name].as_it_comes and stepper.twin) or stepper
        return decode_block(own, drafts[name], asked, setup.stop, rows)

    with progress(f"Decoding with {len(drafts)} contenders", len(prompts) * len(drafts) * decoding.rounds) as advance:
        return decode_contenders(
            decode_with,
            prompts,
            drafts,
            batch_size=rows,
            rounds=decoding.rounds,
            journal=journal,
            progress=advance,
            renew=stepper.renew,
        )


@dataclass(frozen=True)
class Contest:
    """The prompts that all contenders decoded, and the plain answers that theirs are compared with.

    reference    : the trace, or log, of these very prompts: plain answers, to compare with and to replay
    has_one_text : whether the text is the same with every tree, so that the reference can be replayed
    """

    target: Target
    prompts: Sequence[Prompt]
    reference: RankTrace | RequestLog
    batch_size: int
    has_one_text: bool = True

    def contender(self, name: str, entrant: Entrant, all_visits: Sequence[BlockVisit]) -> Contender:
        visits = [(visit, visit.runs[name]) for visit in all_visits if name in visit.runs]
        first = [run for visit, run in visits if visit.round == 0]
        rows = sorted((row for run in first for row in run.rows), key=lambda row: row.id)
        draft = _widened(entrant, [row for _, run in visits for row in run.rows])
        steps, emitted, accepted = self._replayed(draft, rows, self.has_one_text and entrant.is_replayable)
        return Contender(
            name=name,
            batch_size=self.batch_size,
            draft=draft,
            sequences=[self._answer(row, taken, n) for row, taken, n in zip(rows, steps, emitted, strict=True)],
            blocks=[
                Block(
                    round=visit.round,
                    prompts=visit.prompts,
                    tokens=run.tokens,
                    steps=run.steps,
                    decode_s=run.decode_s,
                    group=self.prompts[visit.prompts[0]].group,
                )
                for visit, run in visits
            ],
            passes=sum(run.passes for run in first),
            prefill_s=sum(run.prefill_s for _, run in visits),
            predicted=Predicted.of(entrant.predicted),
            accepted=np.bincount([n for row in rows for n in row.accepted]).tolist(),
            replayed_accepted=accepted,
            predicted_accepted=entrant.predicted_accepted,
            stopped=len(visits) < len(all_visits),
        )

    def _replayed(
        self, draft: Draft, rows: Sequence[AnswerRun], is_replayable: bool
    ) -> tuple[list[int | None], list[int], list[int]]:
        """Steps of each answer by replay, None where there is none, and the tokens that they emit; all steps by accepted guesses."""
        places = np.array([row.id for row in rows])
        if isinstance(self.reference, RequestLog):
            return copied_steps(self.reference.select(places), draft, is_replayable)
        prefilled = np.array([row.prefilled for row in rows])
        recorded = behind(self.reference.select(places), prefilled - 1)
        accepted: list[int] = []
        steps: list[int | None] = [None] * len(rows)
        if is_replayable and tells(recorded, draft):
            lengths = accepted_lengths(recorded, draft)
            steps = replay_lengths(recorded, lengths).tolist()
            accepted = length_counts(recorded, lengths, draft.depth).tolist()
        return steps, (recorded.lengths - 1).tolist(), accepted

    def _answer(self, row: AnswerRun, replayed_steps: int | None, replayed_tokens: int) -> Answer:
        """One answer beside the plain one to the same prompt, which replay emits with so many steps."""
        prompt, theirs = self.prompts[row.id], self.reference.texts[row.id]
        pairs = enumerate(itertools.zip_longest(row.tokens, theirs))
        at = next((i for i, (mine, other) in pairs if mine != other), None)
        return Answer(
            id=prompt.sha256,
            steps=len(row.accepted),
            tokens=len(row.tokens),
            prefilled=row.prefilled,
            identical=at is None,
            replayed_steps=replayed_steps,
            replayed_tokens=None if at is None or replayed_steps is None else replayed_tokens,
            group=prompt.group,
            first_difference=at,
            logit_gap=None if at is None else self._gap(prompt.tokens, tuple(row.tokens[: at + 1]), tuple(theirs), at),
        )

    @cached_property
    def _gap(self) -> Callable[..., float | None]:
        """`logit_gap`, once where contenders leave the plain answer in the same way: a long prompt takes seconds."""
        from treeopt.runtime.measure.bench import logit_gap

        return lru_cache(maxsize=None)(partial(logit_gap, self.target))


def _widened(entrant: Entrant, rows: Sequence[AnswerRun]) -> Draft:
    """The entrant's draft, or the longest chain that was accepted: guesses that are split again may be more than were told."""
    draft = entrant.draft
    if len(draft) == 1 or entrant.is_replayable:
        return draft
    most = max(n for row in rows for n in (row.prefilled - 1, *row.accepted))
    return draft if most <= draft.depth else Tree.chain(most)


def behind(trace: RankTrace, states: IntArray) -> RankTrace:
    """The ranks of a trace without the first so many states of each sequence; its last state stays."""
    begins = np.minimum(trace.starts[:-1] + states, trace.starts[1:] - 1)
    kept = np.arange(len(trace.ranks)) >= np.repeat(begins, trace.lengths)
    starts = np.concatenate([[0], np.cumsum(trace.starts[1:] - begins)])
    known: dict[str, Any] = {name: part[kept] for name in OF_GUESSES if (part := getattr(trace, name)) is not None}
    return RankTrace(starts=starts, **known, meta=trace.meta)


def _quality(
    decoding: Decoding, visits: Sequence[BlockVisit], prompts: Sequence[Prompt], reference: RankTrace, rows: int
) -> dict[str, Quality]:
    """How likely every contender's texts are to the target, and how far they are from the plain ones."""
    from treeopt.runtime.measure.bench import measure_quality

    found = {}
    with progress("Judging the texts", None):
        for name in decoding.entrants:
            runs = [visit.runs[name] for visit in visits if visit.round == 0 and name in visit.runs]
            texts = dict(sorted((row.id, row.tokens) for run in runs for row in run.rows))
            found[name] = measure_quality(
                decoding.session.target,
                [prompts[i].tokens for i in texts],
                list(texts.values()),
                [reference.texts[i] for i in texts],
                conversations=[prompts[i].cluster for i in texts],
                batch_size=rows,
            )
    return found


def usual_prompts(batch_size: int) -> int:
    """Held-out prompts that are decoded where nobody says how many."""
    return max(64, 10 * batch_size)


def evenly(conversations: Sequence[Conversation], wanted: int) -> tuple[Conversation, ...]:
    """So many of the conversations, or all: of every group its share, to one, evenly spaced over the group's own order."""
    ordered, wanted = sorted(conversations, key=lambda one: one.group), min(wanted, len(conversations))
    return tuple(ordered[i * len(ordered) // wanted] for i in range(wanted))
