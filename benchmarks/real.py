"""A real model in a real engine: settings for SmolLM2 as planned, as replayed and as measured.

`python benchmarks/real.py FOLDER PROMPTS --drafter eagle3 [--engine openvino] [--batch-size 4]`
`python benchmarks/real.py FOLDER PROMPTS --drafter eagle3 --engine openvino --most-tokens 256`
`python benchmarks/real.py FOLDER PROMPTS --drafter eagle3 --engine openvino --least-tokens 1000 --calibrate 64 --held-out 48`
`python benchmarks/real.py FOLDER PROMPTS --drafter eagle3 --engine vllm --engine-python PATH --calibrate 40 --held-out 40`
`python benchmarks/real.py FOLDER --model demo --drafter dflash --dtype bfloat16`

PROMPTS are 600 or more that no drafter learned from: the first 256 are calibrated on, 240 others decoded. Without --engine
treeopt's own decoder decodes. Runs are kept in FOLDER, one for each length, and a killed benchmark goes on there. Speedups are
over the faster of plain decoding as timed and by the engine as it comes; step costs are over a plain step of the same precision,
and the last line says how far predicted ones are off.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import torch
from treeopt.pipeline.decoding import Decoding, decode

from treeopt import pipeline
from treeopt.files.provenance import machine
from treeopt.growth.grow import grow
from treeopt.growth.replay import replay, tells
from treeopt.latency.costs import StepCosts
from treeopt.pipeline.bench import held_out
from treeopt.pipeline.entrants import Entrant, plain_and_chosen, rivals
from treeopt.records.benchmark import AS_IT_COMES, FEWEST_LAUNCHES, IDLE, Benchmark
from treeopt.records.estimate import Estimate
from treeopt.records.plan import PlanEntry
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.verdict import PUBLISHED
from treeopt.runtime.engines import open_stepper
from treeopt.runtime.session import Session, open_session
from treeopt.runtime.stepper import Stepper
from treeopt.trees.draft import DDTree, Draft, DynamicTree
from treeopt.trees.published import published_tree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

CALIBRATION, HELD_OUT, TOKENS, SECONDS, BAR = 256, 240, 48, 420, 0.03
# What a user might try: 12 settings, beside the engine's defaults, the chain of 5.
CHAINS = (1, 2, 3, 4, 6)
TREE_ROWS = (6, 10, 16, 24)
LAUNCHED_CHAINS = range(1, 9)  # of an engine whose length changes while it runs
TREES = ((2, 2, 5), (2, 4, 9), (3, 2, 7), (3, 4, 11), (4, 2, 9), (4, 4, 16), (5, 8, 24))
TITLE = (
    "setting | tokens/step predicted | replayed | measured | off % | step cost predicted | measured | speedup predicted | measured "
    "| off % | same text"
)


@dataclass(frozen=True)
class Case:
    """A drafter, the engine that decodes (None: treeopt), and a batch size."""

    run: RunDirectory
    session: Session
    engine: Stepper | None
    batch_size: int
    seconds: int

    @property
    def name(self) -> str:
        return "treeopt" if self.engine is None else self.engine.name

    @property
    def takes_trees(self) -> bool:
        return self.engine is None or (self.engine.takes_trees and self.batch_size == 1)

    def measured(self) -> RunDirectory:
        """The run with a profile of this engine and batch size, and the plan on it."""
        own = RunDirectory(self.run.path / f"{self.name}-{self.batch_size}")
        own.path.mkdir(parents=True, exist_ok=True)
        for file in (self.run.trace, self.run.calibration):
            place = own.path / file.name
            if not place.exists():
                place.hardlink_to(file)
        sizes = {"batch_sizes": (self.batch_size,), "time_limit_s": self.seconds}
        if not own.profile.exists():
            engine = {} if self.engine is None else {"engine": self.engine.name, "budget": 32}
            if self.engine is not None:
                self.engine.renew()  # what it launched takes memory from that of the profile
            pipeline.profile(own, self.session, **engine, **sizes)
        planned_for = None if self.engine is None else self.engine.name.split("-")[0]
        pipeline.search(own, batch_sizes=(self.batch_size,), engine=planned_for)
        return own

    def entrants(self, entry: PlanEntry, trace: RankTrace) -> dict[str, Entrant]:
        """Plain decoding, what was planned, and what a user might try."""
        found = {**plain_and_chosen(entry)}
        found |= {name: one for name, one in rivals(entry).items() if self.engine is None or name == "dynamic"}
        if self.engine is None:
            found[PUBLISHED] = Entrant(published_tree().cut(max_depth=self.session.drafter.num_heads))
            return found | (block_sweep(trace, found) if self.session.drafter.has_marginals else {})
        if twin := AS_IT_COMES if self.engine.as_it_comes else IDLE if self.engine.idle else None:
            found[twin] = replace(found["plain"], as_it_comes=True)
        lengths = LAUNCHED_CHAINS if self.engine.is_launched else CHAINS
        tried: list[Draft] = [Tree.chain(n) for n in lengths if n <= trace.num_heads]
        tried += [DynamicTree(*setting) for setting in TREES] if self.takes_trees else []
        known = {one.draft for one in found.values()}
        for tree in tried:
            if tree not in known:
                found[tree.name] = Entrant(tree, rate(trace, tree))
        return found


def rate(trace: RankTrace, tree: Draft) -> Estimate | None:
    """Tokens per step on the calibration's prompts."""
    return Estimate(replay(trace, tree).tokens_per_step) if tells(trace, tree) else None


