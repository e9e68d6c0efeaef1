"""Profiling: where it stops, where sizes are placed, what is added to a file, contexts, kills."""

import json
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import steps
from treeopt.errors import InvalidInput
from treeopt.files.journal import Journal
from treeopt.growth.source import source_of
from treeopt.latency.costs import StepCosts, margins_of_error
from treeopt.latency.measurements import paired_ratios
from treeopt.latency.rounds import Visit, Visitor, margin_of_error, plan_rounds, time_steps
from treeopt.pipeline.profile.placement import placed_sizes, shaped, timing_trees, tree_families
from treeopt.records.calibration import Calibration
from treeopt.records.profile import LatencyProfile
from treeopt.runtime.decode import Decoder
from treeopt.runtime.session import Session
from treeopt.runtime.setup import Setup
from treeopt.runtime.stepper import StepVisits, rows_at
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target
from treeopt.trees.tree import FIXED, Cost, Tree

from .conftest import CONTEXT, HEADS, asked, tiny_heads, tiny_model

NEVER = StopRule(frozenset(), 20, at_loops=False)


# Where it stops: steps whose latencies are known, on a clock of their own.


class Clock(Visitor):
    """Steps of known latency; a visit takes a quarter of a second, a round with one tree a whole one."""

    def __init__(self, latency, trees):
        super().__init__(trees, 1)
        self.now, self.turn, self.latency = 0.0, 0, latency

    def warm_up(self):
        return [1e-3] * (len(self.trees) + 1), 0.0

    def visit(self, place, steps, turn):
        self.now, self.turn = self.now + 0.25, turn
        tree = self.trees[place] if place < len(self.trees) else None
        return Visit(place=place, seconds=0.25, step_ms=[1e3 * self.latency(self, tree) for _ in range(steps[1])])


@pytest.fixture
def measured():
    def run(latency, n_trees=1, **options):
        clock = Clock(latency, [Tree.chain(d + 1) for d in range(n_trees)])
        found = time_steps(clock, **{"time_limit_s": 1e9, **options})
        return found.rounds, *found.timings(9)[0]

    return run


def test_without_noise_five_rounds_are_enough(measured):
    rounds, *_ = measured(lambda clock, tree: 1e-3)
    assert len(rounds) == 5


def test_rounds_grow_with_the_square_of_the_noise(measured):
    """A round's ratio has 4 % noise, its median 1.2533 x 4 % / sqrt(n): 2 % needs about (1.96 x 2.5)^2 = 24."""
    rng = np.random.default_rng(0)
    noise = {}

    def latency(clock, tree):
        if tree is None:
            return 1e-3
        return 1e-3 * noise.setdefault(clock.now, 2 + 2 * 0.04 * rng.standard_normal())

    rounds, points, plain = measured(latency, n_trees=4)
    assert 20 <= len(rounds) <= 60
    assert all(margin_of_error(point, plain) <= 0.02 for point in points)
    noise.clear()
    many, *_ = measured(latency, n_trees=4, precision=0.01)
    assert len(many) > 2 * len(rounds)


def test_time_ends_it_after_three_rounds_at_least(measured):
    wild = np.random.default_rng(0).lognormal(0.0, 1.0, 10_000).tolist()
    rounds, *_ = measured(lambda clock, tree: 1e-3 * wild.pop(), time_limit_s=1e-9)
    assert len(rounds) == 3
    rounds, *_ = measured(lambda clock, tree: 1e-3 * wild.pop(), time_limit_s=7.5)
    assert len(rounds) == 7  # another one would end after 8 s


class Slow(Visitor):
    """Steps that take a second, more with more rows."""

    def step_s(self, place):
        return 1 + len(self.trees[place]) / 100 if place < len(self.trees) else 1.0

    def warm_up(self):
        step_s = [self.step_s(place) for place in range(len(self.trees) + 1)]
        return step_s, sum(step_s)

    def visit(self, place, steps, turn):
        return Visit(
            place=place, seconds=sum(steps) * self.step_s(place), step_ms=[1e3 * self.step_s(place)] * steps[1]
        )


class Starved(Slow):
    """A machine whose neighbours take its memory's bandwidth for some 8 s, every 20 s or so: all steps take twice as long."""

    def __init__(self, trees, batch_size):
        super().__init__(trees, batch_size)
        self.rng, self.now, self.ends, self.starves = np.random.default_rng(0), 0.0, 0.0, True

    def step_s(self, place):
        return super().step_s(place) / 10

    def visit(self, place, steps, turn):
        took = []
        for _ in range(sum(steps)):
            if self.now >= self.ends:
                self.starves = not self.starves
                self.ends = self.now + self.rng.exponential(8 if self.starves else 12)
            took.append(self.step_s(place) * (1 + self.starves))
            self.now += took[-1]
        return Visit(place=place, seconds=sum(took), step_ms=[1e3 * s for s in took[steps[0] :]])


