"""Confident chains: the cut and the replay against plain loops, what they cost, how they are planned, and damage that is refused."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.growth.replay import (
    THRESHOLDS,
    accepted_lengths,
    confident_rates,
    kept_lengths,
    rate_anew,
    record_for,
    replay,
    tells,
)
from treeopt.growth.source import TraceSource
from treeopt.latency.estimate import StepCosts
from treeopt.latency.rounds import Planned, Rounds, Visit
from treeopt.pipeline.profile.placement import anew_trees
from treeopt.planning.candidates import Candidate, shares_of
from treeopt.planning.planner import plan_trees
from treeopt.planning.regret import plan_losses
from treeopt.planning.request import PlanRequest
from treeopt.records.drafters import DRAFTERS, is_stepwise
from treeopt.records.plan import Plan
from treeopt.records.pools import Counts
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.trace import RankTrace
from treeopt.runtime.acceptance.rules import Greedy
from treeopt.runtime.drafters.levels import LevelDraft, drafting_of
from treeopt.runtime.drafters.protocol import Drafter
from treeopt.trees.draft import ALL_CUT, CONFIDENT, ConfidentChain, SurvivingChain, draft_of
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

from .conftest import random_trace
from .test_block_paths import WIDTH, random_dflash2, random_dspark, slow_dflash2, slow_dspark, slow_path, slow_taps
from .test_dflash import CAUSAL, random_dflash, slow_dflash
from .test_dynamic import slow_replay

HEADS, BATCHES = 4, (1, 2)
EDGES = (0.1, 0.7, 0.5)  # float32 is above, below and at these


def recorded(seed, lengths, *, informed=False) -> RankTrace:
    """Random ranks and confidences, some at the thresholds that are asked; informed ones are high where the guess is right."""
    rng = np.random.default_rng(seed)
    trace = random_trace(rng, np.array(lengths), HEADS, 6)
    sure, ranks = rng.random(trace.ranks.shape), trace.ranks
    if informed:  # about half of the texts are easy
        ranks = np.where((rng.random((len(ranks), 1)) < 0.5) & (ranks > 0), 0, ranks)
        sure = np.where(ranks == 0, 1 - 0.6 * sure**2, 0.6 * sure)
    sure = np.where(rng.random(sure.shape) < (0.02 if informed else 0.3), rng.choice([*EDGES, 0, 1], sure.shape), sure)
    about = {"cluster": np.arange(len(lengths)) // 2, "meta": trace.meta | {"confidences": True}}
    return replace(trace, ranks=ranks, confidences=sure.astype(np.float32), **about)


def slow_kept(sure, threshold, length, kind=ConfidentChain) -> int:
    """Guesses before the first of one state whose confidence is below the threshold; or whose survival is, at least one."""
    kept, survival = 0, 1.0
    while kept < length:
        survival = float(sure[kept]) * (survival if kind is SurvivingChain else 1.0)
        if survival < threshold:
            break
        kept += 1
    return max(kept, kind is SurvivingChain)


def slow_states(trace, chain) -> tuple[list[int], list[int], list[list[int]]]:
    """What each state keeps and accepts, and the states at which each sequence takes a step."""
    kept = [slow_kept(sure, chain.threshold, chain.length, type(chain)) for sure in trace.confidences]
    match = [next((d for d, rank in enumerate(ranks) if rank), HEADS) for ranks in trace.ranks.tolist()]
    accepted = list(map(min, kept, match))
    return kept, accepted, slow_replay(trace, accepted)


@pytest.mark.parametrize("seed", range(3))
def test_every_threshold_and_length_is_replayed_as_a_plain_loop_does(tmp_path, seed):
    recorded(seed, lengths := [1, 2, 30, 7, 40, 25]).save(tmp_path / "t.npz")
    trace = RankTrace.load(tmp_path / "t.npz")
    kinds = (ConfidentChain, SurvivingChain)
    for kind, threshold, length in itertools.product(kinds, (0, *EDGES, 0.33, 1), range(1, HEADS + 1)):
        chain = kind(length, threshold)
        kept, accepted, states = slow_states(trace, chain)
        assert kept_lengths(trace, chain).tolist() == kept
        assert accepted_lengths(trace, chain).tolist() == accepted
        assert replay(trace, chain).steps.tolist() == [len(some) for some in states]
        rates, flat = TraceSource(trace).rate(chain), [*itertools.chain(*states)]
        assert (
            rates.steps.tolist() == np.bincount(np.arange(len(lengths)) // 2, [len(some) for some in states]).tolist()
        )
        shares = np.bincount([kept[t] for t in flat], minlength=1 + length) / len(flat)
        np.testing.assert_allclose(rates.kept, shares, atol=1e-12)
        counted = np.bincount([accepted[t] for t in flat], minlength=1 + length)
        assert TraceSource(trace).guess_counts(chain).tolist() == counted.tolist()
    for kind in kinds:
        found = confident_rates(trace, 3, kind)
        assert 1 < len(found) <= THRESHOLDS
        for chain, rates in found.items():
            assert (type(chain), chain.length) == (kind, 3)
            assert rates.steps.tolist() == TraceSource(trace).rate(chain).steps.tolist()
    assert not tells(trace, ConfidentChain(HEADS + 1, 0.5))
    for other in (replace(trace, confidences=None), trace):
        with pytest.raises(OutOfRange, match="does not tell"):
            accepted_lengths(other, ConfidentChain(HEADS + (other is trace), 0.5))
    assert not confident_rates(replace(trace, confidences=None), 3)


class Given(LevelDraft):
    """Drafts the same guesses for every row, with these confidences."""

    def __init__(self, sure):
        self.sure = torch.tensor(sure)

    def chain(self, length, roots, mark, until):
        return torch.arange(1, 1 + length).expand(len(self.sure), -1), self.sure[:, :length]


class Guesser(Drafter):
    kind, num_heads, has_confidences, draft_vocab_size = "medusa", HEADS, True, 99


def test_a_step_verifies_as_many_rows_as_the_longest_of_the_batch_keeps():
    trace, drafter = recorded(5, [40]), Guesser()
    for kind, threshold, b in itertools.product((ConfidentChain, SurvivingChain), (*EDGES, 0, 0.9, 1), (1, 2, 5)):
        sure, chain = trace.confidences[10 : 10 + b], kind(HEADS, threshold)
        kept = [slow_kept(row, threshold, HEADS, kind) for row in sure]
        step = drafting_of(chain, drafter, Given(sure), Greedy(), torch.device("cpu"))(
            torch.arange(b), lambda part: None
        )
        shape = b, 1 + max(kept)
        assert step.tokens.tolist() == [
            [row, *(d if d <= n else -1 for d in range(1, shape[1]))] for row, n in enumerate(kept)
        ]
        assert step.ancestors.tolist() == np.tri(shape[1], dtype=bool).tolist()
        assert step.depths.tolist() == list(range(shape[1]))
        choices = torch.arange(1, 1 + shape[1]).expand(shape)  # the target says what was guessed
        assert [len(path) - 1 for path in step.accepted(choices, choices)[2]] == kept


class Counted(LevelDraft):
    """Draws random logits of each level, and counts how many levels were asked for."""

    def __init__(self, drafter):
        self.drafter, self.levels = drafter, []

    def begin(self, roots, depth):
        self.random = torch.Generator().manual_seed(len(self.levels))
        self.levels.append(0)

    def logits(self, level, tokens):
        self.levels[-1] += 1
        return 2 * torch.randn((*tokens.shape, 12), generator=self.random)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_stepwise_drafter_drafts_one_guess_beyond_the_longest_that_is_kept(kind):
    """And a guess's confidence is its share among the likeliest ten of twelve."""
    drafter, seen = Guesser(), set()
    drafter.kind, drafter.draft_vocab_size = kind, 12
    state = Counted(drafter)
    for chain in (ConfidentChain(HEADS, one) for one in (0, *np.linspace(0.2, 0.6, 17), 1)):
        step = drafting_of(chain, drafter, state, Greedy(), torch.device("cpu"))(torch.arange(3), lambda part: None)
        kept = step.tokens.shape[1] - 1
        assert state.levels[-1] == (min(HEADS, kept + 1) if kind == "eagle3" else HEADS)
        seen.add(kept)
    assert seen == set(range(HEADS + 1))
    state.begin(torch.arange(3), HEADS)
    (known,) = {tuple(state.logits(None, torch.zeros(3, 1)).topk(10).values.softmax(-1)[:, 0, 0].tolist())}
    state.levels.pop()
    sure = state.chain(1, torch.arange(3), lambda part: None)[1]
    assert sure[:, 0].tolist() == pytest.approx(known)


