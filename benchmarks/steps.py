"""Predicted steps of many short profiles against all others together: `python benchmarks/steps.py FOLDER [--profiles 30]`.

The demo model, calibrated once. Every profile of 60 s chooses a draft; the step that it predicts for it is compared with what
all other profiles together say, whose noise is that of one over the root of their number. Profiles that are in the folder stay.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from treeopt import pipeline
from treeopt.files.provenance import machine
from treeopt.latency.costs import StepCosts
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.runtime.session import Session, open_session
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Cost

BUDGET, MANY = 64, 10**6  # rows; more rounds than one profile has


def profiled(folder: Path, session: Session, number: int, seconds: float) -> LatencyProfile:
    run = RunDirectory(folder / str(number))
    if not run.profile.exists():
        first = RunDirectory(folder / "0")
        if not first.trace.exists():
            pipeline.calibrate(first, session, num_prompts=128, max_new_tokens=128)
        run.path.mkdir(exist_ok=True)
        if number:
            run.trace.write_bytes(first.trace.read_bytes())
        pipeline.profile(run, session, batch_sizes=(1,), time_limit_s=seconds)
    return run.read_profile()


def together(profiles: list[LatencyProfile]) -> LatencyProfile:
    """All timings as of one profile, the rounds of each apart, at one context."""

    def moved(timing: StepTiming, i: int) -> StepTiming:
        return replace(timing, context_tokens=0, round=tuple(MANY * i + n for n in timing.round or ()))

    points = [moved(p, i) for i, profile in enumerate(profiles) for p in profile.points]
    plain = [moved(p, i) for i, profile in enumerate(profiles) for p in profile.autoregressive]
    return LatencyProfile(tuple(points), tuple(plain))


def ratio(costs: StepCosts, cost: Cost) -> tuple[float, float]:
    """A step over a plain one, and the standard error of its logarithm."""
    plain = Cost(cost.family, 1, 0)
    draws = costs.draws_ms([cost, plain], 2000, np.random.default_rng(0))
    return float(costs.ms([cost])[0] / costs.plain.ms), float(np.log(draws[0] / draws[1]).std())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--profiles", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--dtype", default="bfloat16")
    asked = parser.parse_args()
    asked.folder.mkdir(exist_ok=True)
    session = open_session({"dtype": asked.dtype})
    profiles = [profiled(asked.folder, session, i, asked.seconds) for i in range(asked.profiles)]
    trace = RunDirectory(asked.folder / "0").read_trace()
    print(f"Demo model, {asked.dtype}, {len(profiles)} profiles of {asked.seconds:.0f} s, {machine()}.\n")
    print(
        "| draft | speedup | step over plain predicted | by all others | off by % | in errors | rounds |\n"
        + "|---" * 7
        + "|"
    )
    off, errors = [], []
    for i, profile in enumerate(profiles):
        entry = plan_trees(trace, profile, PlanRequest(Limits(BUDGET), batch_sizes=(1,)))[1]
        draft = entry.draft if entry.speculates else entry.tree
        if len(draft) == 1:
            print(f"| plain in profile {i} |")
            continue
        others = StepCosts(together([p for j, p in enumerate(profiles) if j != i]), 1)
        mine, truth = ratio(StepCosts(profile, 1, entry.context_tokens), draft.cost), ratio(others, draft.cost)
        off.append(float(np.log(mine[0] / truth[0])))
        errors.append(off[-1] / float(np.hypot(mine[1], truth[1])))
        rounds = max(len(set(p.round or ())) for p in profile.points)
        print(
            f"| {draft.name} | {entry.chosen.speedup:.3f} | {mine[0]:.3f} ±{mine[0] * mine[1]:.3f} | {truth[0]:.3f} "
            f"±{truth[0] * truth[1]:.3f} | {100 * off[-1]:+.2f} | {errors[-1]:+.2f} | {rounds} |"
        )
    print(
        f"\nMean {100 * np.mean(off):+.2f} %, rms {100 * np.mean(np.square(off)) ** 0.5:.2f} %; "
        f"{sum(abs(e) < 1.96 for e in errors)} of {len(errors)} within 1.96 standard errors."
    )


if __name__ == "__main__":
    main()
