"""Predicted against measured, on the demo model: `python benchmarks/predictions.py [DTYPE]`.

The whole line at batch sizes 1 and 4. Tokens per step are predicted from the calibration's prompts, cross-
fitted where the tree was grown on them, and measured by decoding others; the overhead of a step is
predicted from the profile and measured in the benchmark, interleaved with plain steps in both.
"""

from __future__ import annotations

import sys
import tempfile

import numpy as np

from treeopt import pipeline
from treeopt.files.provenance import machine
from treeopt.latency.costs import StepCosts
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import RunDirectory
from treeopt.runtime.session import open_session
from treeopt.trees.draft import Draft

BATCH_SIZES = (1, 4)
CALIBRATION, HELD_OUT, SECONDS = 640, 120, 150


def predicted_overhead(profile: LatencyProfile, batch_size: int, tree: Draft) -> float | None:
    """Latency of a step with the tree over a plain one, by the profile; None where it does not say."""
    costs = StepCosts(profile, batch_size)
    ms = float(costs.ms([tree.cost])[0])
    return None if np.isnan(ms) else ms / costs.plain.ms


def main() -> None:
    dtype = sys.argv[1] if len(sys.argv) > 1 else "bfloat16"
    session = open_session({"dtype": dtype})
    run = RunDirectory(tempfile.mkdtemp(prefix="treeopt-predictions-"))
    pipeline.calibrate(run, session, num_prompts=CALIBRATION, max_new_tokens=128)
    pipeline.profile(run, session, batch_sizes=BATCH_SIZES, time_limit_s=SECONDS)
    plan = pipeline.search(run, batch_sizes=BATCH_SIZES)
    print(f"Demo model, {dtype}, {CALIBRATION} prompts calibrated on, {HELD_OUT} others decoded, {machine()}.\n")
    print(
        "| batch | contender | rows | predicted | measured | difference % | in standard errors "
        "| overhead predicted | measured | off by % |\n|" + "---|" * 10
    )
    differences, errors, overheads = [], [], []
    for entry in plan.entries:
        bench = pipeline.bench(run, session, batch_size=entry.batch_size, num_prompts=HELD_OUT, rounds=1)
        for c in bench.contenders:
            if c.size == 1 or c.name == "plain":
                continue
            predicted, error, rate = c.predicted.tokens_per_step, c.predicted.stderr, c.rate_of()
            assert predicted is not None
            assert error is not None
            assert rate.stderr is not None
            difference = 100 * (predicted / rate - 1)
            in_errors = (predicted - rate) / float(np.hypot(error, rate.stderr))
            ratio = bench.overhead(c.name)
            expected = predicted_overhead(run.read_profile(), entry.batch_size, c.draft)
            off = None if ratio is None or expected is None else 100 * (expected / ratio.value - 1)
            differences.append(abs(difference))
            errors.append(abs(in_errors))
            overheads += [] if off is None else [abs(off)]
            print(
                f"| {entry.batch_size} | {c.name} | {c.size} "
                f"| {predicted:.3f} ± {error:.3f} | {rate:.3f} ± {rate.stderr:.3f} | {difference:+.1f} "
                f"| {in_errors:+.1f} | {'–' if expected is None else f'{expected:.3f}'} "
                f"| {'–' if ratio is None else ratio} | {'–' if off is None else f'{off:+.1f}'} |",
                flush=True,
            )
    print(
        f"\nTokens per step: {np.mean(differences):.2f} % off on average (bar 2 %), at most {max(errors):.1f} standard "
        f"errors (bar 3). Overhead: {np.mean(overheads):.1f} % off on average, at most {max(overheads):.1f} % (bar 5 %)."
    )


if __name__ == "__main__":
    main()
