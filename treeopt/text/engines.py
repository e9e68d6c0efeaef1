"""Engines' drafters that copy text: the rule of each, the engine's options for it, and the values that a search tries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from treeopt.errors import InvalidInput, quoted
from treeopt.files.options import number_fault
from treeopt.text.llama_cpp import Cache, Map, Mod, Simple
from treeopt.text.prompt_lookup import Lookup, SuffixLookup
from treeopt.text.rules import TextDrafter
from treeopt.text.suffix import SuffixDecoding

SHORT, LONG = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16), (2, 4, 8, 12, 16, 24, 32, 48, 64)
MATCHED = (1, 2, 3, 4, 5, 6, 8, 12)
FACTORS, PROBS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0), (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)


class Option(NamedTuple):
    """An option of a drafter.

    parameter   : its name in the rule
    tried       : values that a search tries, in order
    needed      : whether nothing is drafted without it
    kind        : type of its values; whole numbers are floats too
    least, most : values that the engine takes
    """

    parameter: str
    tried: Sequence[Any] = ()
    needed: bool = False
    kind: type = int
    least: float = 1
    most: float = inf

    def fault(self, value: Any) -> str | None:
        """The rule that a value breaks; None for a value that the engine takes."""
        if self.kind is tuple:
            return None if type(value) is tuple else f"must be a list, but got {quoted(value)}"
        return number_fault(value, self.kind, least=self.least, most=self.most)


class EngineDrafter(NamedTuple):
    """A drafter that an engine has.

    make    : makes the rule
    options : by the engine's names
    fixed   : parameters of the rule that the engine sets, and its defaults
    usual   : values in the engine's documentation, where it has no defaults
    memory  : what a server keeps from one request to the next, in words
    """

    make: Callable[..., Any]
    options: Mapping[str, Option]
    fixed: Mapping[str, Any] = {}
    usual: Mapping[str, Any] = {}
    memory: str = ""

    @property
    def grid(self) -> dict[str, Sequence[Any]]:
        """The values that a search tries of each option."""
        return {name: option.tried for name, option in self.options.items() if option.tried}


def vllm_ngram(length: int, longest: int | None = None, shortest: int | None = None, **fixed: Any) -> Lookup:
    """vLLM's look-up. A single bound stands for both."""
    return Lookup(length, longest or shortest or 5, shortest or longest or 5, **fixed)


def prefixed(prefix: str, options: Mapping[str, Option]) -> dict[str, Option]:
    """Options with a prefix before their names."""
    return {prefix + name: option for name, option in options.items()}