def slow_chain(heads, hidden, root):
    """The drafted path, and of each guess how likely it is, one after the other."""
    path, found, w = [], [], heads.weights
    for k in range(heads.num_heads):
        around = [slow_taps] if heads.kind == "dflash2" else []
        row, before = slow_path(heads, hidden, root, path, *around)[k]
        if heads.kind == "dspark":
            read = torch.cat([row, w["markov_head.markov_w1.weight"][before]])[
                : w["confidence_head.proj.weight"].shape[1]
            ]
            found.append(
                1 / (1 + (-(w["confidence_head.proj.weight"][0] @ read + w["confidence_head.proj.bias"][0])).exp())
            )
            path.append(slow_dspark(heads, [], hidden, root, path)[0])
            continue
        logits = heads.lm_head @ row
        if heads.kind == "dflash2":
            some, selector = slow_dflash2(heads, [], hidden, root, path), heads.candidate_selector
            gate = selector.predecessor_codebook[before] * (selector.hidden_projection.weight @ row)
            logits = torch.stack([logits[b] + gate @ selector.successor_codebook[b] for b in some])
            path.append(some[0])
        else:
            path.append(slow_dflash(heads, [], hidden, root, path)[0])
        most = logits if heads.kind == "dflash2" else logits.topk(10).values
        found.append(logits.exp().max() / most.exp().sum())
    return path, found


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dspark, narrow", "dflash2"])
@pytest.mark.parametrize("causal", CAUSAL[:2])
def test_confidences_are_those_of_a_forward_that_is_written_out(kind, causal):
    """Along the drafted path, whatever the text says: DSpark's head, else the probability of the likeliest guess."""
    head = WIDTH if "narrow" in kind else WIDTH + 5
    make, form = {"dflash": (random_dflash, {}), "dflash2": (random_dflash2, {})}.get(
        kind, (random_dspark, {"confidence": head, "markov": "gated"})
    )
    heads = make(causal=causal, guesses=4, **form)
    assert heads.has_confidences
    hidden = torch.randn(6, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        draft = heads.start(1, 40)
        draft.prefill([[1, 2, 3, 4, 5, 6]], hidden[None])
        guesses, sure = draft.chain(4, torch.tensor([7]), lambda part: None)
        path, slow = slow_chain(heads, hidden, 7)
    assert guesses[0].tolist() == path
    torch.testing.assert_close(sure[0], torch.stack(slow).float())
    assert sure.dtype == torch.float32


# Latencies and plans.


def profile_of(batch_sizes=BATCHES, *, row_ms=1.0, ends=False) -> LatencyProfile:
    """Plain steps of 5 ms; a guess costs 0.3 ms to draft and 1 ms to verify, and confidences 0.2 ms a step.

    ends : whether the drafter ends behind a guess that is cut
    """
    plain = [StepTiming(b, 512, 1, 0, (5.0,) * 9) for b in batch_sizes]
    points = [
        StepTiming(b, 512, n, d, (5 + 0.3 * d + row_ms * (n - 1),) * 9)
        for b in batch_sizes
        for n in range(2, 9)
        for d in range(1, min(n, HEADS + 1))
    ]
    for b in batch_sizes:
        draft_ms = 0.3 * HEADS + 0.2
        points.append(StepTiming(b, 512, 1 + HEADS, HEADS, (5 + draft_ms + row_ms * HEADS,) * 9, confident=HEADS))
        points.append(StepTiming(b, 512, 1, 0, (5 + (0.5 if ends else draft_ms),) * 9, confident=HEADS))
    return LatencyProfile(tuple(points), tuple(plain))


def slow_ms(trace, chain, batch_size, row_ms=1.0) -> float:
    """Mean over all batches of steps of the replay: all drafted, and verified as far as the longest of each."""
    kept, _, states = slow_states(trace, chain)
    lengths = [kept[t] for t in itertools.chain(*states)]
    longest = [max(batch) for batch in itertools.product(lengths, repeat=batch_size)]
    return 5 + 0.3 * chain.length + 0.2 + row_ms * float(np.mean(longest))


@pytest.mark.parametrize("row_ms", [0.02, 2.0])
def test_a_plan_has_the_threshold_with_the_best_throughput(tmp_path, row_ms):
    record, profile = recorded(6, [40] * 10, informed=True), profile_of(row_ms=row_ms)
    profile.save(tmp_path / "profile.json")
    profile = LatencyProfile.load(tmp_path / "profile.json")
    plan = plan_trees(record, profile, PlanRequest(Limits(8), batch_sizes=BATCHES, context=512))
    plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    for entry in plan:
        best = entry.best("confident")
        ms = {chain: slow_ms(record, chain, entry.batch_size, row_ms) for chain in confident_rates(record, HEADS)}
        rate = {chain: replay(record, chain).tokens_per_step / each for chain, each in ms.items()}
        assert best.step_ms == pytest.approx(ms[best.draft], rel=0.02)  # without what the choice owes to luck
        assert rate[best.draft] == max(rate.values())
        chain = entry.best("chain")
        assert (entry.draft.kind == "confident") == (row_ms == 2.0 and best.rate > 1.005 * chain.rate)
        _, accepted, states = slow_states(record, best.draft)
        if entry.draft == best.draft:
            counts = np.bincount([accepted[t] for t in itertools.chain(*states)], minlength=1 + HEADS)
            np.testing.assert_allclose(entry.accepted, counts / counts.sum(), atol=1e-9)
    assert any(entry.draft.kind == "confident" for entry in plan) == (row_ms == 2.0)
    other = recorded(7, [30] * 10, informed=True)  # whose thresholds are others
    for entry, loss in zip(plan, plan_losses(plan, other, profile), strict=True):
        if entry.draft.kind == "confident":
            assert loss.reached.step_ms == pytest.approx(
                slow_ms(other, entry.draft, entry.batch_size, row_ms), rel=1e-9
            )


def test_two_chains_are_timed_and_their_costs_lie_beyond_a_fixed_one_and_a_plain_step():
    trace = recorded(8, [30, 30])
    assert anew_trees(trace, 64) == [ConfidentChain(HEADS, 0.0), ConfidentChain(HEADS, 1.0)]
    assert anew_trees(trace, 3) == [ConfidentChain(2, 0.0), ConfidentChain(2, 1.0)]
    trees = anew_trees(trace, 64)
    visits = tuple(Visit(place=i, seconds=1.0, step_ms=[3.0 + i], accepted=[0.5], lengths=[9]) for i in range(3))
    ((timed, _),) = Rounds(trees, 2, Planned([0, 1], (1, 1), 1.0, 1.0), [visits]).timings()
    assert [(t.size, t.depth, t.confident, t.drafted) for t in timed] == [(5, 4, 4, CONFIDENT), (1, 0, 4, ALL_CUT)]
    costs = StepCosts(profile_of(), 1)
    np.testing.assert_allclose(costs.ms([5, 1], [4, 0], [CONFIDENT, ALL_CUT]), [10.4, 6.4])
    timed = profile_of()
    less = [replace(p, step_ms=(9.0,) * 9) if p.confident and p.size > 1 else p for p in timed.points]
    less = StepCosts(replace(timed, points=tuple(less)), 1)
    np.testing.assert_allclose(less.ms([5, 5], [4, 4], [CONFIDENT, 0]), [9.0, 10.2])
    fixed = LatencyProfile(tuple(profile_of().fixed), profile_of().autoregressive)
    assert np.isnan(StepCosts(fixed, 1).ms([5, 1], [4, 0], [CONFIDENT, ALL_CUT])).all()


@pytest.mark.parametrize("batch_size", BATCHES)
def test_a_step_of_a_stepwise_drafter_costs_what_it_drafts(batch_size):
    trace, costs = recorded(6, [40] * 10), StepCosts(profile_of(ends=True), batch_size)
    for threshold in (0.25, 0.5, 0.75):
        one = ConfidentChain(HEADS, threshold)
        _, _, states = slow_states(trace, one)
        lengths = [kept for s in states for kept in kept_lengths(trace, one)[s].tolist()]
        longest = [max(batch) for batch in itertools.product(lengths, repeat=batch_size)]
        expected = np.mean([5 + 0.3 * min(n + 1, HEADS) + 0.2 + n for n in longest])
        steps = shares_of(Candidate("confident", 5, 4, None, rate_anew(trace, one), one, True), batch_size)
        found = np.array([*steps.values()]) @ costs.ms(*np.array([*steps]).T)
        assert found == pytest.approx(expected, rel=1e-6)
        assert sum(steps.values()) == pytest.approx(1)


def test_which_drafters_end_where_they_are_unsure():
    assert {kind for kind in DRAFTERS if is_stepwise({"drafter": {"kind": kind}})} == {
        "eagle3", "eagle", "mtp", "draft-model", "early-exit",
    }  # fmt: skip
    assert not is_stepwise({})
    assert not is_stepwise({"drafter": {"kind": "unheard-of"}})


# Records.


def test_confidences_are_asked_for_and_kept_where_records_are_joined():
    assert record_for([ConfidentChain(3, 0.5), Tree.chain(2)]) == Counts(1, confidences=True)
    assert record_for([Tree.chain(2)]) == Counts(1)
    few = SimpleNamespace(draft_vocab_size=6, num_heads=4, has_probabilities=True, has_marginals=False)
    for few.has_confidences, kept in ((True, {"confidences": True}), (False, {})):
        assert Counts(confidences=True).fitting(few).record == {"top_k": 6, **kept}
    trace = recorded(9, [3, 9, 5])
    both = RankTrace.concatenate([trace, trace], trace.meta)
    assert (both.select(np.arange(3, 6)).confidences == trace.confidences).all()


@pytest.mark.parametrize(
    "damage", [np.nan, -0.1, 1.5, lambda sure: sure[:, 1:], lambda sure: sure[:-1], lambda sure: sure[:, 0]]
)
def test_damaged_confidences_are_refused(tmp_path, damage):
    trace = recorded(10, [4, 6])
    sure = damage(trace.confidences) if callable(damage) else trace.confidences.copy()
    if not callable(damage):
        sure[3, 1] = damage
    trace.save(tmp_path / "t.npz")
    with np.load(tmp_path / "t.npz") as saved:
        arrays = dict(saved)
    np.savez(tmp_path / "t.npz", **arrays | {"confidences": sure})
    with pytest.raises(InvalidInput, match="confidences must"):
        RankTrace.load(tmp_path / "t.npz")


def test_a_draft_is_read_from_its_record_and_has_limits():
    for chain in (ConfidentChain(7, 0.4), ConfidentChain(1, 0), ConfidentChain(63, 1), SurvivingChain(7, 0.4)):
        assert draft_of(chain.record) == chain
    for record in ({"length": 0}, {"length": 64}, {"threshold": -0.1}, {"threshold": 1.1}, {"threshold": float("nan")}):
        with pytest.raises(InvalidInput, match=f"{next(iter(record))} of a confident chain must be"):
            draft_of(ConfidentChain(3, 0.5).record | record)
    for wrong in ("0.5", True, None):
        with pytest.raises(InvalidInput, match="threshold of a draft must be a number"):
            draft_of({"length": 3, "threshold": wrong})
