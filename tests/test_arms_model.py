"""Throughput of arms as one Gaussian, and what is decided by it: against brute force, and for what must not matter."""

from dataclasses import replace

import numpy as np
import pytest

from treeopt.arms import model
from treeopt.arms.arm import Arm
from treeopt.arms.decide import decide, next_run
from treeopt.arms.model import MISFITS, Posterior, posterior_of


def sweep(*, drafters=("MTP",), lengths=(0, 1, 2, 3, 5), loads=(1, 8, 64), rate=100.0, **given):
    """Arms whose steps are of the model's form: 0.1 plain steps fixed, 0.06 (1 + log2 c / 4) each guess, 0.7 accepted."""
    arms = []
    for concurrency in loads:
        plain = rate * concurrency / (1 + concurrency / 32)
        for k in lengths:
            tokens = sum(0.7**i for i in range(k + 1))
            cost = 1 + (k > 0) * 0.1 + k * 0.06 * (1 + np.log2(concurrency) / 4)
            for drafter in drafters if k else ("none",):
                speed = plain * tokens / cost
                arms.append(Arm(drafter=drafter, k=k, concurrency=concurrency, tokens_per_s=speed, **given))
    return arms


def cell_of(arms, concurrency):
    return [i for i, arm in enumerate(arms) if arm.concurrency == concurrency]


def hidden(arms, *places):
    return [replace(arm, tokens_per_s=None) if i in places else arm for i, arm in enumerate(arms)]


def test_the_posterior_is_the_weighted_mean_of_what_the_prior_draws(monkeypatch):
    monkeypatch.setattr(model, "LEVEL", 0.3)
    arms = [Arm(tokens_per_s=1.3), Arm(drafter="MTP", k=2, tokens_per_s=2.0), Arm(drafter="MTP", k=4)]
    mean, covariance = model._prior(arms)
    rng = np.random.default_rng(0)
    draws = rng.multivariate_normal(mean, covariance, 400_000)
    latent = draws[:, :3] + rng.choice(MISFITS, (len(draws), 1)) * rng.standard_normal((len(draws), 3))
    off = [(latent[:, 0] - np.log(1.3)) / 0.05, (latent[:, 1] - np.log(2)) / 0.05]
    weights = np.exp(-0.5 * np.square(off).sum(axis=0))
    expected = np.average(latent, axis=0, weights=weights)
    posterior = posterior_of(arms, launch=0.05)
    assert posterior.mean == pytest.approx(expected, abs=0.01)
    spread = np.cov(latent.T, aweights=weights)
    assert np.sqrt(np.diag(posterior.covariance)) == pytest.approx(np.sqrt(np.diag(spread)), rel=0.05)


def test_steps_of_the_form_are_told_between_what_was_run():
    arms = sweep()
    places = [i for i, arm in enumerate(arms) if arm.k == 3 or arm.concurrency == 8]
    posterior = posterior_of(hidden(arms, *places))
    for i in places:
        assert arms[i].tokens_per_s == pytest.approx(posterior.throughput(i), rel=0.2)
        assert posterior.throughput(i).low < arms[i].tokens_per_s < posterior.throughput(i).high


@pytest.mark.parametrize(
    "change",
    [
        lambda arms: arms[::-1],
        lambda arms: [*arms, Arm(drafter="EAGLE", k=4)],
        lambda arms: [replace(arm, tokens_per_s=arm.tokens_per_s and arm.tokens_per_s * 50) for arm in arms],
        lambda arms: [
            replace(arm, unit="request", tokens_per_s=arm.tokens_per_s and arm.tokens_per_s / arm.concurrency)
            for arm in arms
        ],
    ],
    ids=["order", "a candidate more", "another unit of time", "for each request"],
)
def test_what_does_not_matter(change):
    arms = hidden(sweep(), 3, 7)
    changed = change(arms)
    place = {(arm.setting, arm.concurrency): i for i, arm in enumerate(changed)}
    before, after = posterior_of(arms), posterior_of(changed)
    moved = [place[arm.setting, arm.concurrency] for arm in arms]
    assert before.mean - before.mean[0] == pytest.approx(after.mean[moved] - after.mean[moved[0]], abs=0.02)
    assert before.ratio(3, 0).high == pytest.approx(after.ratio(moved[3], moved[0]).high, rel=0.02)


@pytest.mark.parametrize("stderr", [1e-3, 0.0])
def test_a_figure_that_is_well_known_is_taken_as_measured(stderr):
    """One without any error has a variance that rounding alone decides: its root was a traceback where that was below 0."""
    arms = [
        replace(arm, stderr=stderr, tokens_per_s=arm.tokens_per_s * (1.3 if i == 2 else 1))
        for i, arm in enumerate(sweep())
    ]
    posterior = posterior_of(arms)
    assert posterior.covariance.diagonal().min() > 0
    for i, arm in enumerate(arms):
        assert arm.tokens_per_s == pytest.approx(posterior.throughput(i), rel=1e-3)


