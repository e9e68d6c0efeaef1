"""Plans of dynamic trees on their way into an engine: search --for, then export --to."""

import re
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.engine_rows import READERS, export_plan, setting_of
from tests.helpers.steps import search
from treeopt.engines.plans import method_for_plan, planned_method
from treeopt.errors import InvalidInput
from treeopt.growth.replay import dynamic_rates
from treeopt.growth.source import source_of
from treeopt.latency.costs import StepCosts
from treeopt.pipeline.export import export, export_to
from treeopt.records.exchange import ExportOptions
from treeopt.records.figure import fastest
from treeopt.records.plan import Plan, merged
from treeopt.records.pools import columns_of
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.trees.draft import DynamicLimits, DynamicTree, pool_size
from treeopt.trees.tree import Tree

SIZES, LEVELS, TOPKS = (1, 4, 64), 3, (2, 4)
WITHIN = DynamicLimits(rows=12)
ROW = {1: 0.1, 4: 0.9, 64: 30.0}  # ms of a row more


def measured(drafter="eagle3", *, pools=True, rule=None) -> RankTrace:
    """Answers whose pools rank a node behind all that its path's ranks pass over: at topk 2 less than at 4."""
    rng, n, length = np.random.default_rng(1), 16, 20
    ranks = rng.choice(8, p=[0.6, 0.16, 0.08, 0.06, 0.04, 0.03, 0.02, 0.01], size=(n * length, LEVELS)).astype(np.int16)
    left = np.tile(np.arange(length, 0, -1), n)[:, None]
    ranks[left < 2 + np.arange(LEVELS)] = -1
    meta = {"num_heads": LEVELS, "top_k": 8, "drafter": {"kind": drafter, "id": drafter}}
    meta |= {"acceptance": rule} if rule else {}
    found = {}
    if pools:
        places = np.full((len(ranks), len(TOPKS), columns_of(LEVELS).stop), 255, dtype=np.uint8)
        for i, topk in enumerate(TOPKS):
            inside = ((ranks >= 0) & (ranks < topk)).cumprod(1).astype(bool)
            order = (np.where(inside, ranks, 0) * (topk - 1) + 1).cumsum(1) - 1
            for levels in range(1, LEVELS + 1):
                part = np.where(inside, order + np.arange(LEVELS) * (levels - 1), 255)[:, :levels]
                part = np.where(part < min(pool_size(levels, topk), 63), part, 255)
                if levels > 1:  # what the smaller pool has not, this one has not either
                    part[:, :-1] = np.maximum(
                        part[:, :-1], np.where(places[:, i, columns_of(levels - 1)] == 255, 255, 0)
                    )
                places[:, i, columns_of(levels)] = np.maximum.accumulate(part, axis=1)
        meta["pools"] = {"levels": LEVELS, "topks": list(TOPKS)}
        found = {"pool_places": places}
    return RankTrace(ranks, np.arange(n + 1) * length, meta=meta, **found)


def timed(sizes=SIZES, *, dynamic=0.3) -> LatencyProfile:
    """Chains and trees; a dynamic tree takes so many ms more a level, or none was timed (None)."""
    plain = tuple(StepTiming(size, 128, 1, 0, (10.0,) * 3) for size in sizes)
    points = [
        StepTiming(size, 128, rows, depth, (10 + 0.2 * depth + ROW[size] * (rows - 1),) * 3)
        for size in sizes
        for depth in range(1, LEVELS + 1)
        for rows in (2, 3, 4, 5, 8, 12)
        if rows > depth
    ]
    trees = [(topk, levels) for topk in TOPKS for levels in (2, LEVELS) if dynamic is not None]
    points += [
        StepTiming(size, 128, 5, levels, (10 + 0.2 * levels + ROW[size] * 4 + dynamic * levels,) * 3, topk=topk)
        for size in sizes
        for topk, levels in trees
    ]
    return LatencyProfile(tuple(points), plain)


@pytest.fixture
def run(tmp_path):
    found = RunDirectory(tmp_path / "run")
    timed().save(found.profile)
    measured().save(found.trace)
    return found


def planned(run, engine=None, **options) -> Plan:
    return search(run, budget=12, engine=engine, **options)


