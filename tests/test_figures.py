"""Figures: their numbers against slow oracles, and what is drawn from a run directory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given

from tests.conftest import random_trace, traces, trees
from tests.test_coverage import random_probe
from treeopt import pipeline
from treeopt.errors import InvalidInput, OutOfRange
from treeopt.growth.coverage import COVERAGE
from treeopt.growth.objectives import grow
from treeopt.growth.probed import replay_probe
from treeopt.growth.replay import replay
from treeopt.growth.source import source_of
from treeopt.planning.comparison import dense_widths
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import Calibration
from treeopt.records.contender import Answer, Block, Contender
from treeopt.records.expected import AdaptiveFigures, DynamicFigures
from treeopt.records.inputs import inputs_of
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report import figures
from treeopt.report.figures import style
from treeopt.report.figures.accuracy import accuracy_data, groups_data, positions_data
from treeopt.report.figures.bench import accepted_data, contenders_data
from treeopt.report.figures.kinds import Mark, kinds_data
from treeopt.report.figures.latency import latency_data, parts_data
from treeopt.report.figures.pareto import pareto_data
from treeopt.report.figures.planning import sizes_data, throughput_data
from treeopt.report.figures.tree import columns, tree_data
from treeopt.trees.published import published_tree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

NAMES = [
    "coding in Python, JavaScript and other languages of GitHub",
    "chat",
    "mathematics, step by step",
    "retrieval augmented generation",
    "stem",
    "roleplay",
    "translation",
    "summarization",
    "writing",
    "extraction",
    "humanities",
    "multi-turn",
    "W" * 60,
]


def long_trace(heads: int, *, sequences: int = 24, ranks: int = 10, seed: int = 0) -> RankTrace:
    rng = np.random.default_rng(seed)
    trace = random_trace(rng, rng.integers(20, 60, sequences), heads, ranks)
    source = {"model": "organisation/some-model-7b-v1.3", "dtype": "bfloat16", "device": "cuda:0"}
    return replace(trace, meta={**trace.meta, "provenance": source})


def some_profile(batch_sizes, *, depth: int = 3, largest: int = 64, parts: bool = True) -> LatencyProfile:
    rng = np.random.default_rng(1)
    points, plain = [], []
    for b in batch_sizes:
        noise = rng.normal(1, 0.03, 9)
        plain.append(StepTiming(b, 512, 1, 0, tuple((3 + 0.1 * b) * noise)))
        for size in (s for s in (2, 4, 8, 16, 32, 64, 128, 256) if s <= largest):
            for d in {1, min(depth, size - 1)}:
                spent = {"draft": 0.3 * d, "target": 3 + 0.02 * b * size, "verify": 0.2, "commit": 0.1}
                ms = tuple(sum(spent.values()) * noise)
                each = {name: tuple(t * noise) for name, t in spent.items()} if parts else None
                points.append(StepTiming(b, 512, size, d, ms, parts_ms=each))
    runtime = {"name": "treeopt", "version": "0.1.0", "attention": "sdpa"}
    return LatencyProfile(tuple(points), tuple(plain), runtime)


@cache
def some_plan(batch_sizes: tuple[int, ...]) -> Plan:
    """Of ``long_trace(3)`` and ``some_profile``, made once: it takes seconds."""
    return plan_trees(long_trace(3), some_profile(batch_sizes), PlanRequest(Limits(16), batch_sizes=batch_sizes))


def some_bench(groups=("",), *, blocks: int = 6, batch_size: int = 1) -> Benchmark:
    rng = np.random.default_rng(2)

    def contender(name: str, tree: Tree, speed: float, accepted: list[int]) -> Contender:
        rate = 1 + sum(n * count for n, count in enumerate(accepted)) / 100
        timed = [
            Block(
                round=r,
                prompts=[g * blocks + i],
                tokens=50,
                steps=round(50 / rate),
                group=group,
                decode_s=0.5 / speed * rng.uniform(0.9, 1.1),
            )
            for g, group in enumerate(groups)
            for i in range(blocks)
            for r in range(2)
        ]
        return Contender(
            name=name,
            batch_size=batch_size,
            size=len(tree),
            medusa_choices=tree.choices,
            steps=100,
            passes=105,
            tokens=round(100 * rate),
            tokens_per_step=rate,
            tokens_per_s=sum(b.tokens for b in timed) / sum(b.decode_s for b in timed),
            identical=9,
            compared=9,
            predicted_tokens_per_step=rate * 1.03,
            accepted=accepted,
            replayed_accepted=[40, 40, 20],
            predicted_accepted=[0.5, 0.25, 0.25],
            blocks=timed,
        )

    found = [
        contender("plain", Tree.chain(0), 1.0, [100]),
        contender("chosen", Tree.chain(2), 1.4, [50, 30, 20]),
        contender("mc_sim_7b_63", published_tree(), 0.8, [30, 30, 30, 10]),
        contender("a tree with a name as long as a file's may be", Tree.chain(3), 1.3, [40, 40, 20]),
    ]
    return Benchmark(contenders=tuple(found), dtype="bfloat16", rounds=2, prompts="held out")


def with_answers(contender: Contender) -> Contender:
    """With the answers that its blocks are of, the first of them unlike the plain one."""
    answers = [
        Answer(id=str(p), steps=block.steps, tokens=1 + block.tokens, identical=p > 0, group=block.group)
        for block in contender.blocks
        if block.round == 0
        for p in block.prompts
    ]
    answers[0] = replace(answers[0], first_difference=2, logit_gap=0.01)
    steps, tokens = sum(a.steps for a in answers), sum(a.tokens - 1 for a in answers)
    most, rest = divmod(tokens - steps, steps)
    return replace(
        contender,
        steps=steps,
        passes=steps,
        tokens=tokens,
        tokens_per_step=tokens / steps,
        identical=len(answers) - 1,
        compared=len(answers),
        accepted=[0] * most + [steps - rest, rest],
        sequences=answers,
    )


def some_groups(heads: int, names) -> dict:
    rng = np.random.default_rng(3)
    hits = rng.integers(0, 50, (len(names), heads))
    return {
        name: {"hits": [[int(h), 1] for h in row], "trials": [60] * heads, "sequences": 5, "tokens_per_step": 2.0}
        for name, row in zip(names, hits, strict=True)
    }


def grown(heads: int, size: int):
    trace = long_trace(heads)
    family = grow(trace, Limits(size, shape="any"), objective="replay")
    return tree_data(family.tree(len(family)), trace)


# Numbers


def test_wilson_is_scipys():
    from scipy.stats import binomtest

    for hits, trials in [(0, 7), (3, 9), (40, 40), (1, 5000)]:
        want = binomtest(hits, trials).proportion_ci(method="wilson")
        got = style.wilson(hits, trials)
        assert np.allclose([got.low, got.high], [want.low, want.high], atol=1e-9)


def walk(trace: RankTrace, tree: Tree) -> tuple[dict, int]:
    """Decode the trace step by step, as one would by hand."""
    visits, steps, nodes = dict.fromkeys(tree.paths, 0), 0, set(tree.paths)
    for start, stop in itertools.pairwise(trace.starts.tolist()):
        t = start
        while t < stop - 1:
            steps += 1
            path = ()
            visits[path] += 1
            for rank in trace.ranks[t].tolist():
                if (*path, rank) not in nodes:
                    break
                path = (*path, rank)
                visits[path] += 1
            t += 1 + len(path)
    return visits, steps


@given(traces(), trees(depth=3, ranks=5))
def test_visits_are_those_of_a_walk_by_hand(trace, tree):
    data = tree_data(tree, trace)
    visits, steps = walk(trace, tree)
    assert data.steps == steps
    assert data.visits.tolist() == [visits[path] for path in tree.paths]
    assert data.probabilities[0] == 1
    assert data.tokens_per_step == replay(trace, tree).tokens_per_step
    assert 0 <= data.visits.sum() - (trace.lengths - 1).sum() <= trace.num_sequences


def test_probabilities_of_a_calibration_are_products():
    calibration = Calibration(np.array([[60, 20], [40, 10]]), np.array([100, 100]))
    data = tree_data(Tree.from_choices([[0], [1], [1, 0]]), calibration)
    assert data.probabilities == pytest.approx([1, 0.6, 0.2, 0.08])
    assert data.visits is None
    with pytest.raises(OutOfRange, match="2 heads and 2 ranks"):
        tree_data(Tree.chain(3), calibration)


@given(trees(most_nodes=60))
def test_the_layout_is_tidy(tree):
    probabilities = np.random.default_rng(len(tree)).permutation(len(tree)) / len(tree)
    x = columns(tree, probabilities)
    children = {}
    for node in range(1, len(tree)):
        children.setdefault(tree.parents[node], []).append(node)
    order = []  # every subtree in one piece, likely children first

    def visit(node):
        order.append(node)
        below = sorted(children.get(node, []), key=lambda c: -probabilities[c])
        if below:
            assert x[below[0]] == x[node]  # a parent stands over its first child
        for child in below:
            visit(child)

    visit(0)
    for depth in range(tree.depth + 1):
        row = [x[node] for node in order if tree.depths[node] == depth]
        assert (np.diff(row) > 1 - 1e-9).all()
    assert x.min() == 0


def test_accuracy_counts_single_and_cumulative():
    trace = long_trace(3)
    data = accuracy_data(Calibration.from_trace(trace), ranks=4)
    ranks = trace.ranks[trace.has_step]
    for head, rank in itertools.product(range(3), range(4)):
        column = ranks[:, head][ranks[:, head] != -2]
        assert data.single.value[head, rank] == pytest.approx((column == rank).mean())
        inside = (column >= 0) & (column <= rank)
        assert data.cumulative.value[head, rank] == pytest.approx(inside.mean())


@pytest.mark.parametrize(
    ("info", "guesser", "right"),
    [
        ({"drafter": {"kind": "medusa"}}, "head", "the heads are right"),
        ({"drafter": {"kind": "ngram"}}, "depth", "guesses are right"),
        ({}, "depth", "guesses are right"),
        ({"drafter": {"kind": "draft-model"}, "acceptance": {"rule": "rejection"}}, "depth", "tokens are accepted"),
        ({"source": "engine log"}, "depth", "tokens are accepted"),
    ],
)
def test_only_heads_are_called_heads(info, guesser, right):
    calibration = Calibration(np.array([[60], [40]]), np.array([100, 100]), meta=info)
    words = accuracy_data(calibration).words
    assert words.guesser == guesser
    assert right in words.right
    groups = {"a": {"hits": [[3]], "trials": [10]}}
    assert groups_data(groups, info).words == words
    data = tree_data(Tree.chain(1), calibration)
    assert data.guesser == ("depth" if "drafter" not in info else guesser)
    trace = replace(long_trace(2), meta={**long_trace(2).meta, **info})
    assert positions_data(trace).words == words


def test_captions_name_the_rule():
    trace = long_trace(2)
    trace = replace(trace, meta={**trace.meta, "acceptance": {"rule": "sample-then-match", "temperature": 0.7}})
    data = [tree_data(Tree.chain(1), trace), positions_data(trace)]
    data += [sizes_data(trace, Limits(4)), accuracy_data(Calibration.from_trace(trace))]
    for each in data:
        assert "--acceptance sample --temperature 0.7" in each.caption


def test_groups_go_by_the_accuracy_of_head_1():
    groups = {"a": {"hits": [[3], [1]], "trials": [10, 10]}, "b": {"hits": [[9], [2]], "trials": [10, 20]}}
    data = groups_data(groups)
    assert data.names == ("b", "a")
    assert data.top1.value.tolist() == [[0.9, 0.1], [0.3, 0.1]]
    assert data.tokens_per_step is None
    with pytest.raises(InvalidInput, match="hits and trials"):
        groups_data({"a": {"hits": [[3]]}})


@given(traces())
def test_positions_are_counted_once(trace):
    if not trace.has_step.any():
        with pytest.raises(OutOfRange, match="at least 2 tokens"):
            positions_data(trace)
        return
    data = positions_data(trace, buckets=3)
    hits, trials = np.zeros_like(data.trials), np.zeros_like(data.trials)
    for start, stop in itertools.pairwise(trace.starts.tolist()):
        for t in range(start, stop - 1):
            bucket = max(b for b in range(len(data.edges) - 1) if data.edges[b] <= t - start)
            hits[:, bucket] += trace.ranks[t] == 0
            trials[:, bucket] += trace.ranks[t] != -2
    assert data.trials.tolist() == trials.tolist()
    assert np.nan_to_num(data.top1.value * trials).round().astype(int).tolist() == hits.tolist()


def test_buckets_have_about_equally_many_states():
    trace = random_trace(np.random.default_rng(0), [101] * 10, 2, 5)
    assert np.diff(positions_data(trace, buckets=4).edges).tolist() == [25] * 4


def test_dense_widths_are_all_within_the_budget():
    brute = {
        widths
        for depth in (1, 2, 3)
        for widths in itertools.product(range(1, 6), repeat=depth)
        if len(Tree.dense(widths)) <= 17
    }
    found = dense_widths(17, 3, 5)
    assert len(found) == len(set(found))
    assert set(found) == brute


def test_sizes_are_cross_fitted_and_dense_trees_replayed():
    trace = long_trace(3)
    data = sizes_data(trace, Limits(12), most_dense=15)
    limits = Limits(12, max_depth=3)
    for objective, curve in data.curves.items():
        want = source_of(trace).crossfit(limits, objective).tokens_per_step
        assert curve.value == pytest.approx(want)
        assert (curve.low <= curve.value).all()
        assert (curve.value <= curve.high).all()
    assert len(data.others.dense) == 15 < data.others.n_dense
    for widths, size, rate in data.others.dense:
        assert size == len(Tree.dense(widths)) <= 12
        assert rate == replay(trace, Tree.dense(widths)).tokens_per_step


def test_sizes_of_a_probe_are_those_of_its_steps():
    """Once they were of the greedy trace beside it, with the plan's objective in the caption."""
    rng, policy = np.random.default_rng(3), Tree.chain(2)
    probe = random_probe(rng, Tree.dense([3, 2]), 400, policy=policy)
    probe = replace(probe, meta={**probe.meta, "acceptance": {"rule": "typical", "temperature": 0.7}})
    data = sizes_data(probe, Limits(8), objective="coverage")
    (curve,) = data.curves.values()
    want = (
        source_of(probe).crossfit(Limits(8, max_depth=2, max_rank=9, shape="sibling-closed"), COVERAGE).tokens_per_step
    )
    assert curve.value == pytest.approx(want)
    assert data.objective in data.curves
    assert "--acceptance typical" in data.caption
    dense = {widths: rate for widths, _, rate in data.others.dense}
    assert set(dense) == {(1,), (2,), (3,), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1)}
    for widths, rate in dense.items():
        assert rate == pytest.approx(replay_probe(probe, Tree.dense(widths)).tokens_per_step)
    assert {name: rate for name, _, rate in data.others.fixed} == pytest.approx(
        {f"chain of {d}": replay_probe(probe, Tree.chain(d)).tokens_per_step for d in (1, 2)}
    )


