"""Figures: their numbers against slow oracles, and what is drawn from a run directory."""

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given

from tests.conftest import random_trace, traces, trees
from tests.test_coverage import random_probe, replay_probe
from treeopt.errors import InvalidInput, OutOfRange
from treeopt.growth.grow import grow
from treeopt.growth.replay import replay
from treeopt.growth.source import source_of
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import Calibration
from treeopt.records.contender import Answer, Block, Contender, Predicted
from treeopt.records.inputs import inputs_of
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report import figures
from treeopt.report.figures.accuracy import accuracy_chart, groups_chart
from treeopt.report.figures.bench import accepted_chart, contenders_chart
from treeopt.report.figures.chart import wilson
from treeopt.report.figures.planning import bands, latency_chart, sizes_chart, throughput_chart
from treeopt.report.figures.tree import columns, tree_data
from treeopt.trees.published import published_tree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

NAMES = ["coding in Python, JavaScript and other languages of GitHub", "chat", "mathematics, step by step"]
NAMES += [
    "retrieval augmented generation",
    *["stem", "roleplay", "translation", "summarization", "writing", "extraction"],
]
NAMES += ["humanities", "multi-turn", "W" * 60]


def long_trace(heads: int, *, sequences: int = 24, ranks: int = 10, seed: int = 0) -> RankTrace:
    rng = np.random.default_rng(seed)
    trace = random_trace(rng, rng.integers(20, 60, sequences), heads, ranks)
    source = {"model": "organisation/some-model-7b-v1.3", "dtype": "bfloat16", "device": "cuda:0"}
    return replace(trace, meta={**trace.meta, "provenance": source})


def some_profile(batch_sizes, *, depth: int = 3, largest: int = 64) -> LatencyProfile:
    rng = np.random.default_rng(1)
    points, plain = [], []
    for b in batch_sizes:
        noise = rng.normal(1, 0.03, 9)
        plain.append(StepTiming(b, 512, 1, 0, tuple((3 + 0.1 * b) * noise)))
        for size in (s for s in (2, 4, 8, 16, 32, 64, 128, 256) if s <= largest):
            for d in {1, min(depth, size - 1)}:
                ms = 0.3 * d + 3 + 0.02 * b * size + 0.3
                points.append(StepTiming(b, 512, size, d, tuple(ms * noise)))
    runtime = {"name": "treeopt", "version": "0.1.0", "attention": "sdpa"}
    return LatencyProfile(tuple(points), tuple(plain), runtime)


@cache
def some_plan(batch_sizes: tuple[int, ...]) -> Plan:
    """Of ``long_trace(3)`` and ``some_profile``, made once: it takes seconds."""
    return plan_trees(long_trace(3), some_profile(batch_sizes), PlanRequest(Limits(16), batch_sizes=batch_sizes))


def some_bench(groups=("",), *, blocks: int = 6, batch_size: int = 1) -> Benchmark:
    rng = np.random.default_rng(2)
    where = [(g * blocks + i, group, r) for g, group in enumerate(groups) for i in range(blocks) for r in range(2)]

    def contender(name: str, tree: Tree, speed: float, accepted: list[int]) -> Contender:
        rate = 1 + sum(n * count for n, count in enumerate(accepted)) / 100
        steps, timed = round(50 / rate), []
        for prompt, group, r in where:
            seconds = 0.5 / speed * rng.uniform(0.9, 1.1)
            timed.append(Block(round=r, prompts=[prompt], tokens=50, steps=steps, group=group, decode_s=seconds))
        told = [
            Answer(id=str(p), steps=steps, tokens=51, identical=p > 0, group=group, replayed_steps=steps)
            for p, group, r in where
            if r == 0
        ]
        told[0] = replace(told[0], first_difference=2, logit_gap=0.01)
        guessed = {"replayed_accepted": [40, 40, 20], "predicted_accepted": [0.5, 0.25, 0.25], "accepted": accepted}
        predicted = Predicted(tokens_per_step=min(rate * 1.03, 1 + tree.depth))
        kept = {"sequences": told, "blocks": timed, "passes": 105, "predicted": predicted, **guessed}
        return Contender(name=name, batch_size=batch_size, draft=tree, **kept)

    found = [
        contender("plain", Tree.chain(0), 1.0, [100]),
        contender("chosen", Tree.chain(2), 1.4, [50, 30, 20]),
        contender("mc_sim_7b_63", published_tree(), 0.8, [30, 30, 30, 10]),
        contender("a tree with a name as long as a file's may be", Tree.chain(3), 1.3, [40, 40, 20]),
    ]
    return Benchmark(contenders=tuple(found), dtype="bfloat16", prompts="held out")