def test_repeats_correct_what_is_usual_between_launches():
    arms = sweep()
    quiet = [replace(arm, stderr=0.003, repeats=9) for arm in arms]
    loud = [replace(arm, stderr=0.1, repeats=3) if i == 4 else arm for i, arm in enumerate(arms)]
    assert posterior_of(arms).launch == pytest.approx(0.025**2)
    assert posterior_of(arms, launch=0.1).launch == pytest.approx(0.1**2)
    assert posterior_of(quiet).launch == pytest.approx(0.009**2, rel=0.3)
    launch = posterior_of(loud).launch
    assert launch[4] > launch[0] > 0.025**2
    assert posterior_of([replace(arms[0], stderr=0.2), arms[1]]).launch == pytest.approx([0.2**2, 0.025**2])


def test_ratios_are_told_at_a_concurrency_that_was_not_run():
    arms = sweep()
    off = {arm.concurrency: arm.tokens_per_s for arm in arms if arm.k == 0}
    ratios = [replace(arm, unit="ratio", tokens_per_s=arm.tokens_per_s / off[arm.concurrency]) for arm in arms]
    posterior = posterior_of(hidden(ratios, *cell_of(ratios, 8)))
    for i in cell_of(ratios, 8):
        estimate = posterior.throughput(i)
        assert estimate.low < ratios[i].tokens_per_s < estimate.high < 2.5 * estimate.low
    for i, j in ((2, 0), (13, 10)):  # what was run is compared as the absolute figures are
        assert posterior.ratio(i, j) == pytest.approx(posterior_of(arms).ratio(i, j), rel=0.02)


def gaussian(mean, covariance, run, launch=0.03):
    arms = tuple(Arm(drafter="MTP", k=i, tokens_per_s=1.0 if i in run else None) for i in range(len(mean)))
    return Posterior(arms, np.array(mean, float), np.array(covariance, float), np.full(len(mean), launch**2))


CORRELATED = np.array([[9, 4, 2], [4, 16, 8], [2, 8, 25]]) * 1e-4


@pytest.mark.parametrize("i", range(3))
def test_the_value_of_a_run_by_brute_force(i):
    posterior = gaussian([0.0, 0.02, 0.03], CORRELATED, run={0, 1})
    rng = np.random.default_rng(0)
    outcomes = rng.normal(0, np.sqrt(CORRELATED[i, i] + 0.03**2), 200_000)
    after = posterior.mean[:, None] + CORRELATED[:, [i]] / (CORRELATED[i, i] + 0.03**2) * outcomes
    known = after[[0, 1, *([2] if i == 2 else [])]]
    following = next_run(posterior, i, [0, 1])
    assert following.gain == pytest.approx(known.max(axis=0).mean() - 0.02, abs=3e-4)
    assert following.chance == pytest.approx((known.argmax(axis=0) != 1).mean(), abs=0.02)


@pytest.mark.parametrize(
    ("mean", "run", "chosen", "tied", "predicted"),
    [
        ([0, 0.3], {0, 1}, 1, (), None),
        ([0, 0.01], {0, 1}, 1, (0,), None),
        ([0.3, 0], {0}, 0, (), None),
        ([0, 0.3], {0}, 0, (), 1),
        ([0.01, 0], {0, 1}, 0, (1,), None),
    ],
)
def test_decisions(mean, run, chosen, tied, predicted):
    decision = decide(gaussian(mean, np.eye(2) * 1e-4, run), [0, 1])
    assert (decision.chosen, decision.tied) == (chosen, tied)
    assert (decision.predicted.arm if decision.predicted else None) == predicted
    if predicted is not None:
        assert decision.next_run.arm == predicted
        assert decision.next_run.gain == pytest.approx(np.expm1(0.3), rel=0.01)
        assert decision.predicted.chance > 0.99


def test_nothing_is_decided_where_nothing_was_run():
    arms = hidden(sweep(), *range(5))
    posterior = posterior_of(arms)
    assert decide(posterior, cell_of(arms, 1)) is None
    assert decide(posterior, cell_of(arms, 8)) is not None
    assert decide(posterior_of([Arm()]), [0]) is None


def test_one_arm_is_chosen_and_one_with_an_engines_lengths_is_compared():
    assert decide(posterior_of([Arm(tokens_per_s=3.0)]), [0]).chosen == 0
    arms = [*sweep(loads=(1,)), Arm(drafter="MTP adaptive", k=None, tokens_per_s=500.0)]
    decision = decide(posterior_of(arms), range(len(arms)))
    assert (decision.chosen, decision.tied) == (len(arms) - 1, ())