def test_throughput_is_the_plans():
    plan = some_plan((1, 4))
    data = throughput_data(plan)
    for entry, curve in zip(plan.entries, data.curves, strict=True):
        assert curve.at(entry.size) == pytest.approx(entry.tokens_per_s)
        assert curve.plain == pytest.approx(entry.tokens_per_s / entry.speedup)
        assert {curve.chosen, *curve.tied} == set(entry.tied_sizes)
    with pytest.raises(OutOfRange, match="treeopt profile"):
        throughput_data(plan_trees(long_trace(3), request=PlanRequest(Limits(8))))


def test_latency_is_the_median_at_the_deepest_tree():
    points = [StepTiming(2, 9, 8, d, tuple(ms)) for d, ms in ((1, (4.0, 4, 5)), (3, (6.0, 8, 9)))]
    profile = LatencyProfile(tuple(points), (StepTiming(2, 9, 1, 0, (2.0, 2, 2)),))
    (curve,) = latency_data(profile).curves
    assert (curve.sizes.tolist(), curve.depths.tolist(), curve.ms.value.tolist()) == ([8], [3], [8.0])
    assert curve.others == ((8, 1, 4.0),)
    assert curve.overhead.value.tolist() == [4.0]
    half = 1.96 * 1.2533 * 1.4826 / np.sqrt(3)  # the median absolute deviation is 1
    assert curve.ms.high - curve.ms.value == pytest.approx(half, rel=1e-3)


