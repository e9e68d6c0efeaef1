"""Search the settings of an engine's drafter of text: a grid of its options' values, from coarse to fine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.text.engines import KINDS

Settings = tuple[tuple[str, Any], ...]  # options and values, sorted
BOUNDS = (("prompt_lookup_min", "prompt_lookup_max"), ("spec_ngram_mod_n_min", "spec_ngram_mod_n_max"))


def drafters_of(engine: str | None) -> list[str]:
    """The names of an engine's drafters; of all drafters without an engine."""
    return [name for name in KINDS if engine in (None, name.partition(":")[0])]


def usual(drafter: str) -> Settings:
    """The engine's default options, or those in its documentation where it has no defaults."""
    return tuple(sorted(KINDS[drafter].usual.items()))


def fits(settings: Mapping[str, Any]) -> bool:
    """Whether every lower bound is at most its upper bound."""
    return all(settings[low] <= settings[high] for low, high in BOUNDS if {low, high} <= settings.keys())


def sought(
    drafter: str, value: Callable[[Sequence[Settings]], NDArray[np.float64]], *, most: int = 60
) -> dict[Settings, NDArray[np.float64]]:
    """Some settings and their values at every batch size: settings far apart first, then those beside the best ones.

    value : (n, B) values of n settings at B batch sizes, higher is better

    >>> def length_of(settings):
    ...     return np.array([[-abs(dict(setting)["prompt_lookup_num_tokens"] - 6.0)] for setting in settings])
    >>> values = sought("transformers:prompt-lookup", length_of)
    >>> dict(max(values, key=lambda settings: values[settings][0]))["prompt_lookup_num_tokens"], len(values) <= 60
    (6, True)
    """
    grid, values = KINDS[drafter].grid, dict[Settings, NDArray[np.float64]]()
    ends = product(*(sorted({0, len(tried) // 2, len(tried) - 1}) for tried in grid.values()))
    coarse = [{option: grid[option][i] for option, i in zip(grid, places, strict=True)} for places in ends]
    far_apart = [tuple(sorted(settings.items())) for settings in coarse if fits(settings)]
    np.random.default_rng(0).shuffle(far_apart)
    new = [*dict.fromkeys([usual(drafter), *far_apart[: most // 2 - 1]])]
    while new:
        values |= zip(new, value(new), strict=True)
        best = {max(values, key=lambda settings: values[settings][b]) for b in range(len(values[new[0]]))}
        near = [other for settings in sorted(best, key=str) for other in _beside(settings, grid)]
        new = [settings for settings in dict.fromkeys(near) if settings not in values][: most - len(values)]
    return values


def _beside(settings: Settings, grid: Mapping[str, Sequence[Any]]) -> Iterator[Settings]:
    """Settings with one option changed to the next value below or above. An option without a value is at the grid's middle."""
    options = dict(settings)
    for option, tried in grid.items():
        value = options.get(option, tried[len(tried) // 2])
        below, above = [other for other in tried if other < value], [other for other in tried if other > value]
        others = [*below[-1:], *above[:1]]
        if option not in options:
            others.append(value)
        for other in others:
            if fits(changed := {**options, option: other}):
                yield tuple(sorted(changed.items()))
