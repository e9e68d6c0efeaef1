"""Profile: latencies of decoding steps, in two stages, added to what the run has measured before.

stage one   trees at the edges of tiles and of every depth (`placement`)
stage two   what a plan on those latencies would choose, and its rivals, timed for themselves
setting     a batch size at a context length; None is that of the prompts as they are

Every setting and stage has a journal of its rounds, and what is done next depends on those rounds alone, so
a killed run goes on to what it would have done.

No sample is thrown away. A tree's latency is the plain step's median times the median over rounds of its
ratio to the plain steps of the same round (`treeopt.latency.paired`); so neither interruptions nor drift,
which is recorded all the same, reach it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from treeopt.files.journal import Journal
from treeopt.growth.source import Source, source_of
from treeopt.latency.rounds import Planned, Round, drifts, processor_share, timed_trees, timings
from treeopt.pipeline.profile.outcome import check_can_join, finish
from treeopt.pipeline.profile.placement import (
    Wanted,
    check_sizes,
    dynamic_trees,
    rivals,
    shaped,
    timing_trees,
    tree_families,
)
from treeopt.pipeline.threads import settle_threads
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.inputs import Accuracies, find_accuracies, inputs_of
from treeopt.records.plan import PlanEntry
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rules import check_drafter
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import note, progress
from treeopt.trees.dynamic import AnyTree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import MAX_RANK, Tree, TreeFamily

if TYPE_CHECKING:
    from treeopt.runtime.acceptance.greedy import Acceptance
    from treeopt.runtime.session import Session

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
    max_new_tokens: int = 128,
    calibration: str | None = None,
    gb_per_s: float | None = None,
    overwrite: bool = False,
    **options: Any,
) -> LatencyProfile:
    """Time decoding steps at each batch size and context, until every latency is known well enough.

    calibration  what trees are grown on, a path or a name; by default the run's own
    gb_per_s     memory bandwidth to compare a plain step with
    overwrite    whether a profile of something else may be replaced
    options      those of `Wanted`: batch_sizes, contexts, sizes (without a second stage), budget, precision,
                 time_limit_s

    A batch size that does not fit into memory is halved, unless that one is measured anyway. What the run's
    profile knows of the same model on the same machine is kept, but for the settings measured again.
    """
    wanted, is_random, drafter = Wanted(**options), session.weights != "checkpoint", session.drafter
    if is_random and not wanted.contexts:
        wanted = replace(wanted, contexts=(RANDOM_CONTEXT,))
    otherwise = RANDOM_CALIBRATION if is_random else None
    used, record = find_accuracies(run, calibration, otherwise=otherwise) or (None, None)
    source = source_of(record) if record else None
    if calibration is None and source is not None and used == run.trace:
        check_drafter(source.meta.get("drafter"), session.drafter_record, "Profile times steps")
    families = tree_families(source, drafter.num_heads, wanted.largest, ranks=drafter.draft_vocab_size)
    check_sizes(wanted.sizes or (), families)
    settle_threads(run, session)
    check_can_join(run, session.runtime(), session.provenance(seed=0).record(), overwrite=overwrite)
    dynamic = dynamic_trees(source.pooled if source else None, wanted.budget)
    stages = Stages(run, session, wanted, families, max_new_tokens, _acceptance(session, source), dynamic)
    stages.first()
    if wanted.sizes is None and source is not None:
        stages.second(source)
    found = list(stages.found.values())
    points, plain = all_timings(found)
    info = _info(session, plain, gb_per_s)
    info["drift"] = drifts(plain, [measured.context is not None for measured in found])
    info["inputs"] = inputs_of(used) if used else {}
    if session.target.device.type == "cpu":
        info["processor_share"] = processor_share([r for at in found for _, rounds in at.stages for r in rounds])
    return finish(run, LatencyProfile(points, plain, session.runtime(), info), wanted.precision)


@dataclass
class Measured:
    """The rounds of a setting: of each stage its trees, and the rounds in which they were timed."""

    batch_size: int
    context: Context
    stages: list[tuple[list[AnyTree], list[Round]]] = field(default_factory=list)

    @property
    def trees(self) -> list[AnyTree]:
        return [tree for trees, _ in self.stages for tree in trees]

    @property
    def seconds(self) -> float:
        rounds = [round_ for _, rounds in self.stages for round_ in rounds]
        return float(sum(round_["seconds"] + round_.get("warm_up_s", 0.0) for round_ in rounds))

    @property
    def mean_step_s(self) -> float:
        rounds = [round_ for _, rounds in self.stages for round_ in rounds]
        return float(sum(round_["seconds"] for round_ in rounds) / sum(len(round_["lengths"]) for round_ in rounds))

    def timings(self) -> tuple[list[StepTiming], StepTiming]:
        """All trees' timings, and the plain one over the rounds of all stages."""
        points: list[StepTiming] = []
        plains: list[StepTiming] = []
        context, first_round = self.context, 0
        for trees, rounds in self.stages:
            timed, plain = timings(rounds, trees, self.batch_size, context_tokens=context, first_round=first_round)
            points += timed
            plains.append(plain)
            context, first_round = plain.context_tokens, first_round + len(rounds)
        parts = plains[0].parts_ms or {}
        whole = replace(
            plains[0],
            step_ms=tuple(ms for plain in plains for ms in plain.step_ms),
            round=tuple(number for plain in plains for number in plain.round or ()),
            parts_ms={part: tuple(ms for plain in plains for ms in (plain.parts_ms or {})[part]) for part in parts},
        )
        return points, whole


