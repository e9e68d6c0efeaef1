"""Drafters that copy text, as engines are told of them: by the options that a `CopiedText` has, which are the engine's own.

What an option takes stands here, read where the engine checks it; what options must be to each other `treeopt.text` says. An
engine's file names its drafters and writes them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any, NamedTuple

from treeopt.engines.base import About, Method
from treeopt.errors import quoted
from treeopt.files.shell import shell_word
from treeopt.records.plan import Ranges
from treeopt.text.engines import text_drafter
from treeopt.trees.draft import CopiedText, Draft
from treeopt.trees.limits import EngineLimits

KIND = "copied-text"
EXPORTED = {"arctic": "vllm", "llama.cpp": "llama-cpp"}  # by how a drafter's name begins, what --to calls the engine


class Takes(NamedTuple):
    """The values of an option, in words, and whether one is among them."""

    words: str
    holds: Callable[[Any], bool]


def whole(least: int = 1, most: float = inf) -> Takes:
    words = f"whole numbers from {least}" + (f" to {most}" if most < inf else " on")
    return Takes(words, lambda value: type(value) is int and least <= value <= most)


def number(least: float = -inf, most: float = inf) -> Takes:
    words = "numbers" + f" from {least:g}" * (least > -inf) + f" to {most:g}" * (most < inf)
    return Takes(words, lambda value: type(value) in (int, float) and least <= value <= most and abs(value) < inf)


def at_most_1024(drafter: str, **least: int) -> dict[str, Takes]:
    return {f"spec_ngram_{drafter}_{option}": whole(low, 1024) for option, low in least.items()}


TAKES: Mapping[str, Takes] = {
    "suffix_decoding_max_cached_requests": whole(0), "suffix_decoding_max_spec_factor": number(0),
    "suffix_decoding_min_token_prob": number(0, 1), "suffix_cache_max_requests": whole(0), "suffix_max_spec_factor": number(0),
    "suffix_max_spec_offset": number(), "suffix_min_token_prob": number(0, 1),
    "dynamic_draft": Takes("False or True", lambda value: type(value) is bool),
    **at_most_1024("simple", size_n=1, size_m=1), **at_most_1024("map_k", size_n=1, size_m=1),
    **at_most_1024("map_k4v", size_n=1, size_m=1), **at_most_1024("mod", n_match=1, n_min=0, n_max=0),
    "eos_token_id": Takes("lists of tokens", lambda value: isinstance(value, tuple)),
}  # fmt: skip
# Options without which a drafter does not start, or does not draft.
NEEDED: Mapping[str, tuple[str, ...]] = {
    "vllm:ngram-v1": ("num_speculative_tokens",),
    "vllm:ngram-v2": ("num_speculative_tokens",),
    "transformers:prompt-lookup": ("prompt_lookup_num_tokens",),
    "openvino:prompt-lookup": ("num_assistant_tokens", "max_ngram_size"),
    "exllamav3:ngram": ("ngram_match_min",),
}
KEPT: Mapping[str, str] = {
    "vllm:suffix": "the answers of the latest requests, as many as suffix_decoding_max_cached_requests",
    "arctic:suffix": "the answers of the latest requests, as many as suffix_cache_max_requests",
    "llama.cpp": "the text of every slot for that slot, and of ngram-mod one table for all",
}  # by what a drafter's name begins with


def refuses(*engines: str) -> Callable[[Ranges[CopiedText], About], str | None]:
    """What a method refuses whose drafters have names that begin with one of ``engines``."""

    def fault(served: Ranges[CopiedText], about: About) -> str | None:
        faults = (_fault(draft, engines) for *_, draft in served if len(draft) > 1)
        return next(filter(None, faults), None)

    return fault


def _fault(draft: CopiedText, engines: tuple[str, ...]) -> str | None:
    """What is wrong with a draft; InvalidInput for options that do not go together."""
    own, options = draft.drafter.partition(":")[0], draft.options
    if own not in engines:
        return (
            f"has no {draft.drafter}, and its own drafters find other text, so the plan's figures do not hold there; export "
            f"--to {EXPORTED.get(own, own)}, or plan anew"
        )
    if missing := [option for option in NEEDED.get(draft.drafter, ()) if option not in options]:
        return f"drafts by {draft.drafter} with {' and '.join(missing)} only, but the plan does not say it"
    for option, value in options.items():
        takes = TAKES.get(option, whole())
        if not takes.holds(value):
            return f"takes {takes.words} for {option} of {draft.drafter}, but the plan has {quoted(value)}"
    text_drafter(draft.drafter, options)
    return None


def flags(options: Mapping[str, Any], between: str = "-") -> str:
    """Options of a command line; what is true is said alone, and what is false is not said.

    >>> flags({"spec_ngram_simple_size_n": 4, "spec_ngram_simple_size_m": 8})
    ' --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 8'
    """
    said = {f" --{option.replace('_', between)}": value for option, value in options.items() if value is not False}
    return "".join(name if value is True else f"{name} {shell_word(value)}" for name, value in said.items())


def notes_on(draft: Draft) -> list[str]:
    """A note on what a drafter that copies text keeps between requests; none for other drafts."""
    return [
        f"It keeps {what}: the plan's figures hold for a server that is not restarted, and had requests such as those that were "
        "replayed before."
        for begin, what in KEPT.items()
        if draft.name.startswith(begin)
    ]


method = partial(Method, name=KIND, drafters=(KIND,), limits=EngineLimits(copies=True), rules=("greedy", "sample"))
