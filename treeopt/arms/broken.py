"""Drafters of whose guesses nearly none are accepted: something is wrong with them, which no length mends."""

from __future__ import annotations

from collections.abc import Iterable

from treeopt.arms.arm import Arm
from treeopt.records.calibration import LEAST_RIGHT


def broken(arms: Iterable[Arm]) -> dict[str, str]:
    """Why each drafter is broken, of which no arm has 0.05 of the first guesses accepted.

    >>> broken([Arm(drafter="EAGLE", k=4, tokens_per_step=1.01), Arm(drafter="MTP", k=1, tokens_per_step=1.7)])
    {'EAGLE': '1.01 tokens per step with 4 guesses: nearly none is accepted'}
    """
    best: dict[str, Arm] = {}
    for arm in arms:
        if arm.k != 0 and arm.emitted and (arm.drafter not in best or _first(arm) > _first(best[arm.drafter])):
            best[arm.drafter] = arm
    return {
        drafter: f"{arm.emitted:.2f} tokens per step with {arm.k or 'its'} guesses: nearly none is accepted"
        for drafter, arm in best.items()
        if _first(arm) < LEAST_RIGHT
    }


def _first(arm: Arm) -> float:
    """Share of its first guesses that is accepted, at most."""
    return arm.positions[0] if arm.positions else (arm.emitted or 1) - 1
