"""How the demo model's parts learn: one training loop with checkpoints, and the losses.

Several processes (torchrun) learn together: each draws batches of its own, and their gradients are averaged. On a busy
machine one thread in each of two processes is much faster than two threads, which wait for each other in every product.

B windows per batch · T tokens per window · V vocabulary · K heads · d width
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from treeopt.runtime.drafters.medusa import MedusaHeads

WARMUP = 50  # optimiser steps
GAMMA, HEADS_WEIGHT = 0.8, 0.2  # weight of head k: GAMMA^k (Medusa, section 2.2.1), and of all beside the base
LEARN, UNLEARN = 1, 2  # what becomes of a token of the model's own answers
RANK, WORLD = (int(os.environ.get(name, one)) for name, one in (("RANK", 0), ("WORLD_SIZE", 1)))  # of torchrun
Streams = Mapping[float, np.ndarray]  # share of the training windows to the token ids that they are cut from


def whole_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention within full windows in plain products; compiled, its backward is faster on a CPU than torch's own."""
    seen = torch.ones(query.shape[-2:-1] * 2, dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.transpose(-1, -2)).float() * scaling
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("whole", whole_attention)


def learning_rate(step: int, steps: int) -> float:
    """A factor of the peak: linear warm-up, constant for half of the steps, then linear decay to zero."""
    return min((step + 1) / WARMUP, 1.0, 2 * (1 - step / steps))