def block_sweep(trace: RankTrace, known: Mapping[str, Entrant]) -> dict[str, Entrant]:
    """Chains, grown trees and trees over marginals that a user of a block drafter might try: 12, but those that are known."""
    deepest = trace.num_heads
    grown = grow(trace, Limits(max(TREE_ROWS), deepest))
    tried: list[Draft] = [Tree.chain(n) for n in CHAINS if n <= deepest]
    tried += [grown.tree(rows) for rows in TREE_ROWS] + [DDTree(deepest, 4, rows) for rows in TREE_ROWS]
    drafts = {one.draft for one in known.values()}
    return {
        one.name if one.kind == "ddtree" else f"{one.kind} {len(one)}": Entrant(one, rate(trace, one))
        for one in tried
        if one not in drafts
    }


def costs(profile: LatencyProfile, entry: PlanEntry, trees: Mapping[str, Draft]) -> dict[str, float]:
    """Step latency over a plain step's, the plan's own or by the profile at its context; NaN where it knows none."""
    costs = StepCosts(profile, entry.batch_size, entry.context_tokens)
    found = {name: float(costs.ms([tree.cost])[0]) / costs.plain.ms for name, tree in trees.items()}
    planned = {"chosen": entry.chosen, **entry.others}
    found |= {
        name: planned[name].step_ms / costs.plain.ms for name in found if name in planned and planned[name].step_ms
    }
    if costs.twin:
        found[IDLE if costs.is_idle else AS_IT_COMES] = costs.twin.ms / costs.plain.ms
    return found


