"""Heads that have learned nothing yet: each begins as a copy of the target's own; and what they cost.

d width · V vocabulary · K heads
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treeopt.runtime.drafters.hydra import HydraHeads
from treeopt.runtime.drafters.medusa import MedusaHeads
from treeopt.runtime.target import Target
from treeopt.runtime.training.recipe import HYDRA, HYDRA_PLUS, Recipe


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


def make_heads(target: Target, recipe: Recipe, *, hidden_rms: float = 1.0) -> Any:
    """Heads to train, in float32 or more: they guess what the target itself says next.

    hidden_rms : usual root mean square of the target's hidden states, with which the norm of Hydra++'s prefix
                 layer begins
    """
    dtype = torch.promote_types(target.dtype, torch.float32)
    torch.manual_seed(recipe.seed)
    return _made(target, recipe, target.lm_head.weight.detach().to(dtype), hidden_rms).requires_grad_(True)


def size_of_heads(target: Target, recipe: Recipe) -> Size:
    """What heads would cost, without making them."""
    made = _made(target, recipe, torch.empty_like(target.lm_head.weight, device="meta"), 1.0)
    parts: Counter[str] = Counter()
    for name, parameter in made.named_parameters():
        is_projection = "projection" in name or "lm_head" in name
        part = "projections" if is_projection else "prefix layer" if name.startswith("prefix") else "blocks"
        parts[part] += parameter.numel()
    return Size(dict(parts), target.dtype.itemsize)


def _made(target: Target, recipe: Recipe, lm_head: Tensor, hidden_rms: float) -> Any:
    if recipe.kind not in (HYDRA, HYDRA_PLUS):
        return MedusaHeads.like_lm_head(lm_head, recipe.num_heads, recipe.layers)
    embedding = target.model.get_input_embeddings().weight.detach().to(lm_head.device, lm_head.dtype)
    bias = getattr(target.lm_head, "bias", None)
    return HydraHeads.untrained(
        embedding,
        lm_head,
        recipe.num_heads,
        recipe.layers,
        like=target.config if recipe.kind == HYDRA_PLUS else None,
        lm_head_bias=None if bias is None else bias.detach(),
        hidden_rms=hidden_rms,
    )