def test_a_machine_that_starves_for_seconds_spoils_no_ratio():
    trees = [Tree.from_choices([[i] for i in range(1 + n)]) for n in range(24)]
    found = time_steps(Starved(trees, 1), time_limit_s=120.0, precision=1e-9)
    assert len(found.rounds) >= 7
    assert len({tuple(visit.place for visit in round_) for round_ in found.rounds}) == len(found.rounds)
    ((points, plain),) = found.timings(64)
    assert set(plain.by_round()) > set(points[0].by_round())
    for tree, point in zip([found.trees[place] for place in found.plan.places], points, strict=True):
        ratio = median(paired_ratios(point, plain).tolist())
        assert ratio == pytest.approx(1 + len(tree) / 100, rel=0.02)


@pytest.mark.parametrize(("limit_s", "sizes"), [(1e4, 20), (200.0, 20), (100.0, 9), (40.0, 2), (0.0, 2)])
def test_a_time_limit_is_kept_or_what_does_not_fit_is_said_before(limit_s, sizes):
    """Of 20 trees those far apart stay."""
    trees, said = [Tree.from_choices([[i] for i in range(1 + n)]) for n in range(20)], []
    precision = 1e-9 if limit_s < 1e4 else 0.02
    found = time_steps(Slow(trees, 1), time_limit_s=limit_s, precision=precision, progress=said.append)
    assert said[0] == found.plan
    assert len(found.plan.places) == sizes
    assert {len(found.trees[place]) for place in found.plan.places} >= {2, 21}
    assert len(found.rounds) >= 3
    assert found.seconds <= 1.2 * max(limit_s, found.plan.warm_up_s + found.plan.least_s)


def test_the_least_that_is_timed_encloses_most_sizes():
    """Of two trees of different depths, neither has a size beside it, so that every size between was unknown."""
    families = tree_families(None, 4, 64)
    trees = timing_trees(families, placed_sizes(1, 64))
    plan = plan_rounds(trees, [1.0] * (len(trees) + 1), 0.0)
    assert [(len(trees[place]), trees[place].depth) for place in plan.places] == [(5, 4), (64, 4)]


def test_a_machine_that_slows_down_spoils_no_ratio(measured):
    def latency(clock, tree):
        return (1.0 + 0.01 * clock.now) * (1e-3 if tree is None else 2e-3)

    _, (point,), plain = measured(latency, precision=1e-9, time_limit_s=40.0)
    profile = LatencyProfile((point,), (plain,))
    assert StepCosts(profile, 1, 9).ms([Cost(FIXED, 2, 1)])[0] / StepCosts(profile, 1, 9).plain.ms == pytest.approx(
        2.0, rel=0.01
    )


# Which sizes.


@given(st.sampled_from([1, 2, 3, 4, 7, 8, 16, 32, 64, 128]), st.integers(2, 256))
def test_placed_sizes_are_few_and_begin_and_end_right(batch_size, budget):
    sizes = placed_sizes(batch_size, budget)
    assert list(sizes) == sorted(set(sizes))
    assert {size for size in (2, 3, 4, budget) if size <= budget} <= set(sizes) <= set(range(2, budget + 1))
    assert min(12, budget - 1) <= len(sizes) <= 16


@given(st.sampled_from([1, 2, 4, 8]), st.integers(40, 200))
def test_tiles_end_between_neighbouring_sizes(batch_size, budget):
    """At least three of the placed sizes fill a tile of 8 rows, with the first size of the next beside them."""
    sizes = placed_sizes(batch_size, budget)
    pairs = [size for size in sizes if size * batch_size % 8 == 0 and size + 1 in sizes]
    assert len(pairs) >= 3


def test_all_sizes_at_the_full_depth_and_three_at_each_other():
    families = tree_families(None, 4, 64)
    found = [(len(tree), tree.depth) for tree in timing_trees(families, placed_sizes(1, 64))]
    assert [size for size, depth in found if depth == 4] == [5, *(s for s in placed_sizes(1, 64) if s > 5)]
    for depth, largest in ((1, 11), (2, 64), (3, 64)):
        here = [size for size, d in found if d == depth]
        assert len(here) == 3
        assert (here[0], here[-1]) == (depth + 1, largest)


def test_given_sizes_are_exactly_what_is_timed():
    families = tree_families(None, 3, 20)
    found = timing_trees(families, (3, 20), given=True)
    assert [(len(tree), tree.depth) for tree in found] == [(3, 1), (3, 2), (20, 2), (20, 3)]


@given(st.integers(0, 50))
def test_timed_trees_have_their_size_and_depth_and_no_gaps(seed):
    accept = np.random.default_rng(seed).dirichlet(np.ones(6), 4)[:, :5]
    families = tree_families(source_of(Calibration((1000 * accept).astype(int), np.full(4, 1000))), 4, 24)
    for tree in timing_trees(families, placed_sizes(1, 24)):
        known = set(tree.paths)
        assert all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in known for path in tree.paths[1:])
    assert (len(shaped(families[3], 7, 4)), shaped(families[3], 7, 4).depth) == (7, 4)


