"""What is decided from parts of public benchmark tables, against the whole tables: `python benchmarks/sweeps.py FOLDER`.

FOLDER has a table in each CSV file. ``--write docs/sweeps.md`` writes the page.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
from simulated_arms import simulated

from treeopt.arms.arm import Arm
from treeopt.arms.decide import Choice, decide
from treeopt.arms.groups import apart, merged
from treeopt.arms.model import Floats, Posterior, posterior_of
from treeopt.arms.tables import read_tables
from treeopt.files.writing import write_text
from treeopt.records.estimate import Z95

DRAWS = 10  # of the arms that are left
LEAST_ARMS = 4  # of a cell of which some are left out
SOURCES = {
    "vllm-gb10-flash-next-nvfp4-mtp2-3": 'a comparison of checkpoints, "Speculative decoding: measured"',
    "gb10-nemotron-30b-mtp1-3-approximate": "a reference guide for Nemotron 3.5 Lightning, section 10.2",
    "vllm-gh200-apertus-8b-dspark-eagle31": '"Plain Apertus 1.5 8B load test: memory and capacity"',
    "vllm-ep8-qwen3-30b-eagle3-k1-8": '"Phase 57 results", arm A and stage A2',
    "vllm-ep16-qwen3-30b-eagle3-k0-3": '"Phase 57 results", stages 2 and A2',
    "vllm-h100nvl-qwen38-27b-mtp7-dflash7": "a report on MTP and DFlash 2 in Chinese, September 2026",
    "sglang-2xa100-qwen36-27b-mtp-dflash-domino-relative": "SpecForge's blog and README; sgl-project/sglang#32018",
    "vllm-mi355x-dsv4-dspark-adaptive": "vllm-project/vllm#52362",
    "vllm-rtxpro6000-qwen38-27b-mtp2-4": "sudoingX/qwen38-mtp#11",
    "llamacpp-8050s-qwen36-27b-dflash-none-accepted": "a follow-up on TurboQuant and DFlash, July 2026",
    "mtplx-m2pro-qwen36-35b-mtp0-3": '"MTPLX (native MTP) vs omlx on M2 Pro"',
    "llamacpp-2xrtx5060ti-gemma4-three-models": '"Gemma 4 MTP before/after benchmark"',
    "mlxvlm-m3ultra-glm53-flash-mtp-dflash2-by-context": "Blaizzy/mlx-vlm#2074",
    "trtllm-8xb200-llama4-scout-ngram-sparse": "TensorRT-LLM's tech blog 7; NVIDIA/TensorRT-LLM#6311",
}
INTRO = """# From a sweep to a decision

Tables of arms (settings of speculation that were run) as people publish them, of which a part is given: what is decided by it
against the whole table. A cell is a model, a data set and a concurrency. Figures were retyped from the sources below;
`python benchmarks/sweeps.py FOLDER --write docs/sweeps.md` made this page of them.
"""


def arms_of(file: Path) -> list[Arm]:
    """Its arms that have figures, repeats merged."""
    arms, _ = apart(read_tables(file.read_text("utf-8"), file, {}).arms)
    return [arm for arm in merged(arms) if arm.tokens_per_s]


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


def decided(posterior: Posterior, cell: Sequence[int]) -> Choice:
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
        losses["Half of the arms, against the best of them"].append(max(0.0, table.loss(left, decision.chosen)))
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
            half = Z95 * float(np.sqrt(part.covariance[i, i] + part.launch[i] / table.arms[i].repeats))
            errors[kind].append((abs(part.mean[i] - table.truth[i]), half))


def decisions(table: Table) -> str:
    """What is chosen at which concurrencies, by data sets that differ in it."""
    posterior, found = table.without(set()), []
    for dataset in dict.fromkeys(arm.dataset for arm in table.arms):
        cells = [cell for cell in table.cells if table.arms[cell[0]].dataset == dataset]
        named = sorted(
            (table.arms[cell[0]].concurrency, table.arms[decided(posterior, cell).chosen].name) for cell in cells
        )
        parts = []
        for name, same in groupby(named, key=lambda pair: pair[1]):
            loads = [load for load, _ in same]
            parts.append(f"{loads[0]}{f' to {loads[-1]}' if len(loads) > 1 else ''}: {name}")
        found.append(", ".join(parts))
    return "; ".join(dict.fromkeys(found))


def page(folder: Path) -> Iterator[str]:
    losses: dict[str, list[float]] = defaultdict(list)
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    rng = np.random.default_rng(0)
    chosen = []
    for file in sorted(folder.glob("*.csv")):
        arms = arms_of(file)
        for model in dict.fromkeys(arm.model for arm in arms):
            table = Table([arm for arm in arms if arm.model == model])
            whole = table.without(set())
            losses["Whole table"] += [table.loss(cell, decided(whole, cell).chosen) for cell in table.cells]
            for _ in range(DRAWS if table.large else 0):
                halves(table, rng, losses)
                pairs(table, rng, losses)
            coverage(table, errors)
            source = SOURCES.get(file.stem.partition("-")[2], file.stem)
            chosen.append(f"| {source} | {model} | {len(table.arms)} | {decisions(table)} |")
    yield INTRO
    yield "| decided by | cells | mean loss [%] | worst | within 3 % [%] | above 10 % [%] |"
    yield "|---|---|---|---|---|---|"
    for name, values in losses.items():
        loss = 100 * np.array(values)
        near, far = 100 * (loss <= 3).mean(), 100 * (loss > 10).mean()
        yield f"| {name} | {len(loss)} | {loss.mean():.2f} | {loss.max():.1f} | {near:.0f} | {far:.1f} |"
    yield "\n## Figures of arms that were left out\n"
    yield "| left out | figures | median error [%] | 95 % intervals hold [%] | median half width [%] |"
    yield "|---|---|---|---|---|"
    for name, figures in {**errors, "all": [figure for kind in errors.values() for figure in kind]}.items():
        error, half = np.array(figures).T
        held = 100 * (error <= half).mean()
        yield f"| {name} | {len(error)} | {100 * np.median(error):.1f} | {held:.0f} | {100 * np.median(half):.0f} |"
    yield "\n## The tables\n"
    yield "Chosen at each concurrency; data sets for which that differs, one after the other.\n"
    yield "| source | model | arms | chosen |"
    yield "|---|---|---|---|"
    yield from chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--tables", type=int, default=200, help="simulated ones")
    given = parser.parse_args()
    text = "\n".join([*page(given.folder), "\n## Simulated tables\n", *simulated(given.tables)]) + "\n"
    print(text)
    if given.write:
        write_text(given.write, text)


if __name__ == "__main__":
    main()
