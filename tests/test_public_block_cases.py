"""Block drafters as others measured them: what was published goes in, and what they found comes out of `search`.

Where accept lengths and tokens per second are published, a step took the one over the other. Where plain decoding's are not, the finding
holds for any that is slower than the best setting: a plain step takes no longer than one that verifies more rows.

K guesses of a block · accept length = tokens per step, the target's own included
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.steps import search
from treeopt import compare
from treeopt.records.plan import Plan
from treeopt.records.pools import NO_PLACE
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.trees.draft import MOST_WIDTH
from treeopt.trees.tree import Tree

from .conftest import some_long

SEQUENCES, LENGTH, ROUNDS = 8, 600, 3
U = np.random.default_rng(0).permutation(SEQUENCES * LENGTH) / (SEQUENCES * LENGTH)
LEFT = np.tile(np.arange(LENGTH, 0, -1), SEQUENCES)  # tokens from each state on


def ranks_of(reached: float | Sequence[float], width: int) -> np.ndarray:
    """Ranks of a block of which a chain has that accept length, or whose guesses are accepted in these shares of the steps."""
    if isinstance(reached, float):
        accepted = np.floor(reached - 1) + ((reached - 1) % 1 > U)
    else:
        accepted = (U[:, None] < np.array(reached)).sum(1)
    ended = np.tile(np.arange(LENGTH, 0, -1), SEQUENCES)[:, None] <= np.arange(
        1, width + 1
    )  # no token is left to guess
    return np.where((np.arange(width) < accepted[:, None]) & ~ended, 0, -1).astype(np.int16)


def trace_of(width, reached, kind="dflash") -> RankTrace:
    """A record of a block of K guesses, by what it reached."""
    drafter = {"kind": kind, "num_heads": width, "widest": width}
    starts = np.arange(SEQUENCES + 1) * LENGTH
    return RankTrace(ranks_of(reached, width), starts, meta={"top_k": 2, "num_heads": width, "drafter": drafter})


def profile_of(width, plain_ms, steps_ms, context=0) -> LatencyProfile:
    """What a plain step took at each batch size, and one with all K guesses of the block."""
    plain = tuple(StepTiming(b, context, 1, 0, (ms,) * ROUNDS) for b, ms in plain_ms.items())
    points = tuple(StepTiming(b, context, width + 1, width, (ms,) * ROUNDS) for b, ms in steps_ms.items())
    return LatencyProfile(points, plain)


def planned(run, trace, profile=None, engine="vllm", **options) -> Plan:
    trace.save(run.trace)
    if profile:
        profile.save(run.profile)
    return search(run, engine=engine, **options)


# A length beyond the block.

# DeepSeek-V4-Flash's DSpark has a block of 5, and its card said 7. Share of the steps that accept each guess. vllm-project/vllm#41834
# Widths. Tokens per second without a drafter, None where they were not published; of each K accept length and tokens per second; the best.

WIDTHS = {
    # DFlash of Qwen3.6-35B-A3B, block 4 and 8, long contexts on an M1 Max. bstnxbt/dflash-mlx#32
    "dflash-mlx": (None, {3: (2.80, 25.1), 7: (3.73, 13.7)}, 3),
    # The same drafter, block 4 and the default of 16, M5 Max. z-lab/dflash#151
    "z-lab": (None, {3: (2.95, 191.1), 15: (4.30, 147.6)}, 3),
    # DFlash2 of Qwen3.8-27B, block 15 and the default of 8, code. osaurus-ai/vmlx-swift#276
    "vmlx-swift": (17.2, {7: (5.71, 33.3), 14: (7.27, 43.3)}, 14),
    # The same drafter, cut to 2, 4 and 7 guesses; 2 and 4 are slower than none. raullenchai/Rapid-MLX#2195
    "mlx-dspark": (21.3, {2: (2.75, 19.5), 4: (4.03, 19.1), 7: (5.35, 28.2)}, 7),
}  # fmt: skip


def plains(plain, settings) -> list[float]:
    """Tokens per second without a drafter, as published; else some of those that there can have been."""
    slowest = max(speed / accept for accept, speed in settings.values())
    return [plain] if plain else [slowest, max(speed for _, speed in settings.values()) / 1.1]


@pytest.mark.parametrize("name", ["dflash-mlx", *some_long("z-lab", "vmlx-swift", "mlx-dspark")])
def test_compare_finds_the_width_that_was_fastest_whatever_the_default(name, tmp_path):
    """Each width has a run of its own."""
    plain, settings, best = WIDTHS[name]
    for rate in plains(plain, settings):
        runs = {width: RunDirectory(tmp_path / f"{rate:.0f}" / str(width)) for width in settings}
        for width, (accept, speed) in settings.items():
            profile = profile_of(width, {1: 1e3 / rate}, {1: 1e3 * accept / speed})
            (entry,) = planned(runs[width], trace_of(width, accept), profile).entries
            if speed > 1.02 * rate:
                assert entry.draft == Tree.chain(width)
                assert entry.chosen.tokens_per_s == pytest.approx(speed, rel=0.01)
            elif speed < 0.98 * rate:
                assert entry.chosen.size == 1  # without a drafter
        (winner,) = compare(*runs.values()).winners
        assert winner.drafter == str(best)


# Off.


# What a step with DSpark's 4 guesses of Kimi-K3 costs over a plain one: accept lengths above it pay. vllm-project/vllm#54691
BREAK_EVEN = {
    2_048: {1: 1.47, 4: 1.55, 16: 1.74},
    32_768: {1: 1.91, 4: 2.82, 16: 4.94},
    131_072: {1: 3.51, 4: 6.79, 16: 14.59},
}


@pytest.mark.parametrize("context", [131_072, *some_long(2_048, 32_768)])
def test_off_below_the_accept_length_that_breaks_even(run, context):
    """4 guesses reach 5 tokens at most: at 131,072 tokens of context 4 requests never pay, however good the drafter."""
    for batch_size, ratio in BREAK_EVEN[context].items():
        profile = profile_of(4, {batch_size: 10.0}, {batch_size: 10.0 * ratio}, context)
        for accept in (min(0.95 * ratio, 5.0), 1.05 * ratio):
            if accept <= 5.0:
                plan = planned(run, trace_of(4, accept, "dspark"), profile, batch_sizes=(batch_size,))
                assert plan.entries[0].speculates == (accept > ratio), (batch_size, accept)


# Trees.


@pytest.mark.long
def test_a_tree_is_not_worth_its_rows_where_the_9th_costs_a_step_up(run):
    """DFlash2 of a 27B hybrid, 2 x A6000 with CUDA graphs (rmagur1203/vllm-ddtree): 8 rows take 53.8 ms, 9 to 17 take 60.8.

    The chain of 7 emits 3.200 tokens a step, with 2 siblings 3.329; DDTree of 32 nodes 3.282, and decodes at 0.78 of the chain's speed.
    At which guesses was not published: here the chain's are all right equally often, and the siblings are of the first two.
    """
    right, siblings, anew, nodes, slower = 0.7070, 3.329 - 3.200, 3.282, 32, 0.78
    depth = np.arange(1, 8)
    trace = trace_of(7, right**depth)
    ranks, rng = np.array(trace.ranks), np.random.default_rng(1)
    for d in (0, 1):
        missed = (ranks[:, d] < 0) & (ranks[:, :d] == 0).all(1) & (d + 1 < LEFT)
        ranks[rng.permutation(np.flatnonzero(missed))[: round(siblings / 2 * len(ranks))], d] = 1
    places = np.where(ranks_of(anew, 7) == 0, nodes - 1 - 7 + depth, NO_PLACE).astype(np.uint8)
    cuts = np.concatenate([places[:, :levels] for levels in depth], 1)
    meta = {**trace.meta, "marginals": {"levels": 7, "widths": [MOST_WIDTH]}}
    trace = replace(trace, ranks=ranks, marginal_places=cuts[:, None], meta=meta)
    ms = {8: 53.8, 9: 60.8, 10: 60.8, 17: 60.8, 33: anew / slower * 53.8 / 3.200}
    points = [StepTiming(1, 0, rows, 7, (each,) * ROUNDS) for rows, each in ms.items()]
    points.append(replace(points[-1], over_marginals=True))
    for plain_ms in (53.8, 20.0):
        profile = LatencyProfile(tuple(points), (StepTiming(1, 0, 1, 0, (plain_ms,) * ROUNDS),))
        (entry,) = planned(run, trace, profile, engine=None, measured_only=True).entries
        assert entry.draft == Tree.chain(7)
        assert entry.chosen.tokens_per_step == pytest.approx(3.200, abs=0.15)  # of 1,540 steps
        ddtree, wide = entry.others["ddtree"], next(point for point in entry.curve if point.size == 10)
        assert ddtree.draft.rows == 33
        assert ddtree.tokens_per_s / entry.chosen.tokens_per_s == pytest.approx(slower, abs=0.03)
        assert wide.tokens_per_s / entry.chosen.tokens_per_s == pytest.approx(3.329 / 60.8 / (3.200 / 53.8), abs=0.03)
