"""A gate: whether what is served lost more than a tolerance allows, beyond noise.

PASS          every loss is within the tolerance, by the upper ends of their 95 % intervals
FAIL          a loss is above it, by the lower ends of intervals that hold together in 95 % of the cases
INCONCLUSIVE  neither, since noise is larger than the tolerance
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log, log1p, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from treeopt.arms.arm import Arm, Arms
from treeopt.arms.groups import merged
from treeopt.arms.model import launch_variances
from treeopt.errors import InvalidInput
from treeopt.files.storage import document
from treeopt.records.bootstrap import LEVEL
from treeopt.records.calibration import Calibration
from treeopt.records.display import Displayed
from treeopt.records.estimate import Z95, Estimate

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
STATUS = {PASS: 0, FAIL: 3, INCONCLUSIVE: 4}  # exit status


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a setting reaches before and after.

    before, after : tokens per step, or per second
    stderr        : of the logarithm of their ratio
    runs          : prompts, drafts or launches that each side has at least
    one_run       : variance of that logarithm if each side had one
    """

    name: str
    before: float
    after: float
    stderr: float
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
        return 1 - exp(-Z95 * self.stderr)

    def least_loss(self, tests: int) -> float:
        """The lower end of an interval that holds together with those of all ``tests``."""
        return self._lost(NormalDist().inv_cdf((1 - LEVEL) / 2 / tests))

    def runs_for(self, tolerance: float) -> int | None:
        """Prompts, drafts or launches on each side that hold a tolerance, in two digits; None for 0."""
        runs = self.one_run * (Z95 / log1p(-tolerance)) ** 2 if tolerance else inf
        unit = 10 ** max(0, len(str(int(min(runs, 1e15)))) - 2)
        return ceil(runs / unit) * unit if runs < 1e15 else None

    def _lost(self, z: float) -> float:
        return 1 - exp(log(self.after / self.before) - z * self.stderr)


@dataclass(frozen=True, kw_only=True, repr=False)
class Gate(Displayed):
    """What was served before, and what the same settings reach after.

    measure   : of the changes, tokens per step or per second
    noun      : of what more would tell: prompts, drafts or launches
    tolerance : share that may be lost
    """

    names: tuple[str, str]
    measure: str
    noun: str
    changes: tuple[Change, ...]
    tolerance: float
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        if any(change.least_loss(len(self.changes)) > self.tolerance for change in self.changes):
            return FAIL
        return PASS if all(change.loss.ends[1] <= self.tolerance for change in self.changes) else INCONCLUSIVE

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
        changes = [
            {**document(change), "loss": {"value": change.loss.value, "low": change.loss.low, "high": change.loss.high}}
            for change in self.changes
        ]
        shown = {"gate": self.verdict, "holds": self.noisiest.held, "needs": self.noisiest.runs_for(self.tolerance)}
        return {**document(self), "changes": changes, **shown, "status": self.status}


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
        stderr=sqrt(sum(variances)),
        runs=min(runs),
        one_run=variances[0] * runs[0] + variances[1] * runs[1],
    )
    notes = []
    lengths = [side.meta.get("draft_length") or side.num_heads for side in (before, after)]
    if lengths[0] != lengths[1]:
        notes.append(f"Before, up to {lengths[0]} guesses were drafted, after up to {lengths[1]}.")
    if noun == "draft":
        notes.append("Drafts of one prompt are alike, so their noise is larger than is said here, and more are needed.")
    return Gate(names=names, measure=change.name, noun=noun, changes=(change,), tolerance=tolerance, notes=tuple(notes))


def _tokens_per_step(counts: Calibration) -> tuple[float, float]:
    """Tokens per step as served, steps without a draft among them, and their standard error.

    Drafts that depend on one another count as so many independent ones as give the errors of survival.
    """
    survival, steps = counts.survival * counts.drafted, int(counts.trials[0]) / counts.drafted
    accepted = float(survival.sum())
    squared = float(
        ((2 * np.arange(len(survival)) + 1) * survival).sum()
    )  # mean square of the number of accepted guesses
    binomial = float((survival * (1 - survival)).sum()) / steps
    errors = np.multiply(counts.meta.get("survival_stderr") or 0.0, counts.drafted)
    together = max(1.0, float(np.square(errors).sum()) / binomial) if binomial else 1.0
    least = 1 / steps  # of drafts that all went alike
    return 1 + accepted, sqrt(together * max(squared - accepted**2, least) / steps)


def arms_gate(names: tuple[str, str], before: Arms, after: Arms, tolerance: float) -> Gate:
    """Tokens per second of the fastest setting of each cell before, and of the same one after.

    Raises InvalidInput where no setting of a cell was run both before and after.
    """
    firsts, seconds = (
        {(*arm.cell, *arm.setting, arm.unit): arm for arm in merged(arms.arms) if arm.tokens_per_s}
        for arms in (before, after)
    )
    pairs = [(first, seconds[key]) for key, first in firsts.items() if key in seconds]
    if not pairs:
        raise InvalidInput(
            f"No setting of {names[0]} was run in {names[1]}: model, data set, concurrency, drafter and length must be the same."
        )
    variances = launch_variances([arm for pair in pairs for arm in pair]).reshape(-1, 2)
    fastest = dict[tuple[str, str, int], Change]()
    for (first, second), variance in zip(pairs, variances.tolist(), strict=True):
        if first.cell not in fastest or (first.tokens_per_s or 0) > fastest[first.cell].before:
            fastest[first.cell] = _change(first, second, variance)
    notes = []
    different = {
        f"{name} ({value} and {second.about[name]})": None
        for first, second in pairs
        for name, value in first.about.items()
        if second.about.get(name, value) != value
    }
    if different:
        notes.append(f"Before and after differ in {', '.join(different)} too.")
    if lost := len(firsts) + len(seconds) - 2 * len(pairs):
        notes.append(f"{lost} settings were run on one side only, and are not compared.")
    return Gate(
        names=names,
        measure="tokens per second",
        noun="run",
        changes=tuple(fastest.values()),
        tolerance=tolerance,
        notes=tuple(notes),
    )


def _change(first: Arm, second: Arm, variances: Sequence[float]) -> Change:
    """What a setting reaches before and after, by the variances between launches."""
    where = ", ".join([*filter(None, (first.model, first.dataset)), f"{first.concurrency} at once"])
    return Change(
        name=f"{first.name} ({where})",
        before=first.tokens_per_s or 0,
        after=second.tokens_per_s or 0,
        stderr=sqrt(variances[0] / first.repeats + variances[1] / second.repeats),
        runs=min(first.repeats, second.repeats),
        one_run=sum(variances),
    )
