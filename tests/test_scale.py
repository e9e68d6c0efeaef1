"""Planning from counts of distinct paths and segments decoded again, against planning state by state; samples; large files."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from treeopt.cli import cli
from treeopt.errors import InvalidInput
from treeopt.files import npz
from treeopt.files.storage import to_json
from treeopt.growth import paths as paths_module
from treeopt.growth import walk as walk_module
from treeopt.growth.objectives import grow, grow_replay
from treeopt.growth.paths import Paths, Tally
from treeopt.growth.shrinkage import NONE, Fit, PathCounts, Strengths
from treeopt.growth.source import source_of
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.calibration import Calibration
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.trace import RankTrace
from treeopt.trees.shapes import Limits

from . import slow_growth
from .conftest import examples, random_trace, traces

ROWS = (2, 4, 8, 16)


def profile(depths: int) -> LatencyProfile:
    """Steps with noise, so that intervals have something to say."""
    rng = np.random.default_rng(0)
    points = tuple(
        StepTiming(1, 64, n, d, tuple((4 + 0.1 * n + 0.1 * d) * rng.normal(1, 0.02, 5)))
        for n in ROWS
        for d in range(1, depths + 1)
        if d < n
    )
    return LatencyProfile(points, (StepTiming(1, 64, 1, 0, (3.9, 4.0, 4.1)),))


def runs_trace(seed: int, sequences: int, heads: int, *, turns: bool) -> RankTrace:
    """Easy and hard runs, so that decoding jumps; several turns of a conversation; short answers among long ones."""
    rng = np.random.default_rng(seed)
    trace = random_trace(rng, rng.choice([1, 2, 3, 40, 120], sequences), heads, 12)
    ease = np.repeat(rng.random(len(trace.ranks) // 5 + 1) < 0.6, 5)[: len(trace.ranks), None]
    ranks = np.where(ease & (trace.ranks > 1) & (rng.random(trace.ranks.shape) < 0.8), 0, trace.ranks)
    cluster = np.sort(rng.integers(0, sequences // 2, sequences)) if turns else None
    return replace(trace, ranks=ranks, cluster=cluster)


@pytest.mark.parametrize(
    ("seed", "heads", "takes", "turns"),
    [(0, 4, "sibling-closed", False), (1, 3, "sibling-closed", True), (2, 2, "low-rank-expands", True)],
)
def test_plans_are_those_of_planning_state_by_state(monkeypatch, seed, heads, takes, turns):
    """Whole plans, to the last digit: trees of every depth, held-out figures, intervals, the curve."""
    trace = runs_trace(seed, 24, heads, turns=turns)
    request = PlanRequest(Limits(12, max_rank=4), takes=takes)
    fast = plan_trees(trace, profile(heads), request)
    monkeypatch.setattr("treeopt.planning.planner.source_of", slow_growth.SlowSource)
    slow = plan_trees(trace, profile(heads), request)
    assert to_json(fast.document()) == to_json(slow.document())
    assert slow.entries[0].chosen.size > 1


@examples(25)
@given(traces(sequences=6), st.integers(1, 3))
def test_families_are_those_of_growing_state_by_state(trace, depth):
    if not trace.has_step.any():
        return
    limits, strengths = Limits(10, max_depth=depth, max_rank=2), Strengths(1.0, 2.0, 3.0)
    fast, slow = (
        grow_replay(trace, limits, strengths=strengths),
        slow_growth.grow_replay(trace, limits, strengths=strengths),
    )
    assert (fast.paths, fast.gains.tolist()) == (slow.paths, slow.gains.tolist())


def test_held_out_steps_are_those_of_replay(monkeypatch):
    """In blocks of a few states, too, and where paths are looked at a few at a time."""
    trace = runs_trace(3, 30, 4, turns=True)
    limits = Limits(20, max_depth=4, max_rank=5)
    whole = source_of(trace).crossfit(limits, "replay")
    monkeypatch.setattr(walk_module, "AT_ONCE", 50)
    monkeypatch.setattr(walk_module, "narrow", lambda numbers, most: numbers.astype(np.uint32))  # as of many paths
    monkeypatch.setattr(paths_module, "AT_ONCE", 7)
    monkeypatch.setattr("treeopt.growth.paths.AT_ONCE", 11)
    monkeypatch.setattr("treeopt.growth.paths.SEQUENCES", 2)
    pieces = source_of(trace).crossfit(limits, "replay")
    slow = slow_growth.SlowSource(trace).crossfit(limits, "replay")
    for one in (whole, pieces):
        for rates, others in zip(one.every, slow.every, strict=True):
            assert rates.document() == others.document()
            assert (rates.steps.tolist(), rates.tokens.tolist()) == (others.steps.tolist(), others.tokens.tolist())
        for (test, family), (wanted, other) in zip(one.grown, slow.grown, strict=True):
            assert test.tolist() == wanted.tolist()
            assert family.paths == other.paths
            assert family.gains.tolist() == other.gains.tolist()


def test_memory_that_was_never_written_decides_nothing(monkeypatch):
    """Neither what is found nor how much is asked for: 10^8 states asked for 43 GB once."""
    trace, limits, largest = runs_trace(5, 30, 3, turns=True), Limits(12, max_depth=3, max_rank=3), []

    class Dirty:
        def __getattr__(self, name):
            return getattr(np, name)

        def empty(self, shape, dtype):
            return np.full(shape, np.iinfo(dtype).max, dtype)

        def zeros(self, shape, dtype):
            largest.append(np.prod(shape))
            return np.zeros(shape, dtype)

    clean = grow_replay(trace, limits)
    monkeypatch.setattr(walk_module, "np", Dirty())
    dirty = grow_replay(trace, limits)
    assert (dirty.paths, dirty.gains.tolist()) == (clean.paths, clean.gains.tolist())
    assert max(largest) < 10 * len(trace.ranks)


def test_a_tree_that_depends_on_the_order_of_segments_is_none():
    """Conversations in another order have the same trees: segments know nothing of what stands beside them."""
    trace = runs_trace(4, 20, 3, turns=False)
    mixed = trace.select(np.random.default_rng(0).permutation(20))
    assert grow_replay(trace, Limits(24)).paths == grow_replay(mixed, Limits(24)).paths


STRENGTHS = [NONE, Strengths(1.0, 2.0, 3.0), Strengths(1e12, 1e12, 1e12)]


@given(traces(), st.integers(1, 3))
def test_counts_and_chances_of_paths_are_those_of_states(trace, top):
    """Without strengths, mixed with the levels above, and with these alone."""
    ranks = trace.ranks[trace.has_step]
    if not len(ranks):
        return
    part = np.arange(len(ranks)) % 2
    tally, slow = Tally.of_ranks(ranks, part, top), slow_growth.PathCounts(ranks, top)
    known, open_paths = PathCounts(tally), [()]
    mixed = [(PathCounts(tally, s), slow_growth.PathCounts(ranks, top, s)) for s in STRENGTHS]
    for path in open_paths:
        for fast, definition in mixed:
            chances = fast.chances(path)
            assert chances == pytest.approx(definition.chances(path))
            assert chances.sum() <= 1 + 1e-9
        assert known.counts(path).tolist() == slow.counts(path).tolist()
        assert known.trial_share(path) == slow.trial_share(path)
        if len(path) + 1 < ranks.shape[1]:
            for rank in range(top):
                for one in (known, *(fast for fast, _ in mixed)):
                    one.open(path, rank)
                open_paths.append((*path, rank))
    grid = [0.1, 1.0, 10.0]
    assert Fit(tally, grid).strengths(ranks.shape[1]).depth == slow_growth.fit_strengths(ranks, part, top, grid).depth


def test_ranks_too_many_to_be_ticked_off_are_sorted(monkeypatch):
    ranks = np.random.default_rng(0).integers(-2, 900, (60, 3)).astype(np.int16)
    ticked = Paths.of_ranks(ranks, 900)
    monkeypatch.setattr(paths_module, "TICKED", 0)
    found = Paths.of_ranks(ranks, 900)
    assert (found.of == ticked.of).all()
    assert (found.ranks == ticked.ranks).all()


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A trace in a file that is not compressed."""
    trace = runs_trace(5, 60, 4, turns=True)
    monkeypatch.setattr(npz, "LARGE_BYTES", trace.ranks.nbytes)
    trace.save(tmp_path / "trace.npz")
    return trace, tmp_path / "trace.npz"


