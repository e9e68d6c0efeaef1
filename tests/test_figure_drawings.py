"""Every figure on small and large inputs: no texts that overlap or are cut off, and the files as promised."""

import itertools
import re
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given

from tests.conftest import examples, in_new_python, traces, trees
from tests.helpers.runs import NAMES, long_trace, some_bench, some_groups, some_profile
from tests.test_coverage import random_probe
from tests.test_figures import grown
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.calibration import Calibration
from treeopt.records.profile import LatencyProfile
from treeopt.report import figures
from treeopt.report.figures import style
from treeopt.report.figures.accuracy import accuracy_chart, groups_chart
from treeopt.report.figures.bench import accepted_chart, contenders_chart
from treeopt.report.figures.chart import draw
from treeopt.report.figures.planning import latency_chart, sizes_chart, throughput_chart
from treeopt.report.figures.tree import draw_tree, tree_data
from treeopt.trees.published import published_tree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree


def overlaps(figure) -> list[str]:
    """What is wrong with the texts that are really drawn: two on one place, cut off, or a legend on axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    drawn, original = [], Text.draw

    def record(self, renderer):
        original(self, renderer)
        if self.get_visible() and self.get_text().strip():
            drawn.append((self.get_text(), self.get_window_extent(renderer)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", record)
        with style.look():
            FigureCanvasAgg(figure).draw()
    wrong = [f"{a!r} on {b!r}" for (a, one), (b, two) in itertools.combinations(drawn, 2) if meet(one, two)]
    width, height = figure.bbox.size
    wrong += [
        f"{text!r} is cut off"
        for text, box in drawn
        if box.x0 < -0.5 or box.y0 < -0.5 or box.x1 > width + 0.5 or box.y1 > height + 0.5
    ]
    legends = [legend.get_window_extent() for part in figure.subfigs for legend in part.legends]
    wrong += ["a legend on axes" for box in legends for axes in figure.axes if axes.axison and meet(box, axes.bbox)]
    return wrong


def meet(a, b) -> bool:
    return min(a.x1, b.x1) - max(a.x0, b.x0) > 0.5 and min(a.y1, b.y1) - max(a.y0, b.y0) > 0.5


def drawings():
    """Every figure on small and large inputs, each made only when its test runs; those between are for ``make test-long``."""
    for heads, size in ((2, 1), (2, 8), (4, 64), (8, 64), (8, 256)):
        yield f"tree-{size}-{heads}", lambda h=heads, n=size: draw_tree(grown(h, n))
    wide = Tree.from_choices([[r] for r in range(63)])
    yield "tree-wide", lambda: draw_tree(tree_data(wide, long_trace(2, ranks=64)))
    yield "tree-published", lambda: draw_tree(tree_data(published_tree(), long_trace(5)))
    charts = {}
    for heads in (1, 2, 8):
        charts[f"accuracy-{heads}"] = lambda h=heads: accuracy_chart(Calibration.from_trace(long_trace(h)))
        for n in (1, 3, 13):
            charts[f"groups-{heads}-{n}"] = lambda h=heads, n=n: groups_chart(some_groups(h, NAMES[-n:]))
    for heads, budget in ((2, 8), (4, 32)):
        charts[f"sizes-{heads}"] = lambda h=heads, b=budget: sizes_chart(long_trace(h), Limits(b))
    for sizes in ((1,), (1, 2, 4, 8, 16, 32)):
        profile, n = some_profile(sizes, largest=256), len(sizes)
        request = PlanRequest(Limits(64), batch_sizes=sizes)
        plan = cache(lambda p=profile, r=request: plan_trees(long_trace(3), p, r))
        charts[f"latency-{n}"] = lambda p=profile: latency_chart(p)
        charts[f"throughput-{n}"] = lambda p=plan: throughput_chart(p())
    for groups in ([""], NAMES[:2], NAMES):
        charts[f"contenders-{len(groups)}"] = lambda g=groups: contenders_chart(some_bench(g))
    few = some_bench(blocks=1)
    charts |= {"contenders-few": lambda: contenders_chart(few), "accepted": lambda: accepted_chart(few)}
    hits = {"nothing": np.zeros((1, 1), int), "never": np.zeros((5, 10), int), "seldom": np.eye(5, 10, dtype=int)}
    for name, some in (hits | {"chain": np.full((5, 1), 3)}).items():
        about = {"acceptance": {"rule": "rejection"}}
        charts[f"accuracy-{name}"] = lambda h=some, m=about: accuracy_chart(Calibration(h, np.full(len(h), 5), meta=m))
    probe = random_probe(np.random.default_rng(3), Tree.dense([3, 2]), 400, policy=Tree.chain(2))
    charts["sizes-probe"] = lambda: sizes_chart(probe, Limits(8))
    two = some_profile((1, 4))
    charts["latency-plain"] = lambda: latency_chart(LatencyProfile((), two.autoregressive[:1]))
    points, plain = ([replace(p, context_tokens=4096) for p in some] for some in (two.points, two.autoregressive))
    both = LatencyProfile((*two.points, *points), (*two.autoregressive, *plain), two.runtime)
    charts["latency-contexts"] = lambda: latency_chart(both)
    for name, make in charts.items():
        yield name, lambda make=make: draw(make())


BETWEEN = re.compile("tree-(8-2|64-.)|accuracy-(2|seldom)|groups-(1-3|2-.*|8-[13])|sizes-2|contenders-2")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[pytest.mark.long] * bool(BETWEEN.fullmatch(name)))
        for name, make in drawings()
    ],
)
def test_no_label_overlaps_another_or_is_cut_off(make):
    assert overlaps(make()) == []


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_and_depths_are_whole_numbers(ranks):
    drawing = draw(accuracy_chart(Calibration(np.full((1, ranks), 2), np.array([9]))))
    for axes in filter(lambda axes: axes.axison, drawing.axes):
        low, high = axes.get_xlim()
        ticks = [float(tick) for tick in axes.get_xticks() if low <= tick <= high]
        assert ticks
        assert all(tick.is_integer() for tick in ticks)


def test_shares_of_0_stand_at_the_edge_of_a_logarithmic_axis():
    hits = np.array([[4, 0, 1], [0, 0, 2]])
    drawing = draw(accuracy_chart(Calibration(hits, np.array([9, 9]))))
    at_edge = [line for line in drawing.axes[0].lines if line.get_transform() != drawing.axes[0].transData]
    assert sum(len(line.get_xdata()) for line in at_edge) == (hits == 0).sum()
    assert "hollow marks" in drawing.get_supxlabel()


def test_the_overlap_check_sees_overlaps():
    figure = style.blank()
    figure.text(0.5, 0.5, "one")
    figure.text(0.51, 0.5, "two")
    figure.text(0.99, 0.9, "beyond the edge")
    assert overlaps(figure) == ["'one' on 'two'", "'beyond the edge' is cut off"]


@examples(7)
@given(traces(), trees(depth=3, ranks=4))
def test_any_small_trace_can_be_drawn(trace, tree):
    draw_tree(tree_data(tree, trace))


def test_the_same_figure_is_the_same_file_with_text_and_ids():
    data = grown(3, 12)
    (one, two), (png, again) = ([style.to_bytes(draw_tree(data), kind) for _ in range(2)] for kind in ("svg", "png"))
    assert (one, png) == (two, again)
    ids = {element.get("id") for element in ElementTree.fromstring(one).iter()}
    assert {figures.tree.node_gid(path) for path in data.tree.paths} <= ids
    assert b"tokens per step" in one
    assert b"date" not in one.lower()


def test_a_prefix_keeps_the_ids_of_two_figures_apart():
    file = style.to_bytes(draw_tree(grown(3, 12)), "svg")
    first, second = (ElementTree.fromstring(figures.svg_element(file, prefix)) for prefix in ("a-", "b-"))
    ids = [{e.get("id") for e in svg.iter()} - {None} for svg in (first, second)]
    assert not ids[0] & ids[1]
    link = "{http://www.w3.org/1999/xlink}href"
    for svg, known in ((first, ids[0]), (second, ids[1])):
        assert {e.get(link)[1:] for e in svg.iter() if (e.get(link) or "").startswith("#")} <= known


def test_drawing_leaves_matplotlib_as_it_was():
    code = (
        "import sys, treeopt.report.figures as f\n"
        "heavy = {'matplotlib', 'scipy', 'networkx', 'torch', 'rich'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "import matplotlib; before = dict(matplotlib.rcParams.copy())\n"
        "from treeopt.records.calibration import Calibration; import numpy as np\n"
        "from treeopt.report.figures.accuracy import accuracy_chart\n"
        "from treeopt.report.figures.chart import draw\n"
        "from treeopt.report.figures.style import to_bytes\n"
        "to_bytes(draw(accuracy_chart(Calibration(np.array([[3, 1]]), np.array([9])))), 'svg')\n"
        "assert dict(matplotlib.rcParams.copy()) == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    in_new_python(code)
