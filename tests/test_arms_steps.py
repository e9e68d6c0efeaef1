"""The step taken apart: simulated steps of known parts, what lacks without off or with one length, and broken drafters."""

import numpy as np
import pytest

from treeopt.arms.arm import Arm
from treeopt.arms.decide import decide
from treeopt.arms.model import broken, posterior_of
from treeopt.arms.steps import step_parts


def arms_of(plain, fixed, guess, lengths, *, concurrency=1, noise=(), accepted=0.7, **given):
    """Arms by the milliseconds of the parts of their steps; ``noise``: of the logarithm of each figure."""
    arms = []
    for k, off in zip(lengths, noise or [0.0] * len(lengths), strict=True):
        tokens = sum(accepted**i for i in range(k + 1))
        speed = 1000 * concurrency * tokens / (plain + (k > 0) * fixed + k * guess) * np.exp(off)
        drafter = "MTP" if k else "none"
        arms.append(
            Arm(drafter=drafter, k=k, concurrency=concurrency, tokens_per_s=speed, tokens_per_step=tokens, **given)
        )
    return arms


def parts_of(arms):
    (parts,) = step_parts(posterior_of(arms), range(len(arms)))
    return parts


@pytest.mark.parametrize(
    ("parts", "lengths"),
    [
        ((37.7, 35.0, 26.0), (0, 1, 3)),  # vLLM issue 47277: step(k) = 37.7 + 35 + 26 k
        ((37.7, 35.0, 26.0), (0, 2, 4, 5, 8)),
        ((30.0, 3.0, 8.1), (0, 1, 2, 4)),  # each verified row 0.27 plain steps
        ((8.0, 20.0, 0.5), (0, 4, 8, 16)),  # llama.cpp issue 25908: 20 ms whatever is drafted
    ],
)
def test_parts_of_steps_that_others_fitted(parts, lengths):
    plain, fixed, guess = parts
    found = parts_of(arms_of(*parts, lengths))
    assert found.plain_ms == pytest.approx(plain)
    assert found.fixed_ms == pytest.approx(fixed, abs=0.05 * plain)
    assert found.per_guess_ms == pytest.approx(guess, abs=0.02 * plain)
    assert found.step_ms == pytest.approx(plain + fixed + found.served.k * guess)
    assert found.break_even_tokens == pytest.approx(found.step_ms / found.plain_ms)


def test_intervals_hold_the_parts_of_noisy_steps():
    rng = np.random.default_rng(0)
    held = []
    for _ in range(100):
        fixed, guess = 20 * np.exp(rng.normal(np.log([0.12, 0.06]), 0.9))
        found = parts_of(arms_of(20.0, fixed, guess, (0, 2, 4), noise=list(rng.normal(0, 0.03, 3))))
        step = 20 + fixed + found.served.k * guess
        pairs = zip(
            (found.fixed_ms, found.per_guess_ms, found.step_ms, found.break_even_tokens),
            (fixed, guess, step, step / 20),
            strict=True,
        )
        held.append([estimate.low < value < estimate.high for estimate, value in pairs])
    assert np.mean(held, axis=0) == pytest.approx(0.95, abs=0.07)


@pytest.mark.parametrize(
    ("lengths", "given", "known"),
    [
        ((0, 3), {}, {"plain_ms", "step_ms", "break_even_tokens"}),
        ((1, 3), {}, {"per_guess_ms", "step_ms"}),
        ((3,), {}, {"step_ms"}),
        ((0, 1, 3), {"unit": "ratio"}, {"break_even_tokens"}),
    ],
)
def test_what_is_known_without_off_or_with_one_length_or_by_ratios(lengths, given, known):
    found = parts_of(arms_of(20.0, 2.0, 1.0, lengths, **given))
    names = {"plain_ms", "fixed_ms", "per_guess_ms", "step_ms", "break_even_tokens"}
    assert {name for name in names if getattr(found, name) is not None} == known


def test_a_request_waits_where_many_do_so_that_steps_are_by_its_own_time_per_token():
    arms = [
        Arm(drafter=drafter, k=k, concurrency=512, tokens_per_s=1900.0, tpot_ms=tpot, tokens_per_step=tokens)
        for drafter, k, tpot, tokens in (("none", 0, 65.0, 1.0), ("MTP", 3, 60.0, 2.0))
    ]
    found = parts_of(arms)
    assert (found.plain_ms, found.step_ms) == pytest.approx((65.0, 120.0))
    assert not found.hopeless
    assert parts_of(arms_of(10.0, 40.0, 8.0, (0, 2))).hopeless  # 6.6 plain steps for at most 3 tokens


def test_an_arm_whose_length_is_not_known_does_not_tell_the_parts():
    arms = arms_of(20.0, 2.0, 1.0, (0, 1, 3))
    unknown = Arm(drafter="MTP", k=None, tokens_per_s=500.0, tokens_per_step=2.0)
    found = parts_of([*arms, unknown])
    assert found.served == unknown
    assert found.fixed_ms == pytest.approx(parts_of(arms).fixed_ms)


@pytest.mark.parametrize(
    ("figures", "is_broken"),
    [
        ({"tokens_per_step": 1.0}, True),
        ({"tokens_per_step": 1.03}, True),
        ({"positions": (0.03, 0.02, 0.02, 0.01)}, True),
        ({"positions": (0.4, 0.02, 0.0, 0.0)}, False),
        ({"tokens_per_step": 1.3}, False),
        ({}, False),
    ],
)
def test_a_drafter_is_broken_where_nearly_nothing_is_accepted(figures, is_broken):
    arms = [Arm(tokens_per_s=30.0), Arm(drafter="EAGLE", k=4, tokens_per_s=31.0, **figures), Arm(drafter="EAGLE", k=2)]
    assert (set(broken(arms)) == {"EAGLE"}) == is_broken
    decision = decide(posterior_of(arms), range(3))
    assert decision.chosen == (0 if is_broken else 1)
    if is_broken:
        assert decision.predicted is None
        assert decision.next_run is None or decision.next_run.arm == 0
