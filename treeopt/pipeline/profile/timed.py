"""Profile: latencies of decoding steps, treeopt's own or an engine's, added to what the run has measured before.

stage one   trees at the edges of tiles and of every depth (`placement`); of an engine the chains and trees that it takes
stage two   what a plan on those latencies would choose, and its rivals, timed for themselves; not in an engine
setting     a batch size at a context length; None is that of the prompts as they are

Every setting and stage has a journal of its rounds, and what is done next depends on those rounds alone, so
a killed run goes on to what it would have done.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from treeopt.errors import InvalidInput, Unsupported
from treeopt.files.journal import Journal
from treeopt.growth.source import Source, source_of
from treeopt.latency.rounds import Planned, Rounds, Visit, processor_share, time_rounds
from treeopt.pipeline.profile.outcome import check_can_join, finish
from treeopt.pipeline.profile.placement import (
    Wanted,
    check_sizes,
    dynamic_trees,
    engine_trees,
    rivals,
    shaped,
    timing_trees,
    tree_families,
)
from treeopt.pipeline.session import compiled as with_compiled
from treeopt.pipeline.threads import settle_threads
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.inputs import find_accuracies, inputs_of
from treeopt.records.origins import OURS, Runtime
from treeopt.records.plan import PlanEntry
from treeopt.records.profile import LatencyProfile, ProfileSetting, StepTiming
from treeopt.records.rules import check_drafter
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import note, progress
from treeopt.trees.draft import Draft
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import MAX_RANK, TreeFamily

if TYPE_CHECKING:
    from treeopt.runtime.acceptance.greedy import Acceptance
    from treeopt.runtime.session import Session
    from treeopt.runtime.stepper import Stepper

STAGE_ONE = 0.75  # share of the time limit
LEAST_STEPS = 40  # that the second stage of a setting takes
SPARE = 1.2  # times the limit that is kept without a word
RANDOM_CALIBRATION = "vicuna-7b-medusa1"  # whose accuracies random weights get where the run has none
RANDOM_CONTEXT = 512

Context = int | None  # tokens that rows are held at; None: as long as the prompts make them


def profile(
    run: RunDirectory,
    session: Session,
    *,
    engine: str | None = None,
    max_new_tokens: int = 128,
    calibration: str | None = None,
    gb_per_s: float | None = None,
    compiled: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> LatencyProfile:
    """Time decoding steps at each batch size and context, until every latency is known well enough.

    engine       whose own steps are timed; by default treeopt's decoder · gb_per_s: bandwidth to compare with
    calibration  what trees are grown on, a path or a name; by default the run's own
    overwrite    whether a profile of something else may be replaced
    options      those of `Wanted`; with ``sizes`` there is no second stage

    A batch size that does not fit into memory is halved, unless that one is measured anyway.
    """
    wanted, is_random, opened = Wanted(**options), session.weights != "checkpoint", None
    if is_random and not wanted.contexts:
        wanted = replace(wanted, contexts=(RANDOM_CONTEXT,))
    if engine is not None:
        own = {"contexts": wanted.contexts, "sizes": wanted.sizes, "compiled": compiled, "calibration": calibration}
        opened = _opened(engine, session, max_new_tokens, wanted, {**own, "gb_per_s": gb_per_s})
        run.read_trace()
    usual = RANDOM_CALIBRATION if is_random else None
    used, record = find_accuracies(run, calibration, otherwise=usual) or (None, None)
    source = source_of(record) if record else None
    if calibration is None and source is not None and used == run.trace:
        check_drafter(source.meta.get("drafter"), session.drafter_record, "Profile times steps")
    stages = Stages(run, session, wanted, source, max_new_tokens, opened)
    if opened is None:
        check_sizes(wanted.sizes or (), stages.families)
    settle_threads(run, session)
    with with_compiled(session, compiled):
        runtime: Runtime = {"name": opened.name, "version": opened.version} if opened else session.runtime()
        check_can_join(run, runtime, session.provenance(seed=0).record(), overwrite=overwrite)
        stages.measure()
        points, plain = all_timings(list(stages.found.values()))
        info = _info(session, stages, plain, gb_per_s) | {"inputs": inputs_of(used) if used else {}}
        return finish(run, LatencyProfile(points, plain, runtime, info), wanted.precision)


def _opened(engine: str, session: Session, max_new_tokens: int, wanted: Wanted, own: Mapping[str, object]) -> Stepper:
    """The engine, where its steps can be timed as wanted; ``own`` are options that only treeopt's own decoder has."""
    from treeopt.runtime.engines import open_stepper

    asked, batch_size = f"`engine={engine}`", max(wanted.batch_sizes)
    if given := [name for name, value in own.items() if value]:
        raise InvalidInput(f"{asked} does not go with `{given[0]}`: leave it out.")
    opened = open_stepper(engine, session.setup(max_new_tokens), note)
    if not opened.is_stepwise:
        raise Unsupported(f"{asked} decodes whole answers, so its steps are not timed one by one: use bench.")
    if opened.most_rows is not None and batch_size > opened.most_rows:
        raise Unsupported(f"{asked} decodes {opened.most_rows} sequences at a time, but got `batch_size={batch_size}`.")
    return opened


