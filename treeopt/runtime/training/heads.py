"""Heads that have learned nothing yet: each begins as a copy of the target's own; and what they cost.

EAGLE-3's layer begins so too: it hands the last of the target's states on, and its head is rows of the target's.

d width · V vocabulary · K heads
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeopt.errors import Unsupported
from treeopt.runtime.drafters.eagle3 import FEWEST_LAYERS, Eagle3Heads, Form
from treeopt.runtime.drafters.hydra import HydraHeads
from treeopt.runtime.drafters.layer import layer_config
from treeopt.runtime.drafters.medusa import MedusaHeads
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import Text
from treeopt.runtime.training.recipe import DRAFT_VOCAB, EAGLE_3, HYDRA, HYDRA_PLUS, MEDUSA_SHARED, Recipe


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


def make_heads(target: Target, recipe: Recipe, *, hidden_rms: float = 1.0, texts: Sequence[Text] = ()) -> Any:
    """Heads to train, in float32 or more: they guess what the target itself says next.

    hidden_rms : usual root mean square of the target's hidden states, with which the norm of Hydra++'s prefix
                 layer begins
    texts      : by which the tokens are chosen that EAGLE-3 guesses

    From now on the target hands out the states that EAGLE-3 reads.
    """
    dtype = torch.promote_types(target.dtype, torch.float32)
    torch.manual_seed(recipe.seed)
    lm_head = target.lm_head.weight.detach().to(dtype)
    if recipe.kind != EAGLE_3:
        heads = _made(target, recipe, lm_head, hidden_rms).requires_grad_(True)
        if heads.shares_projection:
            heads.projection.requires_grad_(False)  # it is the target's
        return heads
    ids = common_tokens(texts, target.vocab_size, recipe.draft_vocab or DRAFT_VOCAB)
    heads = _eagle3(target, recipe, lm_head, None if len(ids) == target.vocab_size else ids)
    target.read_layers(heads.layers_of(target.num_layers))
    begin_like(heads, target, lm_head[ids.to(lm_head.device)])
    return heads.requires_grad_(True)


def size_of_heads(target: Target, recipe: Recipe) -> Size:
    """What heads would cost, without making them."""
    lm_head = torch.empty_like(target.lm_head.weight, device="meta")
    if recipe.kind == EAGLE_3:
        size = min(target.vocab_size, recipe.draft_vocab or DRAFT_VOCAB)
        made: Any = _eagle3(target, recipe, lm_head, torch.arange(size))
    else:
        made = _made(target, recipe, lm_head, 1.0)
    parts: Counter[str] = Counter()
    for name, parameter in made.named_parameters():
        if name == "projection" and made.shares_projection:
            continue
        is_projection = "projection" in name or "lm_head" in name
        part = "projections" if is_projection else "prefix layer" if name.startswith("prefix") else "blocks"
        part = "layer" if part == "blocks" and recipe.kind == EAGLE_3 else part
        parts[part] += parameter.numel()
    return Size(dict(parts), target.dtype.itemsize)


def _made(target: Target, recipe: Recipe, lm_head: Tensor, hidden_rms: float) -> Any:
    if recipe.kind == MEDUSA_SHARED:
        if getattr(target.lm_head, "bias", None) is not None:
            raise Unsupported("Heads that share the lm_head need one without a bias, but this model's has one.")
        vocab_size, width = lm_head.shape
        like: dict[str, Any] = {"dtype": lm_head.dtype, "device": lm_head.device}
        return MedusaHeads(recipe.num_heads, recipe.layers, width, vocab_size, shared=lm_head, **like)
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


def common_tokens(texts: Sequence[Text], vocab_size: int, size: int) -> Tensor:
    """(size,) ids of the tokens that the answers have most often, ascending; of equally common ones the lower.

    >>> common_tokens([Text(np.array([9, 4, 7, 4]), 1, "")], 10, 3).tolist()
    [0, 4, 7]
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for text in texts:
        counts += np.bincount(text.tokens[text.prompt_tokens :], minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def layers_to_read(num_layers: int) -> tuple[int, ...] | None:
    """At whose inputs a drafter that is trained here reads the target: None for the usual three, where they are three.

    The first is never 1, which readers take for the output of layer 1.

    >>> [layers_to_read(n) for n in (1, 2, 3, 4, 6, 7)]
    [(0, 1), (0, 1, 2), (0, 2, 3), (2, 3, 4), (2, 4, 6), None]
    """
    if num_layers >= FEWEST_LAYERS:
        return None
    low = 2 if num_layers > 3 else 0
    return tuple(dict.fromkeys((low, (low + num_layers + 1) // 2, num_layers)))


def _eagle3(target: Target, recipe: Recipe, lm_head: Tensor, token_ids: Tensor | None) -> Eagle3Heads:
    """Without weights. Its rotation is the plain one that EAGLE-3's readers take where config.json says none."""
    config = layer_config(target.config, target.width)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    layers = layers_to_read(target.num_layers)
    form = Form(target.width, target.vocab_size, states=3 if layers is None else len(layers), layers=layers)
    return Eagle3Heads(
        config,
        form,
        embedding=target.model.get_input_embeddings().weight.to(lm_head.device),
        token_ids=token_ids,
        num_heads=recipe.num_heads,
        dtype=lm_head.dtype,
        device=lm_head.device,
    )


@torch.no_grad()
def begin_like(heads: Eagle3Heads, target: Target, rows: Tensor) -> None:
    """Weights with which the layer hands the target's last state on and guesses by (Vt, d) rows of its lm_head."""
    for name, weight in heads.weights.items():
        if weight.ndim == 1:
            torch.nn.init.ones_(weight)
        elif not name.endswith(("o_proj.weight", "down_proj.weight")):  # what they add is nothing at first
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    heads.fc.weight.zero_()
    heads.fc.weight[:, -heads.width :] = torch.eye(heads.width)
    heads.lm_head.copy_(rows)
    norm: Any = getattr(target.model.get_decoder(), "norm", None)
    if "RMSNorm" in type(norm).__name__:  # which scales a vector of ones by its weight, however it is stored
        heads.weights["norm.weight"].copy_(norm(torch.ones(heads.width, dtype=target.dtype, device=target.device)))
