"""Pictures of a block drafter: every number against plain loops, and drawn only where the record has what they show."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from treeopt.errors import OutOfRange
from treeopt.growth.replay import replay
from treeopt.growth.source import source_of
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.pools import Counts
from treeopt.records.trace import NO_TRIAL, RankTrace
from treeopt.report import figures
from treeopt.report.figures.blocks import ddtree_chart, widths_chart
from treeopt.report.figures.chart import draw
from treeopt.report.page import write_report
from treeopt.trees.draft import DDTree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

from .test_ddtree import draft
from .test_figure_drawings import overlaps
from .test_figures import long_trace

LENGTHS, TOKENS = (30, 2, 17, 25, 9, 40), 5


def block(rng, width, tried=(63,)) -> RankTrace:
    """A trace of random guesses, many of them ties, that all right: what the texts say is drawn beside them."""
    states, last = sum(LENGTHS), np.cumsum(LENGTHS)
    given = draft(rng, width, TOKENS + 1, states)
    order = np.argsort(-given.given.numpy(), axis=-1, kind="stable")
    ranks = np.minimum(rng.geometric(0.6, (states, width)) - 1, TOKENS)
    labels = np.take_along_axis(order, ranks[..., None], -1)[..., 0]
    ended = np.arange(1, width + 1) >= np.repeat(last, LENGTHS)[:, None] - np.arange(states)[:, None]
    labels[ended | (labels == TOKENS)] = -1  # the last is none of the target's
    places = given.true_nodes(torch.arange(states), torch.tensor(labels), tried).numpy()
    ranks = np.where(ended, NO_TRIAL, np.where(labels < 0, -1, ranks))
    meta = Counts(TOKENS + 1, depth=width, widths=tried).record | {"drafter": {"kind": "dflash"}, "num_heads": width}
    return RankTrace(ranks, np.concatenate([[0], last]), marginal_places=places, meta=meta)


def several(rng, widths=(2, 4)) -> tuple[RankTrace, dict[int, RankTrace]]:
    """A trace of several widths, and each of them alone."""
    alone = {width: block(rng, width) for width in widths}
    narrower = {f"{name}-{n}": getattr(alone[n], name) for n in widths[:-1] for name in ("ranks", "marginal_places")}
    whole = alone[widths[-1]]
    return replace(whole, narrower=narrower, meta={**whole.meta, "narrower": [*widths[:-1]]}), alone


def test_a_line_for_each_width_counts_its_own_block():
    whole, alone = several(np.random.default_rng(0))
    chart = widths_chart(whole)
    for width, trace in alone.items():
        states = [row for row in trace.ranks.tolist() if row[0] != NO_TRIAL]
        columns = [[rank for rank in column if rank != NO_TRIAL] for column in zip(*states, strict=True)]
        shares = [sum(rank == 0 for rank in column) / len(column) for column in columns]
        accuracy, chain = (chart[panel][str(width)] for panel in (0, 1))
        assert accuracy.y == pytest.approx(shares)
        assert [*np.round(accuracy.x)] == [*np.round(chain.x)] == [*range(1, width + 1)]
        tokens = [replay(trace, Tree.chain(depth)).tokens_per_step for depth in range(1, width + 1)]
        assert chain.y == pytest.approx(tokens)
        low, high = accuracy.ends
        assert (low <= shares).all()
        assert (shares <= high).all()
    assert [one.label for one in chart[0].series] == ["2", "4"]


@pytest.mark.parametrize("tried", [(63,), (2, 63)])
def test_three_kinds_are_held_against_each_other_at_equal_rows(tried):
    trace = block(np.random.default_rng(1), 3, tried)
    chart, source = ddtree_chart(trace, 12), source_of(trace)
    anew, fixed, chain = (chart[0][name] for name in ("DDTree", "best fixed tree", "chain"))
    held_out = source.crossfit(Limits(12, 3), "replay")
    assert [*fixed.x] == held_out.family.sizes.tolist()
    assert fixed.y == pytest.approx(held_out.tokens_per_step)
    assert [*anew.x] == [*range(2, 13)]
    wanted = [replay(trace, DDTree(min(3, n - 1), n - 1, n)).tokens_per_step for n in anew.x]
    assert anew.y == pytest.approx(wanted)
    assert [*chain.x] == [2, 3, 4]
    assert chain.y == pytest.approx([replay(trace, Tree.chain(n - 1)).tokens_per_step for n in chain.x])
    of_fixed = dict(zip(fixed.x, fixed.y, strict=True))
    for one in (anew, chain):
        assert chart[1][one.label].y == pytest.approx([y / of_fixed[x] for x, y in zip(one.x, one.y, strict=True)])


def test_ratios_are_surer_than_what_they_are_of():
    chart = ddtree_chart(block(np.random.default_rng(2), 4), 8)
    line = next(i for i, one in enumerate(chart[0].series) if one.label == "DDTree")
    both, ratio = (np.diff(panel.series[i].ends, axis=0)[0] for panel, i in ((chart[0], line + 1), (chart[1], 2)))
    assert (ratio < both / chart[0].series[line].y).mean() > 0.5


@pytest.mark.parametrize("widths", [(1, 2), (2, 4), (1, 3, 7)])
def test_no_label_overlaps_another_or_is_cut_off(widths):
    whole, alone = several(np.random.default_rng(3), widths)
    assert overlaps(draw(widths_chart(whole))) == []
    assert overlaps(draw(ddtree_chart(alone[widths[-1]]))) == []


# From a run directory


def test_they_are_in_the_report_of_a_plan_whose_record_has_them(run):
    whole, alone = several(np.random.default_rng(0))
    whole.save(run.trace)
    replace(plan_trees(alone[2], request=PlanRequest(Limits(8))), inputs={}).save(run.plan)
    drawn = {one.stem: one for one in figures.pictures(run) if not isinstance(one, str)}
    assert {"widths", "ddtree"} <= drawn.keys()
    assert [one.label for one in drawn["widths"].data[0].series] == ["2", "4"]
    assert max(drawn["ddtree"].data[0]["chain"].x) == 3  # of the planned block, not of the widest
    page = write_report(run, drawn=[*drawn.values()]).read_text()
    for name in ("widths", "ddtree"):
        assert f'aria-label="{figures.FIGURES[name].caption}"' in page


def test_of_other_records_no_word_is_lost_on_them_unless_they_are_named(run):
    for trace in (long_trace(2), replace(block(np.random.default_rng(0), 2), marginal_places=None)):
        trace.save(run.trace)
        said = [*figures.pictures(run)]
        assert not [one for one in said if (one if isinstance(one, str) else one.stem).startswith(("widths", "ddtree"))]
        for name, reason in (("widths", "of a single width.*--widths"), ("ddtree", "no trees over marginals")):
            (note,) = figures.pictures(run, names=[name])
            assert note.startswith(f"{name} was left out")
            with pytest.raises(OutOfRange, match=reason):
                {"widths": widths_chart, "ddtree": ddtree_chart}[name](trace)


def test_a_single_sequence_has_nothing_to_hold_out():
    with pytest.raises(OutOfRange, match="at least 2 sequences"):
        ddtree_chart(block(np.random.default_rng(0), 2).select(np.array([0])))
