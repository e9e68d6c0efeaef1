"""Comparing traffic, groups and drafters: against slow ways and closed forms."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treeopt
from treeopt.errors import InvalidInput
from treeopt.growth.grow import grow
from treeopt.growth.heldout import folds
from treeopt.growth.replay import replay
from treeopt.pipeline.run import Line, groups_of
from treeopt.planning.compared import Compared, DrafterFigure, winner
from treeopt.planning.planner import plan_trees
from treeopt.planning.regret import drawn_accept, group_losses, group_parts, plan_losses, tokens_of
from treeopt.planning.request import PlanRequest
from treeopt.records.calibration import Calibration
from treeopt.records.estimate import Estimate
from treeopt.records.figure import Figure
from treeopt.records.options import Source, TreeLimits
from treeopt.records.plan import PlannedEngine
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.trace import NO_TRIAL, RankTrace
from treeopt.report.comparison import verdict
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

from .conftest import examples, invoke, random_trace
from .helpers.engine_files import exposition
from .helpers.runs import some_bench


def conversations(rng, n: int, *, best: float = 0.5, heads: int = 3) -> RankTrace:
    """A trace of n answers, each with a difficulty of its own, so that its states depend on one another."""
    blocks = []
    for length in rng.integers(10, 30, n):
        easy = rng.beta(8 * best, 8 * (1 - best))
        block = np.where(rng.random((length, heads)) < easy, 0, rng.integers(1, 5, (length, heads)))
        state, head = np.indices(block.shape)
        block[state + head + 2 > length] = NO_TRIAL
        blocks.append(block)
    starts = np.concatenate([[0], np.cumsum([len(block) for block in blocks])])
    return RankTrace(np.concatenate(blocks), starts, meta={"top_k": 8})


def constant(ranks, n: int = 10, length: int = 13) -> RankTrace:
    """Answers at whose every state the heads have the token at the same ranks."""
    block = np.tile(ranks, (length, 1))
    state, head = np.indices(block.shape)
    block[state + head + 2 > length] = NO_TRIAL
    return RankTrace(np.tile(block, (n, 1)), np.arange(0, n * length + 1, length), meta={"top_k": 4})


def grouped(**parts: RankTrace) -> RankTrace:
    group = np.concatenate([np.full(part.num_sequences, g) for g, part in enumerate(parts.values())])
    whole = RankTrace.concatenate(list(parts.values()), {"top_k": 4, "group_names": list(parts)})
    return replace(whole, group=group)


# What a plan loses.


def test_a_plan_for_other_traffic_loses_what_can_be_worked_out():
    """Two guesses: rank 0 is always right in A, rank 1 in B. A's plan takes 12 steps on B, B's own 6."""
    plan = plan_trees(constant([0, 0]), request=PlanRequest(Limits(3)))
    (found,) = plan_losses(plan, constant([1, 1]))
    assert (found.served.size, found.served.tokens_per_step) == (3, 1.0)
    assert (found.best.tokens_per_step, found.loss, found.loss.stderr) == (2.0, 0.5, 0.0)
    (same,) = plan_losses(plan, constant([0, 0]))
    assert (same.loss, same.loss.ends) == (0.0, (0.0, 0.0))


@examples(15)
@given(st.integers(0, 2**32))
def test_the_best_is_grown_on_other_conversations_and_chosen_by_others(seed):
    """Against growing, choosing and replaying fold by fold; latencies are such that no two trees tie."""
    rng = np.random.default_rng(seed)
    trace, other = (random_trace(rng, rng.integers(3, 12, 12), 2, 4) for _ in range(2))
    ms = {1: 10.0, 2: 11.0 + np.pi / 30, 3: 12.0 + np.e / 30, 4: 13.0 + 2**0.5 / 30}
    points = [StepTiming(1, 64, n, d, (ms[n],)) for n in (2, 3, 4) for d in (1, 2) if d < n]
    profile = LatencyProfile(tuple(points), (StepTiming(1, 64, 1, 0, (10.0,)),))
    plan = plan_trees(other, profile, PlanRequest(Limits(4)))
    (found,) = plan_losses(plan, trace, profile)
    families = {d: grow(trace, Limits(4, d)) for d in (1, 2)}
    keys = [(d, n) for d, family in families.items() for n in family.sizes if max(family.tree(n).depth, 1) == d]
    steps = {key: np.zeros(12, dtype=int) for key in keys}
    for train, test in folds(trace):
        for d, n in keys:
            tree = grow(trace.select(train), Limits(4, d)).tree(n)
            steps[d, n][test] = replay(trace.select(test), tree).steps
    steps |= {("chain", n): replay(trace, Tree.chain(n - 1)).steps for n in (2, 3)}
    spent = 0.0
    for rest, test in folds(trace):
        best = min(steps, key=lambda key: steps[key][rest].sum() * ms[key[1]])
        spent += steps[best][test].sum() * ms[best[1]]
    entry = plan.entries[0]
    ours = replay(trace, entry.tree)
    assert found.loss == pytest.approx(1 - spent / (ours.steps.sum() * ms[entry.chosen.size]), abs=1e-6)
    assert found.loss.low <= found.loss.high
    assert found.served.tokens_per_step == pytest.approx(ours.tokens_per_step)


@pytest.mark.parametrize(
    ("engine", "best"),
    [
        (PlannedEngine(name="hydra", method="choices"), [[0], [1]]),
        (PlannedEngine(name="medusa", method="choices"), [[0], [1], [1, 0]]),
        (None, [[0], [1], [1, 0]]),
    ],
)
def test_the_best_is_a_tree_that_the_engine_takes(engine, best):
    """The second guess is right, then the first. A child of [1] alone pays, but Hydra takes no such tree."""
    trace, steps = constant([1, 0]), ((2, 1), (3, 1), (3, 2), (4, 1), (4, 2))
    points = tuple(StepTiming(1, 64, size, depth, (10.0,)) for size, depth in steps)
    profile = LatencyProfile(points, (StepTiming(1, 64, 1, 0, (10.0,)),))
    plan = plan_trees(trace, profile, PlanRequest(Limits(4), takes="low-rank-expands", engine=engine))
    result = treeopt.compare(plan, trace, profile=profile)
    assert result.losses[0].best.draft.medusa_choices == best
    assert result.keep == (best == plan.entries[0].tree.medusa_choices)


def test_counts_without_conversations_give_a_loss_with_an_interval():
    """A chain of two is planned where siblings are the best: 1 + 0.3 x 1.1 tokens a step for 1 + 0.3 + 0.5."""
    before = Calibration(np.array([[600, 100], [500, 50]]), np.array([1000, 1000]))
    after = Calibration(np.array([[300, 500], [100, 50]]), np.array([1000, 1000]))
    plan = plan_trees(before, request=PlanRequest(Limits(3)))
    (found,) = plan_losses(plan, after)
    assert found.loss == pytest.approx(1 - 1.33 / 1.8)
    # Of 1.33 / 1.8 to first order: derivatives by the shares of ranks 0 and 1, and by that of the second guess.
    first, second, deeper = (1.1 * 1.8 - 1.33) / 1.8**2, -1.33 / 1.8**2, 0.3 / 1.8
    variance = first**2 * 0.3 + second**2 * 0.5 - (first * 0.3 + second * 0.5) ** 2 + deeper**2 * 0.1 * 0.9
    assert found.loss.stderr == pytest.approx(np.sqrt(variance / 1000), rel=0.2)
    assert found.loss.low < found.loss < found.loss.high


def test_steps_without_a_draft_cost_the_plan_what_they_cost_its_rivals():
    """Half of the steps had no draft, and steps of 4 rows take 14 ms for 10: 12 ms on average, for the best too."""
    meta = {"steps_without_draft": 1000}
    counts = Calibration(np.array([[800], [600], [420]]), np.array([1000, 800, 600]), meta=meta)
    points = tuple(StepTiming(1, 64, size, size - 1, (10.0 + size,)) for size in (2, 3, 4))
    profile = LatencyProfile(points, (StepTiming(1, 64, 1, 0, (10.0,)),))
    (found,) = plan_losses(plan_trees(counts, profile, PlanRequest(Limits(4))), counts, profile)
    assert (found.served.size, found.served.step_ms, found.loss) == (4, pytest.approx(12.0), 0.0)


def test_the_spread_of_drawn_counts_is_the_error_that_an_engine_s_requests_have():
    log = Calibration(np.array([[500]]), np.array([1000]), meta={"survival": [Estimate(0.5, 0.05)]})
    assert tokens_of(Tree.chain(1), drawn_accept(log)[1:]).std() == pytest.approx(0.05, rel=0.1)
    free = replace(log, meta={})
    assert tokens_of(Tree.chain(1), drawn_accept(free)[1:]).std() == pytest.approx(np.sqrt(0.25 / 1000), rel=0.1)


# Groups.


def test_the_losses_of_two_groups_by_hand():
    """3 rows. x: best guesses two deep, 3 tokens a step with (0), (0, 0). y: second guess, one deep.

    Grown on all, x counts more and y gets 1 token a step, half of what it could.
    """
    x, y = constant([0, 0], n=75), constant([1, 3], n=20)  # no fold has too few of y
    trace = grouped(x=x, y=y)
    request = PlanRequest(Limits(3, max_rank=1))
    shared = plan_trees(trace, request=request)
    assert shared.entries[0].tree.medusa_choices == [[0], [0, 0]]
    losses = {one.group: one.loss for one in group_losses(shared, trace, None)}
    assert losses == pytest.approx({"x": 0.0, "y": 0.5}, abs=1e-9)


@pytest.fixture
def mixed_run(tmp_path):
    """A run of two groups: in x every guess is right, in y none is. A plain step takes 10 ms, one with guesses 12."""
    run, trace = treeopt.RunDirectory(tmp_path / "mixed"), grouped(x=constant([0, 0], n=60), y=constant([3, 3], n=10))
    run.replace_accuracies(Calibration.from_trace(trace), trace)
    steps = tuple(StepTiming(1, 64, size, size - 1, (12.0,) * 4) for size in (2, 3))
    LatencyProfile(steps, (StepTiming(1, 64, 1, 0, (10.0,) * 4),)).save(run.profile)
    treeopt.search(run=run, budget=3, limits=TreeLimits(max_rank=0))
    return run


def test_a_run_by_group_says_which_group_is_better_off_without_speculation(mixed_run):
    """Without guesses y takes 10 ms a token, not 12: exactly 1.2 times as fast, whatever is drawn again."""
    found = groups_of(mixed_run, SimpleNamespace(source=Source(group_by="kind")))
    (y,) = found.gainers
    assert (y.group, y.best.draft) == ("y", Tree.chain(0))
    assert (y.gain.value, y.gain.low, y.gain.high) == pytest.approx((1.2, 1.2, 1.2), rel=1e-4)
    said = verdict(found)
    assert "y at batch size 1 (do not speculate), 1.20 (1.20 to 1.20) times as fast as shared" in said
    assert groups_of(mixed_run, SimpleNamespace(source=Source())) is None


def test_groups_that_are_too_few_to_be_judged_do_not_end_a_run(mixed_run, capsys):
    mixed_run.read_trace().select(np.arange(62)).save(mixed_run.trace)
    assert groups_of(mixed_run, SimpleNamespace(source=Source(group_by="kind"))) is None
    assert "two groups of 5 conversations" in capsys.readouterr().err.replace("\n", " ")


def test_the_last_lines_of_a_run_have_its_groups(mixed_run, monkeypatch):
    groups = groups_of(mixed_run, SimpleNamespace(source=Source(group_by="kind")))
    monkeypatch.setattr(
        "treeopt.pipeline.session.session_of", lambda *given, **options: SimpleNamespace(source=Source())
    )
    monkeypatch.setattr(
        "treeopt.pipeline.run.run_line", lambda *given: Line(mixed_run.read_plan(), [some_bench()], [], groups, {})
    )
    last = invoke("run", "--run", mixed_run.path).stdout.rpartition("The speedup is")[2]
    assert last.index("do not speculate") < last.index("own over shared") < last.index("Found: ")
    document = json.loads(invoke("run", "--run", mixed_run.path, "--json").stdout)
    assert [one["group"] for one in document["groups"]["groups"]] == ["x", "y"]


def test_a_trace_without_groups_has_none_to_compare():
    with pytest.raises(InvalidInput, match="group_by"):
        group_parts(constant([0]))


# Drafters.


def setting(name: str, value: float, low: float | None, high: float | None) -> DrafterFigure:
    figure = Figure(draft=Tree.chain(1), batch_size=1, tokens_per_step=1.5, step_ms=1.5, plain_ms=value,
                    speedup=Estimate(value, None, low, high))  # fmt: skip
    return DrafterFigure(drafter=name, figure=figure, setting="", is_measured=True)


def test_the_winner_is_the_fastest_and_names_what_it_is_not_told_from():
    settings = [setting("slow", 1.1, 1.05, 1.15), setting("fast", 2.0, 1.9, 2.1), setting("near", 1.95, 1.85, 2.05)]
    found = winner(settings)
    assert (found.drafter, found.tied, found.pays) == ("fast", ("near",), True)
    assert winner([setting("slow", 0.8, 0.7, 0.9)]).pays is False
    unknown = winner([setting("a", 2.0, None, None), setting("b", 1.0, 0.9, 1.1)])
    assert (unknown.tied, unknown.pays) == (("b",), None)


# The command.


@pytest.fixture
def files(tmp_path):
    """Traces of two kinds of traffic, each with its name."""
    rng = np.random.default_rng(7)
    for name, best in (("old", 0.7), ("same", 0.7), ("new", 0.2)):
        conversations(rng, 120, best=best).save(tmp_path / f"{name}.npz")
    points = [StepTiming(1, 64, size, 3, (10.0 + size / 2,)) for size in (4, 8, 16)]
    LatencyProfile(tuple(points), (StepTiming(1, 64, 1, 0, (10.0,)),)).save(tmp_path / "profile.json")
    return tmp_path


def test_the_exit_status_says_when_to_plan_anew(files, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    options = ("--profile", files / "profile.json", "--budget", 16)
    kept = invoke("compare", files / "old.npz", files / "same.npz", *options)
    assert "keep it" in kept.stdout
    lost = invoke("compare", files / "old.npz", files / "new.npz", *options, code=3)
    assert "plan anew" in lost.stdout
    assert max(map(len, lost.stdout.splitlines())) <= 80
    invoke("compare", files / "old.npz", files / "new.npz", *options, "--tolerance", 90)
    document = json.loads(invoke("compare", files / "old.npz", files / "new.npz", *options, "--json", code=3).stdout)
    assert (document["schema"], document["status"], document["keep"]) == ("treeopt.comparison/2", 3, False)
    assert document["losses"][0]["loss"]["low"] > 0.005


def test_the_first_line_says_where_speculation_now_costs_and_where_it_gains():
    """One guess, always right in A, never in B. A step of 2 rows takes 11 ms for 10: all 10 % lost. With C it gains 82 %.

    At batch size 32 a step takes twice the time of a plain one, and even in A speculation is not planned.
    """
    steps = [StepTiming(b, 64, 2, 1, (ms,)) for b, ms in ((1, 11.0), (32, 21.0))]
    profile = LatencyProfile(tuple(steps), tuple(StepTiming(b, 64, 1, 0, (10.0,)) for b in (1, 32)))
    request = PlanRequest(Limits(2), [1, 32])
    before, never = constant([0]), constant([-1])
    plan = plan_trees(before, profile, request)
    assert [entry.chosen.size for entry in plan.entries] == [2, 1]
    cost, off = plan_losses(plan, never, profile)
    assert (cost.served.speedup, off.served.speedup) == (pytest.approx(10 / 11), 1.0)
    gain, _ = plan_losses(plan, before, profile)
    cost_words = "At batch size 1 speculation now costs 9 %: turn it off."
    gain_words = "At batch size 1 speculation gains 82 %."
    assert gain.served.speedup == pytest.approx(2 * 10 / 11)
    assert gain.served.speedup.ends == pytest.approx((2 * 10 / 11, 2 * 10 / 11), rel=1e-4)
    for losses, first in [
        ((cost,), f"{cost_words} The plan"),
        ((gain, off), f"{gain_words} At batch size 32 the plan is not to speculate. The plan"),
        ((gain, cost), f"{cost_words} {gain_words} The plan"),
    ]:
        said = verdict(Compared(names=("A", "B"), losses=losses, tolerance=0.005))
        assert said.startswith(first)
    without, *_ = plan_losses(plan_trees(before, request=PlanRequest(Limits(2))), never)
    assert without.served.speedup is None


def test_an_engine_s_counters_are_a_source(files):
    (files / "now.prom").write_text(exposition())
    found = invoke("compare", files / "old.npz", files / "now.prom", "--budget", 16, "--json")
    document = json.loads(found.stdout)
    assert document["losses"][0]["served"]["tokens_per_step"]["value"] == pytest.approx(2.82)
    assert "chain" in found.stderr


def test_what_cannot_be_compared_is_said(files, tmp_path):
    old = files / "old.npz"
    trace = RankTrace.load(old)
    for name, meta in [
        ("model", {"provenance": {"model": "other"}}),
        ("drafter", {"drafter": {"kind": "hydra"}}),
        ("rule", {"acceptance": {"rule": "typical"}}),
    ]:
        mine = {"provenance": {"model": "mine"}, "drafter": {"kind": "medusa"}, "acceptance": {"rule": "greedy"}}
        one, two = (replace(trace, meta={**trace.meta, **m}) for m in (mine, {**mine, **meta}))
        with pytest.raises(InvalidInput, match=f"differ in .*{name}"):
            treeopt.compare(one, two)
    for words, said in [
        ((old, files / "profile.json"), "none of them"),
        ((old, old, old), "got 2"),
        ((old,), "--group-by"),
        ((old, tmp_path / "nothing"), "does not exist"),
    ]:
        assert said in invoke("compare", *words, "--budget", 4, code=1).stderr
    assert "--tolerance" in invoke("compare", old, old, "--tolerance", 100, code=2).stderr


def test_results_are_compared_in_python_and_show_themselves():
    found = treeopt.compare(constant([0]), constant([0]), budget=4)
    assert found.keep
    assert "keep it" in found._repr_html_()
    groups = treeopt.compare(grouped(x=constant([0], n=30), y=constant([1], n=10)), budget=3)
    assert {group.group for group in groups.groups} == {"x", "y"}
    assert "One plan" in groups._repr_html_()
