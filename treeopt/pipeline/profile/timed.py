"""Profile: latencies of decoding steps, in two stages, added to what the run has measured before.

stage one   trees at the edges of tiles and of every depth (`placement`)
stage two   what a plan on those latencies would choose, and its rivals, timed for themselves
setting     a batch size at a context length; None is that of the prompts as they are

Every setting and stage has a journal of its rounds, and what is done next depends on those rounds alone, so
a killed run goes on to what it would have done.

No sample is thrown away. A tree's latency is the plain step's median times the median over rounds of its
ratio to the plain steps of the same round (`latency.paired_latency`); so neither interruptions nor drift,
which is recorded all the same, reach it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.files.journal import Journal, discard
from treeopt.latency.rounds import drifts, timings
from treeopt.pipeline.profile.earlier import reached, with_earlier
from treeopt.pipeline.profile.placement import candidates, placed_sizes, shaped, timing_trees, tree_families
from treeopt.planning.planner import plan_trees
from treeopt.records.calibration import Calibration
from treeopt.records.inputs import find_accuracies, inputs_of
from treeopt.records.plan import PlanEntry
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rules import check_drafter
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.terminal import note, progress
from treeopt.trees.tree import MAX_RANK, Tree, TreeFamily

if TYPE_CHECKING:
    from treeopt.runtime.acceptance.greedy import Acceptance
    from treeopt.runtime.session import Session

STAGE_ONE = 0.75  # share of the time limit
TOLD_DRIFT = 0.05
RANDOM_CALIBRATION = "vicuna-7b-medusa1"  # whose accuracies random weights get where the run has none
RANDOM_CONTEXT = 512

Measurable = tuple[int, int | None]  # batch size, nominal context


@dataclass
class Measured:
    """The rounds of a setting: those of stage one and, on other trees, of stage two."""

    batch_size: int
    nominal: int | None  # context
    trees: list[Tree]
    rounds: list[dict[str, Any]]
    refined: list[Tree] = field(default_factory=list)
    more_rounds: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return float(sum(round_["seconds"] for round_ in (*self.rounds, *self.more_rounds)))

    def timings(self) -> tuple[list[StepTiming], StepTiming]:
        """All trees' timings and the plain one of both stages."""
        points, plain = timings(self.rounds, self.trees, self.batch_size, context_tokens=self.nominal)
        if not self.more_rounds:
            return points, plain
        more, again = timings(
            self.more_rounds,
            self.refined,
            self.batch_size,
            context_tokens=plain.context_tokens,
            first_round=len(self.rounds),
        )
        assert plain.parts_ms is not None
        assert again.parts_ms is not None
        parts = {part: (*ms, *again.parts_ms[part]) for part, ms in plain.parts_ms.items()}
        both = replace(
            plain,
            step_ms=plain.step_ms + again.step_ms,
            parts_ms=parts,
            round=(plain.round or ()) + (again.round or ()),
        )
        return [*points, *more], both


def profile(
    run: RunDirectory,
    session: Session,
    *,
    batch_sizes: Sequence[int],
    contexts: Sequence[int] = (),
    sizes: Sequence[int] | None = None,
    budget: int = 64,
    precision: float = 0.02,
    time_limit_s: float = 60.0,
    max_new_tokens: int = 128,
    calibration: str | None = None,
    gb_per_s: float | None = None,
) -> LatencyProfile:
    """Time decoding steps at each batch size and context, until every latency is known to ``precision``.

    sizes        exactly these and no second stage; by default placed up to ``budget`` rows
    contexts     lengths [tokens] that rows are held at; by default rows are as long as the prompts make them
    calibration  what trees are grown on, a path or a name; by default the run's own
    gb_per_s     memory bandwidth to compare a plain step with

    A batch size that does not fit into memory is halved, unless that one is measured anyway. What the run's
    profile knows of the same model on the same machine is kept, but for the settings measured again.
    """
    if min([*batch_sizes, *(sizes or ()), budget]) < 1:
        raise InvalidInput("--batch-size, --sizes and --budget must be at least 1.")
    is_random = session.weights != "checkpoint"
    if not contexts and is_random:
        contexts = (RANDOM_CONTEXT,)
    otherwise = RANDOM_CALIBRATION if is_random else None
    used, source = find_accuracies(run, calibration, otherwise=otherwise) or (None, None)
    if calibration is None and source is not None and used == run.trace:
        check_drafter(source.meta.get("drafter"), session.drafter_record, "Profile times steps")
    drafter = session.drafter
    families = tree_families(source, drafter.num_heads, max(sizes or [budget]), ranks=drafter.draft_vocab_size)
    check_sizes(sizes or (), families)
    measure = Stages(run, session, precision, time_limit_s, max_new_tokens, _acceptance(session, source))
    held: list[int | None] = [*sorted(set(contexts))] or [None]
    settings = [(batch_size, context) for batch_size in sorted(set(batch_sizes)) for context in held]
    found = measure.first(settings, families, sizes, budget)
    if sizes is None and source is not None:
        measure.second(found, families, source, budget)
    points, plain = [], []
    for measured in found:
        trees, reference = measured.timings()
        points += trees
        plain.append(reference)
    result = LatencyProfile(tuple(points), tuple(plain), session.runtime(), _info(session, found, plain, gb_per_s))
    result.info["precision"] = reached(result, precision)
    result.info["inputs"] = inputs_of(used) if used else {}
    tell(result)
    whole = with_earlier(run, result)
    whole.save(run.profile)
    discard(run.partial("profile"))
    return whole


