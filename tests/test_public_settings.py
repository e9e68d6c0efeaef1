"""Plans of settings that others measured: where their tables say that speculation does not pay, so must the plan."""

import numpy as np
import pytest

from tests.helpers.steps import search
from treeopt.growth.source import source_of
from treeopt.records.pools import NO_PLACE, columns_of
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.trees.draft import DynamicTree, pool_size
from treeopt.trees.tree import Tree

# Of each batch size tokens per second without speculation, and of each setting (levels, topk, rows) the accept length and
# tokens per second. Qwen3-30B-A3B with EAGLE-3, MT-Bench.
SPECFORGE = {  # sgl-project/SpecForge#339
    1: (222.5, {
        (3, 1, 4): (1.86, 159.8), (3, 3, 8): (2.20, 173.0), (3, 3, 4): (1.99, 207.6), (7, 4, 16): (2.52, 191.9),
        (6, 4, 12): (2.42, 171.5), (8, 8, 60): (3.20, 177.5),
    }),
}  # fmt: skip
ANGELSLIM = {  # Tencent/AngelSlim#163
    1: (218.9, {(4, 4, 16): (2.55, 185.6)}),
    4: (507.5, {(4, 4, 16): (2.55, 476.4)}),
    8: (677.1, {(4, 4, 16): (2.55, 673.1)}),
    32: (1128, {(4, 4, 16): (2.55, 927)}),
    64: (1238, {(4, 4, 16): (2.55, 1308)}),
}


def trace_of(accept_lengths: dict[tuple[int, int, int], float], sequences=8, length=1000) -> RankTrace:
    """Answers on which every setting reaches its accept length, and as little as can be with fewer rows."""
    states, levels = sequences * length, max(setting[0] for setting in accept_lengths)
    u = np.random.default_rng(0).permutation(states) / states
    topks = tuple(sorted({topk for _, topk, _ in accept_lengths} - {1}))
    depth = np.arange(1, levels + 1)
    ended = np.tile(np.arange(length, 0, -1), sequences)[:, None] <= depth  # no token is left to guess
    ranks = np.full((states, levels), -1, dtype=np.int16)
    places = np.full((states, len(topks), columns_of(levels).stop), NO_PLACE, dtype=np.uint8)
    for topk in (1, *topks):
        place, before = np.full((states, levels), NO_PLACE), np.zeros(states, dtype=int)
        for (_, _, rows), accept in sorted(
            ((s, a) for s, a in accept_lengths.items() if s[1] == topk), key=lambda one: one[1]
        ):
            accepted = np.floor(accept - 1).astype(int) + (u < (accept - 1) % 1)
            new = (depth > before[:, None]) & (depth <= accepted[:, None])
            place = np.where(new & ~ended, rows - 2 - accepted[:, None] + depth, place)
            before = accepted
        if topk == 1:
            ranks = np.where(place < NO_PLACE, 0, -1).astype(np.int16)
            continue
        for s in range(1, levels + 1):
            last = pool_size(s, topk) - 1 - s + depth[:s]  # the best place that is left when the pool ends with it
            known = place[:, :s] < NO_PLACE
            places[:, topks.index(topk), columns_of(s)] = np.where(known, np.minimum(place[:, :s], last), NO_PLACE)
    meta = {"drafter": {"kind": "eagle3"}, "pools": {"levels": levels, "topks": list(topks)}, "top_k": 1}
    starts = np.arange(sequences + 1) * length
    return RankTrace(ranks, starts, pool_places=places, meta=meta)


def profile_of(table) -> LatencyProfile:
    """What steps took: tokens per step over tokens per second; a fixed tree of as many rows and levels, or a chain, as much.

    Chains that were not measured accept nothing.
    """
    plain, points = [], []
    for batch_size, (rate, settings) in table.items():
        plain.append(StepTiming(batch_size, 0, 1, 0, (1e3 * batch_size / rate,) * 3))
        for (levels, topk, rows), (accept, speed) in settings.items():
            ms = (1e3 * batch_size * accept / speed,) * 3
            points.append(StepTiming(batch_size, 0, rows, levels, ms))
            if topk > 1:
                points.append(StepTiming(batch_size, 0, levels + 1, levels, ms))
                points.append(StepTiming(batch_size, 0, rows, levels, ms, topk=topk))
    return LatencyProfile(tuple(points), tuple(plain))


@pytest.mark.parametrize(
    ("table", "pays"),
    [pytest.param(SPECFORGE, [], marks=pytest.mark.long), (ANGELSLIM, [64])],
    ids=["SpecForge", "AngelSlim"],
)
def test_the_plan_says_off_where_the_measurements_do(tmp_path, table, pays):
    run = RunDirectory(tmp_path / "run")
    trace = trace_of({setting: accept for _, settings in table.values() for setting, (accept, _) in settings.items()})
    trace.save(run.trace)
    profile_of(table).save(run.profile)
    plan = search(run, budget=64, batch_sizes=tuple(table), engine="sglang", method="dynamic-tree")
    for entry in plan:
        rate, settings = table[entry.batch_size]
        for setting, (accept, _) in settings.items():
            draft = DynamicTree(*setting) if setting[1] > 1 else Tree.chain(setting[0])
            assert source_of(trace).rates(draft).tokens_per_step == pytest.approx(accept, rel=0.01)
        best = max(speed for _, speed in settings.values())
        assert (best > rate) == (entry.batch_size in pays)
        fastest = max(
            [entry.chosen, *entry.others.values()], key=lambda figure: figure.rate if figure.size > 1 else 0.0
        )
        assert fastest.speedup == pytest.approx(best / rate, rel=0.08)  # timings of one shape contradict each other
        served = entry.serving(lambda draft: draft.kind in ("chain", "dynamic"))
        assert (served.size > 1) == (entry.batch_size in pays)