@dataclass
class MeasuredSetting:
    """The rounds of each stage of a setting."""

    batch_size: int
    context: Context
    stages: list[Rounds] = field(default_factory=list)

    @property
    def trees(self) -> list[Draft]:
        return [tree for stage in self.stages for tree in stage.trees]

    @property
    def visits(self) -> list[Visit]:
        return [visit for stage in self.stages for round_ in stage.rounds for visit in round_.visits]

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    def timings(self) -> tuple[list[StepTiming], StepTiming]:
        """All trees' timings, and the plain one over the rounds of all stages."""
        points: list[StepTiming] = []
        plains: list[StepTiming] = []
        context, first_round = self.context, 0
        for stage in self.stages:
            timed, plain = stage.timings(context, first_round)
            points += timed
            plains.append(plain)
            context, first_round = plain.context_tokens, first_round + len(stage.rounds)
        parts = plains[0].parts_ms
        whole = replace(
            plains[0],
            step_ms=tuple(ms for plain in plains for ms in plain.step_ms),
            round=tuple(number for plain in plains for number in plain.round or ()),
            parts_ms=parts and {part: tuple(ms for p in plains for ms in (p.parts_ms or {})[part]) for part in parts},
        )
        return points, whole


def all_timings(found: Sequence[MeasuredSetting]) -> tuple[tuple[StepTiming, ...], tuple[StepTiming, ...]]:
    """The points of several settings, and the plain step of each."""
    timed = [measured.timings() for measured in found]
    return tuple(point for points, _ in timed for point in points), tuple(plain for _, plain in timed)


@dataclass(frozen=True)
class Stages:
    """The stages of a measurement, what they need, and what was measured by batch size and context.

    engine : whose steps are timed; None for treeopt's own
    """

    run: RunDirectory
    session: Session
    wanted: Wanted
    source: Source | None
    max_new_tokens: int
    engine: Stepper | None
    found: dict[tuple[int, Context], MeasuredSetting] = field(default_factory=dict)

    @cached_property
    def families(self) -> Sequence[TreeFamily]:
        drafter = self.session.drafter
        return tree_families(self.source, drafter.num_heads, self.wanted.largest, ranks=drafter.draft_vocab_size)

    def measure(self) -> None:
        """Stage one at every setting, or at half its batch size where memory runs out; then stage two."""
        from treeopt.runtime.memory import with_less_memory

        has_second = self.wanted.sizes is None and self.engine is None
        limit_s = self.wanted.time_limit_s * (STAGE_ONE if has_second else 1.0)
        settings = self.wanted.settings(None)
        for i, (batch_size, context) in enumerate(settings):
            share_s = (limit_s - self._seconds()) / (len(settings) - i)
            with_less_memory(partial(self._first_at, context=context, limit_s=share_s), batch_size, note)
        if has_second and self.source is not None:
            self._second(self.source)

    def _first_at(self, batch_size: int, *, context: Context, limit_s: float) -> None:
        """Stage one at one setting, unless a larger batch was halved to it before."""
        if (batch_size, context) not in self.found:
            measured = MeasuredSetting(batch_size, context)
            measured.stages.append(self._rounds(measured, self._trees_at(batch_size), limit_s))
            self.found[batch_size, context] = measured

    def _trees_at(self, batch_size: int) -> list[Draft]:
        """The trees of stage one."""
        wanted, source = self.wanted, self.source
        if self.engine is not None:
            assert source is not None, "an engine is timed with a run's own trace"
            return engine_trees(source, wanted.budget, dynamic=self.engine.takes_trees and batch_size == 1)
        trees = timing_trees(self.families, wanted.sizes_at(batch_size), given=bool(wanted.sizes))
        return [*trees, *(() if wanted.sizes else dynamic_trees(source.pooled if source else None, wanted.budget))]

    def _second(self, source: Source) -> None:
        """Stage two: at every setting the trees that a plan on stage one would choose between."""
        record, answers, drafter = source.record, source.answers, self.session.drafter
        if answers is not None and answers.num_conversations < 2:  # one conversation: nothing to hold out
            record = source.calibration or record
        limits = Limits(self.wanted.budget, max_rank=min(MAX_RANK, drafter.draft_vocab_size - 1))
        waiting: list[tuple[MeasuredSetting, list[Draft]]] = []
        started = time.perf_counter()
        for context in dict.fromkeys(measured.context for measured in self.found.values()):
            here = [measured for measured in self.found.values() if measured.context == context]
            request = PlanRequest(limits, [measured.batch_size for measured in here], "joint", dynamic=None)
            with progress("Planning", None):
                plan = plan_trees(record, LatencyProfile(*all_timings(here)), request)
            waiting += [(measured, self._rivals(plan.entry(measured.batch_size), measured.trees)) for measured in here]
        waiting, planned_s = [(measured, trees) for measured, trees in waiting if trees], time.perf_counter() - started
        for i, (measured, trees) in enumerate(waiting):
            share_s = (self.wanted.time_limit_s - planned_s - self._seconds()) / (len(waiting) - i)
            step_s = sum(v.seconds for v in measured.visits) / sum(len(v.lengths) for v in measured.visits)
            if share_s < LEAST_STEPS * step_s:
                note(f"No time is left to time the plan's own candidates at batch size {measured.batch_size}.")
                continue
            measured.stages.append(self._rounds(measured, trees, share_s, stage="-refined"))

    def _rivals(self, entry: PlanEntry, measured: Sequence[Draft]) -> list[Draft]:
        """The trees that a plan would choose between, but for those ``measured``."""
        return [
            shaped(self.families[depth - 1], size, depth)
            for size, depth in rivals(entry, {(len(tree), tree.depth) for tree in measured if tree.topk is None})
            if depth <= len(self.families) and size <= len(self.families[depth - 1])
        ]

    def _seconds(self) -> float:
        return sum(measured.seconds for measured in self.found.values())

    def _rounds(self, at: MeasuredSetting, trees: list[Draft], limit_s: float, stage: str = "") -> Rounds:
        """The rounds of one setting and stage, through its journal."""
        from treeopt.runtime.decode import Decoder
        from treeopt.runtime.stepper import StepVisits, rows_at

        session, stepper = self.session, self.engine
        prompts: Sequence[Sequence[int]] = [c.first for c in session.prompts.conversations[:64]]
        if stepper is None:
            setup = replace(session.setup(self.max_new_tokens), acceptance=_acceptance(session, self.source))
            if at.context is not None:
                prompts, stop = rows_at(at.context, prompts, session.target)
                setup = replace(setup, stop=stop)
            stepper = Decoder(setup)
        known = {
            **session.provenance(seed=0).record(),
            "time": None,
            "command": None,
            "compiled": session.target.compiled,
            "runtime": [stepper.name, stepper.version],
            "batch_size": at.batch_size,
            "context": at.context,
            "trees": [tree.record for tree in trees],
            "precision": self.wanted.precision,
            "time_limit_s": self.wanted.time_limit_s,
            "max_new_tokens": self.max_new_tokens,
        }
        held = "" if at.context is None else f"-context-{at.context}"
        of = "" if stepper.name == OURS else f"{stepper.name}-"
        journal = Journal(self.run.partial("profile") / f"{of}batch-size-{at.batch_size}{held}{stage}", known)
        title = f"Timing {len(trees)} trees, batch size {at.batch_size}" + held.replace("-", " ")
        visits = StepVisits(stepper, prompts, trees, at.batch_size)
        with progress(title, max(limit_s, 0.0)) as advance, closing(visits):

            def heard(event: Planned | Visit) -> None:
                if isinstance(event, Planned):
                    _say_planned(at, trees, limit_s, event)
                else:
                    advance(event.seconds)

            return time_rounds(
                visits, time_limit_s=limit_s, precision=self.wanted.precision, journal=journal, progress=heard
            )


