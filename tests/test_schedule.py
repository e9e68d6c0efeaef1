"""Schedules: the fewest ranges, and never a tree that is known to be slower."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from treeopt.cli import cli
from treeopt.errors import InvalidInput
from treeopt.export.chains import merged
from treeopt.export.write import method_of
from treeopt.pipeline.search import SearchOptions, request_of
from treeopt.planning.candidates import Candidates
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.planning.schedule import schedule_of
from treeopt.planning.select import Selection
from treeopt.records.calibration import Calibration
from treeopt.records.plan import Plan, PlannedEngine
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.report.plan_table import plan_table, price, schedule
from treeopt.trees.shapes import Limits

SIZES = (1, 2, 4, 8)


def option(batch_size: int, throughput: list[float], tied: list[int]) -> tuple[Candidates, Selection]:
    """Candidates of these throughputs; chosen is the best."""
    n = len(throughput)
    rates = np.array(throughput)
    ms = np.full(n, 1e3 * batch_size)
    c = Candidates(
        batch_size, 1, [], np.array(SIZES[:n]), np.arange(n), rates, rates[:, None], ms, ms[:, None], ms, ms[:2]
    )
    best = int(rates.argmax())
    return c, Selection(best, np.array(sorted({best, *tied})), None, [1, 1])


@given(st.lists(st.tuples(st.permutations([1.0, 1.1, 1.2, 1.3]), st.sets(st.integers(0, 3))), min_size=1, max_size=6))
def test_ranges_are_the_fewest_that_tied_trees_allow(cases):
    pairs = [option(2**i, list(t), sorted(tied)) for i, (t, tied) in enumerate(cases)]
    options, selections = [c for c, _ in pairs], [s for _, s in pairs]
    found = schedule_of(options, selections)
    chosen = [s.chosen for s in selections]
    allowed = [{i for i, key in enumerate(chosen) if key in s.tied} for s in selections]  # entries by option
    assert [part.first for part in found] == sorted({1, *(part.first for part in found)})
    for c, s, serving in zip(options, selections, allowed, strict=True):
        part = next(p for p in found if p.first <= c.batch_size and (p.last or 1e9) >= c.batch_size)
        assert part.entry in serving
        cost = 1 - c.throughput[chosen[part.entry]] / c.throughput[s.chosen]
        assert part.loss >= cost - 1e-12
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


def test_chains_shorten_with_the_batch_until_none_pays():
    profile = hardware()
    plan = plan_trees(calibration(), profile, PlanRequest(Limits(shape="chain"), batch_sizes=profile.batch_sizes))
    lengths = [plan.entries[part.entry].depth for part in plan.schedule]
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0], lengths[-1]) == (3, 0)
    assert all(entry.size == entry.depth + 1 for entry in plan.entries)
    assert plan.schedule[-1].last is None
    assert "chain of 3" in schedule(plan)
    for entry in plan.entries:
        assert entry.unconstrained.tokens_per_s >= entry.tokens_per_s * 0.995
    assert f"best tree {plan.entries[0].unconstrained.tokens_per_step:.2f}" in price(plan)
    plan_table(plan)


def test_a_plan_keeps_its_schedule(tmp_path):
    profile = hardware()
    plan = plan_trees(calibration(), profile, PlanRequest(batch_sizes=profile.batch_sizes))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").schedule == plan.schedule
    document = json.loads((tmp_path / "plan.json").read_text())
    document["schedule"][0]["from"] = 2
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match="ranges from 1 on"):
        Plan.load(tmp_path / "plan.json")
    del document["schedule"]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    assert [part.entry for part in Plan.load(tmp_path / "plan.json").schedule] == list(range(7))


def test_without_a_limit_no_price_is_named():
    plan = plan_trees(calibration(), hardware(), PlanRequest(batch_sizes=[1]))
    assert plan.entries[0].unconstrained is None
    assert price(plan) == ""


def test_plans_of_older_releases_load_without_what_is_gone(tmp_path):
    plan = plan_trees(calibration(), hardware(), PlanRequest(batch_sizes=[1]))
    plan.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    document["entries"][0]["rebuilds"] = {"trees": [{"size": 8}], "mean_loss": 0.1, "worst_loss": 0.2}
    document["constraint"]["shape"] = "level-uniform"
    (tmp_path / "plan.json").write_text(json.dumps(document))
    assert Plan.load(tmp_path / "plan.json").entries[0].tree == plan.entries[0].tree


def engine_log(kind: str | None = "eagle3") -> Calibration:
    """Survival .8, .6, .42, as an engine's counters of 1,000 steps have it."""
    info = {"source": "engine log", "drafter": {"kind": kind}, "survival": [0.8, 0.6, 0.42]}
    return Calibration(np.array([[800], [600], [420]]), np.array([1000, 800, 600]), meta=info)


