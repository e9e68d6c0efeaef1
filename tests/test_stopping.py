"""Contenders that lose by far stop early: how often that is wrong, what their intervals hold, and that it is said."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.runs import shown, some_bench
from treeopt.files.journal import Journal
from treeopt.pipeline.contest import Blocks, Contest, interleaved, slower
from treeopt.pipeline.entrants import Entrant
from treeopt.records.benchmark import LOOKS, Benchmark, loses_by_far
from treeopt.records.contender import Answer, Block, Contender, Prompt
from treeopt.report.bench_table import bench_table, bench_tables
from treeopt.report.figures.bench import contenders_chart
from treeopt.runtime.stepper import Stepper
from treeopt.runtime.stop import StopRule
from treeopt.trees.tree import Tree

BLOCKS, DISTURBED = 64, 0.1
LOOKED = [BLOCKS // part for part in LOOKS]


def played(rng: np.random.Generator, speed: float) -> np.ndarray:
    """(blocks, 4) of `rates_ratio`: answers of all lengths, the same prompts, one block in ten disturbed for either."""
    tokens = rng.integers(20, 128, BLOCKS)
    alike = rng.lognormal(0, 0.2, BLOCKS)
    sides = []
    for times in (speed, 1.0):
        noise = rng.lognormal(0, 0.15, BLOCKS) * np.where(rng.random(BLOCKS) < DISTURBED, rng.uniform(1, 3, BLOCKS), 1)
        sides += [tokens, tokens / (100 * times * alike) * noise]
    return np.stack(sides, axis=1)


def contest(rng: np.random.Generator, speed: float) -> tuple[bool, int]:
    """Whether a rival of that speed was stopped, and after how many blocks its figures end."""
    pairs = played(rng, speed)
    n = next((n for n in LOOKED if loses_by_far(pairs[:n])), None)
    return n is not None, n or BLOCKS


def test_a_rival_as_fast_as_the_chosen_tree_is_hardly_ever_stopped():
    """By the bound at most 0.15 % of contests, half of three times 0.1 %; 9 of 1000 have a probability of 3e-5."""
    rng = np.random.default_rng(0)
    assert sum(contest(rng, 1.0)[0] for _ in range(1000)) < 9


def test_a_rival_that_is_much_slower_is_stopped_early():
    rng = np.random.default_rng(1)
    ends = [contest(rng, 0.6) for _ in range(100)]
    assert sum(stopped for stopped, _ in ends) > 70
    assert np.median([n for _, n in ends]) <= BLOCKS / 2


@pytest.mark.parametrize("speed", [1.0, 0.75, 0.6])  # hardly ever stopped, stopped now and then, stopped nearly always
def test_intervals_hold_the_truth_as_often_as_they_say_whatever_stops(speed):
    """Of 95 %; 29 of 300 misses have a probability of 5e-4 at 5.3 %."""
    rng, missed = np.random.default_rng(2), 0
    for _ in range(300):
        ratio = benchmark(rng, speed).speedup("rival", "chosen")
        missed += not ratio.low <= speed <= ratio.high
    assert missed < 29


def benchmark(rng: np.random.Generator, speed: float) -> Benchmark:
    """Of a chosen tree and a rival of that speed, which is decoded until it is stopped."""
    pairs = played(rng, speed)
    stopped = next((n for n in LOOKED if loses_by_far(pairs[:n])), None)
    first = some_bench().contender("chosen")
    block = replace(first.blocks[0], round=0, group="")

    def contender(name: str, columns: np.ndarray, n: int | None) -> Contender:
        blocks = [
            replace(block, prompts=[i], tokens=int(tokens), steps=1, decode_s=float(seconds))
            for i, (tokens, seconds) in enumerate(columns[:n])
        ]
        return replace(first, name=name, blocks=blocks, stopped=n is not None)

    return Benchmark(contenders=(contender("chosen", pairs[:, 2:], None), contender("rival", pairs[:, :2], stopped)))


PROMPTS = [Prompt((1 + i, 2, 3), str(i), "ab"[i % 2], i) for i in range(24)]
SECONDS = {"plain": 1.0, "chosen": 0.6, "slow": 1.2, "close": 0.6}


class Timed(Stepper):
    """Decodes nothing, by a clock that tells a contender's time."""

    name, version, stop = "timed", "1", StopRule(frozenset(), 50)

    def __init__(self, who: str = "") -> None:
        self.who = who

    def answer(self, prompts, draft, rows=1):
        raise AssertionError

    def decode(self, prompts, draft, rows=1):
        place = prompts[0].cluster
        seconds = SECONDS[self.who] * (1 + 0.01 * (place % 5)) * (1 + 0.01 * (self.who == "close") * (-1) ** place)
        answers = [Answer(id=prompt.id, steps=24, tokens=50, identical=True, text=[1] * 50) for prompt in prompts]
        places, group = [*range(len(prompts))], prompts[0].group
        return [Block(round=0, prompts=places, tokens=48, steps=24, decode_s=seconds, group=group, answers=answers)]