def check_sizes(sizes: Sequence[int], families: Sequence[TreeFamily]) -> None:
    """Name the sizes that no tree has; InvalidInput where none is left."""
    most = max(map(len, families))
    beyond = sorted({size for size in sizes if size > most})
    if beyond and len(beyond) == len(set(sizes)):
        raise InvalidInput(
            f"--sizes must be at most {most} with {len(families)} heads and the ranks that are known, but got "
            f"{', '.join(map(str, beyond))}."
        )
    if beyond:
        note(
            f"Not timed: sizes {', '.join(map(str, beyond))}, since the largest tree of {len(families)} heads and "
            f"the ranks that are known has {most} rows."
        )


@dataclass(frozen=True)
class Stages:
    """The two stages of a measurement, and what both need."""

    run: RunDirectory
    session: Session
    precision: float
    time_limit_s: float
    max_new_tokens: int
    acceptance: Acceptance

    def first(
        self, settings: Sequence[Measurable], families: Sequence[TreeFamily], sizes: Sequence[int] | None, budget: int
    ) -> list[Measured]:
        """Stage one at every setting, or at half its batch size where memory runs out."""
        from treeopt.runtime.memory import with_less_memory

        found: dict[Measurable, Measured] = {}
        limit = self.time_limit_s * (STAGE_ONE if sizes is None else 1.0)
        for i, (wanted, context) in enumerate(settings):
            left = limit - sum(measured.seconds for measured in found.values())

            def attempt(
                batch_size: int, context: int | None = context, share: float = left / (len(settings) - i)
            ) -> None:
                if (batch_size, context) not in found:
                    trees = timing_trees(families, sizes or placed_sizes(batch_size, budget), given=bool(sizes))
                    rounds = self._rounds(batch_size, context, trees, share)
                    found[batch_size, context] = Measured(batch_size, context, trees, rounds)

            with_less_memory(attempt, wanted, note)
        return list(found.values())

    def second(
        self, found: Sequence[Measured], families: Sequence[TreeFamily], source: RankTrace | Calibration, budget: int
    ) -> None:
        """Stage two: at every setting the trees that a plan on stage one would choose between."""
        if isinstance(source, RankTrace) and source.clusters.max() < 1:
            source = Calibration.from_trace(source)  # one conversation: nothing to hold out
        ranks = min(MAX_RANK + 1, self.session.drafter.draft_vocab_size)
        limits = {"budget": budget, "max_rank": ranks - 1, "shape": "sibling-closed"}
        for nominal in dict.fromkeys(measured.nominal for measured in found):
            here = [measured for measured in found if measured.nominal == nominal]
            with progress("Planning", None):
                entries = planned(here, source, limits)
            for measured in here:
                measured.refined = refined(entries[measured.batch_size], measured.trees, families)
        waiting = [measured for measured in found if measured.refined]
        for i, measured in enumerate(waiting):
            left = self.time_limit_s - sum(other.seconds for other in found)
            measured.more_rounds = self._rounds(
                measured.batch_size, measured.nominal, measured.refined, left / (len(waiting) - i), stage="-refined"
            )

    def _rounds(
        self, batch_size: int, context: int | None, trees: list[Tree], share: float, stage: str = ""
    ) -> list[dict[str, Any]]:
        """The rounds of one setting and stage, through its journal."""
        from treeopt.runtime.measure.steps import measure_steps, rows_at

        session = self.session
        prompts: Sequence[Sequence[int]] = [c.first for c in session.prompts.conversations[:64]]
        setup = replace(session.setup(self.max_new_tokens), acceptance=self.acceptance)
        if context is not None:
            prompts, stop = rows_at(context, prompts, session.target)
            setup = replace(setup, stop=stop)
        known = {
            **session.provenance(seed=0).record(),
            "time": None,
            "command": None,
            "compiled": session.target.compiled,
            "batch_size": batch_size,
            "context": context,
            "trees": [tree.choices for tree in trees],
            "precision": self.precision,
            "time_limit_s": self.time_limit_s,
            "max_new_tokens": self.max_new_tokens,
        }
        held = "" if context is None else f"-context-{context}"
        journal = Journal(self.run.partial("profile") / f"batch-size-{batch_size}{held}{stage}", known)
        title = f"Timing {len(trees)} trees, batch size {batch_size}" + held.replace("-", " ")
        with progress(title, max(share, 0.0)) as advance:
            return measure_steps(
                setup,
                prompts,
                trees,
                batch_size=batch_size,
                time_limit_s=share,
                precision=self.precision,
                journal=journal,
                progress=advance,
            )


