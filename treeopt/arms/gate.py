"""A gate: whether what is served lost more than a tolerance allows, beyond noise.

PASS          every loss is within the tolerance, by the upper ends of their 95 % intervals
FAIL          a loss is above it, by the lower ends of intervals that hold together in 95 % of the cases
INCONCLUSIVE  neither: noise is larger than the tolerance, or what was fastest before has no figure after
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log, log1p, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from treeopt.arms.arm import Arm, Arms
from treeopt.arms.groups import apart, levelled, merged
from treeopt.arms.model import LAUNCH, launch_variances
from treeopt.errors import InvalidInput
from treeopt.files.storage import document
from treeopt.records.bootstrap import LEVEL
from treeopt.records.calibration import Calibration
from treeopt.records.display import Displayed
from treeopt.records.estimate import Z95, Estimate

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
STATUS = {PASS: 0, FAIL: 3, INCONCLUSIVE: 4}  # exit status
OPTIMISTIC = "survival_stderr_is_optimistic"  # key of counts that do not tell prompts apart
ALIKE = 0.2  # share of the variance of drafts that is taken to lie between such prompts


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a setting reaches before and after.

    before, after : tokens per step, or per second
    log_stderr    : standard error of the logarithm of their ratio
    runs          : prompts, drafts or launches that each side has at least
    one_run       : variance of that logarithm if each side had one
    """

    first_keys = ("name", "before", "after", "loss")
    name: str
    before: float
    after: float
    log_stderr: float
    runs: int
    one_run: float

    @property
    def loss(self) -> Estimate:
        """Share that is lost; below 0 it is a gain."""
        low, high = (self._lost(z) for z in (-Z95, Z95))
        return Estimate(self._lost(0), None, low, high)

    @property
    def held(self) -> float:
        """The smallest tolerance that passes where nothing changed: half the interval."""
        return 1 - exp(-Z95 * self.log_stderr)

    def least_loss(self, tests: int) -> float:
        """The lower end of an interval that holds together with those of all ``tests``."""
        return self._lost(NormalDist().inv_cdf((1 - LEVEL) / 2 / tests))

    def runs_for(self, tolerance: float) -> int | None:
        """Prompts, drafts or launches on each side that hold a tolerance, in two digits; None for 0."""
        runs = self.one_run * (Z95 / log1p(-tolerance)) ** 2 if tolerance else inf
        unit = 10 ** max(0, len(str(int(min(runs, 1e15)))) - 2)
        return ceil(runs / unit) * unit if runs < 1e15 else None

    def _lost(self, z: float) -> float:
        return 1 - exp(log(self.after / self.before) - z * self.log_stderr)


@dataclass(frozen=True, kw_only=True, repr=False)
class Gate(Displayed):
    """What was served before, and what the same settings reach after.

    measure   : of the changes, tokens per step or per second
    noun      : of what more would tell: prompts, drafts or launches
    tolerance : share that may be lost
    gone      : settings that were the fastest of their cell before, and have no figure after
    assumed   : what was assumed of the noise, as a sentence; empty where it was measured
    """

    names: tuple[str, str]
    measure: str
    noun: str
    changes: tuple[Change, ...]
    tolerance: float
    gone: tuple[str, ...] = ()
    assumed: str = ""
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        if any(change.least_loss(len(self.changes)) > self.tolerance for change in self.changes):
            return FAIL
        holds = all(change.loss.ends[1] <= self.tolerance for change in self.changes)
        return PASS if holds and not self.gone else INCONCLUSIVE

    @property
    def status(self) -> int:
        """The exit status: 0 passed, 3 failed, 4 inconclusive."""
        return STATUS[self.verdict]

    @property
    def noisiest(self) -> Change:
        return max(self.changes, key=lambda change: change.held)

    @property
    def worst(self) -> Change:
        return max(self.changes, key=lambda change: change.loss)

    def document(self) -> dict[str, Any]:
        shown = {"gate": self.verdict, "holds": self.noisiest.held, "needs": self.noisiest.runs_for(self.tolerance)}
        return {**document(self), **shown, "status": self.status}


def counts_gate(names: tuple[str, str], before: Calibration, after: Calibration, tolerance: float) -> Gate:
    """Tokens per step that an engine counted, before and after.

    >>> counts = Calibration(np.array([[800], [600]]), np.array([1000, 800]), meta={"draft_length": 2})
    >>> gate = counts_gate(("a", "b"), counts, counts, 0.05)
    >>> gate.verdict, round(gate.noisiest.held, 3), gate.noisiest.runs_for(0.02)
    ('PASS', 0.029, 2100)
    """
    sides = [_tokens_per_step(side) for side in (before, after)]
    variances = [(error / tokens) ** 2 for tokens, error in sides]
    drafts = [int(side.trials[0]) for side in (before, after)]
    prompts = [side.meta.get("requests") or 0 for side in (before, after)]
    noun, runs = ("prompt", prompts) if all(prompts) else ("draft", drafts)
    change = Change(
        name="tokens per step",
        before=sides[0][0],
        after=sides[1][0],
        log_stderr=sqrt(sum(variances)),
        runs=min(runs),
        one_run=variances[0] * runs[0] + variances[1] * runs[1],
    )
    lengths = [side.meta.get("draft_length") or side.num_heads for side in (before, after)]
    note = f"Before, up to {lengths[0]} guesses were drafted, after up to {lengths[1]}."
    assumed = ""
    if noun == "draft":
        assumed = "Drafts of one prompt are alike, but are taken as independent: noise is larger than that."
    elif any(side.meta.get(OPTIMISTIC, True) for side in (before, after)):
        assumed = f"Prompts are counted, but not told apart: {100 * ALIKE:g} % of the variance of drafts is taken to be theirs."
    return Gate(
        names=names,
        measure=change.name,
        noun=noun,
        changes=(change,),
        tolerance=tolerance,
        assumed=assumed,
        notes=() if lengths[0] == lengths[1] else (note,),
    )


