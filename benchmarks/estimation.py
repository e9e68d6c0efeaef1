"""Which way of growing trees is best on answers not seen: `python benchmarks/estimation.py [--books FILE]`.

Calibrates the demo model on held-out modules of the standard library, and on a book where one is given;
then for both domains and for every module with enough conversations the trees of the three objectives,
grown on four fifths of the conversations and replayed on the rest. Differences are paired: the same
resampled conversations for both objectives.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from treeopt import pipeline
from treeopt.files.provenance import machine
from treeopt.growth.heldout import HeldOut
from treeopt.growth.objectives import OBJECTIVES
from treeopt.growth.source import source_of
from treeopt.records.bootstrap import conversation_draws, drawn_rates, interval95
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.trees.shapes import Limits

SIZES = (8, 16, 32, 64, 128)
FEWEST = 40  # conversations of a group
PASSAGE, PASSAGES = 300, 320  # characters of a prompt from a book, prompts


def calibrate(folder: Path, **source: str) -> RankTrace:
    """The trace of all prompts but those that bench keeps; a finished one is read."""
    run = RunDirectory(folder)
    if not run.trace.exists():
        from treeopt.runtime.session import open_session

        pipeline.calibrate(run, open_session(source), num_prompts=10_000, max_new_tokens=128)
    return run.read_trace()


def passages(book: Path, folder: Path) -> Path:
    """Prompts from all over a book, each from the beginning of a paragraph."""
    text, file = book.read_text(encoding="utf-8"), folder / "passages.jsonl"
    step = len(text) // PASSAGES
    begins = [text.find("\n\n", i * step) + 2 for i in range(PASSAGES)]
    prompts = [text[begin : begin + PASSAGE].rsplit(" ", 1)[0] for begin in begins]
    file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts), encoding="utf-8")
    return file


def domains(folder: Path, book: Path | None) -> dict[str, RankTrace]:
    code = calibrate(folder / "code", group_by="module")
    found = {"code": code}
    if book is not None:
        found["books"] = calibrate(folder / "books", prompts=str(passages(book, folder)))
    assert code.group is not None
    for g, name in enumerate(code.group_names):
        members = np.flatnonzero(code.group == g)
        if len(members) >= FEWEST:
            found[f"code: {name}"] = code.select(members)
    return found


def compare(name: str, trace: RankTrace) -> float:
    """Print a row for each size; the least lower bound of replay against independent [%]."""
    limits = Limits(max(SIZES))
    grown = {objective: source_of(trace).crossfit(limits, objective) for objective in OBJECTIVES}
    base, n = grown["independent"], grown["independent"].conversations
    draws, worst = conversation_draws(n), np.inf
    for size in SIZES:
        cells = [f"{name} ({n})" if size == SIZES[0] else "", str(size), f"{base.tokens_per_step[at(base, size)]:.3f}"]
        for objective in ("joint", "replay"):
            ours = grown[objective]
            assert ours.steps is not None
            assert base.steps is not None
            assert ours.tokens is not None
            pair = np.stack([ours.steps[at(ours, size)], base.steps[at(base, size)]])
            rates = drawn_rates(ours.tokens, pair, draws)
            low, high = interval95(100 * (rates[0] / rates[1] - 1), n)
            value = 100 * (pair[1].sum() / pair[0].sum() - 1)
            cells.append(f"{value:+.2f} [{low:+.2f}, {high:+.2f}]")
            worst = min(worst, low) if objective == "replay" else worst
        print("| " + " | ".join(cells) + " |", flush=True)
    return worst


def at(held_out: HeldOut, size: int) -> int:
    return min(size, len(held_out.family)) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--books", type=Path, help="A text of another domain, for example a novel.")
    parser.add_argument("--run", type=Path, help="Folder to keep the traces in.")
    options = parser.parse_args()
    folder = options.run or Path(tempfile.mkdtemp(prefix="treeopt-estimation-"))
    folder.mkdir(parents=True, exist_ok=True)
    traces = domains(folder, options.books)
    print(f"Held-out tokens per step, demo model, {machine()}. Differences to `independent` in %, [95 % interval].\n")
    print("| domain (conversations) | rows | independent | joint | replay |\n|---|---|---|---|---|")
    worst = {name: compare(name, trace) for name, trace in traces.items()}
    print(
        f"\nLeast lower bound of replay against independent: {min(worst.values()):+.2f} % ({min(worst, key=worst.get)})."
    )


if __name__ == "__main__":
    main()
