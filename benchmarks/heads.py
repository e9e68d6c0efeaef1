"""Medusa-1 and Hydra heads on the demo model: `python benchmarks/heads.py train`, then `... compare`.

train    four heads of every kind, from the same answers of the model itself and for the same number of tokens
compare  their accuracies, tokens per step with the best trees of some sizes and at their own best tree, tokens per second
         at batch sizes 1, 2, 4 and 8, and how many of the heads pay. Both go on where they were stopped; run `compare` on a quiet machine.

Everything lies in --work; the figures of a comparison in --work/heads.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from treeopt import pipeline
from treeopt.files.provenance import machine
from treeopt.growth.source import TraceSource
from treeopt.pipeline import open_session
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.benchmark import Benchmark
from treeopt.records.options import BenchOptions, CalibrateOptions, ProfileOptions, SearchOptions, Source, TrainOptions
from treeopt.records.rundir import RunDirectory
from treeopt.runtime.training.recipe import KINDS, Recipe
from treeopt.trees.shapes import Limits

BATCH_SIZES = (1, 2, 4, 8)
HEADS, DTYPE = 4, "float32"
SIZES = (8, 16, 32, 64)


def train(work: Path, steps: int, num_prompts: int) -> None:
    """Train what is not trained yet."""
    for kind in KINDS:
        if not (work / kind / "training" / "training.json").exists():
            recipe = Recipe(kind=kind, num_heads=HEADS, steps=steps)
            pipeline.train(work / kind, Source(), recipe, TrainOptions(num_prompts, 128, answers=work / "answers"))


def compare(work: Path, kind: str, time_limit_s: float, num_prompts: int) -> dict[str, Any]:
    """The figures of a kind; measured steps are kept in its run directory."""
    run, session = RunDirectory(work / "runs" / kind), open_session(Source(drafter=str(work / kind), dtype=DTYPE))
    with run.writing():
        if not run.trace.exists():
            pipeline.calibrate(run, session, CalibrateOptions(num_prompts=num_prompts))
        if not run.profile.exists():
            pipeline.profile(run, session, ProfileOptions(batch_sizes=BATCH_SIZES, time_limit_s=time_limit_s))
        plan = pipeline.search(run, SearchOptions(batch_sizes=BATCH_SIZES))
        calibration, profile, trace = run.read_calibration(), run.read_profile(), run.read_trace()
        by_depth = [
            plan_trees(trace, profile, PlanRequest(Limits(max_depth=depth), batch_sizes=(1,))).entries[0]
            for depth in range(1, HEADS + 1)
        ]
        at_sizes = TraceSource(trace).crossfit(Limits(max(SIZES), max_depth=HEADS, shape="sibling-closed"))
        measured = []
        for entry in plan.entries:
            file = run.bench_of(entry.batch_size)
            if not file.exists():
                pipeline.bench(run, session, BenchOptions(batch_size=entry.batch_size))
            result = Benchmark.load(file)
            chosen, plain = result.contender("chosen"), result.contender("plain")
            measured.append(
                {
                    "batch_size": entry.batch_size,
                    "size": chosen.size,
                    "depth": chosen.depth,
                    "tokens_per_step": chosen.tokens_per_step,
                    "predicted": entry.chosen.tokens_per_step,
                    "tokens_per_s": chosen.tokens_per_s,
                    "plain_tokens_per_s": plain.tokens_per_s,
                }
            )
    training = json.loads((work / kind / "training" / "training.json").read_text(encoding="utf-8"))
    return {
        "kind": kind,
        "top1": calibration.accept[:, 0].tolist(),
        "top1_stderr": calibration.stderr[:, 0].tolist(),
        "training_steps": training["steps"],
        "training_s": training["seconds"],
        "tokens_per_step_at": [at_sizes.rates(size).tokens_per_step for size in SIZES],
        "measured": measured,
        "speedup_by_heads": [entry.chosen.speedup for entry in by_depth],
    }


def tables(rows: list[dict[str, Any]]) -> str:
    """Markdown, as benchmarks/README.md has it."""
    heads = [f"head {k}" for k in range(1, HEADS + 1)]
    lines = ["| heads | training | " + " | ".join(heads) + " |", "|---" * (2 + HEADS) + "|"]
    for row in rows:
        cells = [f"{rate:.3f} ± {error:.3f}" for rate, error in zip(row["top1"], row["top1_stderr"], strict=True)]
        lines.append(
            f"| {row['kind']} | {row['training_steps']} steps, {row['training_s'] / 60:.0f} min | "
            + " | ".join(cells)
            + " |"
        )
    lines += [
        "",
        "| tokens/step, held out | " + " | ".join(f"{size} rows" for size in SIZES) + " |",
        "|---" * (1 + len(SIZES)) + "|",
    ]
    for row in rows:
        lines.append(f"| {row['kind']} | " + " | ".join(f"{x:.2f}" for x in row["tokens_per_step_at"]) + " |")
    lines += [
        "",
        "| heads | " + " | ".join(f"batch {b}" for b in BATCH_SIZES) + " |",
        "|---" * (1 + len(BATCH_SIZES)) + "|",
    ]
    for row in rows:
        cells = [
            f"{m['size']} row{'s' * (m['size'] > 1)}: {m['tokens_per_step']:.2f} tokens/step, {m['tokens_per_s']:.0f} tokens/s "
            f"({m['tokens_per_s'] / m['plain_tokens_per_s']:.2f}x)"
            for m in row["measured"]
        ]
        lines.append(f"| {row['kind']} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| predicted speedup with the first heads only | " + " | ".join(map(str, range(1, HEADS + 1))) + " |",
        "|---" * (1 + HEADS) + "|",
    ]
    for row in rows:
        lines.append(f"| {row['kind']} | " + " | ".join(f"{x:.2f}" for x in row["speedup_by_heads"]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("train", "compare"))
    parser.add_argument("--work", type=Path, default=Path("build/heads"))
    parser.add_argument("--steps", type=int, default=1200, help="Training steps of 8 texts, the same for all.")
    parser.add_argument("--prompts", type=int, default=4096, help="Prompts whose answers they learn from.")
    parser.add_argument("--calibrate-on", type=int, default=192, help="Prompts to compare on, besides bench's.")
    parser.add_argument("--time-limit", type=float, default=150.0, help="Seconds of timing for every kind.")
    options = parser.parse_args()
    if options.step == "train":
        train(options.work, options.steps, options.prompts)
        return
    rows = []
    for kind in KINDS:
        rows.append(compare(options.work, kind, options.time_limit, options.calibrate_on))
        (options.work / "heads.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(f"Demo model, {DTYPE}, {machine()}.\n\n{tables(rows)}")


if __name__ == "__main__":
    main()