def _tokens_per_step(counts: Calibration) -> tuple[float, float]:
    """Tokens per step as served, steps without a draft among them, and their standard error.

    Drafts that depend on one another count as so many independent ones as give the errors of survival, or as many as `ALIKE`
    says where prompts are counted, but not told apart.
    """
    survival, steps = counts.survival * counts.drafted, int(counts.trials[0]) / counts.drafted
    accepted = float(survival.sum())
    # mean square of the number of accepted guesses
    squared = float(((2 * np.arange(len(survival)) + 1) * survival).sum())
    binomial = float((survival * (1 - survival)).sum()) / steps
    errors = 0.0 if counts.survival_stderr is None else counts.survival_stderr * counts.drafted
    together = max(1.0, float(np.square(errors).sum()) / binomial) if binomial else 1.0
    if counts.meta.get(OPTIMISTIC, True):
        prompts = counts.meta.get("requests") or steps
        together = max(together, 1 + ALIKE * (steps / prompts - 1))
    least = 1 / steps  # of drafts that all went alike
    return 1 + accepted, sqrt(together * max(squared - accepted**2, least) / steps)


def arms_gate(names: tuple[str, str], before: Arms, after: Arms, tolerance: float, noise: float = LAUNCH) -> Gate:
    """Tokens per second of the fastest setting of each cell before, and of the same one after.

    noise : standard deviation between launches, as a share, which repeats correct

    Raises InvalidInput where no setting of a cell was run both before and after.
    """
    both = levelled([*before.arms, *after.arms])
    firsts, seconds = (
        {(*arm.cell, *arm.setting, arm.unit): arm for arm in merged(apart(side)[0]) if arm.tokens_per_s}
        for side in (both[: len(before.arms)], both[len(before.arms) :])
    )
    pairs = [(first, seconds[key]) for key, first in firsts.items() if key in seconds]
    if not pairs:
        raise InvalidInput(
            f"No setting of {names[0]} was run in {names[1]}: model, data set with its conditions, concurrency, drafter and length must be the same."
        )
    run = [arm for pair in pairs for arm in pair]
    variances = launch_variances(run, noise).reshape(-1, 2).tolist()
    fastest, compared = _fastest(firsts.values()), _fastest(first for first, _ in pairs)
    assumed = f"Nothing was repeated: launches are taken to differ by {100 * noise:g} %, which --noise sets."
    notes = []
    different = {
        f"{name} ({value} and {second.about[name]})": None
        for first, second in pairs
        for name, value in first.about.items()
        if second.about.get(name, value) != value
    }
    if different:
        notes.append(f"Before and after differ in {', '.join(different)} too.")
    for side, arms, others in (("before", firsts, seconds), ("after", seconds, firsts)):
        if lost := [_name(arm) for key, arm in arms.items() if key not in others]:
            notes.append(f"Run {side} only, and not compared: {', '.join(lost)}.")
    return Gate(
        names=names,
        measure="tokens per second",
        noun="run",
        changes=tuple(
            _change(first, second, variance)
            for (first, second), variance in zip(pairs, variances, strict=True)
            if first is compared[first.cell]
        ),
        tolerance=tolerance,
        gone=tuple(_name(arm) for cell, arm in fastest.items() if arm is not compared.get(cell)),
        assumed="" if any(arm.stderr is not None for arm in run) else assumed,
        notes=tuple(notes),
    )


def _fastest(arms: Iterable[Arm]) -> dict[tuple[str, str, int], Arm]:
    """The fastest arm of each cell."""
    return {arm.cell: arm for arm in sorted(arms, key=lambda arm: arm.tokens_per_s or 0)}


def _name(arm: Arm) -> str:
    """Its setting, and the cell that it was run in."""
    return f"{arm.name} ({', '.join([*filter(None, (arm.model, arm.dataset)), f'{arm.concurrency} at once'])})"


def _change(first: Arm, second: Arm, variances: Sequence[float]) -> Change:
    """What a setting reaches before and after, by the variances between launches."""
    return Change(
        name=_name(first),
        before=first.tokens_per_s or 0,
        after=second.tokens_per_s or 0,
        log_stderr=sqrt(variances[0] / first.repeats + variances[1] / second.repeats),
        runs=min(first.repeats, second.repeats),
        one_run=sum(variances),
    )
