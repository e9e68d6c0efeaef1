"""What a table of arms says: the choice at each concurrency, what it brings, what its steps take, and the next run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from treeopt.arms.arm import OFF, Arm, Arms
from treeopt.arms.decide import Choice, NextRun, decide
from treeopt.arms.groups import apart, merged
from treeopt.arms.model import Posterior, posterior_of
from treeopt.arms.steps import StepTime, step_times
from treeopt.errors import InvalidInput, spoken
from treeopt.files.storage import document, schema


@dataclass(frozen=True, eq=False, kw_only=True)
class Decided:
    """What a table of arms says: the choice at each concurrency, what steps take, broken drafters, the next run.

    posteriors : one for each model, whose arms are as they were compared: repeats merged, groups apart
    limit_ms   : most milliseconds per token
    """

    posteriors: tuple[Posterior, ...]
    choices: tuple[Choice, ...]
    steps: tuple[StepTime, ...]
    limit_ms: float | None = None
    meanings: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def arms(self) -> list[Arm]:
        return [arm for posterior in self.posteriors for arm in posterior.arms]

    @property
    def groups(self) -> dict[tuple[str, str], list[Choice]]:
        """The choices of each model and data set, by concurrency."""
        groups: dict[tuple[str, str], list[Choice]] = {choice.arm.cell[:2]: [] for choice in self.choices}
        for choice in sorted(self.choices, key=lambda choice: choice.arm.concurrency):
            groups[choice.arm.cell[:2]].append(choice)
        return groups

    @property
    def broken(self) -> dict[str, str]:
        """Why each drafter is broken that is."""
        return {drafter: why for posterior in self.posteriors for drafter, why in posterior.broken.items()}

    @property
    def launch(self) -> float:
        """Standard deviation of log tokens per second between launches, of the median arm."""
        return float(np.sqrt(np.median(np.concatenate([posterior.launch for posterior in self.posteriors]))))

    @cached_property
    def next_run(self) -> tuple[Choice, NextRun] | None:
        """The run that is worth most of all; None where none is."""
        worth = [(choice, choice.next_run) for choice in self.choices if choice.next_run]
        return max(worth, key=lambda pair: pair[1].gain, default=None)

    def document(self) -> dict[str, object]:
        estimates = [
            {**_arm(arm), "tokens_per_s": document(posterior.throughput(i)), "run": bool(arm.tokens_per_s)}
            for posterior in self.posteriors
            for i, arm in enumerate(posterior.arms)
        ]
        return {
            "schema": schema("decision"),
            "decisions": [_decision(choice) for choice in self.choices],
            "estimates": estimates,
            "steps": [_step(step) for step in self.steps],
            "next_run": self.next_run and {**_arm(self.next_run[0].arm), **_run(*self.next_run)},
            "broken": [{"drafter": drafter, "why": why} for drafter, why in self.broken.items()],
            "meanings": dict(self.meanings),
            "notes": list(map(spoken, self.notes)),
        }


def _arm(arm: Arm) -> dict[str, object]:
    return {"model": arm.model, "dataset": arm.dataset, "concurrency": arm.concurrency, **_setting(arm)}


def _setting(arm: Arm) -> dict[str, object]:
    return {"drafter": arm.drafter, "k": arm.k}


def _decision(choice: Choice) -> dict[str, object]:
    posterior, predicted = choice.posterior, None
    if choice.predicted:
        i, chance = choice.predicted
        predicted = {**_setting(posterior.arms[i]), "tokens_per_s": document(posterior.throughput(i)), "chance": chance}
    return {
        **_arm(choice.arm),
        "tokens_per_s": document(choice.throughput),
        "over_off": document(choice.over_off),
        "tied_with": [_setting(posterior.arms[i]) for i in choice.tied],
        "predicted": predicted,
        "next_run": choice.next_run and _run(choice, choice.next_run),
    }


def _run(choice: Choice, run: NextRun) -> dict[str, object]:
    setting = _setting(choice.posterior.arms[run.arm])
    size = {"prompts": prompts_of(choice), "minutes": minutes_of(choice, run)}
    return {**setting, **size, "gain": run.gain, "chance": run.chance}


def prompts_of(choice: Choice) -> int | None:
    """Prompts of a run like those of the cell; None where it does not say how many they were."""
    return max((prompts for i in choice.cell if (prompts := choice.posterior.arms[i].prompts)), default=None)


def minutes_of(choice: Choice, run: NextRun) -> float | None:
    """Minutes that a run takes by those of the cell, whose answers it has at another speed; None where none is known."""
    arms = [choice.posterior.arms[i] for i in choice.cell]
    tokens = [arm.seconds * arm.tokens_per_s for arm in arms if arm.seconds and arm.tokens_per_s]
    return float(np.mean(tokens)) / choice.posterior.throughput(run.arm) / 60 if tokens else None


def _step(step: StepTime) -> dict[str, object]:
    parts = {name: document(getattr(step, name)) for name in ("plain_ms", "step_ms")}
    arm = {name: value for name, value in _arm(step.served).items() if name != "k"}
    return {**arm, **parts, "break_even_tokens_per_step": document(step.break_even_tokens)}


def decide_arms(
    arms: Arms, *, lengths: Sequence[int] = (), noise: float | None = None, tpot_limit: float | None = None
) -> Decided:
    """The decision by some arms.

    lengths    : lengths that could be run with each drafter, beside those of the table
    noise      : standard deviation between launches, as a share; by default what repeats say, else 2.5 %
    tpot_limit : most milliseconds per token
    """
    compared, notes = apart(arms.arms)
    if not any(arm.tokens_per_s for arm in compared):
        raise InvalidInput("No arm has tokens per second or a time per token, so nothing can be compared.")
    if tpot_limit is not None and any(arm.unit == "ratio" for arm in compared):
        raise InvalidInput("`tpot_limit` needs times or tokens per second: a ratio to another setting says neither.")
    compared = _with_lengths(merged(compared), lengths)
    notes += _too_fast(compared)
    posteriors, choices, steps = [], [], list[StepTime]()
    for model in dict.fromkeys(arm.model for arm in compared):
        posterior = posterior_of([arm for arm in compared if arm.model == model], launch=noise)
        posteriors.append(posterior)
        for cell in dict.fromkeys(arm.cell for arm in posterior.arms):
            places = [i for i, arm in enumerate(posterior.arms) if arm.cell == cell]
            steps += step_times(posterior, places)
            if choice := decide(posterior, places, tpot_limit):
                choices.append(choice)
            elif any(i in posterior.run for i in places):
                notes.append(
                    f"At concurrency {cell[2]} broken drafters alone were run: nothing is chosen there. Run off."
                )
    if not any(arm.k for arm in compared if not arm.tokens_per_s) and any(arm.k for arm in compared):
        notes.append("Only settings in the files were weighed. `lengths` adds some that could be run.")
    return Decided(
        posteriors=tuple(posteriors),
        choices=tuple(choices),
        steps=tuple(steps),
        limit_ms=tpot_limit,
        meanings=arms.meanings,
        notes=(*arms.notes, *notes),
    )


def _too_fast(arms: Sequence[Arm]) -> list[str]:
    """A sentence for each arm that is faster than if all its guesses were right and cost nothing."""
    plain = {arm.cell: arm.tokens_per_s for arm in arms if arm.k == 0 and arm.tokens_per_s}
    notes = []
    for arm in arms:
        if arm.k and arm.tokens_per_s and arm.cell in plain and arm.tokens_per_s > (arm.k + 1) * plain[arm.cell]:
            ratio = arm.tokens_per_s / plain[arm.cell]
            notes.append(
                f"{arm.name} at concurrency {arm.concurrency} is {ratio:.1f} times as fast as off, but a step of {arm.k} guesses "
                f"gives at most {arm.k + 1} tokens: a figure is wrong, or off was run otherwise."
            )
    return notes


def _with_lengths(arms: list[Arm], lengths: Sequence[int]) -> list[Arm]:
    """The arms, and candidates of more lengths for each drafter in each cell where it was run."""
    known = {(arm.cell, arm.setting) for arm in arms}
    added = []
    for arm in arms:
        for k in lengths:
            setting = (OFF, 0) if k == 0 else (arm.drafter, k)
            if (k == 0 or arm.k) and (arm.cell, setting) not in known:
                known.add((arm.cell, setting))
                model, dataset, concurrency = arm.cell
                place = Arm(model=model, dataset=dataset, concurrency=concurrency, unit=arm.unit)
                added.append(replace(place, drafter=setting[0], k=k))
    return [*arms, *added]


def title_of(model: str, dataset: str) -> str:
    return ", ".join(filter(None, (model, dataset))) or "Settings that were run"