def some_groups(heads: int, names) -> dict:
    rng = np.random.default_rng(3)
    hits = rng.integers(0, 50, (len(names), heads))
    return {
        name: {"hits": [[int(h), 1] for h in row], "trials": [60] * heads, "sequences": 5, "tokens_per_step": 2.0}
        for name, row in zip(names, hits, strict=True)
    }


def grown(heads: int, size: int):
    trace = long_trace(heads)
    return tree_data(grow(trace, Limits(size)).largest(size), trace)


# Numbers


def test_wilson_is_scipys():
    from scipy.stats import binomtest

    for hits, trials in [(0, 7), (3, 9), (40, 40), (1, 5000)]:
        want = binomtest(hits, trials).proportion_ci(method="wilson")
        got = wilson(hits, trials)
        assert np.allclose(got.ends, [want.low, want.high], atol=1e-9)


def walk(trace: RankTrace, tree: Tree) -> tuple[dict, int]:
    """Decode the trace step by step, as one would by hand."""
    visits, steps = dict.fromkeys(tree.paths, 0), 0
    for start, stop in itertools.pairwise(trace.starts.tolist()):
        t = start
        while t < stop - 1:
            steps += 1
            ranks = tuple(trace.ranks[t].tolist())
            reached = list(itertools.takewhile(visits.__contains__, (ranks[:d] for d in range(len(ranks) + 1))))
            for path in reached:
                visits[path] += 1
            t += len(reached)
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


@given(trees(most_nodes=60))
def test_the_layout_is_tidy(tree):
    probabilities = np.random.default_rng(len(tree)).permutation(len(tree)) / len(tree)
    x, order = columns(tree, probabilities), []  # every subtree in one piece, likely children first

    def visit(node):
        order.append(node)
        below = sorted(np.flatnonzero(tree.parents == node), key=lambda child: -probabilities[child])
        assert not below or x[below[0]] == x[node], "a parent stands over its first child"
        for child in below:
            visit(child)

    visit(0)
    for depth in range(tree.depth + 1):
        row = [x[node] for node in order if tree.depths[node] == depth]
        assert (np.diff(row) > 1 - 1e-9).all()
    assert x.min() == 0


def test_accuracy_counts_single_and_cumulative():
    trace = long_trace(3)
    left, right = accuracy_chart(Calibration.from_trace(trace), ranks=4).panels[0]
    ranks = trace.ranks[trace.has_step]
    for head, rank in itertools.product(range(3), range(4)):
        column = ranks[:, head][ranks[:, head] != -2]
        single = next(one.y for one in left.series if one.look["color"] == right[str(head + 1)].look["color"])
        assert single[rank] == pytest.approx((column == rank).mean())
        assert right[str(head + 1)].y[rank] == pytest.approx(((column >= 0) & (column <= rank)).mean())


HEADS, GUESSES, TOKENS = (
    ("head", "the heads are right"),
    ("depth", "guesses are right"),
    ("depth", "tokens are accepted"),
)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"drafter": {"kind": "medusa"}}, HEADS),
        ({"drafter": {"kind": "ngram"}}, GUESSES),
        ({}, GUESSES),
        ({"drafter": {"kind": "draft-model"}, "acceptance": {"rule": "rejection"}}, TOKENS),
        ({"source": "engine log"}, TOKENS),
    ],
)
def test_only_heads_are_called_heads_and_probabilities_are_products(info, words):
    calibration = Calibration(np.array([[60, 20], [40, 10]]), np.array([100, 100]), meta=info)
    groups = groups_chart({"a": {"hits": [[3]], "trials": [10]}}, info)
    for chart in (accuracy_chart(calibration), groups):
        assert chart.legend == words[0]
        assert words[1] in chart.title
    data = tree_data(Tree.from_choices([[0], [1], [1, 0]]), calibration)
    assert data.probabilities == pytest.approx([1, 0.6, 0.2, 0.08])
    assert (data.visits, data.guesser) == (None, words[0])
    with pytest.raises(OutOfRange, match="2 heads and 2 ranks"):
        tree_data(Tree.chain(3), calibration)


