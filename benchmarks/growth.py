"""Trees grown by two checkouts, judged on other conversations: `python benchmarks/growth.py --other CHECKOUT TRACE...`.

Each trace is divided at random, several times: both grow on 128 of its conversations, and the trees are replayed on all
others. Losses are shares of the other's tokens per step, with the error over conversations that were judged on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from treeopt.growth.replay import replay
from treeopt.records.bootstrap import conversation_draws, stderr
from treeopt.records.trace import RankTrace
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

SIZES = (4, 6, 8, 12, 16, 24, 32, 48, 64)


def grown_trees(trace: RankTrace) -> list[list[list[int]]]:
    """The nodes of the tree of each of `SIZES`, or of the largest that there is."""
    try:
        from treeopt.growth.grow import grow
    except ImportError:  # a checkout that has several objectives
        from treeopt.growth.objectives import grow as grow_by  # type: ignore[import-not-found]

        family = grow_by(trace, Limits(max(SIZES)), objective="replay")
    else:
        family = grow(trace, Limits(max(SIZES)))
    return [[list(choice) for choice in family.tree(min(size, len(family))).choices] for size in SIZES]


def grown_by(checkout: Path, traces: Sequence[Path]) -> list[list[Tree]]:
    """The trees that a checkout grows on each of some traces."""
    command = [sys.executable, str(Path(__file__).resolve()), "--grow", *map(str, traces)]
    found = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(checkout)}, check=True, stdout=subprocess.PIPE, text=True
    )
    return [[Tree.from_choices(choices) for choices in trees] for trees in json.loads(found.stdout)]


def steps_of(trace: RankTrace, trees: Sequence[Tree]) -> np.ndarray:
    """(sizes, S) replayed steps of every sequence."""
    return np.stack([replay(trace, tree).steps for tree in trees])


def compare(name: str, trace: RankTrace, other: Path, grow_on: int, draws: int) -> np.ndarray:
    """(sizes, 2) losses of this checkout's trees [%] and their errors, of which a line is printed."""
    rng, judged = np.random.default_rng(0), []
    with tempfile.TemporaryDirectory() as folder:
        files, rest = [Path(folder, f"{i}.npz") for i in range(draws)], []
        for file in files:
            order = rng.permutation(trace.num_conversations)
            is_grown_on = np.isin(trace.clusters, order[:grow_on])
            part = trace.select(np.flatnonzero(is_grown_on))
            RankTrace(part.ranks, part.starts, cluster=part.cluster, meta={"top_k": part.top_k}).save(file)
            rest.append(np.flatnonzero(~is_grown_on))
        ours, theirs = (grown_by(checkout, files) for checkout in (Path(__file__).resolve().parents[1], other))
    for here, mine, others in zip(rest, ours, theirs, strict=True):
        steps = np.zeros((2, len(SIZES), trace.num_conversations))
        part = trace.select(here)
        for by_conversation, trees in zip(steps, (mine, others), strict=True):
            np.add.at(by_conversation.T, trace.clusters[here], steps_of(part, trees).T)
        judged.append(steps)
    mine, others = np.sum(judged, axis=0)  # (sizes, C) of all divisions together
    weights = conversation_draws(trace.num_conversations)
    rows = []
    for size in range(len(SIZES)):
        drawn = 1 - (weights @ others[size]) / (weights @ mine[size])
        loss = 1 - others[size].sum() / mine[size].sum()
        rows.append((100 * loss, 100 * stderr(drawn, trace.num_conversations)))
    losses = np.array(rows)
    cells = " | ".join(f"{loss:+.2f} ±{error:.2f}" for loss, error in rows)
    judged_on = trace.num_conversations - grow_on
    print(f"| {name} ({judged_on} judged) | {cells} | {losses[:, 0].mean():+.3f} |", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", help="trace.npz files; a folder's name is the drafter's")
    parser.add_argument("--other", type=Path, help="root of the checkout to compare with")
    parser.add_argument("--grow-on", type=int, default=128, help="conversations")
    parser.add_argument("--draws", type=int, default=4, help="divisions of each trace")
    parser.add_argument("--grow", action="store_true", help="print the trees that are grown on the traces, as JSON")
    options = parser.parse_args()
    if options.grow:
        print(json.dumps([grown_trees(RankTrace.load(file)) for file in options.traces]))
        return
    print("| loss [%] at rows | " + " | ".join(map(str, SIZES)) + " | mean |\n|" + "---|" * (len(SIZES) + 2))
    found = [
        compare(file.parent.name, RankTrace.load(file), options.other, options.grow_on, options.draws)
        for file in options.traces
    ]
    losses = np.stack(found)
    worst = losses[..., 0].argmax()
    loss, error = losses.reshape(-1, 2)[worst]
    print(
        f"mean loss {losses[..., 0].mean():+.3f} % (bar 0.1), worst size {loss:+.2f} ±{error:.2f} % (bar 0.5 + error)"
    )


if __name__ == "__main__":
    main()
