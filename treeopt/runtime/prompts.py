"""Prompts: from a file, or cut from the standard library for the demo.

A prompt is known by the hash of its tokens, so that bench never decodes one that calibration saw.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.runtime.target import Target

SLOT_CHARS = 1000  # the demo cuts one prompt per so many characters of a module
DEMO_TOKENS = (48, 128)  # shortest and longest demo prompt
KEYS = ("prompt", "text", "question", "instruction")  # columns that hold a prompt, first found


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, and the group (category, module) that they come from."""

    tokens: tuple[int, ...]
    group: str = ""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(np.array(self.tokens, dtype="<i4").tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class PromptSet:
    """Prompts in a fixed order, with where they come from."""

    prompts: tuple[Prompt, ...]
    name: str
    fingerprint: str

    def without(self, hashes: Sequence[str]) -> PromptSet:
        """The prompts whose hash is not among ``hashes``."""
        seen = set(hashes)
        kept = tuple(prompt for prompt in self.prompts if prompt.sha256 not in seen)
        return PromptSet(kept, self.name, self.fingerprint)


def check_tokenizer(target: Target) -> None:
    """Raise InvalidInput where the tokenizer can make ids that the model has no embedding for."""
    if len(target.tokenizer) > target.vocab_size:
        raise InvalidInput(
            f"The tokenizer must belong to the model, but it has {len(target.tokenizer)} tokens and "
            f"the model {target.vocab_size}."
        )


def load_prompts(target: Target, path: Path) -> PromptSet:
    """One prompt per line of a .jsonl file (key prompt, text, ...) or of a .txt file.

    Raises InvalidInput for an empty prompt or one longer than the model's context.
    """
    check_tokenizer(target)
    try:
        data = path.read_bytes()
        lines = data.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--prompts must be a text file, but {path}: {error}.") from None
    texts = list(_jsonl(path, lines)) if path.suffix == ".jsonl" else [line for line in lines if line]
    if not texts:
        raise InvalidInput(f"--prompts must hold at least one prompt, but {path} is empty.")
    prompts = []
    for number, text in enumerate(texts, 1):
        tokens = target.tokenizer(text)["input_ids"] if text.strip() else []
        if not 1 <= len(tokens) < target.context:
            raise InvalidInput(
                f"Every prompt must have 1 to {target.context - 1} tokens, but prompt {number} of "
                f"{path} has {len(tokens)}."
            )
        prompts.append(Prompt(tuple(tokens)))
    unique = tuple(dict.fromkeys(prompts))
    return PromptSet(unique, path.name, hashlib.sha256(data).hexdigest())


def _jsonl(path: Path, lines: list[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidInput(f"{path}, line {number}, is not JSON: {error.msg}.") from None
        key = next((k for k in KEYS if isinstance(record, dict) and isinstance(record.get(k), str)), None)
        if key is None:
            raise InvalidInput(f"{path}, line {number}, must have a text under {', '.join(KEYS)}.")
        yield record[key]


def demo_prompts(target: Target) -> PromptSet:
    """Beginnings cut from the held-out modules of this interpreter's standard library.

    At most one prompt, of 48 to 128 tokens, starts in every stretch of 1,000 characters, at a line.
    Their order is shuffled, the same way every time.
    """
    from treeopt.demo.corpus import fingerprint, standard_library

    modules = standard_library(held_out=True)
    rng = np.random.default_rng(0)
    texts: list[tuple[str, str]] = []
    for module in modules:
        for start in range(0, len(module.text) - SLOT_CHARS, SLOT_CHARS):
            slot = module.text[start : start + SLOT_CHARS]
            texts.append((slot[slot.find("\n") + 1 :], module.name))
    order = rng.permutation(len(texts))
    lengths = rng.integers(DEMO_TOKENS[0], DEMO_TOKENS[1] + 1, len(texts))
    all_ids = target.tokenizer([text for text, _ in texts])["input_ids"]
    prompts = [Prompt(tuple(all_ids[i][: lengths[i]]), texts[i][1]) for i in order if all_ids[i]]
    name = "held-out modules of the Python standard library"
    return PromptSet(tuple(dict.fromkeys(prompts)), name, fingerprint(modules))
