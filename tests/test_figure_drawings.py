"""Every figure on small and large inputs: no texts that overlap or are cut off, and the files as promised."""

import itertools
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given

from tests.conftest import examples, in_new_python, traces, trees
from tests.helpers.runs import NAMES, long_trace, some_bench, some_groups, some_profile
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


def throughput_of(sizes, heads, budget):
    return throughput_chart(plan_trees(long_trace(heads), some_profile(sizes), PlanRequest(Limits(budget), sizes)))


MANY = (1, 2, 4, 8, 16, 32)
DRAWINGS = {  # each figure of a small run and of a large one, made only when its test runs
    "tree-small": lambda: draw_tree(grown(2, 1)),
    "tree-large": lambda: draw_tree(grown(8, 64)),
    "accuracy-small": lambda: draw(accuracy_chart(Calibration(np.zeros((1, 1), int), np.array([5])))),
    "accuracy-large": lambda: draw(accuracy_chart(Calibration.from_trace(long_trace(8)))),
    "groups-small": lambda: draw(groups_chart(some_groups(1, NAMES[-1:]))),
    "groups-large": lambda: draw(groups_chart(some_groups(8, NAMES))),
    "sizes-small": lambda: draw(sizes_chart(long_trace(2), Limits(8))),
    "sizes-large": lambda: draw(sizes_chart(long_trace(8), Limits(64))),
    "latency-small": lambda: draw(latency_chart(LatencyProfile((), some_profile((1,)).autoregressive))),
    "latency-large": lambda: draw(latency_chart(some_profile(MANY, largest=256))),
    "throughput-small": lambda: draw(throughput_of((1,), 2, 8)),
    "throughput-large": lambda: draw(throughput_of(MANY, 3, 32)),
    "accepted-small": lambda: draw(accepted_chart(some_bench(blocks=1))),
    "contenders-small": lambda: draw(contenders_chart(some_bench(blocks=1))),
    "contenders-large": lambda: draw(contenders_chart(some_bench(NAMES))),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_no_label_overlaps(name):
    """No text stands on another or is cut off, and no legend on axes."""
    assert overlaps(DRAWINGS[name]()) == []


def test_colours_tell_often_from_seldom():
    """A node that 0.60 of the steps accept and one that 0.13 do; each says its share."""
    data = replace(grown(2, 3), tree=Tree.chain(2), places=np.zeros(3), probabilities=np.array([1.0, 0.6, 0.13]))
    axes = draw_tree(data).axes[0]
    marks = [line.get_markerfacecolor() for line in axes.lines]
    assert np.abs(np.subtract(marks[1], marks[2]))[:3].max() > 0.3
    assert {"60.0%", "13.0%"} <= {text.get_text() for text in axes.texts}


def test_measured_is_in_its_colour():
    """Speedups and tokens per step of a benchmark, accepted guesses and latencies; plain is a dashed line."""
    measured, bench = style.KINDS["measured"]["color"], some_bench()
    speedups, rates = contenders_chart(bench).panels
    latencies = latency_chart(some_profile((1,))).panels[0].series
    shown = [speedups.series[0], rates["measured"], accepted_chart(bench).panels[0].series[-1], latencies[0]]
    assert {series.look["color"] for series in shown} == {measured}
    gap = latencies[1].look["linestyle"][1]
    assert gap[0] > gap[1]


@pytest.mark.parametrize("ranks", [1, 4])
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


@pytest.mark.long  # a new process
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
