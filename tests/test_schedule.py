"""Schedules: the fewest ranges, and never a tree that is known to be slower."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.engine_rows import READERS
from tests.helpers.runs import at_speed, some_bench
from tests.helpers.steps import request_of
from treeopt.cli import cli
from treeopt.engines.registry import method_of
from treeopt.errors import InvalidInput
from treeopt.growth.rates import Rates
from treeopt.pipeline.export import export_to
from treeopt.planning.planner import plan_trees, schedule_of
from treeopt.planning.request import PlanRequest
from treeopt.planning.select import Selection
from treeopt.planning.table import Candidate, Table
from treeopt.records.calibration import Calibration
from treeopt.records.exchange import ExportOptions
from treeopt.records.plan import BatchRange, Plan, PlanEntry, PlannedEngine
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.report.export_notes import load_notes
from treeopt.report.plan_table import certainty, mixture, schedule, trees_table
from treeopt.report.plan_verdict import doubts
from treeopt.trees.draft import TreeSize
from treeopt.trees.shapes import Limits

SIZES = (1, 2, 4, 8)
CANDIDATES = [Candidate("grown", TreeSize(size, depth), Rates.expected()) for depth, size in enumerate(SIZES)]


def option(batch_size: int, throughput: list[float], tied: list[int]) -> tuple[Table, Selection]:
    """Table of these throughputs; chosen is the best."""
    rates = np.array(throughput)
    ms = np.full(len(rates), 1e3 * batch_size)
    known = np.ones(len(rates), dtype=bool)
    c = Table(batch_size, 1, CANDIDATES[: len(rates)], rates, rates[:, None], ms, ms[:, None], known, known, known)
    best = int(rates.argmax())
    return c, Selection(best, np.array(sorted({best, *tied})), None, plain=0)


@given(st.lists(st.tuples(st.permutations([1.0, 1.1, 1.2, 1.3]), st.sets(st.integers(0, 3))), min_size=1, max_size=6))
def test_ranges_are_the_fewest_that_tied_trees_allow(cases):
    pairs = [option(2**i, list(t), sorted(tied)) for i, (t, tied) in enumerate(cases)]
    options, selections = [c for c, _ in pairs], [s for _, s in pairs]
    found = schedule_of(pairs)
    chosen = [s.chosen for s in selections]
    pays = [c.throughput >= c.throughput[0] for c in options]
    allowed = [{i for i, key in enumerate(chosen) if key in s.tied and pays[b][key]} for b, s in enumerate(selections)]
    assert [part.first for part in found] == sorted({1, *(part.first for part in found)})
    for c, serving in zip(options, allowed, strict=True):
        part = next(p for p in found if p.first <= c.batch_size and (p.last or 1e9) >= c.batch_size)
        assert part.entry in serving
        assert c.throughput[chosen[part.entry]] >= c.throughput[0], "no range speculates where plain decoding is faster"
    fewest = next(
        n
        for n in range(1, len(cases) + 1)
        for cuts in itertools.combinations(range(1, len(cases)), n - 1)
        if all(set.intersection(*allowed[a:b]) for a, b in itertools.pairwise([0, *cuts, len(cases)]))
    )
    assert len(found) == fewest


def hardware(batch_sizes=(1, 2, 4, 8, 16, 32, 64)) -> LatencyProfile:
    """Rows are free up to 64; exact latencies."""
    points, plain = [], []
    for batch in batch_sizes:
        plain.append(StepTiming(batch, 128, 1, 0, (max(10.0, 10 * batch / 64),) * 3))
        for depth in (1, 2, 3, 4):
            points += [
                StepTiming(batch, 128, size, depth, (max(10.0, 10 * batch * size / 64) + 0.1 * depth,) * 3)
                for size in (depth + 1, 8, 16, 32, 64)
            ]
    return LatencyProfile(tuple(points), tuple(plain))


def calibration() -> Calibration:
    accept = np.outer([0.6, 0.4, 0.3, 0.2], [1.0, 0.3, 0.2, 0.1])
    return Calibration((accept * 10**6).round().astype(int), np.full(4, 10**6))


def searched(*batch_sizes: int, **options) -> Plan:
    """Of latencies that grow evenly with the rows beyond 64, so that a straight line between batch sizes may be wrong."""
    return plan_trees(
        calibration(), hardware((1, 2, 3, 4, 5, 6, 7, 8)), PlanRequest(batch_sizes=batch_sizes, **options)
    )


def true_loss(whole: Plan, entry: PlanEntry, batch_size: int) -> float:
    """What the tree of an entry of another plan loses at a batch size, by the latencies that were measured there."""
    curve = {(point.size, point.depth): point.tokens_per_s for point in whole[batch_size].curve}
    return 1 - curve[entry.chosen.size, entry.chosen.depth] / max(curve.values())


def served(plan: Plan, batch_size: int) -> PlanEntry:
    part = next(p for p in plan.schedule if p.first <= batch_size and (p.last or 10**9) >= batch_size)
    return plan.entries[part.entry]


def test_between_searched_batch_sizes_the_faster_tree_is_taken():
    whole, plan = searched(*range(1, 9)), searched(1, 4, 8)
    assert [part.first for part in plan.schedule] != [1, 4, 8], "not simply that of the next smaller one"
    ours, smaller = 0.0, 0.0
    for batch_size in (2, 3, 5, 6, 7):
        ours = max(ours, true_loss(whole, served(plan, batch_size), batch_size))
        smaller = max(smaller, true_loss(whole, plan[max(b for b in (1, 4) if b < batch_size)], batch_size))
    assert ours < smaller / 2
    said = schedule(plan)
    assert "Searched: 1, 4, 8. Between these step times are interpolated." in said
    assert "Above 8 nothing was searched" in said


def test_what_is_not_known_between_batch_sizes_is_not_claimed():
    assert "interpolated" not in schedule(searched(1, 2))
    unknown = plan_trees(calibration(), request=PlanRequest(batch_sizes=[2, 8]))
    assert "Between these the next smaller one's goes on." in schedule(unknown)
    assert schedule(unknown).endswith("Above 8 nothing was searched, and below 2.")


def test_a_range_with_another_draft_than_the_best_of_a_batch_size_says_so():
    plan = searched(1, 4)
    plan = replace(plan, schedule=[BatchRange(first=1, last=None, entry=0)])
    assert plan[4].draft != plan[1].draft
    assert f"Tied: {plan[1].draft.words} with {plan[4].draft.words} at batch size 4." in schedule(plan)


def test_a_mix_has_totals():
    mix = {1: 2.0, 4: 1.0, 8: 1.0}
    alone, plan = searched(*mix), plan_trees(calibration(), hardware((1, 2, 4, 8)), PlanRequest(batch_sizes=mix))
    shares = [0.5, 0.25, 0.25]
    assert len({entry.draft for entry in plan}) == 1
    total = plan.over_mix(lambda e: e.chosen)
    assert total == pytest.approx(sum(w * e.chosen.tokens_per_s for w, e in zip(shares, plan, strict=True)))
    plain = sum(w * e.plain.tokens_per_s for w, e in zip(shares, plan, strict=True))
    assert plan.mix_speedup == pytest.approx(total / plain)
    assert 0 < total < sum(w * e.chosen.tokens_per_s for w, e in zip(shares, alone, strict=True))
    assert [certainty(entry) for entry in plan] == [""] * 3, "a single batch size was not chosen for"
    assert "share of the time" in mixture(plan)
    assert [row[0] for row in trees_table(plan).rows] == ["1 (50%)", "4 (25%)", "8 (25%)", "mix"]
    assert "50% of the time at 1" in load_notes(plan, [None], method_of("medusa"))[0]
    assert mixture(alone) == schedule(plan) == ""


@pytest.mark.parametrize("mix", [{1: 0.0}, {1: -1.0}, {1: float("nan")}, {1: float("inf")}, {0: 1.0}])
def test_shares_are_positive(mix):
    with pytest.raises(InvalidInput, match=r"share of the time|at least 1"):
        PlanRequest(batch_sizes=mix)


def test_a_batch_size_is_given_once():
    twice = CliRunner().invoke(cli, ["search", "--batch-size", "1:0.5,1:0.5"])
    assert twice.exit_code == 2
    assert "has 1 twice" in twice.output


def exported(plan: Plan, engine: str, tmp_path, **options) -> tuple[dict[str, str], str]:
    """Files by their name below the folder, and the notes; a plan of Medusa heads unless it says otherwise."""
    plan = replace(plan, drafter={"kind": "medusa", "num_heads": 4, **(plan.drafter or {})})
    paths, written = export_to(tmp_path, plan, engine, ExportOptions(**options))
    return {str(path.relative_to(tmp_path)): path.read_text() for path in paths}, " ".join(written.notes)


def test_an_engine_of_one_tree_gets_a_folder_for_each_batch_size(tmp_path):
    plan = searched(1, 4, 8)
    files, notes = exported(plan, "tensorrt-llm", tmp_path)
    for entry in plan:
        choices = yaml.safe_load(files[f"batch-size-{entry.batch_size}/medusa_choices.yml"])
        assert choices == entry.tree.choices
        assert f"{entry.batch_size} ({entry.chosen.size} rows, {entry.chosen.depth} deep)" in notes
    for entry in plan:
        losses = ", ".join(
            f"{100 * true_loss(plan, entry, size):.0f} % slower at {size}"
            for size in (1, 4, 8)
            if size != entry.batch_size
        )
        assert f"The draft of batch size {entry.batch_size} beside the best of the others: {losses}." in notes
    assert "One draft for all: treeopt search --batch-size 1:SHARE,4:SHARE,8:SHARE" in notes
    one, notes = exported(plan, "tensorrt-llm", tmp_path / "one", batch_size=4)
    assert yaml.safe_load(one["medusa_choices.yml"]) == plan[4].tree.choices
    assert f"Written for batch size 4 ({plan[4].chosen.size} rows, {plan[4].chosen.depth} deep), not for 1, 8." in notes
    assert "The draft of batch size 4 beside the best of the others" in notes


def test_losses_that_a_plan_does_not_know_are_said(tmp_path):
    """A plan that keeps no curve knows the drafts of one batch size at no other."""
    plan = searched(1, 8)
    bare = replace(plan, entries=tuple(replace(entry, curve=[]) for entry in plan.entries))
    assert "beside the best of the others: not known at 8." in exported(bare, "tensorrt-llm", tmp_path)[1]


def test_an_export_says_that_the_plan_was_made_without_step_costs(tmp_path):
    plan = plan_trees(calibration(), request=PlanRequest(batch_sizes=[1, 8]))
    notes = exported(plan, "tensorrt-llm", tmp_path)[1]
    assert "made without step costs" in notes
    assert "beside the best" not in notes


@pytest.mark.parametrize("row", [("vllm", "batch-size"), ("sglang", "adaptive"), ("tensorrt-llm", "draft-len")])
def test_a_schedule_does_not_speculate_where_nobody_searched(row, tmp_path):
    plan = plan_trees(engine_log(), hardware(), PlanRequest(Limits(shape="chain"), batch_sizes=[1, 8, 32]))
    plan = replace(plan, drafter={"kind": "eagle3", "num_heads": 3})
    depths = {entry.batch_size: entry.chosen.depth for entry in plan}
    assert depths[32] > 0
    for beyond, length in (("off", 0), ("last", depths[32])):
        paths, written = export_to(tmp_path / beyond, plan, row[0], ExportOptions(beyond=beyond))
        read = READERS[row]({path.name: path.read_text() for path in paths})
        found = {size: next(k for a, b, k in read if a <= size <= (b or size)) for size in (*depths, 33, 256)}
        assert found == {**depths, 33: length, 256: length}
        assert written.notes[0].startswith("Above batch size 32 nothing was searched")


def test_the_first_batch_size_that_does_not_pay_is_named():
    plan = plan_trees(engine_log(), hardware(), PlanRequest(Limits(shape="chain"), batch_sizes=[1, 8, 32, 64]))
    assert [entry.speculates for entry in plan] == [True, True, True, False]
    assert 32 < plan.break_even <= 64
    assert f"From batch size {plan.break_even} on it does not speculate." in schedule(plan)
    assert (
        plan_trees(engine_log(), hardware(), PlanRequest(Limits(shape="chain"), batch_sizes=[1, 8])).break_even is None
    )


def test_an_export_leaves_nothing_of_another_load_behind(tmp_path):
    plan = searched(1, 4, 8)
    exported(plan, "tensorrt-llm", tmp_path)
    exported(searched(1, 4), "tensorrt-llm", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"batch-size-1", "batch-size-4"}
    (tmp_path / "batch-size-4" / "mine.txt").write_text("mine")
    exported(searched(1), "tensorrt-llm", tmp_path)
    assert (tmp_path / "batch-size-4" / "mine.txt").read_text() == "mine"
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()} - {"mine.txt"}
    assert left == {".written", "llm_api_options.yml", "medusa_choices.yml", "commands.sh"}
    assert not (tmp_path / "batch-size-1").exists()


def test_a_plan_keeps_its_schedule(tmp_path):
    profile = hardware()
    plan = plan_trees(calibration(), profile, PlanRequest(batch_sizes=profile.batch_sizes))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").schedule == plan.schedule
    document = json.loads((tmp_path / "plan.json").read_text())
    del document["schedule"]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    assert [part.entry for part in Plan.load(tmp_path / "plan.json").schedule] == list(range(7))


def engine_log(kind: str | None = "eagle3") -> Calibration:
    """Survival .8, .6, .42, as an engine's counters of 1,000 steps have it."""
    info = {"source": "engine log", "drafter": {"kind": kind}, "survival": [0.8, 0.6, 0.42]}
    return Calibration(np.array([[800], [600], [420]]), np.array([1000, 800, 600]), meta=info)


