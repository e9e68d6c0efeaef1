"""How well arms that were not run are told from those that were, on tables: `python benchmarks/sweeps.py FOLDER`.

FOLDER has CSV files in the long form (table, model, drafter, dataset, k, concurrency, tokens_per_s, tokens_per_step, repeats,
note). Rows of a cell are its repeats.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from treeopt.arms.arm import OFF, Arm
from treeopt.arms.decide import decide
from treeopt.arms.model import posterior_of

DRAWS = 10  # halves of each cell


def arms_of(file: Path) -> list[Arm]:
    rows = defaultdict(list)
    for row in csv.DictReader(file.open(encoding="utf-8")):
        if not row["tokens_per_s"] or not row["k"]:
            continue
        adaptive = row["k"].startswith("adaptive")
        k = None if adaptive else int(row["k"])
        drafter = f"{row['drafter']} adaptive" if adaptive else OFF if k == 0 else row["drafter"]
        rows[row["model"], row["dataset"], drafter, k, int(row["concurrency"])].append(row)
    arms = []
    for (model, dataset, drafter, k, concurrency), same in rows.items():
        logs = np.log([float(row["tokens_per_s"]) for row in same])
        steps = [float(row["tokens_per_step"]) for row in same if row["tokens_per_step"]]
        arms.append(
            Arm(
                model=model, dataset=dataset, drafter=drafter, k=k, concurrency=concurrency,
                tokens_per_s=float(np.exp(logs.mean())),
                tokens_per_step=float(np.mean(steps)) if steps else None,
                repeats=sum(int(row["repeats"] or 1) for row in same),
                is_ratio="RELATIVE" in same[0]["note"],
            )
        )  # fmt: skip
    return arms


def cells_of(arms):
    cells = defaultdict(list)
    for i, arm in enumerate(arms):
        cells[arm.cell].append(i)
    return cells


def hidden(arms, places):
    return [replace(arm, tokens_per_s=None, tokens_per_step=None) if i in places else arm for i, arm in enumerate(arms)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    rng = np.random.default_rng(0)
    whole, half, named, after, pairs = [], [], [], [], []
    cover = defaultdict(list)
    for file in sorted(folder.glob("*.csv")):
        every = arms_of(file)
        for model in dict.fromkeys(arm.model for arm in every):
            arms = [arm for arm in every if arm.model == model]
            truth = np.log([arm.tokens_per_s for arm in arms])
            cells = cells_of(arms)
            full = posterior_of(arms)
            for places in cells.values():
                whole.append(max(truth[places]) - truth[decide(full, places).chosen])
            large = {cell: places for cell, places in cells.items() if len(places) >= 4}
            for _ in range(DRAWS if large else 0):
                gone = {i for places in large.values() for i in rng.permutation(places)[: len(places) // 2].tolist()}
                part = posterior_of(hidden(arms, gone))
                for places in large.values():
                    best = max(truth[places])
                    d = decide(part, places)
                    half.append(max(truth[i] for i in places if i not in gone) - truth[d.chosen])
                    taken = d.predicted[0] if d.predicted and d.predicted[1] > 0.5 else d.chosen
                    named.append(best - truth[taken])
                    i = next((i for i in places if d.next_run and part.arms[i].setting == d.next_run.arm.setting), None)
                    if i is None:
                        after.append(best - truth[d.chosen])
                    else:
                        again = posterior_of(hidden(arms, gone - {i}))
                        after.append(best - truth[decide(again, places).chosen])
            # left out: one cell, a length inside or outside, a concurrency inside
            for kind, gone in left_out(arms):
                part = posterior_of(hidden(arms, gone))
                for i in gone:
                    sd = np.sqrt(part.covariance[i, i] + part.launch[i])
                    cover[kind].append((abs(part.mean[i] - truth[i]), sd))
    def say(name, values, far):
        values = np.array(values)
        print(f"{name}: n {len(values)}, mean {100 * values.mean():.2f} %, worst {100 * values.max():.1f} %, above {far} %: {100 * (values > far / 100).mean():.1f} %")
    say("whole", whole, 6); say("half", half, 10); say("predicted", named, 10); say("next run", after, 3)
    for kind, values in cover.items():
        errors, sds = np.array(values).T
        print(f"{kind}: n {len(errors)}, median error {100 * np.median(errors):.1f} %, covers {100 * (errors < 1.96 * sds).mean():.0f} %, half width {100 * np.median(1.96 * sds):.0f} %")


def left_out(arms):
    for i, arm in enumerate(arms):
        others = [a for a in arms if a.cell == arm.cell and a is not arm]
        if others and arm.k != 0:
            yield "one cell", {i}
    for drafter in {a.drafter for a in arms if a.k}:
        ks = sorted({a.k for a in arms if a.drafter == drafter and a.k})
        for k in ks if len(ks) > 1 else ():
            kind = "length inside" if ks[0] < k < ks[-1] else "length outside"
            yield kind, {i for i, a in enumerate(arms) if (a.drafter, a.k) == (drafter, k)}
    for dataset in {a.dataset for a in arms}:
        cs = sorted({a.concurrency for a in arms if a.dataset == dataset})
        for c in cs[1:-1]:
            yield "concurrency inside", {i for i, a in enumerate(arms) if (a.dataset, a.concurrency) == (dataset, c)}


if __name__ == "__main__":
    main()