def lines(result: Benchmark, entrants: Mapping[str, Entrant], overheads: Mapping[str, float]) -> Iterator[str]:
    """A row for each contender, what the planned setting loses against the best of all, and how far step costs are off."""
    off: dict[str, float] = {}
    for name, entrant in entrants.items():
        c, planned = result.contender(name), entrant.predicted
        if name == "plain":
            continue
        measured, speedup = result.overhead(name, "plain"), result.speedup(name)
        cost = overheads[name] if overheads[name] == overheads[name] else None
        if cost is not None and measured is not None:
            off[name] = cost / measured.value - 1
        expected = (
            None if planned is None or cost is None else planned / cost * min(1.0, overheads.get(AS_IT_COMES, 1.0))
        )
        replayed = "–" if c.replayed_tokens_per_step is None else f"{c.replayed_tokens_per_step:.3f}"
        setting = entrant.draft.name if len(entrant.draft) > 1 else "no guesses"
        title = name if setting in name else f"{name} ({setting})"
        cells = (
            title,
            "–" if planned is None else f"{planned:.3f}",
            replayed,
            f"{c.tokens_per_step:.3f} ± {c.rate_of().stderr or 0:.3f}"
            + (f" (stopped after {c.compared})" if c.stopped else ""),
            "–" if planned is None else f"{100 * (planned / c.tokens_per_step - 1):+.1f}",
            "–" if cost is None else f"{cost:.3f}",
            measured
            if measured is None or measured.low is None
            else f"{measured.value:.3f} [{measured.low:.3f}, {measured.high:.3f}]",
            "–" if expected is None else f"{expected:.2f}",
            speedup,
            "–" if expected is None or speedup is None else f"{100 * (expected / speedup.value - 1):+.1f}",
            f"{c.identical}/{c.compared}",
        )
        yield "| " + " | ".join(map(str, cells)) + " |"
    speeds = {name: found.value for name in entrants if (found := result.speedup(name)) is not None}
    planned = max(
        (name for name in ("chosen", "dynamic") if name in speeds),
        key=lambda name: entrants_rate(entrants, overheads, name),
    )
    best = max(speeds, key=lambda name: speeds[name])
    yield f"\nPlanned: {planned}, {speeds[planned]:.3f} times plain decoding; the fastest of all is {best}, {speeds[best]:.3f}: regret {1 - speeds[planned] / speeds[best]:.1%}.\n"
    worst = max(off, key=lambda name: abs(off[name]))
    within = sum(abs(error) <= BAR for error in off.values())
    yield f"Predicted step costs: {within} of {len(off)} within {BAR:.0%} of the measured ones, the worst {worst}, {off[worst]:+.1%}.\n"


def entrants_rate(entrants: Mapping[str, Entrant], overheads: Mapping[str, float], name: str) -> float:
    return (entrants[name].predicted or 0.0) / overheads[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompts", nargs="?")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--engine")
    parser.add_argument("--engine-python")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--held-out", type=int, default=HELD_OUT)
    parser.add_argument("--calibrate", type=int, default=CALIBRATION)
    parser.add_argument("--least-tokens", type=int, default=0)
    parser.add_argument("--most-tokens", type=float, default=inf)
    parser.add_argument("--seconds", type=int, default=SECONDS, help="for timing steps")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    source = {"model": asked.model, "drafter": asked.drafter, "prompts": asked.prompts, "dtype": asked.dtype}
    session = open_session(source | {"engine_python": asked.engine_python})
    some = [c for c in session.prompts.conversations if asked.least_tokens <= len(c.first) <= asked.most_tokens]
    session = replace(session, prompts=replace(session.prompts, conversations=tuple(some)))
    lengths = (asked.least_tokens, asked.most_tokens)
    kind = "" if lengths == (0, inf) else f"-{lengths[0]}-to-{lengths[1]:g}-tokens"
    run = RunDirectory(asked.folder / (Path(asked.drafter).name.replace(":", "-") + kind))
    run.path.mkdir(parents=True, exist_ok=True)
    if not run.trace.exists():
        pipeline.calibrate(run, session, num_prompts=asked.calibrate, max_new_tokens=TOKENS)
    engine = None if asked.engine is None else open_stepper(asked.engine, session.setup(TOKENS), asked.engine_python)
    case = Case(run, session, engine, asked.batch_size, asked.seconds)
    own, trace = case.measured(), run.read_trace()
    plan, profile = own.read_plan(), own.read_profile()
    entrants = case.entrants(plan.entry(asked.batch_size), trace)
    decoding = Decoding(
        session,
        trace,
        {name: replace(one, is_replayable=engine is None or not engine.about) for name, one in entrants.items()},
        batch_size=asked.batch_size,
        rounds=FEWEST_LAUNCHES if engine and engine.is_launched else 1,
        max_new_tokens=TOKENS,
        folder=own.path / "decoded.partial",
        engine=engine,
    )
    result = decode(decoding, held_out(own, decoding.session, trace, asked.held_out))
    version = "" if engine is None else f" {engine.version}"
    print(
        f"\n{asked.model}, {asked.drafter}, {asked.dtype}, {case.name}{version}, batch size {asked.batch_size}, one thread, {machine()}.\n"
    )
    print(f"| {TITLE} |\n|" + "---|" * (1 + TITLE.count("|")))
    overheads = costs(profile, plan.entry(asked.batch_size), {name: one.draft for name, one in entrants.items()})
    print("\n".join(lines(result, entrants, overheads)), flush=True)


if __name__ == "__main__":
    main()
