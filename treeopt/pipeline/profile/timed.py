"""Profile: latencies of decoding steps, treeopt's own or an engine's, added to what the run has measured before.

Trees at the edges of tiles and of every depth (`placement`) are timed; of an engine the chains and trees that it takes, at the
contexts of the trace. Every setting has a journal of its rounds; what is done next depends on those alone, so a killed run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from treeopt.errors import InvalidInput, Unsupported
from treeopt.files.journal import Journal
from treeopt.files.notes import note
from treeopt.growth.source import Source, source_of
from treeopt.latency.rounds import Rounds, TimingPlan, Visit, Visitor, processor_share, time_steps
from treeopt.pipeline.logged import lookups, some_requests
from treeopt.pipeline.profile.outcome import check_can_join, finish
from treeopt.pipeline.profile.placement import anew_trees, engine_trees, placed_sizes, timing_trees, tree_families
from treeopt.records.inputs import find_accuracies, inputs_of
from treeopt.records.options import ProfileOptions
from treeopt.records.origins import OURS, Origin, Runtime, check_same_origin
from treeopt.records.profile import LatencyProfile, ProfileSetting, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.terminal import progress
from treeopt.trees.draft import Draft
from treeopt.trees.tree import GrownTrees, Tree

if TYPE_CHECKING:
    from treeopt.runtime.acceptance.rules import Greedy
    from treeopt.runtime.session import Session
    from treeopt.runtime.stepper import Stepper

SPARE = 1.2  # times the limit that is kept without a word
RANDOM_CALIBRATION = "vicuna-7b-medusa1"  # whose accuracies random weights get where the run has none
RANDOM_CONTEXT = 512
TEXTS, APART = 512, 128  # texts that an engine is timed on; tokens between contexts that are timed for themselves
GOLDEN = 0.6180339887  # its multiples are spread evenly however many they are

Place = tuple[int, int | None]  # batch size; tokens that rows are held at, None: as long as the prompts make them


def profile(
    run: RunDirectory, session: Session, wanted: ProfileOptions, *, max_new_tokens: int = 128
) -> LatencyProfile:
    """Time decoding steps at each batch size and context, until every latency is known well enough.

    A batch size that does not fit into memory is halved, unless that one is measured anyway.
    """
    is_random, opened = session.weights != "checkpoint", None
    if is_random and not wanted.contexts:
        wanted = replace(wanted, contexts=(RANDOM_CONTEXT,))
    usual = RANDOM_CALIBRATION if is_random else None
    if wanted.engine is None:
        used, record = find_accuracies(run, wanted.calibration, otherwise=usual) or (None, None)
    else:  # is timed on the texts of the run's log, or of its trace
        opened = _opened(wanted.engine, session, max_new_tokens, wanted)
        used, record = (None, None) if run.requests.exists() else (run.trace, run.read_trace())
    source = source_of(record) if record else None
    if wanted.calibration is None and source is not None and used == run.trace:
        there, here = (
            Origin.of({"drafter": drafter}) for drafter in (source.meta.get("drafter"), session.drafter_record)
        )
        what = "The drafter that the run was calibrated with (there) and the one whose steps are timed (here)"
        check_same_origin(there, here, what, run.status_says)
    measurement = Measurement(run, session, wanted, source, max_new_tokens, opened)
    if opened is None:
        most, heads = max(map(len, measurement.families)), len(measurement.families)
        if beyond := [size for size in wanted.sizes or () if size > most]:
            raise InvalidInput(
                f"`sizes` must be at most {most} with {heads} heads and the ranks that are known, but got {beyond[0]}."
            )
    runtime: Runtime = {"name": opened.name, "version": opened.version} if opened else session.runtime()
    if opened and opened.is_launched:
        runtime["launches"] = True
    check_can_join(run, runtime, session.provenance(seed=0), overwrite=wanted.overwrite)
    measurement.measure()
    points, plain = all_timings(measurement.found)
    info = _info(session, measurement) | {"inputs": inputs_of(used) if used else {}}
    return finish(run, LatencyProfile(points, plain, runtime, info), wanted.precision)


def _opened(engine: str, session: Session, max_new_tokens: int, wanted: ProfileOptions) -> Stepper:
    """The engine, where its steps can be timed as wanted."""
    from treeopt.runtime.engines import open_stepper

    asked, batch_size = f"`engine={engine}`", max(wanted.batch_sizes)
    if given := [name for name in ("contexts", "sizes", "calibration") if name in wanted.given]:
        raise InvalidInput(f"{asked} does not go with `{given[0]}`: leave it out.")
    opened = open_stepper(engine, session.setup(max_new_tokens), session.source.engine_python)
    if not opened.is_stepwise:
        raise Unsupported(f"{asked} decodes whole answers, so its steps are not timed one by one: use bench.")
    if opened.most_rows is not None and batch_size > opened.most_rows:
        raise Unsupported(f"{asked} decodes {opened.most_rows} sequences at a time, but got `batch_size={batch_size}`.")
    return opened


def all_timings(found: Mapping[Place, Rounds]) -> tuple[tuple[StepTiming, ...], tuple[StepTiming, ...]]:
    timed = [each for (_, context), rounds in found.items() for each in rounds.timings(context)]
    return tuple(point for points, _ in timed for point in points), tuple(plain for _, plain in timed)


@dataclass(frozen=True)
class Measurement:
    """What a measurement needs, and what was measured by batch size and context.

    engine : whose steps are timed; None for treeopt's own
    """

    run: RunDirectory
    session: Session
    wanted: ProfileOptions
    source: Source | None
    max_new_tokens: int
    engine: Stepper | None
    found: dict[Place, Rounds] = field(default_factory=dict)

    @cached_property
    def families(self) -> Sequence[GrownTrees]:
        drafter = self.session.drafter
        return tree_families(self.source, drafter.num_heads, self.wanted.largest, ranks=drafter.draft_vocab_size)

    @cached_property
    def texts(self) -> tuple[list[list[Sequence[int]]], float]:
        """What an engine goes on from, requests of the log or the trace's prompts, and the mean length of the answers [tokens]."""
        if self.source is None:
            log = some_requests(self.run.read_requests(), TEXTS, None, self.session.target.context, half=0)
            return stretches([one.prompt for one in log.requests()], log.texts), float(log.answer_tokens.mean())
        trace = self.run.read_trace()
        return texts_of(trace, self.session), float(trace.lengths.mean())

    def measure(self) -> None:
        """Time every setting, or half its batch size where memory runs out."""
        from treeopt.runtime.memory import with_less_memory

        settings = self.wanted.settings
        for i, (batch_size, context) in enumerate(settings):
            spent_s = sum(rounds.seconds for rounds in self.found.values())
            share_s = (self.wanted.time_limit_s - spent_s) / (len(settings) - i)
            with_less_memory(partial(self._measure_at, context=context, limit_s=share_s), batch_size, note)

    def _measure_at(self, batch_size: int, *, context: int | None, limit_s: float) -> None:
        """Time one setting, unless a larger batch was halved to it before."""
        at, wanted, source = (batch_size, context), self.wanted, self.source
        if at in self.found:
            return
        if self.engine is not None:
            if source is None:  # of a log
                trees = lookups(self.engine.name, wanted.budget)
            else:
                trees = engine_trees(source, wanted.budget, dynamic=self.engine.takes_trees and batch_size == 1)
                trees += [Tree.chain(0)] if self.engine.twin else []
        else:
            sizes = wanted.sizes or placed_sizes(batch_size, wanted.budget)
            trees = [*timing_trees(self.families, sizes, given=bool(wanted.sizes))]
            trees += () if wanted.sizes else anew_trees(source.pooled if source else None, wanted.budget)
        self.found[at] = self._rounds(at, trees, limit_s)

    def _rounds(self, at: Place, trees: list[Draft], limit_s: float) -> Rounds:
        from treeopt.runtime.decode import Decoder
        from treeopt.runtime.stepper import StepVisits, StretchVisits, rows_at

        batch_size, context = at
        session, stepper = self.session, self.engine
        if stepper is not None:
            texts, answer_tokens = self.texts
            visits: StepVisits = StretchVisits(stepper, texts, trees, batch_size, answer_tokens=answer_tokens)
        else:
            prompts: Sequence[Sequence[int]] = [c.first for c in session.prompts.conversations[:64]]
            setup = replace(session.setup(self.max_new_tokens), acceptance=_acceptance(session, self.source))
            if context is not None:
                prompts, stop = rows_at(context, prompts, session.target)
                setup = replace(setup, stop=stop)
            stepper = Decoder(setup)
            visits = StepVisits(stepper, prompts, trees, batch_size)
        at_hand = {"runtime": [stepper.name, stepper.version]}
        asked = {"batch_size": batch_size, "context": context, "trees": [tree.record for tree in trees]}
        limits = {name: getattr(self.wanted, name) for name in ("precision", "time_limit_s")}
        known = {**replace(session.provenance(seed=0), time=None, command=None).record, **at_hand, **asked, **limits}
        known |= {
            "max_new_tokens": self.max_new_tokens,
            "visit_steps": visits.visit_steps,
            "texts": inputs_of(*self.run.accuracies()[:1]) if self.engine else None,
        }
        held = "" if context is None else f"-context-{context}"
        of = "" if stepper.name == OURS else f"{stepper.name}-"
        journal = Journal(self.run.partial("profile") / f"{of}batch-size-{batch_size}{held}", known)
        with closing(visits):
            return all_rounds(visits, at, limit_s, self.wanted.precision, journal)


