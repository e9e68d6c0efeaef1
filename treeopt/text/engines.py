"""By what name and options each engine's drafter of text is asked for: one row for each, with the engine's own defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from treeopt.errors import InvalidInput, quoted
from treeopt.text.adaptive import WindowLookup
from treeopt.text.llama_cpp import Cache, LlamaCpp, Map, Mod, Simple
from treeopt.text.prompt_lookup import PromptLookup
from treeopt.text.rules import TextDrafter


class Kind(NamedTuple):
    """A drafter of an engine.

    make    : the rule
    options : the engine's options, and what the rule calls them
    fixed   : what the engine does, or takes by default
    """

    make: Callable[..., Any]
    options: Mapping[str, str]
    fixed: Mapping[str, Any] = {}


def suffix(**settings: Any) -> TextDrafter:
    """Suffix decoding; numba, which takes a while to import, comes with it."""
    from treeopt.text.suffix import SuffixDecoding

    return SuffixDecoding(**settings)


def vllm_ngram(length: int, longest: int | None = None, shortest: int | None = None, **fixed: Any) -> PromptLookup:
    """With one bound alone it is both."""
    return PromptLookup(length, longest or shortest or 5, shortest or longest or 5, **fixed)


NGRAM = {"num_speculative_tokens": "length", "prompt_lookup_max": "longest", "prompt_lookup_min": "shortest"}
SUFFIX = {
    "max_tree_depth": "depth",
    "max_cached_requests": "cached",
    "max_spec_factor": "factor",
    "min_token_prob": "least",
}
ARCTIC = {
    "speculative_tokens": "length", "cache_max_depth": "depth", "cache_max_requests": "cached",
    "max_spec_factor": "factor", "max_spec_offset": "offset", "min_token_prob": "least",
}  # fmt: skip


def prefixed(prefix: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options whose names all begin alike."""
    return {prefix + option: means for option, means in options.items()}


KINDS = {
    "vllm:ngram-v1": Kind(vllm_ngram, NGRAM),
    "vllm:ngram-v2": Kind(vllm_ngram, NGRAM, {"latest": True, "fill": "last"}),
    "vllm:suffix": Kind(suffix, {"num_speculative_tokens": "length"} | prefixed("suffix_decoding_", SUFFIX)),
    "arctic:suffix": Kind(suffix, prefixed("suffix_", ARCTIC), {"length": 16, "depth": 64, "cached": 100_000}),
    "transformers:prompt-lookup": Kind(
        PromptLookup,
        {"prompt_lookup_num_tokens": "length", "max_matching_ngram_size": "longest", "eos_token_id": "ends"},
        {"longest": 2, "cut": "last", "first": "draft"},
    ),
    "openvino:prompt-lookup": Kind(
        PromptLookup, {"num_assistant_tokens": "length", "max_ngram_size": "longest"}, {"fill": "blank", "cut": "spare", "halved": True}
    ),
    "exllamav3:ngram": Kind(
        WindowLookup, {"num_draft_tokens": "length", "ngram_match_min": "shortest", "dynamic_draft": "dynamic"}, {"length": 4}
    ),
    "llama.cpp:ngram-simple": Kind(Simple, prefixed("spec_ngram_simple_", {"size_n": "n", "size_m": "m"})),
    "llama.cpp:ngram-map-k": Kind(Map, prefixed("spec_ngram_map_k_", {"size_n": "n", "size_m": "m"})),
    "llama.cpp:ngram-map-k4v": Kind(
        Map, prefixed("spec_ngram_map_k4v_", {"size_n": "n", "size_m": "m", "min_hits": "least_hits"}), {"counts": True}
    ),
    "llama.cpp:ngram-mod": Kind(Mod, prefixed("spec_ngram_mod_", {"n_match": "n", "n_min": "least", "n_max": "m"})),
    "llama.cpp:ngram-cache": Kind(Cache, {}),
}  # fmt: skip


def text_drafter(name: str, settings: Mapping[str, Any]) -> TextDrafter:
    """A fresh drafter by an engine's own options; of llama.cpp's several, with a comma between them.

    >>> text_drafter("exllamav3:ngram", {"num_draft_tokens": 8}).length
    8
    """
    engine, _, kinds = name.partition(":")
    names = [f"{engine}:{kind}" for kind in kinds.split(",")]
    unknown = [one for one in names if one not in KINDS]
    if unknown or (len(names) > 1 and engine != "llama.cpp"):
        raise InvalidInput(
            f"Drafters that copy text are {', '.join(KINDS)}, and of llama.cpp several, but got {quoted(name)}."
        )
    known = {option for one in names for option in KINDS[one].options}
    if wrong := sorted(set(settings) - known):
        raise InvalidInput(f"{name} takes the options {', '.join(sorted(known))}, but got {', '.join(wrong)}.")
    made: list[Any] = []
    for kind in (KINDS[one] for one in names):
        given = {parameter: settings[option] for option, parameter in kind.options.items() if option in settings}
        made.append(kind.make(**{**kind.fixed, **given}))
    drafter: TextDrafter = LlamaCpp(made) if engine == "llama.cpp" else made[0]
    return drafter