def decoded(folder: Path, drafts: Mapping[str, Tree], prompts=PROMPTS, rounds: int = 1) -> Blocks:
    entrants = {name: Entrant(draft, stepper=Timed(name)) for name, draft in drafts.items()}
    return interleaved(Contest(Timed(), entrants, prompts), rounds, Journal(folder, {}), lambda answers: None)


CHAINS = {name: Tree.chain(n) for n, name in enumerate(SECONDS)}


@pytest.mark.parametrize("rounds", [1, 2])
def test_only_the_rival_that_loses_by_far_stops(tmp_path, rounds):
    blocks = decoded(tmp_path, CHAINS, rounds=rounds)
    whole = 24 * rounds
    counts = {name: len(some) for name, some in blocks.items()}
    assert counts == {"plain": whole, "chosen": whole, "slow": 6, "close": whole}
    assert {block.group for block in blocks["plain"][:6]} == {"a", "b"}  # what a look sees is of all groups


@pytest.mark.parametrize("kept", [3, 6, 17])
def test_a_benchmark_that_goes_on_stops_whom_it_would_have_stopped(tmp_path, kept):
    whole = decoded(tmp_path / "whole", CHAINS)
    documents, journal = Journal(tmp_path / "whole", {}).documents(), Journal(tmp_path / "part", {})
    for blocks in documents[:kept]:
        journal.append(blocks)
    assert decoded(tmp_path / "part", CHAINS) == whole


def test_nobody_stops_without_another_chosen_tree_or_with_few_blocks(tmp_path):
    for n, others in enumerate(({}, {"chosen": Tree.chain(2)})):  # the same draft under another name
        blocks = decoded(tmp_path / str(n), {"plain": Tree.chain(0), "slow": Tree.chain(2)} | others)
        assert len(blocks["slow"]) == 24
    blocks = decoded(tmp_path / "few", CHAINS, PROMPTS[:6])
    assert slower({name: some[:4] for name, some in blocks.items()}) == set()
    assert slower(blocks) == {"slow"}


def test_a_contender_that_stopped_is_marked_in_the_file_and_below_the_table(tmp_path):
    bench = some_bench()
    slow = bench.contender("mc_sim_7b_63")
    rest = tuple(c for c in bench.contenders if c is not slow)
    blocks = slow.blocks[:6]
    slow = replace(slow, blocks=blocks, stopped=True)
    bench = replace(bench, contenders=(*rest, slow))
    bench.save(tmp_path / "bench.json")
    assert Benchmark.load(tmp_path / "bench.json") == bench
    assert "Stopped early, since shown to be slower than the chosen tree: published mc_sim_7b_63" in shown(
        bench_table(bench)
    )
    speedups = [row[5] for row in bench_tables(bench)[0].rows]
    assert speedups[-1] == "slower (stopped)"
    assert all("[" in said for said in speedups[:-1])
    bars = contenders_chart(bench).panels[0].series
    assert sum(len(one.x) for one in bars) == len(rest)
    assert "Stopped early" not in shown(bench_table(some_bench()))