def refined(entry: PlanEntry, measured: Sequence[Tree], families: Sequence[TreeFamily]) -> list[Tree]:
    """The trees that a plan would choose between, but for those ``measured``."""
    return [
        shaped(families[depth - 1], size, depth)
        for size, depth in candidates(entry, {(len(tree), tree.depth) for tree in measured})
        if depth <= len(families) and size <= len(families[depth - 1])
    ]


def planned(found: Sequence[Measured], source: RankTrace | Calibration, limits: dict[str, Any]) -> dict[int, PlanEntry]:
    """Batch size to the entry of a quick plan on what was measured."""
    timed = [measured.timings() for measured in found]
    latencies = LatencyProfile(tuple(p for points, _ in timed for p in points), tuple(plain for _, plain in timed))
    batch_sizes = [measured.batch_size for measured in found]
    plan = plan_trees(source, latencies, batch_sizes=batch_sizes, objective="joint", **limits)
    return {entry.batch_size: entry for entry in plan.entries}


def _acceptance(session: Session, source: RankTrace | Calibration | None) -> Acceptance:
    """The session's rule; random weights accept by chance."""
    if session.weights == "checkpoint" or source is None:
        return session.acceptance
    from treeopt.runtime.random_weights import DrawnAcceptance

    rates = Calibration.from_trace(source) if isinstance(source, RankTrace) else source
    return DrawnAcceptance(rates.accept, np.random.default_rng(0))


def _info(
    session: Session, found: Sequence[Measured], plain: Sequence[StepTiming], gb_per_s: float | None
) -> dict[str, Any]:
    """What the file says beside the timings."""
    from treeopt.runtime.measure.traffic import bandwidth_floor, weight_bytes

    weights = weight_bytes(session.target, session.drafter)
    info: dict[str, Any] = {
        "measures": "step",
        "drift": drifts(plain, [measured.nominal is not None for measured in found]),
        "weight_bytes": weights,
        "provenance": session.provenance(seed=0).record(),
    }
    if gb_per_s is not None:
        info["bandwidth_floor"] = [
            bandwidth_floor(session.target, p, weights=weights["plain_step"], gb_per_s=gb_per_s) for p in plain
        ]
    return info


def tell(result: LatencyProfile, remedy: str = "a longer --time-limit helps") -> None:
    """Notes on what the reader of the table should know."""
    known = result.info["precision"]
    if not known["reached"]:
        note(
            f"{known['missed']} of {known['timings']} latencies are not known to {known['wanted']:.1%} yet, the worst "
            f"to {known['worst']:.1%}: {remedy}."
        )
    for place in result.info["drift"]:
        if abs(place["drift"]) > TOLD_DRIFT:
            note(
                f"Plain steps at batch size {place['batch_size']} became {abs(place['drift']):.0%} "
                f"{'slower' if place['drift'] > 0 else 'faster'} while they were timed. Trees are compared with "
                "plain steps of their own round, so that this is corrected."
            )
    floors = result.info.get("bandwidth_floor") or []
    if floors or "weights" in result.runtime:
        weights = result.info["weight_bytes"]
        note(f"Weights: {weights['target'] / 1e9:.2f} GB, heads {weights['heads'] / 1e9:.2f} GB.")
    for floor in floors:
        note(
            f"Batch size {floor['batch_size']}: a plain step takes {floor['plain_over_floor']:.2f} times the "
            f"{floor['floor_ms']:.2f} ms that {floor['gb_per_s']:g} GB/s need for weights and cache."
        )