def all_rounds(visitor: Visitor, at: Place, limit_s: float, precision: float, journal: Journal) -> Rounds:
    """All rounds of a visitor at one setting, with their progress, and notes of what the time limit has no room for."""
    title = f"Timing {len(visitor.trees)} trees, batch size {at[0]}" + ("" if at[1] is None else f" context {at[1]}")
    with progress(title, max(limit_s, 0.0)) as advance:

        def heard(event: TimingPlan | Visit) -> None:
            if isinstance(event, TimingPlan):
                _say_planned(at, visitor.trees, limit_s, event)
            else:
                advance(event.seconds)

        return time_steps(visitor, time_limit_s=limit_s, precision=precision, journal=journal, progress=heard)


def texts_of(trace: RankTrace, session: Session) -> list[list[Sequence[int]]]:
    """The texts of `stretches` of those of the trace's prompts that the session has."""
    from treeopt.runtime.measure.ranks import turn_prompts

    known = {conversation.sha256 for conversation in session.prompts.conversations}
    hashes = trace.meta.get("prompt_sha256") or [None]
    mine = [s for s, sha in enumerate(hashes) if sha in known]
    if not mine or trace.tokens is None:
        raise InvalidInput(f"An engine is timed on the trace's prompts, but none are in {session.prompts.name}.")
    trace = trace.select(np.array(mine))
    return stretches([prompt.text for prompt in turn_prompts(session.prompts, trace)], trace.texts)


