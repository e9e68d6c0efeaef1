"""What is decided from parts of public benchmark tables, against the whole tables: `python benchmarks/sweeps.py FOLDER`.

FOLDER has CSV files in the long form: table, model, drafter, dataset, k (0: off; "adaptive<=N": the engine chooses),
concurrency, tokens_per_s, tokens_per_step, repeats, note. Rows of a cell are its repeats. ``--write PAGE`` writes the page.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from treeopt.arms.arm import OFF, Arm
from treeopt.arms.decide import Decision, decide
from treeopt.arms.model import Floats, Posterior, figure_variance, posterior_of
from treeopt.records.estimate import Z95

DRAWS = 10  # of the arms that are left
LEAST_ARMS = 4  # of a cell of which some are left out


def arms_of(file: Path) -> list[Arm]:
    rows = defaultdict(list)
    for row in csv.DictReader(file.open(encoding="utf-8")):
        if row["tokens_per_s"] and row["k"]:
            rows[row["model"], row["dataset"], row["drafter"], row["k"], int(row["concurrency"])].append(row)
    return [_arm(key, same) for key, same in rows.items()]


def _arm(key: tuple[str, str, str, str, int], rows: list[dict[str, str]]) -> Arm:
    model, dataset, drafter, length, concurrency = key
    k = int(length) if length.isdigit() else None
    tokens = [float(row["tokens_per_step"]) for row in rows if row["tokens_per_step"]]
    logs, note = np.log([float(row["tokens_per_s"]) for row in rows]), rows[0]["note"]
    return Arm(
        model=model,
        dataset=dataset,
        drafter=OFF if k == 0 else drafter if k else f"{drafter} {length}",
        k=k,
        concurrency=concurrency,
        tokens_per_s=float(np.exp(logs.mean())),
        unit="ratio" if "RELATIVE" in note else "request" if "per request" in note else "all",
        tokens_per_step=float(np.mean(tokens)) if tokens else None,
        repeats=sum(int(row["repeats"] or 1) for row in rows),
    )


class Table:
    """The arms of one model in one file: what is known of them (log tokens per second, as the posterior has them), and cells."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.arms = tuple(arms)
        self.truth: Floats = np.array(
            [np.log((arm.tokens_per_s or 1) * (arm.concurrency if arm.unit == "request" else 1)) for arm in arms]
        )
        places = defaultdict(list)
        for i, arm in enumerate(arms):
            places[arm.cell].append(i)
        self.cells = list(places.values())
        self.large = [cell for cell in self.cells if len(cell) >= LEAST_ARMS]

    def without(self, gone: set[int]) -> Posterior:
        """What is known where the arms ``gone`` were not run."""
        return posterior_of(
            [
                replace(arm, tokens_per_s=None, tokens_per_step=None) if i in gone else arm
                for i, arm in enumerate(self.arms)
            ]
        )

    def loss(self, cell: Sequence[int], i: int) -> float:
        """Of arm i against the fastest of its cell, as a share."""
        return float(-np.expm1(self.truth[i] - max(self.truth[cell])))


def decided(posterior: Posterior, cell: Sequence[int]) -> Decision:
    decision = decide(posterior, cell)
    assert decision is not None
    return decision


def runs(table: Table, gone: set[int], count: int) -> list[float]:
    """Losses in the large cells after ``count`` runs in each that are named one after the other."""
    for _ in range(count):
        part = table.without(gone)
        named = [decided(part, cell).next_run for cell in table.large]
        gone = gone - {following.arm for following in named if following}
    part = table.without(gone)
    return [table.loss(cell, decided(part, cell).chosen) for cell in table.large]


