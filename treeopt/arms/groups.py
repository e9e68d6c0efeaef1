"""Arms that belong together: repeats of one arm as one, and arms that were run otherwise apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from treeopt.arms.arm import Arm

DESCRIBING = ("prompts",)  # what may differ between arms that are compared
# Whatever else says of the drafter ("block": "8") need not be apart; these are, even where they differ with the drafter alone.
CONDITIONS = (
    "temperature", "top_p", "input_tokens", "output_tokens", "context", "version", "kv_type", "dtype", "quantization",
    "request_rate", "hardware",
)  # fmt: skip

MEANS, NEAR = ("input_tokens", "output_tokens"), 1.1  # means of requests, which differ by so much though run alike


def merged(arms: Sequence[Arm]) -> list[Arm]:
    """Each arm once: the geometric mean of its repeats, with the standard error that they say."""
    repeats = defaultdict(list)
    for arm in arms:
        repeats[arm.cell, arm.setting, arm.unit, tuple(sorted(arm.about.items()))].append(arm)
    return [_mean(alike) for alike in repeats.values()]


def _mean(repeats: Sequence[Arm]) -> Arm:
    run = [arm for arm in repeats if arm.tokens_per_s]
    if len(run) < 2:
        return run[0] if run else repeats[0]
    logs = np.log([arm.tokens_per_s for arm in run if arm.tokens_per_s])
    weights = np.array([arm.repeats for arm in run], dtype=float)
    mean = float(np.average(logs, weights=weights))
    variance = float(weights @ (logs - mean) ** 2) / (len(run) - 1)

    def average(name: str) -> float | None:
        values = [getattr(arm, name) for arm in run if getattr(arm, name) is not None]
        return float(np.mean(values)) if values else None

    positions = [arm.positions for arm in run if len(arm.positions) == max(len(other.positions) for other in run)]
    return replace(
        run[0],
        tokens_per_s=float(np.exp(mean)),
        tpot_ms=average("tpot_ms"),
        tpot_p99_ms=average("tpot_p99_ms"),
        tokens_per_step=average("tokens_per_step"),
        seconds=average("seconds"),
        positions=tuple(np.mean(positions, axis=0).tolist()),
        repeats=int(weights.sum()),
        stderr=float(np.sqrt(variance / weights.sum())) or None,
    )


def apart(arms: Sequence[Arm]) -> tuple[list[Arm], list[str]]:
    """The arms with what sets some of them apart in the name of their data set, and a note on it.

    Arms that differ in more than drafter, length and concurrency are not compared. An arm that does not say a condition stands
    on all sides of it.

    >>> arms = [Arm(dataset="chat", about={"temperature": t}, drafter="MTP", k=k) for t, k in (("0", 2), ("1", 3))]
    >>> [arm.dataset for arm in apart(arms)[0]]
    ['chat, temperature 0', 'chat, temperature 1']
    """
    groups: dict[tuple[str, str], list[Arm]] = defaultdict(list)
    for arm in levelled(arms):
        groups[arm.model, arm.dataset].append(arm)
    found, notes = list[Arm](), list[str]()
    for (model, dataset), same in groups.items():
        for name in dict.fromkeys(name for arm in same for name in arm.about):
            if name in DESCRIBING or not _sets_apart(name, same):
                continue
            values = list(dict.fromkeys(arm.about[name] for arm in same if name in arm.about))
            place = " of ".join(filter(None, (dataset, model))) or "the arms"
            notes.append(
                f"{place[0].upper()}{place[1:]}: arms differ in {name} ({', '.join(values[:5])}), and are decided apart."
            )
            same = [
                replace(arm, dataset=f"{arm.dataset}, {name} {value}".removeprefix(", "))
                for arm in same
                for value in values
                if arm.about.get(name, value) == value
            ]
        if len({arm.unit for arm in same}) > 1:
            notes.append("Ratios and absolute figures stand side by side; they are decided apart.")
            same = [
                replace(arm, dataset=f"{arm.dataset} (ratios)".strip()) if arm.unit == "ratio" else arm for arm in same
            ]
        found += same
    return found, notes


def _sets_apart(name: str, arms: Sequence[Arm]) -> bool:
    """Whether a condition differs; one that only says more of each drafter and length does not set arms apart."""
    values, is_crossed = crossed((arm.setting, arm.about[name]) for arm in arms if name in arm.about)
    if name in CONDITIONS:
        return len(values) > 1
    return is_crossed and len(values) <= max(4, len(arms) / 2)  # else it is a figure of each arm


def crossed(pairs: Iterable[tuple[Hashable, str]]) -> tuple[set[str], bool]:
    """The values at which settings were run, and whether one of them was run at several."""
    values = defaultdict(set)
    for setting, value in pairs:
        values[setting].add(value)
    return set().union(*values.values()), any(len(of_setting) > 1 for of_setting in values.values())


def levelled(arms: Sequence[Arm]) -> list[Arm]:
    """The arms, with one value for mean numbers of tokens that are near each other: answers may end by themselves.

    >>> [arm.about["output_tokens"] for arm in levelled([Arm(about={"output_tokens": n}) for n in ("256", "249", "64")])]
    ['249', '249', '64']
    """
    for name in MEANS:
        values = {arm.about.get(name, "") for arm in arms}
        levels = {"0": "0"}
        before = "0"
        for value in sorted((value for value in values if value.isdecimal()), key=int):
            levels[value] = levels[before] if int(value) <= NEAR * int(before) else value
            before = value
        arms = [
            replace(arm, about={**arm.about, name: levels[arm.about[name]]}) if arm.about.get(name) in levels else arm
            for arm in arms
        ]
    return list(arms)
