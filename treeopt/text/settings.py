"""Which settings of an engine's drafter of text are tried: a grid of its options' values, from coarse to fine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.text.engines import KINDS

Settings = tuple[tuple[str, Any], ...]  # options and values, sorted
Values = Mapping[str, Sequence[Any]]
SHORT, LONG = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16), (2, 4, 8, 12, 16, 24, 32, 48, 64)
MATCHED = (1, 2, 3, 4, 5, 6, 8, 12)
VLLM = {"num_speculative_tokens": SHORT, "prompt_lookup_max": MATCHED, "prompt_lookup_min": MATCHED}
FACTORS, PROBS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0), (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
SIMPLE = (2, 3, 4, 6, 8, 12, 16, 24), (2, 4, 8, 16, 32, 48, 64)
# An engine's drafter: what is usual (its defaults, or what its documentation shows), and the values that are tried.
GRIDS: dict[str, tuple[Mapping[str, Any], Values]] = {
    "vllm:ngram-v1": ({"num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 4}, VLLM),
    "vllm:ngram-v2": ({"num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 4}, VLLM),
    "vllm:suffix": (
        {"num_speculative_tokens": 24},
        {
            "num_speculative_tokens": LONG[1:7],
            "suffix_decoding_max_tree_depth": (8, 16, 24, 32, 48, 64),
            "suffix_decoding_max_spec_factor": FACTORS,
            "suffix_decoding_min_token_prob": PROBS,
        },
    ),
    "arctic:suffix": (
        {},
        {
            "suffix_speculative_tokens": LONG[1:7],
            "suffix_cache_max_depth": (16, 32, 64, 96),
            "suffix_max_spec_factor": FACTORS,
            "suffix_max_spec_offset": (-1.0, 0.0, 1.0, 2.0, 4.0),
            "suffix_min_token_prob": PROBS,
        },
    ),
    "transformers:prompt-lookup": (
        {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 2},
        {"prompt_lookup_num_tokens": (*SHORT, 20), "max_matching_ngram_size": MATCHED},
    ),
    "openvino:prompt-lookup": (
        {"num_assistant_tokens": 5, "max_ngram_size": 3},
        {"num_assistant_tokens": SHORT, "max_ngram_size": MATCHED},
    ),
    "exllamav3:ngram": (
        {"ngram_match_min": 2},
        {"num_draft_tokens": SHORT, "ngram_match_min": MATCHED, "dynamic_draft": (False, True)},
    ),
    **{
        f"llama.cpp:{kind}": ({}, {f"spec_{kind.replace('-', '_')}_size_{x}": of for x, of in zip("nm", SIMPLE, strict=True)})
        for kind in ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
    },
    "llama.cpp:ngram-mod": (
        {},
        {"spec_ngram_mod_n_match": (4, 8, 12, 16, 24, 32), "spec_ngram_mod_n_min": (2, 4, 8, 16, 32, 48), "spec_ngram_mod_n_max": LONG[2:]},
    ),
    "llama.cpp:ngram-cache": ({}, {}),
}  # fmt: skip
BOUNDS = (("prompt_lookup_min", "prompt_lookup_max"), ("spec_ngram_mod_n_min", "spec_ngram_mod_n_max"))


def drafters_of(engine: str | None) -> list[str]:
    return [name for name in KINDS if engine in (None, name.partition(":")[0])]


def usual(drafter: str) -> Settings:
    """The engine's defaults, or what its documentation shows where it has none."""
    return tuple(sorted(GRIDS[drafter][0].items()))


def fits(settings: Mapping[str, Any]) -> bool:
    """Whether no least number is above its greatest."""
    return all(settings[low] <= settings[high] for low, high in BOUNDS if {low, high} <= settings.keys())


def sought(
    drafter: str, value: Callable[[Sequence[Settings]], NDArray[np.float64]], *, most: int = 60
) -> dict[Settings, NDArray[np.float64]]:
    """The settings that were tried, and what each is worth at every batch size: first far apart, then beside the best ones.

    value : (n, B) of n settings at B batch sizes, higher is better

    >>> def length_of(settings):
    ...     return np.array([[-abs(dict(one)["prompt_lookup_num_tokens"] - 6.0)] for one in settings])
    >>> found = sought("transformers:prompt-lookup", length_of)
    >>> dict(max(found, key=lambda one: found[one][0]))["prompt_lookup_num_tokens"], len(found) <= 60
    (6, True)
    """
    values, found = GRIDS[drafter][1], dict[Settings, NDArray[np.float64]]()
    ends = product(*(sorted({0, len(of) // 2, len(of) - 1}) for of in values.values()))
    coarse = [tuple(sorted((o, values[o][i]) for o, i in zip(values, place, strict=True))) for place in ends]
    coarse = [one for one in coarse if fits(dict(one))]
    np.random.default_rng(0).shuffle(coarse)
    new = [*dict.fromkeys([usual(drafter), *coarse[: most // 2 - 1]])]
    while new:
        found |= zip(new, value(new), strict=True)
        best = {max(found, key=lambda one: found[one][b]) for b in range(len(found[new[0]]))}
        near = [one for each in sorted(best, key=str) for one in _beside(each, values)]
        new = [one for one in dict.fromkeys(near) if one not in found][: most - len(found)]
    return found


def _beside(settings: Settings, values: Values) -> Iterator[Settings]:
    """Settings with one option changed to the next value below or above; one that is not said is where the middle is."""
    known = dict(settings)
    for option, of in values.items():
        now = known.get(option, of[len(of) // 2])
        if isinstance(now, bool):
            others = [one for one in of if one != now]
        else:
            below, above = [one for one in of if one < now], [one for one in of if one > now]
            others = [*below[-1:], *above[:1], *([] if option in known else [now])]
        for other in others:
            if fits(changed := {**known, option: other}):
                yield tuple(sorted(changed.items()))