def test_parts_add_up_where_they_vary_together():
    data = parts_data(some_profile((1, 8)))
    for panel in data.panels:
        assert list(panel.ms) == ["draft", "target", "verify", "commit"]
        assert sum(panel.ms.values()) == pytest.approx(panel.total)
    with pytest.raises(OutOfRange, match="treeopt profile"):
        parts_data(some_profile((1,), parts=False))


def test_a_line_has_no_tree_that_is_shallower_than_its_rows_allow():
    """Of 11 rows only a tree of depth 1 was timed: the line fell there to half of its neighbours."""
    times = {(2, 1): 8.0, (3, 2): 10.0, (9, 2): 19.0, (11, 1): 9.0, (16, 2): 20.0}
    points = [
        StepTiming(1, 9, size, depth, (ms, ms), parts_ms={"draft": (ms / 2,), "target": (ms / 2,)})
        for (size, depth), ms in times.items()
    ]
    profile = LatencyProfile(tuple(points), (StepTiming(1, 9, 1, 0, (5.0, 5.0)),))
    (curve,) = latency_data(profile).curves
    assert curve.sizes.tolist() == [2, 3, 9, 16]
    assert curve.depths.tolist() == [1, 2, 2, 2]
    assert curve.others == ((11, 1, 9.0),)
    (panel,) = parts_data(profile).panels
    assert (panel.sizes.tolist(), panel.depth) == ([2, 3, 9, 16], 2)


