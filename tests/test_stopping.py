"""Contenders that lose by far stop early: how often that is wrong, what their intervals hold, and that it is said."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from tests.helpers.runs import shown, some_bench
from treeopt.files.journal import Journal
from treeopt.records.benchmark import LOOKS, Benchmark, loses_by_far
from treeopt.records.contender import Contender
from treeopt.report.bench_table import bench_table, bench_tables
from treeopt.report.figures.bench import contenders_chart
from treeopt.runtime.measure.bench import decode_contenders, slower
from treeopt.runtime.measure.ranks import Prompt
from treeopt.runtime.stepper import AnswerRun, BlockRun
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


def decode(name, asked):
    """As a decoder would, by a clock that tells each contender's time."""
    rows = [AnswerRun(id=i, tokens=[1] * 50, prefilled=1, accepted=[1] * 24) for i, _ in asked]
    seconds = SECONDS[name] * (1 + 0.01 * (asked[0][0] % 5)) * (1 + 0.01 * (name == "close") * (-1) ** asked[0][0])
    times = {"decode_s": seconds, "prefill_s": 0.1, "seconds": seconds, "processor_s": seconds}
    return BlockRun(tokens=48, steps=24, passes=25, rows=rows, **times)


@pytest.mark.parametrize("rounds", [1, 2])
def test_only_the_rival_that_loses_by_far_stops(rounds):
    visits = decode_contenders(decode, PROMPTS, SECONDS, batch_size=1, rounds=rounds)
    assert len(visits) == 24 * rounds
    ends = {name: sum(name in visit.runs for visit in visits) for name in SECONDS}
    assert ends == {"plain": len(visits), "chosen": len(visits), "close": len(visits), "slow": 6}
    groups = [PROMPTS[visit.prompts[0]].group for visit in visits[:6]]
    assert set(groups) == {"a", "b"}  # what a look sees is of all groups


@pytest.mark.parametrize("kept", [3, 6, 17])
def test_a_benchmark_that_goes_on_stops_whom_it_would_have_stopped(tmp_path, kept):
    whole = decode_contenders(decode, PROMPTS, SECONDS, batch_size=1, rounds=1)
    journal = Journal(tmp_path / "bench.partial", {})
    for visit in whole[:kept]:
        journal.append(asdict(visit))
    assert decode_contenders(decode, PROMPTS, SECONDS, batch_size=1, rounds=1, journal=journal) == whole


def test_nobody_stops_without_another_chosen_tree_or_with_few_blocks():
    for others in ({}, {"chosen": Tree.chain(2)}):  # the same draft under another name
        drafts = {"plain": None, "slow": Tree.chain(2)} | others
        visits = decode_contenders(decode, PROMPTS, drafts, batch_size=1, rounds=1)
        assert all("slow" in visit.runs for visit in visits)
    visits = decode_contenders(decode, PROMPTS[:6], SECONDS, batch_size=1, rounds=1)
    assert slower(visits[:4]) == set()
    assert slower(visits) == {"slow"}


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
    bars = contenders_chart(bench).panels[0][0].series
    assert sum(len(one.x) for one in bars) == len(rest)
    assert "Stopped early" not in shown(bench_table(some_bench()))
