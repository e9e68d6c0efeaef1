"""What a step of a drafter takes, and the tokens that it has to emit to be as fast as decoding without speculation.

The step of a request is its tokens times the milliseconds of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from treeopt.arms.arm import Arm
from treeopt.arms.model import Posterior, log_normal
from treeopt.records.estimate import Estimate

TOKENS_ERROR = 0.015  # of the logarithm of tokens per step that were counted in the run itself


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """What a step of a drafter takes in one cell; None where it cannot be told. Ratios tell no milliseconds.

    served            : the drafter's fastest arm
    plain_ms          : a step without speculation
    step_ms           : a step of the served arm
    break_even_tokens : tokens per step with which the served arm is as fast as off
    """

    served: Arm
    plain_ms: Estimate | None
    step_ms: Estimate | None
    break_even_tokens: Estimate | None

    @property
    def hopeless(self) -> bool:
        """Whether a drafter that is always right would lose as well."""
        return bool(self.served.k and self.break_even_tokens and self.break_even_tokens > self.served.k + 1)


def step_times(posterior: Posterior, cell: Sequence[int]) -> list[StepTime]:
    """The steps of each drafter of one cell (places of its arms) of which tokens per step and throughput are known."""
    arms = posterior.arms
    run = [i for i in cell if arms[i].tokens_per_s and arms[i].emitted]
    off = [i for i in run if arms[i].k == 0]
    drafters = dict.fromkeys(arms[i].drafter for i in run if arms[i].k != 0)
    return [_step_time(posterior, off, [i for i in run if arms[i].drafter == drafter]) for drafter in drafters]


def _step_time(posterior: Posterior, off: list[int], drafted: list[int]) -> StepTime:
    arms = posterior.arms
    served = max(drafted, key=lambda i: posterior.mean[i])
    by_request = all(arms[i].tpot_ms for i in off + drafted)
    steps = {i: _log_step(arms[i], by_request) for i in (*off, served)}
    noise = {i: posterior.launch[i] / arms[i].repeats + TOKENS_ERROR**2 for i in steps}
    plain = break_even = None
    if off:
        plain = log_normal(steps[off[0]], noise[off[0]])
        break_even = log_normal(steps[served] - steps[off[0]], noise[served] + noise[off[0]])
    milliseconds = by_request or arms[served].unit != "ratio"
    return StepTime(
        served=arms[served],
        plain_ms=plain if milliseconds else None,
        step_ms=log_normal(steps[served], noise[served]) if milliseconds else None,
        break_even_tokens=break_even,
    )


def _log_step(arm: Arm, by_request: bool) -> float:
    """Logarithm of the milliseconds of a step; for a ratio, of plain steps."""
    if by_request:
        return log((arm.tpot_ms or 1) * (arm.emitted or 1))
    milliseconds = 1.0 if arm.unit == "ratio" else 1000.0 * (arm.concurrency if arm.unit == "all" else 1)
    return log(milliseconds / (arm.tokens_per_s or 1) * (arm.emitted or 1))