def test_parts_and_the_rest_are_the_whole_step():
    profile = some_profile((1,))
    short = [
        replace(p, parts_ms={name: tuple(0.8 * t for t in ms) for name, ms in (p.parts_ms or {}).items()})
        for p in profile.points
    ]
    for panel in parts_data(LatencyProfile(tuple(short), profile.autoregressive)).panels:
        assert sum(panel.ms.values()) == pytest.approx(panel.total)
        assert panel.ms["the rest"] == pytest.approx(0.2 * panel.total, rel=0.01)


def test_a_pareto_picture_has_the_plan_plain_decoding_and_what_was_measured():
    plan, bench = some_plan((1, 4)), some_bench(batch_size=4)
    data = pareto_data(plan, {4: bench})
    trees, plain = data.rates["the plan's trees"], data.rates["plain decoding"]
    assert trees.batch_sizes.tolist() == [1, 4]
    assert trees.total.tolist() == [e.tokens_per_s for e in plan.entries]
    assert trees.per_user.tolist() == [plan[1].tokens_per_s, plan[4].tokens_per_s / 4]
    assert plain.total == pytest.approx([e.curve[0].tokens_per_s for e in plan.entries])
    measured = data.rates["the plan's trees, measured"]
    assert (measured.batch_sizes.tolist(), measured.total.tolist()) == ([4], [bench.contender("chosen").tokens_per_s])
    assert data.rates["plain decoding, measured"].total.tolist() == [bench.contender("plain").tokens_per_s]
    with pytest.raises(OutOfRange, match="at least two batch sizes"):
        pareto_data(some_plan((1,)))


