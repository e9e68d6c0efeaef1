"""What steps take: simulated ones of known parts, what lacks without off, and broken drafters."""

import pytest

from treeopt.arms.arm import Arm
from treeopt.arms.decide import decide
from treeopt.arms.model import broken, posterior_of
from treeopt.arms.steps import step_times


def arms_of(plain, fixed, guess, lengths, **given):
    """Arms by the milliseconds of the parts of their steps."""
    arms = []
    for k in lengths:
        tokens = sum(0.7**i for i in range(k + 1))
        speed = 1000 * tokens / (plain + (k > 0) * fixed + k * guess)
        drafter = "MTP" if k else "none"
        arms.append(Arm(drafter=drafter, k=k, tokens_per_s=speed, tokens_per_step=tokens, **given))
    return arms


def time_of(arms):
    (time,) = step_times(posterior_of(arms), range(len(arms)))
    return time


def test_steps_and_break_even():
    """vLLM issue 47277: a step of k guesses takes 37.7 + 35 + 26 k ms."""
    time = time_of(arms_of(37.7, 35.0, 26.0, (0, 1, 3)))
    assert time.plain_ms == pytest.approx(37.7)
    assert time.step_ms == pytest.approx(72.7 + 26 * time.served.k)
    assert time.break_even_tokens == pytest.approx(time.step_ms / time.plain_ms)


@pytest.mark.parametrize(
    ("lengths", "given", "known"),
    [
        ((0, 3), {}, {"plain_ms", "step_ms", "break_even_tokens"}),
        ((1, 3), {}, {"step_ms"}),
        ((0, 1, 3), {"unit": "ratio"}, {"break_even_tokens"}),
    ],
)
def test_what_is_known_without_off_or_by_ratios(lengths, given, known):
    found = time_of(arms_of(20.0, 2.0, 1.0, lengths, **given))
    names = {"plain_ms", "step_ms", "break_even_tokens"}
    assert {name for name in names if getattr(found, name) is not None} == known


def test_a_request_waits_where_many_do_so_that_steps_are_by_its_own_time_per_token():
    arms = [
        Arm(drafter=drafter, k=k, concurrency=512, tokens_per_s=1900.0, tpot_ms=tpot, tokens_per_step=tokens)
        for drafter, k, tpot, tokens in (("none", 0, 65.0, 1.0), ("MTP", 3, 60.0, 2.0))
    ]
    found = time_of(arms)
    assert (found.plain_ms, found.step_ms) == pytest.approx((65.0, 120.0))
    assert not found.hopeless
    assert time_of(arms_of(10.0, 40.0, 8.0, (0, 2))).hopeless  # 6.6 plain steps for at most 3 tokens


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
