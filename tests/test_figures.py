"""Figures: their numbers against slow oracles, and what is drawn from a run directory."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from tests.conftest import traces, trees
from tests.helpers.runs import NAMES, long_trace, some_bench, some_plan, some_profile
from tests.test_coverage import random_probe, replay_probe
from treeopt.cli.show import FIGURES
from treeopt.errors import InvalidInput, OutOfRange
from treeopt.growth.grow import grow
from treeopt.growth.replay import replay
from treeopt.growth.source import source_of
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.calibration import Calibration
from treeopt.records.inputs import inputs_of
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report import figures
from treeopt.report.figures.accuracy import accuracy_chart, groups_chart
from treeopt.report.figures.bench import accepted_chart, contenders_chart
from treeopt.report.figures.chart import wilson
from treeopt.report.figures.planning import latency_chart, sizes_chart, throughput_chart
from treeopt.report.figures.registry import Inputs
from treeopt.report.figures.tree import places, tree_data
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree


def grown(heads: int, size: int):
    trace = long_trace(heads)
    return tree_data(grow(trace, Limits(size)).largest(size), trace)


# Numbers


def test_wilson_is_scipys():
    """Ends by scipy's ``binomtest(hits, trials).proportion_ci(method="wilson")``."""
    shares = wilson([0, 3, 40, 1], [7, 9, 40, 5000])
    assert shares[1:].round(6).tolist() == [[0.0, 0.120584, 0.912378, 3.5e-05], [0.35433, 0.645798, 1.0, 0.001132]]


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
    x, order = places(tree, probabilities), []  # every subtree in one piece, likely children first

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
    left, right = accuracy_chart(Calibration.from_trace(trace), ranks=4).panels
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
    assert all("--rule sample:temperature=0.7" in each.caption for each in data)


def test_groups_go_by_the_accuracy_of_head_1():
    groups = {"a": {"hits": [[3], [1]], "trials": [10, 10]}, "b": {"hits": [[9], [2]], "trials": [10, 20]}}
    (panel,) = groups_chart(groups).panels  # none of tokens per step, which are not known
    assert panel.rows == ["b (0)", "a (0)"]
    assert [panel[depth].x.tolist() for depth in ("1", "2")] == [[0.9, 0.3], [0.1, 0.1]]
    with pytest.raises(InvalidInput, match="hits and trials"):
        groups_chart({"a": {"hits": [[3]]}})


def test_sizes_are_cross_fitted_and_chains_replayed():
    trace, limits = long_trace(3), Limits(12, max_depth=3)
    panel = sizes_chart(trace, Limits(12)).panels[0]
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
    (curve,) = [one for one in chart.panels[0].series if one.label.startswith("grown")]
    limits = Limits(8, max_depth=2, max_rank=9)
    assert curve.y == pytest.approx(source_of(probe).crossfit(limits).tokens_per_step)
    assert "--rule typical" in chart.caption
    chains = [replay_probe(probe, Tree.chain(d)).tokens_per_step for d in (1, 2)]
    assert chart.panels[0]["chains of top-1"].y == pytest.approx(chains)


def test_throughput_is_the_plans():
    plan = some_plan((1, 4))
    left, right = throughput_chart(plan).panels
    for entry in plan.entries:
        size, chosen = str(entry.batch_size), entry.chosen
        assert chosen.tokens_per_s in [float(one.y[0]) for one in left.series if one.look.get("marker") == "*"]
        assert entry.tied_sizes in [list(one.x) for one in left.series if one.look.get("markersize") == 7]
        shade = next(one for one in left.series if one.kind == "area" and list(one.y) == list(left[size].y))
        half = [1.959964 * p.tokens_per_s.stderr for p in entry.curve]
        assert (shade.ends[1] - shade.y, shade.y - shade.ends[0]) == (pytest.approx(half), pytest.approx(half))
        assert max(right[size].y) == pytest.approx(max(p.tokens_per_s for p in entry.curve) / entry.plain.tokens_per_s)
    with pytest.raises(OutOfRange, match="treeopt profile"):
        throughput_chart(plan_trees(long_trace(3), request=PlanRequest(Limits(8))))


def test_latency_is_the_median_at_the_deepest_tree():
    points = [StepTiming(2, 9, 8, d, tuple(ms)) for d, ms in ((1, (4.0, 4, 5)), (3, (6.0, 8, 9)))]
    profile = LatencyProfile(tuple(points), (StepTiming(2, 9, 1, 0, (2.0, 2, 2)),))
    left, right = latency_chart(profile).panels
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
    line, _, shallow = latency_chart(profile).panels[0].series
    assert (line.x, shallow.x, shallow.y) == ([2, 3, 9, 16], [11], [9.0])


def test_accepted_shares_are_counts_over_steps():
    panel = accepted_chart(some_bench()).panels[0]
    assert {one.label.replace("\n", " "): one.y.tolist() for one in panel.series} == {
        "predicted (0.75 a step)": [0.5, 0.25, 0.25],
        "replayed (0.80 a step)": [0.4, 0.4, 0.2],
        "measured (0.70 a step)": [0.5, 0.3, 0.2],
    }
    bench = some_bench()
    fewer = [replace(c, predicted_accepted=[], replayed_accepted=[]) for c in bench.contenders]
    assert len(accepted_chart(replace(bench, contenders=tuple(fewer))).panels[0].series) == 1
    with pytest.raises(OutOfRange, match="treeopt bench"):
        accepted_chart(replace(bench, contenders=tuple(replace(c, accepted=[]) for c in fewer)))


def test_contenders_are_the_benchmarks():
    bench = some_bench(("code", "chat"))
    left, right, below = contenders_chart(bench).panels
    assert left.series[0].x[1] == bench.speedup("chosen").value
    assert list(right["measured"].x) == [c.tokens_per_step for c in bench.contenders]
    assert below.series[0].x.tolist() == [bench.speedup("chosen", group=group).value for group in below.rows]
    assert len(contenders_chart(some_bench()).panels) == 2


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
    assert [f.name for f in files] == [f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")]
    assert (*figures.FIGURES,) == FIGURES
    assert sorted(run.figures.iterdir()) == sorted(files)


def test_a_plan_on_a_probe_has_the_sizes_of_the_probe(run):
    fill(run, (1,))
    probe = random_probe(np.random.default_rng(3), Tree.dense([3, 2]), 400, policy=Tree.chain(2))
    probe.save(run.probe)
    plan = plan_trees(probe, some_profile((1,)), PlanRequest(Limits(8)))
    replace(plan, inputs=inputs_of(run.probe)).save(run.plan)
    (panel,) = figures.FIGURES["sizes"].compute(Inputs(run), None).panels
    assert [series.label for series in panel.series if "grown" in series.label] == ["grown: coverage"]


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
