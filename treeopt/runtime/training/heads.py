"""Heads before and after training: each begins as a copy of the target's own, and is written as readers expect it."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from treeopt.files.writing import temporary
from treeopt.records.drafters import DRAFTERS
from treeopt.runtime.checkpoints import save_heads
from treeopt.runtime.checkpoints.save import by_libraries
from treeopt.runtime.drafters import part_of
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import Text
from treeopt.runtime.training.recipe import Recipe


@dataclass(frozen=True)
class Size:
    """Parameters of heads by their part, and the bytes that the finished file has for each."""

    parameters: dict[str, int]
    bytes_each: int

    @property
    def total(self) -> int:
        return sum(self.parameters.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {count:,}" for name, count in self.parameters.items())
        return f"{self.total:,} parameters ({parts}), {self.total * self.bytes_each / 1e6:,.1f} MB"


def make_heads(
    target: Target, recipe: Recipe, texts: Sequence[Text] = (), hidden_rms: Callable[[], float] = lambda: 1.0
) -> Any:
    """Heads to train, in float32 or more: they guess what the target itself says next.

    texts      : by which the tokens are chosen that EAGLE-3 guesses
    hidden_rms : usual root mean square of the target's hidden states, with which the norm of Hydra++'s prefix
                 layer begins

    From now on the target hands out the states that the heads read.
    """
    torch.manual_seed(recipe.seed)
    lm_head = target.lm_head.weight.detach().to(torch.promote_types(target.dtype, torch.float32))
    heads = _begun(target, recipe, lm_head, texts, hidden_rms)
    target.read_layers(heads.layers_of(target.num_layers))
    return heads


def _begun(target: Target, recipe: Recipe, *options: Any) -> Any:
    """Heads of a recipe's kind; all that is their own learns."""
    kind = next(name for name, kind in DRAFTERS.items() if recipe.kind in kind.recipes)
    heads = part_of(kind, "begins")(target, recipe, *options).requires_grad_(True)
    if heads.shares_projection:
        heads.projection.requires_grad_(False)  # it is the target's
    return heads


def size_of_heads(target: Target, recipe: Recipe) -> Size:
    """The parameters that heads would have, without making them."""
    made = _begun(target, recipe, torch.empty_like(target.lm_head.weight, device="meta"), (), lambda: 1.0)
    named = {"projection": "projections", "lm_head": "projections", "prefix": "prefix layer"}
    parts: Counter[str] = Counter()
    for name, weight in made.named_parameters():
        own = "layer" if recipe.defaults.one_layer else "blocks"
        parts[next((part for mark, part in named.items() if mark in name), own)] += (
            weight.numel() * weight.requires_grad
        )
    return Size({part: size for part, size in parts.items() if size}, target.dtype.itemsize)


def save_result(trainee: Any, target: Target, recipe: Recipe, folder: Path) -> list[Path]:
    """The files written. The heads take the target's dtype; Medusa-2's adapter becomes part of the base."""
    heads = trainee.heads.eval().requires_grad_(False).to(target.dtype)
    layout = recipe.defaults.layout
    if not recipe.defaults.trains_base:
        lm_head = target.lm_head.weight if heads.shares_projection else None
        return save_heads(heads, layout, folder, base=target.name, lm_head=lm_head)
    base_folder = temporary(folder / "training" / "base")
    try:
        with by_libraries(base_folder):
            trainee.merged().save_pretrained(base_folder)
            if target.tokenizer is not None:
                target.tokenizer.save_pretrained(base_folder)
        return save_heads(heads, layout, folder, base=target.name, base_folder=base_folder)
    finally:
        shutil.rmtree(base_folder, ignore_errors=True)