def test_large_arrays_are_not_compressed_and_the_same(large):
    trace, file = large
    read = RankTrace.load(file)
    assert trace.ranks.tobytes() in file.read_bytes()
    assert not read.ranks.flags.writeable
    assert (read.ranks == trace.ranks).all()
    with np.load(file) as archive:  # and any reader of the format has them
        assert (archive["ranks"] == trace.ranks).all()
    first = file.read_bytes()
    read.save(file)
    assert file.read_bytes() == first


def test_a_large_file_that_is_damaged_or_cut_is_refused_at_every_place(large):
    _, file = large
    data = file.read_bytes()
    with np.load(file) as archive:
        ranks = archive["ranks"].tobytes()
    begin = data.index(ranks)
    for place in (begin, begin + len(ranks) // 2, begin + len(ranks) - 1):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(InvalidInput, match="was it cut off"):
            RankTrace.load(file)
    for length in (begin, begin + len(ranks) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(InvalidInput):
            RankTrace.load(file)


@pytest.fixture
def run(tmp_path):
    runs_trace(6, 200, 3, turns=True).save(tmp_path / "trace.npz")
    profile(3).save(tmp_path / "profile.json")
    return tmp_path


def test_a_sample_is_planned_with_by_conversation_and_said(run, invoke_search):
    result = invoke_search("--sample", "20")
    said = " ".join(result.stdout.split())
    plan, trace = Plan.load(run / "plan.json"), RankTrace.load(run / "trace.npz")
    count = int(trace.clusters.max()) + 1
    assert (plan.sample.conversations, plan.sample.of) == (20, count)
    assert plan.entries[0].basis.conversations == 20
    assert f"Planned with 20 of {count} conversations, drawn at random (seed 0)" in said
    assert f"{np.sqrt(count / 20):.1f} times as wide" in said
    again = (run / "plan.json").read_bytes()
    invoke_search("--sample", "20")
    assert (run / "plan.json").read_bytes() == again


def test_a_sample_of_all_is_none(run, invoke_search):
    assert "so all are planned with" in invoke_search("--sample", "100000").stderr
    assert Plan.load(run / "plan.json").sample is None
    assert "sample" not in json.loads((run / "plan.json").read_text())


def test_the_error_of_a_sample_is_as_much_wider_as_is_said():
    """Of many conversations alike, so that the square root holds to a few percent (2000 draws: 1.6 % each)."""
    trace = runs_trace(7, 900, 3, turns=False)
    tree, few = grow(trace, Limits(6), objective="joint").tree(6), trace.select(np.arange(0, 900, 9))
    errors = [source_of(one).rate(tree).stderr for one in (trace, few)]
    assert errors[1] / errors[0] == pytest.approx(3.0, rel=0.25)


def test_a_calibration_has_nothing_to_sample(run, invoke_search):
    Calibration.from_trace(RankTrace.load(run / "trace.npz")).save(run / "c.json")
    result = invoke_search("--calibration", str(run / "c.json"), "--sample", "5")
    assert result.exit_code == 1
    assert "--sample draws conversations of a trace" in result.stderr


@pytest.fixture
def invoke_search(run) -> Callable[..., Result]:
    def search(*options: str) -> Result:
        return CliRunner().invoke(cli, ["search", "--run", str(run), "--budget", "16", *options])

    return search