def _say_planned(at: MeasuredSetting, trees: Sequence[Draft], limit_s: float, planned: Planned) -> None:
    """Before the first round: what the time limit has no room for."""
    where = f"at batch size {at.batch_size}" + ("" if at.context is None else f", context {at.context}")
    if len(planned.kept) < len(trees):
        kept = sorted({len(trees[i]) for i in planned.kept})
        note(
            f"Timing all {len(trees)} trees {where} would take about {planned.whole_s:.0f} s, of which `time_limit_s` leaves "
            f"{max(limit_s - planned.warm_up_s, 0):.0f} s. Timed are {len(kept)} sizes: {', '.join(map(str, kept))}."
        )
    if planned.least_s > SPARE * limit_s:
        note(
            f"The least that can be timed {where} takes about {planned.least_s:.0f} s, more than the time limit leaves."
        )


def _acceptance(session: Session, source: Source | None) -> Acceptance:
    """The session's rule; random weights accept by chance."""
    accuracies = source.calibration if source else None
    if session.weights == "checkpoint" or accuracies is None:
        return session.acceptance
    from treeopt.runtime.random_weights import DrawnAcceptance

    return DrawnAcceptance(accuracies.accept, np.random.default_rng(0))


def _info(session: Session, stages: Stages, plain: Sequence[StepTiming], gb_per_s: float | None) -> dict[str, Any]:
    """Notes of the file on the model, the machine and the measurement."""
    from treeopt.runtime.memory import bandwidth_floor, weight_bytes

    found = list(stages.found.values())
    info: dict[str, Any] = {"measures": "step", "provenance": session.provenance(seed=0).record()}
    info["settings"] = [
        ProfileSetting(batch_size=p.batch_size, context_tokens=p.context_tokens, nominal=at.context is not None)
        for p, at in zip(plain, found, strict=True)
    ]
    if session.target.device.type == "cpu":
        info["processor_share"] = processor_share([visit for measured in found for visit in measured.visits])
    weights = weight_bytes(session.target, session.drafter)
    info |= {"weight_bytes": weights} if stages.engine is None else {}
    if gb_per_s is not None:
        floor = partial(bandwidth_floor, session.target, weights=weights["plain_step"], gb_per_s=gb_per_s)
        info["bandwidth_floor"] = [floor(timing) for timing in plain]
    return info