def with_dynamic(plan: Plan) -> Plan:
    """The plan with a dynamic and an adaptive tree, the second at its last batch size alone."""
    figures = {"size": 8, "depth": 3, "topk": 4, "tokens_per_step": 2.2, "speedup": 1.6, "speedup_stderr": 0.03}
    rule = {"intercepts": [0.0] * 3, "slopes": [1.0] * 3, "cost_ms": [5.0, 6.0], "tokens_per_ms": 1.0}
    adaptive = AdaptiveFigures(**figures, rows=[4, 8], mean_rows=5.0, **rule)
    entries = [replace(entry, dynamic=DynamicFigures(**figures)) for entry in plan.entries]
    return replace(plan, entries=(*entries[:-1], replace(entries[-1], adaptive=adaptive)))


def test_a_picture_of_kinds_has_what_the_plan_says_of_each_and_what_was_measured():
    plan, bench = with_dynamic(some_plan((1, 4))), some_bench(batch_size=4)
    data = kinds_data(plan, {4: bench})
    assert data.batch_sizes == (1, 4)
    assert [mark.label for mark in data.speedups["fixed"]] == [str(entry.size) for entry in plan.entries]
    assert data.speedups["dynamic"] == (Mark(1.6, 0.03 * 1.959964, "3/4/8"),) * 2
    assert data.speedups["adaptive"] == (None, Mark(1.6, 0.03 * 1.959964, "3/4/4-8"))
    assert data.tokens_per_step["dynamic"][0].value == 2.2
    assert data.measured["fixed"][0] is data.measured["dynamic"][1] is None
    ratio = bench.speedup("chosen")
    assert data.measured["fixed"][1] == Mark(ratio.value, (ratio.high - ratio.low) / 2)
    with pytest.raises(OutOfRange, match="no dynamic trees"):
        kinds_data(some_plan((1,)))