def all_timings(found: Sequence[Measured]) -> tuple[tuple[StepTiming, ...], tuple[StepTiming, ...]]:
    """The points of several settings, and the plain step of each."""
    timed = [measured.timings() for measured in found]
    return tuple(point for points, _ in timed for point in points), tuple(plain for _, plain in timed)


@dataclass(frozen=True)
class Stages:
    """The two stages of a measurement, what both need, and what was measured by batch size and context."""

    run: RunDirectory
    session: Session
    wanted: Wanted
    families: Sequence[TreeFamily]
    max_new_tokens: int
    acceptance: Acceptance
    dynamic: Sequence[AnyTree] = ()
    found: dict[tuple[int, Context], Measured] = field(default_factory=dict)

    def first(self) -> None:
        """Stage one at every setting, or at half its batch size where memory runs out."""
        from treeopt.runtime.memory import with_less_memory

        limit_s = self.wanted.time_limit_s * (STAGE_ONE if self.wanted.sizes is None else 1.0)
        contexts: list[Context] = [*sorted(set(self.wanted.contexts))] or [None]
        settings = [
            (batch_size, context) for batch_size in sorted(set(self.wanted.batch_sizes)) for context in contexts
        ]
        for i, (batch_size, context) in enumerate(settings):
            share_s = (limit_s - self._seconds()) / (len(settings) - i)
            with_less_memory(partial(self._first_at, context=context, limit_s=share_s), batch_size, note)

    def _first_at(self, batch_size: int, *, context: Context, limit_s: float) -> None:
        """Stage one at one setting, unless a larger batch was halved to it before."""
        if (batch_size, context) not in self.found:
            given = bool(self.wanted.sizes)
            trees: list[AnyTree] = [*timing_trees(self.families, self.wanted.sizes_at(batch_size), given=given)]
            trees += [] if given else self.dynamic
            measured = Measured(batch_size, context)
            measured.stages.append(self._rounds(measured, trees, limit_s))
            self.found[batch_size, context] = measured

    def second(self, source: Source) -> None:
        """Stage two: at every setting the trees that a plan on stage one would choose between."""
        record, answers = source.record, source.answers
        if answers is not None and answers.num_conversations < 2:  # one conversation: nothing to hold out
            record = source.calibration or record
        from treeopt.runtime import clock

        waiting: list[tuple[Measured, list[AnyTree]]] = []
        started = clock.start()
        for context in dict.fromkeys(measured.context for measured in self.found.values()):
            here = [measured for measured in self.found.values() if measured.context == context]
            with progress("Planning", None):
                entries = self._planned(here, record)
            waiting += [(measured, self._rivals(entries[measured.batch_size], measured.trees)) for measured in here]
        waiting, planned_s = [(measured, trees) for measured, trees in waiting if trees], clock.elapsed(started)
        for i, (measured, trees) in enumerate(waiting):
            share_s = (self.wanted.time_limit_s - planned_s - self._seconds()) / (len(waiting) - i)
            if share_s < LEAST_STEPS * measured.mean_step_s:
                note(f"No time is left to time the plan's own candidates at batch size {measured.batch_size}.")
                continue
            measured.stages.append(self._rounds(measured, trees, share_s, stage="-refined"))

    def _planned(self, found: Sequence[Measured], record: Accuracies) -> dict[int, PlanEntry]:
        """Batch size to the entry of a quick plan on what was measured."""
        limits = Limits(self.wanted.budget, max_rank=min(MAX_RANK, self.session.drafter.draft_vocab_size - 1))
        request = PlanRequest(limits, [measured.batch_size for measured in found], "joint", dynamic=None)
        plan = plan_trees(record, LatencyProfile(*all_timings(found)), request)
        return {entry.batch_size: entry for entry in plan.entries}

    def _rivals(self, entry: PlanEntry, measured: Sequence[AnyTree]) -> list[AnyTree]:
        """The trees that a plan would choose between, but for those ``measured``."""
        return [
            shaped(self.families[depth - 1], size, depth)
            for size, depth in rivals(entry, {(len(tree), tree.depth) for tree in measured if isinstance(tree, Tree)})
            if depth <= len(self.families) and size <= len(self.families[depth - 1])
        ]

    def _seconds(self) -> float:
        return sum(measured.seconds for measured in self.found.values())

    def _rounds(
        self, at: Measured, trees: list[AnyTree], limit_s: float, stage: str = ""
    ) -> tuple[list[AnyTree], list[Round]]:
        """The rounds of one setting and stage, through its journal, and the trees that there was time for."""
        from treeopt.runtime.measure.steps import measure_steps, rows_at

        session = self.session
        prompts: Sequence[Sequence[int]] = [c.first for c in session.prompts.conversations[:64]]
        setup = replace(session.setup(self.max_new_tokens), acceptance=self.acceptance)
        if at.context is not None:
            prompts, stop = rows_at(at.context, prompts, session.target)
            setup = replace(setup, stop=stop)
        known = {
            **session.provenance(seed=0).record(),
            "time": None,
            "command": None,
            "compiled": session.target.compiled,
            "batch_size": at.batch_size,
            "context": at.context,
            "trees": [tree.choices if isinstance(tree, Tree) else tree.name for tree in trees],
            "precision": self.wanted.precision,
            "time_limit_s": self.wanted.time_limit_s,
            "max_new_tokens": self.max_new_tokens,
        }
        held = "" if at.context is None else f"-context-{at.context}"
        journal = Journal(self.run.partial("profile") / f"batch-size-{at.batch_size}{held}{stage}", known)
        title = f"Timing {len(trees)} trees, batch size {at.batch_size}" + held.replace("-", " ")
        with progress(title, max(limit_s, 0.0)) as advance:

            def heard(event: Planned | Round) -> None:
                if isinstance(event, Planned):
                    _say_planned(at, trees, limit_s, event)
                else:
                    advance(event["seconds"])

            rounds = measure_steps(
                setup,
                prompts,
                trees,
                batch_size=at.batch_size,
                time_limit_s=limit_s,
                precision=self.wanted.precision,
                journal=journal,
                progress=heard,
            )
        return timed_trees(rounds, trees), rounds