def test_an_engines_log_plans_chains_and_says_so():
    plan = plan_trees(engine_log(), request=PlanRequest(Limits(16)))
    (entry,) = plan.entries
    assert entry.medusa_choices == [[0], [0, 0], [0, 0, 0]]
    assert entry.tokens_per_step == pytest.approx(2.82)
    assert any("chains only" in warning for warning in entry.warnings)


def request_for(record=None, **options):
    return request_of(SearchOptions(**{"batch_sizes": [1], **options}), record or calibration(), None)


class TestWithinAnEngine:
    def test_the_engines_limits_and_the_given_ones_hold_together(self):
        request, warnings = request_for(engine="hydra", max_rank=3, batch_sizes=[1, 4])
        assert (request.limits.shape, request.limits.max_rank) == ("low-rank-expands", 3)
        assert request.engine == PlannedEngine(name="hydra", method="choices")
        assert "at most 1 sequence" in warnings[0]
        request, _ = request_for(engine="triton")
        assert (request.limits.shape, request.limits.max_rank) == ("sibling-closed", 15)

    def test_without_an_engine_they_are_as_given(self):
        request, warnings = request_for(shape="chain")
        assert (request.limits, request.engine, warnings) == (Limits(64, shape="chain"), None, [])
        with pytest.raises(InvalidInput, match="--for"):
            request_for(method="medusa")

    def test_a_freer_shape_than_the_engines_is_refused(self):
        with pytest.raises(InvalidInput, match="must be chain or stricter for vllm, but got any"):
            request_for(engine_log(), engine="vllm", shape="any")

    def test_the_drafter_picks_the_method_or_is_refused(self):
        request, _ = request_for(engine_log("eagle3"), engine="tensorrt-llm")
        assert request.engine.method == "draft-len"
        with pytest.raises(InvalidInput, match="of eagle3, which tensorrt-llm, vllm"):
            request_for(engine_log("eagle3"), engine="medusa")
        with pytest.raises(InvalidInput, match="vllm with medusa runs drafters"):
            request_for(engine_log("eagle3"), engine="vllm", method="medusa")


def test_search_for_an_engine_and_its_export_agree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "treeopt-run"
    run.mkdir()
    engine_log().save(run / "calibration.json")
    hardware().save(run / "profile.json")
    for engine in ("vllm", "sglang", "tensorrt-llm"):
        found = CliRunner().invoke(cli, ["search", "--for", engine])
        assert found.exit_code == 0, found.output
        assert "chain" in found.stdout
        plan = Plan.load(run / "plan.json")
        assert plan.constraint.engine.name == engine
        written = CliRunner().invoke(cli, ["export", "--to", engine, "--json"])
        assert written.exit_code == 0, written.output
        files = {Path(name).name: Path(name).read_text() for name in json.loads(written.stdout)["files"]}
        wanted = tuple((p.first, p.last, plan.entries[p.entry].depth) for p in plan.schedule)
        assert merged(method_of(engine, "eagle3").parse(files)) == merged(wanted)
    refused = CliRunner().invoke(cli, ["export", "--to", "tgi"])
    assert refused.exit_code == 1
    assert "kinds medusa, ngram, but this is of eagle3" in refused.output