def test_parts_never_exceed_the_whole_step():
    long = {"draft": (8.0, 8.0), "target": (4.0, 4.0)}
    short = {"draft": (1.0, 1.0), "target": (4.0, 4.0)}
    points = [StepTiming(1, 9, size, 1, (6.0, 6.0), parts_ms=parts) for size, parts in ((4, long), (8, short))]
    profile = LatencyProfile(tuple(points), (StepTiming(1, 9, 1, 0, (5.0, 5.0)),))
    (panel,) = parts_data(profile).panels
    assert panel.ms["draft"].tolist() == [4.0, 1.0]
    assert panel.ms["target"].tolist() == [2.0, 4.0]


def test_accepted_shares_are_counts_over_steps():
    data = accepted_data(some_bench())
    assert data.shares["measured"].value.tolist() == [0.5, 0.3, 0.2]
    assert data.means == pytest.approx({"measured": 0.7, "replayed": 0.8, "predicted": 0.75})


def test_an_older_benchmark_leaves_series_out():
    bench = some_bench()
    older = [replace(c, predicted_accepted=[], replayed_accepted=[]) for c in bench.contenders]
    assert list(accepted_data(replace(bench, contenders=tuple(older))).shares) == ["measured"]
    oldest = tuple(replace(c, accepted=[]) for c in older)
    with pytest.raises(OutOfRange, match="treeopt bench"):
        accepted_data(replace(bench, contenders=oldest))


def test_contenders_are_the_benchmarks():
    bench = some_bench(("code", "chat"))
    data = contenders_data(bench)
    assert data.speedups[1] == bench.speedup("chosen")
    assert data.tokens_per_step["measured"] == (1.0, 1.7, 2.2, 1.8)
    assert data.groups == {g: bench.speedup("chosen", group=g) for g in ("code", "chat")}
    assert contenders_data(some_bench()).groups == {}


# From a run directory


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def fill(run: RunDirectory, batch_sizes) -> Plan:
    trace, profile = long_trace(3), some_profile(batch_sizes)
    named = {**trace.meta, "group_names": NAMES[:2]}
    trace = replace(trace, meta=named, group=np.arange(trace.num_sequences) % 2)
    trace.save(run.trace)
    Calibration.from_trace(trace).save(run.calibration)
    profile.save(run.profile)
    plan = some_plan(batch_sizes)
    plan.save(run.plan)
    return plan