def test_captions_name_the_rule():
    trace = long_trace(2)
    trace = replace(trace, meta={**trace.meta, "acceptance": {"rule": "sample-then-match", "temperature": 0.7}})
    data = [tree_data(Tree.chain(1), trace), sizes_chart(trace, Limits(4))]
    data.append(accuracy_chart(Calibration.from_trace(trace)))
    assert all("--acceptance sample --temperature 0.7" in each.caption for each in data)


def test_groups_go_by_the_accuracy_of_head_1():
    groups = {"a": {"hits": [[3], [1]], "trials": [10, 10]}, "b": {"hits": [[9], [2]], "trials": [10, 20]}}
    ((panel,),) = groups_chart(groups).panels  # none of tokens per step, which are not known
    assert panel.rows == ["b (0)", "a (0)"]
    assert [panel[depth].x.tolist() for depth in ("1", "2")] == [[0.9, 0.3], [0.1, 0.1]]
    with pytest.raises(InvalidInput, match="hits and trials"):
        groups_chart({"a": {"hits": [[3]]}})


def test_sizes_are_cross_fitted_and_chains_replayed():
    trace, limits = long_trace(3), Limits(12, max_depth=3)
    panel = sizes_chart(trace, Limits(12))[0]
    assert panel["grown: replay"].y == pytest.approx(source_of(trace).crossfit(limits).tokens_per_step)
    (area,) = [one for one in panel.series if one.kind == "area"]
    assert (area.ends[0] <= area.y).all() & (area.y <= area.ends[1]).all()
    chains = [replay(trace, Tree.chain(depth)).tokens_per_step for depth in (1, 2, 3)]
    assert panel["chains of top-1"].y == pytest.approx(chains)


def test_sizes_of_a_probe_are_those_of_its_steps():
    """Once they were of the greedy trace beside it, whatever the plan was made from."""
    rng, policy = np.random.default_rng(3), Tree.chain(2)
    probe = random_probe(rng, Tree.dense([3, 2]), 400, policy=policy)
    probe = replace(probe, meta={**probe.meta, "acceptance": {"rule": "typical", "temperature": 0.7}})
    chart = sizes_chart(probe, Limits(8))
    (curve,) = [one for one in chart[0].series if one.label.startswith("grown")]
    limits = Limits(8, max_depth=2, max_rank=9)
    assert curve.y == pytest.approx(source_of(probe).crossfit(limits).tokens_per_step)
    assert "--acceptance typical" in chart.caption
    chains = [replay_probe(probe, Tree.chain(d)).tokens_per_step for d in (1, 2)]
    assert chart[0]["chains of top-1"].y == pytest.approx(chains)


def test_throughput_is_the_plans():
    plan = some_plan((1, 4))
    left, right = throughput_chart(plan).panels[0]
    for entry in plan.entries:
        size, chosen = str(entry.batch_size), entry.chosen
        assert chosen.tokens_per_s in [float(one.y[0]) for one in left.series if one.look.get("marker") == "*"]
        shade = next(one for one in left.series if one.kind == "area" and list(one.y) == list(left[size].y))
        half = [1.959964 * p.tokens_per_s.stderr for p in entry.curve]
        assert (shade.ends[1] - shade.y, shade.y - shade.ends[0]) == (pytest.approx(half), pytest.approx(half))
        assert max(right[size].y) == pytest.approx(max(p.tokens_per_s for p in entry.curve) / entry.plain.tokens_per_s)
    with pytest.raises(OutOfRange, match="treeopt profile"):
        throughput_chart(plan_trees(long_trace(3), request=PlanRequest(Limits(8))))


def test_tied_sizes_are_bands_to_the_middle_of_the_next_ones():
    sizes, rates = np.array([1.0, 2, 4, 8, 16]), np.array([1.0, 3, 5, 4, 2])
    (one,) = bands(sizes, rates, [4, 8])
    assert one[0] == pytest.approx([2**1.5, 4, 8, 2**3.5])
    assert one[1] == pytest.approx([4, 5, 4, 3])
    assert [len(x) for x, _ in bands(sizes, rates, [1, 16])] == [2, 2]
    assert bands(sizes, rates, [4]) == []