def optimisers_of(parts: Mapping[str, nn.Module], scale: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between the layers, AdamW for the rest; ``scale`` times the usual rates."""
    named = [(f"{part}.{name}", p) for part, module in parts.items() for name, p in module.named_parameters()]
    matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
    vectors = [p for n, p in named if p.ndim < 2 or "embed" in n]
    heads = [p for n, p in named if p.ndim > 2]
    groups = [{"params": vectors, "lr": 4e-3 * scale}, {"params": heads, "lr": 2e-3 * scale}]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(torch.optim.Muon(matrices, lr=6e-3 * scale, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"))
    return [*found, torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.95), weight_decay=0.0)]


def fit(
    file: Path, parts: dict[str, nn.Module], loss_of: Callable[[int], Tensor], *, steps: int, scale: float = 1.0
) -> None:
    """Train the parts for so many steps, from the checkpoint in ``file`` where there is one.

    loss_of : the loss of a step, which depends on nothing but its number and the process
    scale   : of the learning rates
    """
    optimisers, first = optimisers_of(parts, scale), 0
    if file.exists():
        state = torch.load(file, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state["parts"][name])
        for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        first = state["step"]
    groups = [group for optimiser in optimisers for group in optimiser.param_groups]
    peaks, started, recent = [group.setdefault("peak", group["lr"]) for group in groups], time.time(), []
    for step in range(first, steps):
        loss = loss_of(step)
        loss.backward()
        average_gradients(p for part in parts.values() for p in part.parameters())
        for part in parts.values():
            torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * learning_rate(step, steps)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        recent.append(loss.item())
        if RANK == 0 and (step + 1) % 20 == 0:
            seconds = (time.time() - started) / (step + 1 - first)
            print(f"{file.stem} {step + 1}/{steps} loss {np.mean(recent[-20:]):.3f} {seconds:.2f} s", flush=True)
        if RANK == 0 and ((step + 1) % 100 == 0 or step + 1 == steps):
            save_checkpoint(
                file,
                parts={name: part.state_dict() for name, part in parts.items()},
                step=step + 1,
                optimisers=[o.state_dict() for o in optimisers],
            )
    for part in parts.values():
        part.eval().requires_grad_(False)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """The mean over all processes; they then make the same step."""
    if not distributed.is_initialized():
        return
    known = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in known]) / distributed.get_world_size()
    distributed.all_reduce(flat)
    for gradient, mean in zip(known, flat.split([gradient.numel() for gradient in known]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def save_checkpoint(path: Path, **state: Any) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)


def windows(stream: np.ndarray, starts: np.ndarray, length: int) -> Tensor:
    return torch.from_numpy(stream[starts[:, None] + np.arange(length)].astype(np.int64))


def batch_of(streams: Streams, step: int, tokens: int, length: int) -> Tensor:
    """(B, length + 1) random windows of the streams, for one step of this process."""
    rng = np.random.default_rng([RANK, step])
    counts = rng.multinomial(tokens // length, list(streams))
    parts = [
        windows(stream, rng.integers(0, len(stream) - length - 1, n), length + 1)
        for stream, n in zip(streams.values(), counts, strict=True)
    ]
    return torch.cat(parts)


def heads_loss(heads: MedusaHeads, hidden: Tensor, known: Tensor) -> Tensor:
    """sum_k 0.8^k CE_k of (N, d) states and the (N, K) tokens that the heads have to guess there, -100 for none."""
    each = [F.cross_entropy(heads.logits(hidden, k).float(), known[:, k]) for k in range(heads.num_heads)]
    return torch.stack([GAMMA ** (k + 1) * part for k, part in enumerate(each)]).sum()


def next_tokens(x: Tensor, count: int) -> Tensor:
    """(B, T - count - 1, count) tokens behind the next one of every place of (B, T) tokens: what heads guess there."""
    return torch.stack([x[:, k + 2 : x.shape[1] - count + k + 1] for k in range(count)], -1)


def joint_loss(
    model: LlamaForCausalLM, heads: MedusaHeads, teacher: LlamaForCausalLM | None = None
) -> Callable[[Tensor], Tensor]:
    """The loss of (B, T) tokens of text, from which the heads and, through them, the base learn.

    CE(base) + 0.2 sum_k 0.8^k CE(head k), the heads on the first quarter of every window: multi-token prediction
    (Gloeckle et al. 2024, section 2) with Medusa's heads and weights. With a teacher, half of CE(base) is that to its
    distributions (Hinton et al. 2015, section 2, at temperature 1).
    """

    def loss(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            hidden = model.model(x[:, :-1], use_cache=False).last_hidden_state  # (B, T - 1, d)
            logits = model.lm_head(hidden).float().flatten(0, 1)
            base = F.cross_entropy(logits, x[:, 1:].flatten())
            if teacher is not None:
                base = (base + F.cross_entropy(logits, distributions(teacher, x[:, :-1]).flatten(0, 1))) / 2
            taught = x.shape[1] // 4
            known = next_tokens(x, heads.num_heads)[:, :taught]
            extra = heads_loss(heads, hidden[:, :taught].flatten(0, 1), known.flatten(0, 1))
        return base + HEADS_WEIGHT * extra

    return torch.compile(loss)


def own_loss(model: LlamaForCausalLM, heads: MedusaHeads) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of the model's own answers: (B, T) tokens, and for each LEARN, UNLEARN or neither.

    Its good answers are learned as text is, the heads from every fourth place. Of answers in a loop the repeated
    tokens are made unlikely: - log(1 - p) (unlikelihood training, Welleck et al. 2020, section 5.2).
    """

    def loss(x: Tensor, kind: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            hidden = model.model(x[:, :-1], use_cache=False).last_hidden_state
            said = F.log_softmax(model.lm_head(hidden).float(), -1).gather(-1, x[:, 1:, None])[..., 0]  # (B, T - 1)
            learned, unlearned = kind[:, 1:] == LEARN, kind[:, 1:] == UNLEARN
            base = -(said * learned).sum() / learned.sum().clamp_min(1)
            loops = -torch.log((1 - said.exp()).clamp_min(1e-4))
            loops = (loops * unlearned).sum() / unlearned.sum().clamp_min(1)
            known = torch.where(kind == LEARN, x, -100)
            known = next_tokens(known, heads.num_heads)[:, ::4]
            extra = heads_loss(heads, hidden[:, : -heads.num_heads : 4].flatten(0, 1), known.flatten(0, 1))
        return base + loops + HEADS_WEIGHT * extra

    return torch.compile(loss)


@torch.no_grad()
def distributions(teacher: LlamaForCausalLM, x: Tensor) -> Tensor:
    """(B, T, V) what a teacher expects after every place of (B, T) tokens."""
    with torch.autocast(x.device.type, torch.bfloat16):
        return teacher(x, use_cache=False).logits.float().softmax(-1)


def taught_loss(model: LlamaForCausalLM, teacher: LlamaForCausalLM) -> Callable[[Tensor], Tensor]:
    """The loss of (B, T) tokens for a model that learns the teacher's distributions there."""

    def loss(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            logits = model(x, use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), distributions(teacher, x).flatten(0, 1))

    return torch.compile(loss)