def rates_of(batch_size, within=WITHIN):
    """Tokens per second of every setting at a batch size, and of plain decoding."""
    costs, trace = StepCosts(timed(), batch_size, 128), measured()
    chains = source_of(trace).nested_rates(Tree.chain(LEVELS).paths, np.arange(2, LEVELS + 2))
    rates = {DynamicTree(n, 1, n + 1): rate for n, rate in enumerate(chains, 1)} | dynamic_rates(trace, within)
    speed = (
        1e3
        * batch_size
        * np.array([one.tokens_per_step for one in rates.values()])
        / costs.ms([tree.cost for tree in rates])
    )
    return dict(zip(rates, speed.tolist(), strict=True)), 1e3 * batch_size / costs.plain.ms


def test_dynamic_trees_within_limits():
    """All of them are rated."""
    trace = measured()
    assert {tree.topk for tree in dynamic_rates(trace)} == set(TOPKS)
    assert max(tree.rows for tree in dynamic_rates(trace, DynamicLimits(rows=3))) == 3
    tight = dynamic_rates(trace, DynamicLimits(levels=3, within_levels=True))
    assert max(tree.levels for tree in tight) == 3
    assert {tree.rows for tree in tight if (tree.levels, tree.topk) == (3, 2)} == set(range(4, 8))


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm"])
def test_fastest_setting(run, engine):
    """The setting of each batch size is the fastest within the engine's limits."""
    plan = planned(run, engine, method="dynamic-tree")
    of_tensorrt = engine == "tensorrt-llm"
    limits = DynamicLimits(rows=12, within_levels=of_tensorrt)
    assert [entry.batch_size for entry in plan] == list(SIZES)
    assert planned_method(plan).limits.dynamic
    chosen = {}
    for entry in plan:
        speed, plain = rates_of(entry.batch_size, limits)
        figure = fastest([best for best in (entry.chosen, *entry.others.values()) if best.size > 1])
        tree = chosen[entry.batch_size] = DynamicTree(figure.depth, figure.draft.topk or 1, figure.size)
        assert figure.tokens_per_s == pytest.approx(speed[tree])
        assert not entry.speculates or speed[tree] >= 0.994 * np.nanmax(list(speed.values()))
        assert figure.speedup == pytest.approx(figure.tokens_per_s / plain)
        assert setting_of(entry.draft) == (tree if figure.tokens_per_s > plain else None)
    assert [entry.speculates for entry in plan] == [True, True, False]
    assert plan[1].draft.topk > 1
    assert plan[1].chosen.size > plan[4].chosen.size
    if engine == "tensorrt-llm":
        assert all(tree.rows - 1 <= tree.topk * tree.levels for tree in chosen.values())
    assert replace(Plan.load(run.plan), runtime=plan.runtime) == plan


def test_chain_instead_of_tree(run):
    """A chain is written where trees cost too much."""
    timed(dynamic=6.0).save(run.profile)
    plan = planned(run, "sglang")
    assert plan[1].draft == Tree.chain(plan[1].chosen.depth)
    assert "--speculative-eagle-topk 1" in export_plan(plan, "sglang", ExportOptions(batch_size=1)).command
    general = planned(run)  # its best chain is known beside the tree
    chain = general[1].best("chain")
    assert general.served_by(planned_method(plan))[1].draft == chain.draft
    assert all(entry.best("dynamic") is None for entry in planned(run, "vllm"))


def test_files_by_batch_size(run):
    """Every batch size gets its own files."""
    plan = planned(run, "sglang")
    paths, written = export(run, "sglang")
    assert {path.parent.name for path in paths} == {f"batch-size-{size}" for size in SIZES}
    for entry in plan:
        command = (run.export / "sglang" / f"batch-size-{entry.batch_size}" / "commands.sh").read_text()
        tree = setting_of(entry.draft)
        numbers = [
            int(n) for n in re.findall(r"--speculative-(?:num-steps|eagle-topk|num-draft-tokens) (\d+)", command)
        ]
        assert numbers == ([tree.levels, tree.topk, tree.rows] if tree else [])
    notes = " ".join(written.notes)
    assert "Batch size 64: No tree pays here" in notes
    _, written = export(run, "sglang", ExportOptions(batch_size=4))
    assert any(note.startswith("Written for batch size 4 (") for note in written.notes)