def test_latency_is_the_median_at_the_deepest_tree():
    points = [StepTiming(2, 9, 8, d, tuple(ms)) for d, ms in ((1, (4.0, 4, 5)), (3, (6.0, 8, 9)))]
    profile = LatencyProfile(tuple(points), (StepTiming(2, 9, 1, 0, (2.0, 2, 2)),))
    left, right = latency_chart(profile).panels[0]
    line, _, shallow = left.series
    assert ([*line.x], [*line.y], [*shallow.x], [*shallow.y]) == ([8], [8.0], [8], [4.0])
    assert line.look["linestyle"] == "none", "a line would assert every dip"
    assert right["batch size 2"].y.tolist() == [4.0]
    assert right["depth 1"].label
    half = 1.96 * 1.2533 * 1.4826 / np.sqrt(3)  # the median absolute deviation is 1; of the other timing it is 0
    assert 0.5 * half < float((line.ends[1] - line.y)[0]) < half


def test_a_line_has_no_tree_that_is_shallower_than_its_rows_allow():
    """Of 11 rows only a tree of depth 1 was timed: the line fell there to half of its neighbours."""
    times = {(2, 1): 8.0, (3, 2): 10.0, (9, 2): 19.0, (11, 1): 9.0, (16, 2): 20.0}
    points = [StepTiming(1, 9, size, depth, (ms, ms)) for (size, depth), ms in times.items()]
    profile = LatencyProfile(tuple(points), (StepTiming(1, 9, 1, 0, (5.0, 5.0)),))
    line, _, shallow = latency_chart(profile)[0].series
    assert (line.x, shallow.x, shallow.y) == ([2, 3, 9, 16], [11], [9.0])


def test_accepted_shares_are_counts_over_steps():
    panel = accepted_chart(some_bench())[0]
    assert {one.label.replace("\n", " "): one.y.tolist() for one in panel.series} == {
        "predicted (0.75 a step)": [0.5, 0.25, 0.25],
        "replayed (0.80 a step)": [0.4, 0.4, 0.2],
        "measured (0.70 a step)": [0.5, 0.3, 0.2],
    }
    bench = some_bench()
    fewer = [replace(c, predicted_accepted=[], replayed_accepted=[]) for c in bench.contenders]
    assert len(accepted_chart(replace(bench, contenders=tuple(fewer)))[0].series) == 1
    with pytest.raises(OutOfRange, match="treeopt bench"):
        accepted_chart(replace(bench, contenders=tuple(replace(c, accepted=[]) for c in fewer)))


def test_contenders_are_the_benchmarks():
    bench = some_bench(("code", "chat"))
    (left, right), (below,) = contenders_chart(bench).panels
    assert left.series[0].x[1] == bench.speedup("chosen").value
    assert right["measured"].x == [c.tokens_per_step for c in bench.contenders]
    assert below.series[0].x.tolist() == [bench.speedup("chosen", group=group).value for group in below.rows]
    assert len(contenders_chart(some_bench()).panels) == 1


# From a run directory


def fill(run: RunDirectory, batch_sizes) -> None:
    trace = long_trace(3)
    named = {**trace.meta, "group_names": NAMES[:2]}
    trace = replace(trace, meta=named, group=np.arange(trace.num_sequences) % 2)
    trace.save(run.trace)
    Calibration.from_trace(trace).save(run.calibration)
    some_profile(batch_sizes).save(run.profile)
    some_plan(batch_sizes).save(run.plan)


@pytest.mark.long
def test_everything_is_drawn_once(run):
    fill(run, (1,))
    some_bench().save(run.bench)
    files, notes = figures.draw(run)
    assert not notes
    assert [f.name for f in files] == [f"{name}.{kind}" for name in figures.FIGURES for kind in ("png", "svg")]
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
    made_by = {"tree": "search", "groups": "calibrate", "latency": "profile", "contenders": "bench"}
    for name, command in made_by.items():
        (note,) = [note for note in notes if note.startswith(f"{name} was left out")]
        assert note.endswith(f"Make it with: {run.command(command)}")
    assert len(notes) == len(figures.FIGURES)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"names": ["three"]}, r"one of tree, accuracy, .*, but got 'three'"),
        ({"formats": ["bmp"]}, "one of png, svg, but got 'bmp'"),
        ({"names": ["latency"]}, "not valid JSON"),  # a damaged file is no note
    ],
)
def test_what_cannot_be_drawn_is_refused(run, options, said):
    fill(run, (1,))
    run.profile.write_text("{")
    with pytest.raises(InvalidInput, match=said):
        figures.draw(run, **options)