def request_for(record=None, **options):
    return request_of(record or calibration(), None, **{"batch_sizes": [1], **options})


class TestWithinAnEngine:
    def test_the_engines_limits_and_the_given_ones_hold_together(self):
        request, warnings = request_for(engine="hydra", max_rank=3, budget=500)
        assert (request.limits.shape, request.limits.max_rank) == ("sibling-closed", 3)
        assert request.takes == "low-rank-expands"
        assert request.engine == PlannedEngine(name="hydra", method="choices")
        assert warnings == []
        request, _ = request_for(engine="tensorrt-llm")
        assert (request.limits.shape, request.limits.max_rank) == ("sibling-closed", 15)

    def test_without_an_engine_they_are_as_given(self):
        request, warnings = request_for(shape="chain")
        assert (request.limits, request.engine, warnings) == (Limits(64, shape="chain"), None, [])
        with pytest.raises(InvalidInput, match="engine"):
            request_for(method="medusa")

    def test_a_freer_shape_than_the_engines_is_refused(self):
        with pytest.raises(InvalidInput, match="must be chain for vllm, but got sibling-closed"):
            request_for(engine_log(), engine="vllm", shape="sibling-closed")

    def test_the_drafter_picks_the_method_or_is_refused(self):
        request, _ = request_for(engine_log("eagle3"), engine="tensorrt-llm")
        assert request.engine.method == "draft-len"
        with pytest.raises(InvalidInput, match=r"drafter is eagle3\. It runs in eagle2, edge-llm, llama-cpp"):
            request_for(engine_log("eagle3"), engine="medusa")
        with pytest.raises(InvalidInput, match="vllm with suffix runs drafters"):
            request_for(engine_log("eagle3"), engine="vllm", method="suffix")