def halves(table: Table, rng: np.random.Generator, losses: dict[str, list[float]]) -> None:
    """Half of the arms of each large cell are left out."""
    gone = {i for cell in table.large for i in rng.permutation(cell)[: len(cell) // 2].tolist()}
    part = table.without(gone)
    for cell in table.large:
        decision = decided(part, cell)
        left = [i for i in cell if i not in gone]
        losses["Half of the arms, against the best of them"].append(table.loss(left, decision.chosen))
        predicted = decision.predicted
        losses["Half of the arms, the predicted one where it is named"].append(
            table.loss(cell, predicted.arm if predicted else decision.chosen)
        )
    losses["Half of the arms, then the named run"] += runs(table, gone, 1)


def pairs(table: Table, rng: np.random.Generator, losses: dict[str, list[float]]) -> None:
    """All but one arm and off (another one where there is no off) of each large cell are left out."""
    gone: set[int] = set()
    for cell in table.large:
        order = sorted(rng.permutation(cell).tolist(), key=lambda i: table.arms[i].k != 0)
        gone |= set(order[2:])
    for count, name in ((1, "the named run"), (2, "two named runs")):
        losses[f"Off and one arm, then {name}"] += runs(table, gone, count)


def left_out(table: Table) -> Iterator[tuple[str, set[int]]]:
    """What is predicted from all the others, by kind."""
    arms = table.arms
    for cell in table.cells:
        for i in cell:
            if len(cell) > 1 and arms[i].k != 0:
                yield "one cell", {i}
    lengths = defaultdict(set)
    for arm in arms:
        if arm.k:
            lengths[arm.drafter].add(arm.k)
    for drafter, ks in lengths.items():
        for k in sorted(ks) if len(ks) > 1 else ():
            kind = "a length inside" if min(ks) < k < max(ks) else "a length outside"
            yield kind, {i for i, arm in enumerate(arms) if arm.setting == (drafter, k)}
    for dataset in dict.fromkeys(arm.dataset for arm in arms):
        for concurrency in sorted({arm.concurrency for arm in arms if arm.dataset == dataset})[1:-1]:
            gone = {i for i, arm in enumerate(arms) if (arm.dataset, arm.concurrency) == (dataset, concurrency)}
            yield "a concurrency inside", gone


def coverage(table: Table, errors: dict[str, list[tuple[float, float]]]) -> None:
    """Errors of log tokens per second of what is left out, and half of their 95 % intervals."""
    for kind, gone in left_out(table):
        part = table.without(gone)
        for i in gone:
            half = Z95 * float(np.sqrt(part.covariance[i, i] + figure_variance(table.arms[i], part.launch[i])))
            errors[kind].append((abs(part.mean[i] - table.truth[i]), half))


def page(folder: Path) -> Iterator[str]:
    losses: dict[str, list[float]] = defaultdict(list)
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    rng, start, tables = np.random.default_rng(0), time.monotonic(), 0
    for file in sorted(folder.glob("*.csv")):
        arms = arms_of(file)
        tables += 1
        for model in dict.fromkeys(arm.model for arm in arms):
            table = Table([arm for arm in arms if arm.model == model])
            whole = table.without(set())
            losses["Whole table"] += [table.loss(cell, decided(whole, cell).chosen) for cell in table.cells]
            for _ in range(DRAWS if table.large else 0):
                halves(table, rng, losses)
                pairs(table, rng, losses)
            coverage(table, errors)
    yield f"{tables} tables, {time.monotonic() - start:.0f} seconds\n"
    yield "| decided by | cells | mean loss [%] | worst | within 3 % [%] | above 10 % [%] |"
    yield "|---|---|---|---|---|---|"
    for name, values in losses.items():
        loss = 100 * np.array(values)
        near, far = 100 * (loss <= 3).mean(), 100 * (loss > 10).mean()
        yield f"| {name} | {len(loss)} | {loss.mean():.2f} | {loss.max():.1f} | {near:.0f} | {far:.1f} |"
    yield "\n| left out | figures | median error [%] | 95 % intervals hold [%] | median half width [%] |"
    yield "|---|---|---|---|---|"
    for name, figures in {**errors, "all": [figure for kind in errors.values() for figure in kind]}.items():
        error, half = np.array(figures).T
        held = 100 * (error <= half).mean()
        yield f"| {name} | {len(error)} | {100 * np.median(error):.1f} | {held:.0f} | {100 * np.median(half):.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for line in page(parser.parse_args().folder):
        print(line)


if __name__ == "__main__":
    main()