def stretches(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Texts that stretches of decoding go on from: prompts with a part of their answers.

    Every state of the answers is as likely as any other, and the first of the texts stand for all. Where contexts differ much,
    those above the mean stand in a list of their own: a step at the mean then lies between two that were timed.
    """
    from treeopt.runtime.stepper import STRETCH

    lengths = np.array([len(answer) for answer in answers])
    which, begins = np.repeat(np.arange(len(prompts)), lengths), np.arange(lengths.sum())
    begins -= np.repeat(np.cumsum(lengths) - lengths, lengths)
    begins -= STRETCH // 2  # a stretch is about its state, where there is room
    begins = np.clip(begins, 0, np.maximum(lengths - STRETCH, 0)[which])
    contexts = np.array([len(prompt) for prompt in prompts])[which] + begins
    above = contexts > contexts.mean()
    low, high = (int(np.median(some)) if len(some) else 0 for some in (contexts[~above], contexts[above]))
    parts = [~above, above] if high - low > max(APART, low // 4) else [np.full(len(above), True)]
    found = list[list[Sequence[int]]]()
    for states in map(np.flatnonzero, parts):
        ordered = states[np.argsort(contexts[states], kind="stable")]
        drawn = ordered[((0.5 + GOLDEN * np.arange(min(TEXTS, len(ordered)))) % 1 * len(ordered)).astype(int)]
        found.append([(*prompts[which[i]], *answers[which[i]][: begins[i]]) for i in drawn])
    return found


def _say_planned(at: Place, trees: Sequence[Draft], limit_s: float, plan: TimingPlan) -> None:
    """Before the first round: what the time limit has no room for."""
    where = f"at batch size {at[0]}" + ("" if at[1] is None else f", context {at[1]}")
    if len(plan.places) < len(trees):
        sizes = sorted({len(trees[place]) for place in plan.places})
        note(
            f"Timing all {len(trees)} trees {where} would take about {plan.whole_s:.0f} s, of which `time_limit_s` leaves "
            f"{max(limit_s - plan.warm_up_s, 0):.0f} s. Timed are {len(sizes)} sizes: {', '.join(map(str, sizes))}."
        )
    if plan.least_s > SPARE * limit_s:
        note(
            f"The least that can be timed {where} takes about {plan.least_s:.0f} s, longer than the limit: fewer `sizes` take less."
        )


def _acceptance(session: Session, source: Source | None) -> Greedy:
    """The session's rule; random weights accept by chance."""
    accuracies = source.calibration if source else None
    if session.weights == "checkpoint" or accuracies is None:
        return session.acceptance
    from treeopt.runtime.random_weights import DrawnAcceptance

    return DrawnAcceptance(accuracies.accept, np.random.default_rng(0))


def _info(session: Session, measurement: Measurement) -> dict[str, Any]:
    info: dict[str, Any] = {"measures": "step", "provenance": session.provenance(seed=0).record}
    info["settings"] = [
        ProfileSetting(batch_size=p.batch_size, context_tokens=p.context_tokens, nominal=context is not None)
        for (_, context), rounds in measurement.found.items()
        for _, p in rounds.timings(context)
    ]
    if session.target.device.type == "cpu":
        visits = [visit for rounds in measurement.found.values() for visit in rounds.visits]
        info["processor_share"] = processor_share([(visit.seconds, visit.processor_s) for visit in visits])
    return info