# The command's function, on a model of 20 lines.


@pytest.fixture(scope="module")
def session():
    target = Target(tiny_model(eos=(3,)), name="tiny")
    prompts = asked([[1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11, 12]])
    return Session(target, tiny_heads(target), {"kind": "medusa", "id": "tiny", "num_heads": HEADS}, prompts)


QUICK = {"time_limit_s": 1e-9, "max_new_tokens": 24}


def timed(run, session, batch_size, sizes=(2,), **options):
    """The run's profile after these were timed too."""
    steps.profile(run, session, batch_sizes=(batch_size,), sizes=sizes, **QUICK, **options)
    return LatencyProfile.load(run.profile)


def test_batch_sizes_are_added_and_measured_again(run, session):
    first = timed(run, session, 1, (2, 5))
    both = timed(run, session, 2, (2, 5))
    assert both.batch_sizes == [1, 2]
    assert [p for p in both.points if p.batch_size == 1] == list(first.points)
    assert {of.batch_size for of in both.info["settings"]} == {1, 2}
    assert len(margins_of_error(both)) == len(both.points) + 2
    again = timed(run, session, 1, (3,))
    assert {p.size for p in again.points if p.batch_size == 1} == {3}
    assert again.batch_sizes == [1, 2]


def test_another_models_profile_is_not_replaced_unasked(run, session):
    timed(run, session, 1)
    other = replace(session, drafter_record={**session.drafter_record, "id": "other"})
    with pytest.raises(InvalidInput, match=r"they differ in drafter id \(\'.*\' there, \'other\' here\).*overwrite"):
        timed(run, other, 2)
    assert LatencyProfile.load(run.profile).batch_sizes == [1]
    assert timed(run, other, 2, overwrite=True).batch_sizes == [2]


def test_contexts_are_nominal_and_added(run, session):
    assert timed(run, session, 1, contexts=(32, 64)).settings == [(1, 32), (1, 64)]
    assert timed(run, session, 1, contexts=(64, 80)).settings == [(1, 32), (1, 64), (1, 80)]
    assert len(timed(run, session, 1).settings) == 4  # rows of real prompts are a setting of their own


@pytest.mark.parametrize("context", [16, 64, CONTEXT])
def test_rows_stay_about_the_context(session, context):
    target, heads = session.target, session.drafter
    prompts, stop = rows_at(context, [c.first for c in session.prompts.conversations], target)
    visits = StepVisits(Decoder(Setup(target, heads, stop)), prompts, [Tree.dense([2, 2])], 2)
    rounds = time_steps(visits, time_limit_s=1e-9).rounds
    half = max(8, context // 16)
    top = min(context + half, CONTEXT)
    lengths = [length for round_ in rounds for visit in round_ for length in visit.lengths]
    assert top - 2 * half <= min(lengths)
    assert max(lengths) <= top
    assert len({len(prompt) for prompt in prompts}) > 1 or context == 16


def test_contexts_beyond_the_model_are_refused(session):
    for context in (8, CONTEXT + 1):
        with pytest.raises(InvalidInput, match=f"must be 16 to {CONTEXT}, the context of the model"):
            rows_at(context, [[1]], session.target)


def test_sizes_that_no_tree_has_are_refused(run, session):
    one = replace(session, drafter=tiny_heads(session.target, num_heads=1))
    with pytest.raises(InvalidInput, match=r"at most 11 with 1 heads .* but got 12"):
        timed(run, one, 1, (2, 12, 30))


class Killed(Exception):
    pass


def test_a_journal_of_other_visits_is_begun_anew(run, session, monkeypatch):
    """Visits had up to four untimed and six timed steps before, and a journal began with that number."""
    append = Journal.append

    def dies(journal, document):
        append(journal, document)
        raise Killed

    monkeypatch.setattr(Journal, "append", dies)
    with pytest.raises(Killed):
        timed(run, session, 1)
    monkeypatch.undo()
    folder = run.partial("profile") / "batch-size-1"
    key, planned = (json.loads((folder / name).read_text()) for name in ("key.json", "000000.json"))
    key.pop("visit_steps", None)
    Journal(folder, key).append({**planned, "visit": [4, 6]})
    assert [len(point.step_ms) for point in timed(run, session, 1).points] == [3]  # one of each of the fewest rounds


def test_the_file_says_how_well_latencies_are_known(run, session, capsys):
    result = steps.profile(run, session, batch_sizes=(1,), sizes=(2, 3), precision=1e-9, **QUICK)
    assert max(margins_of_error(result)) > result.info["precision"] == 1e-9
    assert "a longer time_limit_s helps" in capsys.readouterr().err