def _say_planned(at: Measured, trees: Sequence[AnyTree], limit_s: float, planned: Planned) -> None:
    """Before the first round: what the time limit has no room for."""
    where = f"batch size {at.batch_size}" + ("" if at.context is None else f", context {at.context}")
    if len(planned.kept) < len(trees):
        kept = sorted({len(trees[i]) for i in planned.kept})
        note(
            f"Timing all {len(trees)} trees at {where} would take about {planned.whole_s:.0f} s, of which --time-limit "
            f"leaves {max(limit_s, 0):.0f} s. Timed are {len(kept)} sizes: {', '.join(map(str, kept))}."
        )
    if planned.least_s > SPARE * limit_s:
        note(
            f"The least that can be timed at {where} takes about {planned.least_s:.0f} s, more than the time limit leaves."
        )


def _acceptance(session: Session, source: Source | None) -> Acceptance:
    """The session's rule; random weights accept by chance."""
    accuracies = source.calibration if source else None
    if session.weights == "checkpoint" or accuracies is None:
        return session.acceptance
    from treeopt.runtime.random_weights import DrawnAcceptance

    return DrawnAcceptance(accuracies.accept, np.random.default_rng(0))


def _info(session: Session, plain: Sequence[StepTiming], gb_per_s: float | None) -> dict[str, Any]:
    """What the file says of the model and the machine."""
    from treeopt.runtime.measure.traffic import bandwidth_floor, weight_bytes

    weights = weight_bytes(session.target, session.drafter)
    info: dict[str, Any] = {
        "measures": "step",
        "weight_bytes": weights,
        "provenance": session.provenance(seed=0).record(),
    }
    if gb_per_s is not None:
        info["bandwidth_floor"] = [
            bandwidth_floor(session.target, p, weights=weights["plain_step"], gb_per_s=gb_per_s) for p in plain
        ]
    return info