def test_what_there_is_against_a_mix_is_of_the_mix():
    plan = plan_trees(calibration(), hardware((1, 64)), PlanRequest(batch_sizes={1: 0.99, 64: 0.01}))
    slower = plan[64].chosen.speedup
    assert slower < 1 < plan.mix_speedup
    said = f"The one tree is predicted to be slower than plain decoding at batch size 64 ({slower:.2f} times)."
    assert doubts(plan) == [said]
    tied = replace(plan, entries=tuple(replace(entry, tied_sizes=[1, 2]) for entry in plan))
    assert doubts(tied)[0] == "Speculation is not shown to pay over the mix: plain decoding is tied with it."
    lost = replace(plan, constraint=replace(plan.constraint, mix={1: 0.001, 64: 0.999}))
    assert doubts(lost)[0].startswith("Speculation is not shown to pay over the mix: the error")
    measured = doubts(plan, {64: at_speed(some_bench(batch_size=64), 0.9)})
    assert measured[:2] == [*doubts(plan), "Batch size 64: Speculation is slower than plain decoding here."]


def test_two_far_batch_sizes_are_no_more_work():
    pairs = [option(1, [1.0, 1.1, 1.2, 1.3], []), option(10**9, [1.3, 1.2, 1.1, 1.0], [])]
    _, second = schedule_of(pairs)
    assert 1 < second.first <= 10**9
