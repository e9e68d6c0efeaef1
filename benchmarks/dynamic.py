"""Fixed and dynamic trees, predicted and measured, on the demo model.

`python benchmarks/dynamic.py FOLDER [--drafter NAME,...] [--batch-size N,...]`

The runs are kept in the folder, and a killed benchmark goes on there. Tokens per step are predicted from the calibration's
prompts and measured on others.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from treeopt.pipeline.decoding import Decoding, decode

from treeopt import pipeline
from treeopt.files.provenance import machine
from treeopt.pipeline.bench import held_out
from treeopt.pipeline.entrants import plain_and_chosen, rivals
from treeopt.records.benchmark import Benchmark
from treeopt.records.options import Source
from treeopt.records.plan import PlanEntry
from treeopt.records.pools import RANKS_ALONE, USUAL
from treeopt.records.rundir import RunDirectory
from treeopt.runtime.session import Session, open_session

CALIBRATION, HELD_OUT, TOKENS, SECONDS = 256, 240, 48, 60  # of each batch size
TITLE = (
    "drafter | batch | kind | levels/topk/rows | tokens/step predicted | measured | off % | overhead predicted | measured "
    "| speedup predicted | measured | over fixed predicted | measured"
)


def recorded(run: RunDirectory, session: Session) -> None:
    """The calibration, and what it costs beside one without pools."""
    seconds = {}
    for name, counts in (("ranks", RANKS_ALONE), ("pools", USUAL)):
        into = run if counts is USUAL else RunDirectory(run.path / "ranks-alone")
        into.path.mkdir(parents=True, exist_ok=True)
        if into.trace.exists():
            continue
        began = time.process_time()
        pipeline.calibrate(into, session, num_prompts=CALIBRATION, max_new_tokens=TOKENS, counts=counts)
        seconds[name] = time.process_time() - began
    if len(seconds) == 2:
        said = f"{seconds['pools']:.0f} s of processor with pools, {seconds['ranks']:.0f} s without"
        print(
            f"\n{run.path.name}: calibrated in {said}: {seconds['pools'] / seconds['ranks']:.2f} times as much (bar 2)\n"
        )


def lines(drafter: str, entry: PlanEntry, result: Benchmark) -> list[str]:
    """A row for each kind of tree."""
    found, names = [], {c.name for c in result.contenders}
    for name, figure in {"chosen": entry.chosen, "dynamic": entry.others.get("dynamic")}.items():
        if figure is None or name not in names or figure.overhead is None:
            continue
        c = result.contender(name)
        cells = (
            *(drafter, entry.batch_size, figure.draft.kind, figure.draft.name),
            f"{figure.tokens_per_step:.3f} ± {figure.tokens_per_step.stderr or 0:.3f}",
            f"{c.tokens_per_step:.3f} ± {c.rate_of().stderr or 0:.3f}" + (" (stopped)" if c.stopped else ""),
            f"{100 * (figure.tokens_per_step / c.tokens_per_step - 1):+.1f}",
            f"{figure.overhead:.2f}",
            result.overhead(name),
            f"{figure.speedup:.2f}",
            result.speedup(name),
            f"{figure.rate / entry.chosen.rate:.2f}",
            result.speedup(name, "chosen"),
        )
        found.append("| " + " | ".join(map(str, cells)) + " |")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--drafter", default="medusa,hydra,eagle3,draft")
    parser.add_argument("--batch-size", default="1,4,8")
    asked = parser.parse_args()
    folder, batch_sizes = asked.folder, tuple(map(int, asked.batch_size.split(",")))
    print(
        f"Demo model, float32, {CALIBRATION} prompts calibrated on, {HELD_OUT} others decoded, torch {torch.__version__}, {machine()}."
    )
    for drafter in asked.drafter.split(","):
        run, session = RunDirectory(folder / drafter), open_session(Source(drafter=drafter))
        recorded(run, session)
        if not run.profile.exists():
            pipeline.profile(run, session, batch_sizes=batch_sizes, time_limit_s=SECONDS * len(batch_sizes))
        plan, trace = pipeline.search(run, batch_sizes=batch_sizes), run.read_trace()
        print(f"| {TITLE} |\n|" + "---|" * (1 + TITLE.count("|")))
        for entry in plan.entries:
            decoding = Decoding(
                session,
                trace,
                plain_and_chosen(entry) | rivals(entry),
                batch_size=entry.batch_size,
                rounds=1,
                max_new_tokens=TOKENS,
                folder=run.path / f"decoded-{entry.batch_size}.partial",
            )
            result = decode(decoding, held_out(run, decoding.session, trace, HELD_OUT))
            print("\n".join(lines(drafter, entry, result)), flush=True)


if __name__ == "__main__":
    main()
