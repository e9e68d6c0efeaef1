"""Profile in another runtime: what its own steps take, plain, with chains and with dynamic trees."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from treeopt.errors import InvalidInput, Unsupported
from treeopt.files.journal import Journal
from treeopt.growth.source import Source, source_of
from treeopt.latency.rounds import (
    PLAIN_VISITS,
    Planned,
    Round,
    drifts,
    is_enough,
    plan_rounds,
    processor_share,
    timed_trees,
    timings,
)
from treeopt.pipeline.profile.outcome import check_can_join, finish
from treeopt.pipeline.profile.placement import Wanted
from treeopt.pipeline.threads import settle_threads
from treeopt.records.inputs import inputs_of
from treeopt.records.origins import Runtime
from treeopt.records.profile import LatencyProfile
from treeopt.records.rules import check_drafter
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import note, progress
from treeopt.trees.dynamic import AnyTree, DynamicTree, pool_size
from treeopt.trees.tree import Tree

if TYPE_CHECKING:
    from treeopt.runtime.engines import Engine
    from treeopt.runtime.session import Session

LENGTHS = (1, 2, 3, 4, 5, 6, 8)  # of the chains that are timed
LEVELS, ROWS = (1, 2, 3, 4, 6, 8), (4, 8, 16, 32, 64)  # of the dynamic trees
PLAIN = Tree.chain(0)
LONGEST = 128  # tokens of an answer
MOST_TURNS = 4  # prompts that a row has in a visit before it is given up
OPTIONS = {"contexts": "context", "gb_per_s": "bandwidth", "compiled": "compile"}  # where they are not as the parameter
FIRST_VISIT = 1, 2  # untimed and timed steps that say how long the others take


def profile_in(
    run: RunDirectory,
    session: Session,
    engine: str,
    *,
    ours: Mapping[str, Any] = MappingProxyType({}),
    overwrite: bool = False,
    **options: Any,
) -> LatencyProfile:
    """Time an engine's own steps at each batch size; dynamic trees at batch size 1 alone.

    ours    : options that only treeopt's own decoder has; InvalidInput where any is given
    options : those of `Wanted`: batch_sizes, budget, precision, time_limit_s
    """
    from treeopt.runtime.engines import open_engine

    if given := [name for name, value in ours.items() if value]:
        raise InvalidInput(f"--engine {engine} does not go with --{OPTIONS.get(given[0], given[0])}: leave it out.")
    wanted, trace = Wanted(**options), run.read_trace()
    check_drafter(trace.meta.get("drafter"), session.drafter_record, "Profile times steps")
    settle_threads(run, session)
    opened = open_engine(engine, session.target, session.drafter, session.setup(LONGEST).stop, note)
    runtime: Runtime = {"name": opened.name, "version": opened.version}
    provenance = session.provenance(seed=0).record()
    most = max(wanted.batch_sizes)
    if not opened.is_stepwise:
        raise Unsupported(f"--engine {engine} decodes whole answers, so its steps are not timed one by one: use bench.")
    if most > opened.most_rows:
        raise Unsupported(
            f"--engine {engine} decodes {opened.most_rows} sequences at a time, but got --batch-size {most}."
        )
    check_can_join(run, runtime, provenance, overwrite=overwrite)
    prompts = [conversation.first for conversation in session.prompts.conversations[:64]]
    points, plain, rounds = [], [], []
    sizes = sorted(set(wanted.batch_sizes))
    for batch_size in sizes:
        trees = engine_trees(source_of(trace), wanted.budget, dynamic=opened.takes_trees and batch_size == 1)
        timing = Timing(opened, prompts, trees, batch_size)
        key = {**provenance, "time": None, "command": None, "runtime": runtime, "trees": [str(tree) for tree in trees]}
        journal = Journal(run.partial("profile") / f"{engine}-batch-size-{batch_size}", key)
        found = timing.rounds(wanted.time_limit_s / len(sizes), wanted.precision, journal)
        timed, plain_steps = timings(found, timed_trees(found, trees), batch_size)
        points += timed
        plain.append(plain_steps)
        rounds += found
    info = {
        "measures": "step",
        "provenance": provenance,
        "drift": drifts(plain, [False] * len(plain)),
        "inputs": inputs_of(run.trace),
        "processor_share": processor_share(rounds),
    }
    return finish(run, LatencyProfile(tuple(points), tuple(plain), runtime, info), wanted.precision)


def engine_trees(source: Source, budget: int, *, dynamic: bool) -> list[AnyTree]:
    """The chains that are timed and, where the engine takes them and pools were recorded, dynamic trees."""
    found: list[AnyTree] = [Tree.chain(n) for n in LENGTHS if n <= source.num_heads and n < budget]
    pools = source.pooled.pools if dynamic and source.pooled is not None else None
    for topk, levels, rows in itertools.product(pools.topks if pools else (), LEVELS, ROWS):
        if topk > 1 and pools and levels <= pools.levels and levels < rows <= min(budget, pool_size(levels, topk) + 1):
            found.append(DynamicTree(levels, topk, rows))
    return found


@dataclass(frozen=True)
class Timing:
    """Steps of an engine at one batch size: who takes them, on which prompts, and with which trees."""

    engine: Engine
    prompts: Sequence[Sequence[int]]
    trees: Sequence[AnyTree]
    batch_size: int

    def rounds(self, limit_s: float, precision: float, journal: Journal) -> list[Round]:
        """Rounds until every latency is known to the precision, or the time is over; see `treeopt.latency.rounds`."""
        found: list[Round] = journal.documents()
        title = f"Timing {len(self.trees)} settings of {self.engine.name}, batch size {self.batch_size}"
        with progress(title, limit_s) as advance:
            while not is_enough(
                found, timed_trees(found, self.trees), self.batch_size, time_limit_s=limit_s, precision=precision
            ):
                if not found:
                    planned = self._planned(limit_s)
                    first = {"kept": planned.kept, "visit": planned.visit}
                n = len(found)
                round_ = self._round(n, timed_trees(found or [first], self.trees), (found or [first])[0]["visit"])
                found.append(round_ if found else {**first, **round_})
                journal.append(found[-1])
                advance(round_["seconds"])
        return found

    def _planned(self, limit_s: float) -> Planned:
        """What the time has room for; a note where that is not all."""
        for tree in (PLAIN, *self.trees[:1]):  # so that what is loaded at first is
            self._visit(tree, 0, FIRST_VISIT)
        began = time.perf_counter()
        step_s = [median(self._visit(tree, 0, FIRST_VISIT)["step_ms"]) / 1e3 for tree in (*self.trees, PLAIN)]
        planned = plan_rounds(self.trees, step_s, limit_s - (time.perf_counter() - began))
        if len(planned.kept) < len(self.trees):
            note(
                f"Timing all {len(self.trees)} settings at batch size {self.batch_size} would take about "
                f"{planned.whole_s:.0f} s, of which --time-limit leaves {limit_s:.0f} s: {len(planned.kept)} are timed."
            )
        return planned

    def _round(self, number: int, trees: Sequence[AnyTree], visit: Sequence[int]) -> Round:
        """Every tree visited once, and plain decoding several times, in random order."""
        points: list[dict[str, Any]] = [{"step_ms": [], "accepted": []} for _ in range(len(trees) + 1)]
        lengths: list[int] = []
        began, worked = time.perf_counter(), time.process_time()
        order = np.random.default_rng([0, number]).permutation([*range(len(trees)), *[len(trees)] * PLAIN_VISITS])
        for turn, i in enumerate(order.tolist()):
            tree = trees[i] if i < len(trees) else PLAIN
            found = self._visit(tree, number + turn, visit)
            lengths += found["lengths"]
            points[i]["step_ms"] += found["step_ms"]
            points[i]["accepted"] += found["accepted"]
        return {
            "seconds": time.perf_counter() - began,
            "processor_s": time.process_time() - worked,
            "lengths": lengths,
            "points": points,
        }

    def _visit(self, tree: AnyTree, first: int, visit: Sequence[int]) -> dict[str, Any]:
        """Some steps with a tree, all rows live; of those after the untimed ones the milliseconds and what was accepted."""
        (untimed, timed), began = visit, time.perf_counter()
        count = max(len(self.prompts), MOST_TURNS * self.batch_size)
        asked = list(itertools.islice(itertools.cycle(self.prompts), first, first + count))
        answers, tokens = self.engine.answer(asked, tree, self.batch_size), [len(prompt) for prompt in asked]
        step_ms: list[float] = []
        accepted: list[float] = []
        lengths: list[int] = []
        steps = 0
        for one in answers:
            for place, emitted in one.emitted.items():
                tokens[place] += len(emitted)
            if one.reads_prompt or sum(map(bool, one.emitted.values())) < self.batch_size:
                continue
            steps += 1
            lengths.append(sum(tokens[place] for place in one.emitted) // self.batch_size)
            if steps > untimed:
                step_ms.append(round(1e3 * one.seconds, 5))
                accepted.append(sum(map(len, one.emitted.values())) / self.batch_size - 1)
            if len(step_ms) == timed:
                break
        answers.close()
        if len(step_ms) < timed:
            raise InvalidInput(
                f"Timing needs answers of some length, but {count} prompts gave no {timed} steps in which "
                f"{self.batch_size} were answered together."
            )
        return {"seconds": time.perf_counter() - began, "step_ms": step_ms, "accepted": accepted, "lengths": lengths}