NGRAM = {
    "num_speculative_tokens": Option("length", SHORT, needed=True),
    "prompt_lookup_max": Option("longest", MATCHED),
    "prompt_lookup_min": Option("shortest", MATCHED),
}
NGRAM_USUAL = {"num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 4}
FACTOR, LEAST = Option("factor", FACTORS, kind=float, least=0), Option("least", PROBS, kind=float, least=0, most=1)
SUFFIX = {
    "max_tree_depth": Option("depth", (8, 16, 24, 32, 48, 64)),
    "max_cached_requests": Option("cached", least=0),
    "max_spec_factor": FACTOR,
    "min_token_prob": LEAST,
}
ARCTIC = {
    "speculative_tokens": Option("length", LONG[1:7]),
    "cache_max_depth": Option("depth", (16, 32, 64, 96)),
    "cache_max_requests": Option("cached", least=0),
    "max_spec_factor": FACTOR,
    "max_spec_offset": Option("offset", (-1.0, 0.0, 1.0, 2.0, 4.0), kind=float, least=-inf),
    "min_token_prob": LEAST,
}
SIZES = {
    "size_n": Option("n", (2, 3, 4, 6, 8, 12, 16, 24), most=1024),
    "size_m": Option("m", (2, 4, 8, 16, 32, 48, 64), most=1024),
}
MOD = {
    "n_match": Option("n", (4, 8, 12, 16, 24, 32), most=1024),
    "n_min": Option("least", (2, 4, 8, 16, 32, 48), least=0, most=1024),
    "n_max": Option("m", LONG[2:], most=1024),
}
ANSWERS = "the answers of the latest requests, as many as {}"
SLOTS = "the text of each slot, of which one was replayed"

KINDS = {
    "vllm:ngram-v1": EngineDrafter(vllm_ngram, NGRAM, usual=NGRAM_USUAL),
    "vllm:ngram-v2": EngineDrafter(vllm_ngram, NGRAM, {"latest": True, "fill": "last"}, NGRAM_USUAL),
    "vllm:suffix": EngineDrafter(
        SuffixDecoding,
        {"num_speculative_tokens": Option("length", LONG[1:7]), **prefixed("suffix_decoding_", SUFFIX)},
        usual={"num_speculative_tokens": 24},
        memory=ANSWERS.format("suffix_decoding_max_cached_requests"),
    ),
    "arctic:suffix": EngineDrafter(
        SuffixDecoding,
        prefixed("suffix_", ARCTIC),
        {"length": 16, "depth": 64, "cached": 100_000},
        memory=ANSWERS.format("suffix_cache_max_requests"),
    ),
    "transformers:prompt-lookup": EngineDrafter(
        Lookup,
        {
            "prompt_lookup_num_tokens": Option("length", (*SHORT, 20), needed=True),
            "max_matching_ngram_size": Option("longest", MATCHED),
            "eos_token_id": Option("ends", kind=tuple),
        },
        {"longest": 2, "cut": "last", "first": "draft"},
        {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 2},
    ),
    "openvino:prompt-lookup": EngineDrafter(
        Lookup,
        {
            "num_assistant_tokens": Option("length", SHORT, needed=True),
            "max_ngram_size": Option("longest", MATCHED, needed=True),
        },
        {"fill": "blank", "cut": "spare"},
        {"num_assistant_tokens": 5, "max_ngram_size": 3},
    ),
    "exllamav3:ngram": EngineDrafter(
        SuffixLookup,
        {"num_draft_tokens": Option("length", SHORT), "ngram_match_min": Option("shortest", MATCHED, needed=True)},
        usual={"ngram_match_min": 2},
    ),
    "llama.cpp:ngram-simple": EngineDrafter(Simple, prefixed("spec_ngram_simple_", SIZES), memory=SLOTS),
    "llama.cpp:ngram-map-k": EngineDrafter(Map, prefixed("spec_ngram_map_k_", SIZES), memory=SLOTS),
    "llama.cpp:ngram-map-k4v": EngineDrafter(
        Map,
        prefixed("spec_ngram_map_k4v_", {**SIZES, "min_hits": Option("least_hits")}),
        {"counts": True},
        memory=SLOTS,
    ),
    "llama.cpp:ngram-mod": EngineDrafter(Mod, prefixed("spec_ngram_mod_", MOD), memory=SLOTS),
    "llama.cpp:ngram-cache": EngineDrafter(Cache, {}, memory=SLOTS),
}


def text_drafter(name: str, settings: Mapping[str, Any]) -> TextDrafter:
    """A new drafter by its name and its engine's options. InvalidInput for options and values that the engine refuses.

    >>> text_drafter("exllamav3:ngram", {"ngram_match_min": 2}).length
    4
    """
    if name not in KINDS:
        raise InvalidInput(f"Drafters that copy text are {', '.join(KINDS)}, but got {quoted(name)}.")
    kind = KINDS[name]
    options = kind.options
    if unknown := sorted(set(settings) - set(options)):
        raise InvalidInput(f"{name} takes the options {', '.join(sorted(options))}, but got {', '.join(unknown)}.")
    if missing := [option for option, details in options.items() if details.needed and option not in settings]:
        raise InvalidInput(f"{name} drafts nothing without {' and '.join(missing)}: give it.")
    for option, value in settings.items():
        if fault := options[option].fault(value):
            raise InvalidInput(f"{option} of {name} {fault}.")
    parameters = {options[option].parameter: value for option, value in settings.items()}
    drafter: TextDrafter = kind.make(**{**kind.fixed, **parameters})
    return drafter