@pytest.mark.long
def test_everything_is_drawn_once(run):
    fill(run, (1,))
    some_bench().save(run.bench)
    files, notes = figures.draw(run)
    # Of dynamic trees, and of several batch sizes.
    assert [note.split(":")[0] for note in notes] == ["kinds was left out", "pareto was left out"]
    drawn = [name for name in figures.FIGURES if name not in ("kinds", "pareto")]
    assert [f.name for f in files] == [f"{name}.{kind}" for name in drawn for kind in ("png", "svg")]
    assert sorted(run.figures.iterdir()) == sorted(files)


def test_a_plan_on_a_probe_has_the_sizes_of_the_probe(run):
    fill(run, (1,))
    probe = random_probe(np.random.default_rng(3), Tree.dense([3, 2]), 400, policy=Tree.chain(2))
    probe.save(run.probe)
    plan = plan_trees(probe, some_profile((1,)), PlanRequest(Limits(8)))
    replace(plan, inputs=inputs_of(run.probe)).save(run.plan)
    (picture,) = figures.pictures(run, names=["sizes"])
    text = figures.svg_element(picture.svg)
    assert "grown: coverage" in text
    assert "grown: replay" not in text


def test_several_batch_sizes_have_a_tree_and_a_benchmark_each(run):
    fill(run, (1, 4))
    some_bench(batch_size=4).save(run.bench_of(4))
    some_bench(batch_size=4).save(run.bench)
    files, notes = figures.draw(run, names=["tree", "accepted"], formats=["svg"])
    stems = ["tree-batch-size-1", "tree-batch-size-4", "accepted-batch-size-4"]
    assert [file.stem for file in files] == stems
    assert len(notes) == 1
    assert notes[0].startswith("accepted-batch-size-1 was left out")
    assert "treeopt bench --batch-size 1" in notes[0]
    files, _ = figures.draw(run, names=["tree"], formats=["svg"], batch_size=4)
    assert [file.stem for file in files] == ["tree-batch-size-4"]


def test_an_empty_run_says_which_command_makes_each_input(run):
    files, notes = figures.draw(run)
    assert files == []
    made_by = {"tree": "search", "positions": "calibrate", "latency": "profile", "contenders": "bench"}
    for name, command in made_by.items():
        (note,) = [note for note in notes if note.startswith(f"{name} was left out")]
        assert note.endswith(f"Make it with: {run.command(command)}")
    assert len(notes) == len(figures.FIGURES)


def test_a_published_calibration_gives_its_tree_and_accuracy(run):
    pipeline.search(run, pipeline.SearchOptions(batch_sizes=(1,)), calibration="vicuna-7b-medusa1")
    files, notes = figures.draw(run, formats=["png"])
    assert [file.stem for file in files] == ["tree", "accuracy"]
    assert len(notes) == len(figures.FIGURES) - 2


def test_unknown_names_and_formats_are_refused(run):
    with pytest.raises(InvalidInput, match=r"one of tree, accuracy, .*, but got 'three'"):
        figures.draw(run, names=["three"])
    with pytest.raises(InvalidInput, match="one of png, svg, but got 'bmp'"):
        figures.draw(run, formats=["bmp"])
    with pytest.raises(InvalidInput, match="--dpi must be above 0"):
        figures.draw(run, dpi=0)


def test_a_damaged_file_is_an_error_not_a_note(run):
    fill(run, (1,))
    run.profile.write_text("{")
    with pytest.raises(InvalidInput, match="not valid JSON"):
        figures.draw(run, names=["latency"])


def test_the_svg_of_one_figure_can_go_into_a_page(run):
    plan = fill(run, (1, 4))
    (picture,) = figures.pictures(run, names=["tree"], batch_size=4)
    text = figures.svg_element(picture.svg, "t-")
    svg = ElementTree.fromstring(text)
    assert text.startswith("<svg")
    assert "t-node-0" in {element.get("id") for element in svg.iter()} or plan.entry(4).size == 1