def test_mix(run):
    """A mix of loads gets the fastest setting over it."""
    shares = {1: 0.9, 4: 0.1}
    plan = planned(run, "sglang", batch_sizes=shares)
    (tree,) = {setting_of(entry.draft) for entry in plan}
    speeds = [rates_of(size)[0] for size in shares]
    total = {
        one: sum(shares[size] * speed[one] for size, speed in zip(shares, speeds, strict=True)) for one in speeds[0]
    }
    assert total[tree] >= 0.994 * np.nanmax(list(total.values()))
    _, written = export(run, "sglang")
    assert any("Written for the mix of batch sizes (90% of the time at 1, 10%" in note for note in written.notes)
    alone = planned(run, "sglang", batch_sizes=(4,))
    assert tree not in (None, setting_of(alone[4].draft))
    off = planned(run, "sglang", batch_sizes={64: 0.9, 4: 0.1})
    assert not off.speculates
    assert export(run, "sglang")[1].notes[0].startswith("No tree is shown to pay over the mix")


class TestWithoutDynamicTrees:
    """Where no pools were recorded, or no dynamic trees timed, engines get what they did before."""

    def test_no_pools(self, run):
        """Without pools the plan is of chains, and a named method of dynamic trees is refused."""
        measured(pools=False).save(run.trace)
        assert planned(run, "sglang").constraint.engine.method == "adaptive"
        for engine, method in (("sglang", "dynamic-tree"), ("eagle2", None), ("tensorrt-llm", "dynamic-tree")):
            with pytest.raises(
                InvalidInput, match=r"no pools of dynamic trees: .*treeopt calibrate --topk 2,4,8, then"
            ):
                planned(run, engine, method=method)
        plan = planned(run)
        assert (
            "--speculative-eagle-topk 1"
            in export_plan(plan, "sglang", ExportOptions(batch_size=1, method="dynamic-tree")).command
        )
        assert method_for_plan(plan, "sglang").name == "adaptive"

    def test_no_timings(self, run):
        """Without timings of dynamic trees the plan is of chains."""
        timed(dynamic=None).save(run.profile)
        assert planned(run, "sglang").constraint.engine.method == "adaptive"
        with pytest.raises(InvalidInput, match="the profile has no dynamic trees"):
            planned(run, "sglang", method="dynamic-tree")

    def test_named_method(self, run):
        """A named method stays."""
        plan = planned(run, "sglang", method="adaptive")
        assert plan.constraint.engine.method == "adaptive"
        assert all(entry.best("dynamic") is None for entry in plan)
        assert not planned_method(plan).limits.dynamic

    def test_openvino_batches(self, run):
        """OpenVINO decodes trees for one sequence, and gets chains for more."""
        assert planned(run, "openvino").constraint.engine.method == "draft-model"
        plan = planned(run, "openvino", batch_sizes=(1,))
        assert plan.constraint.engine.method == "dynamic-tree"
        assert '"tree_depth"' in export_plan(plan, "openvino").files["generation_config.json"]

    def test_rejection(self, run):
        """Rejection by the drafter's probabilities is for chains."""
        rule = {"rule": "rejection", "temperature": 1.0, "top_p": None, "top_k": None, "seed": 0}
        measured(rule=rule).save(run.trace)
        assert planned(run, "sglang").constraint.engine.method == "adaptive"


def test_plan_for_no_engine(run, tmp_path):
    """A plan for no engine is exported to engines of dynamic trees and of chains."""
    assert method_for_plan(planned(run, shape="chain"), "sglang").name == "adaptive"  # chains were asked for
    plan = planned(run)
    assert method_for_plan(plan, "sglang").name == "dynamic-tree"
    _, written = export_to(tmp_path, plan, "sglang", ExportOptions(batch_size=1))
    assert "dynamic tree" in " ".join(written.notes)
    _, written = export_to(tmp_path, plan, "vllm")
    chains = {size: plan[size].best("chain") for size in SIZES}
    found = READERS["vllm", "batch-size"](written.files)
    assert found == merged(((1, 3, chains[1].depth), (4, 63, chains[4].depth * (chains[4].speedup > 1)), (64, None, 0)))
    assert any("takes chains only" in note for note in written.notes)
    wide = replace(plan[1], draft=DynamicTree(2, 4, 16), tokens_per_step=2.0, others={})
    with pytest.raises(InvalidInput, match="tensorrt-llm takes up to 8 levels, and 9 rows of 2 levels with topk 4"):
        export_plan(replace(plan, entries=(wide,), schedule=[]), "tensorrt-llm")
