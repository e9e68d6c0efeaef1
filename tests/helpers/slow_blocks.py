"""Drafters that guess all depths in one pass, the slow way: over the whole text and the masks behind it, without any cache.

M tokens of a text so far
"""

import functools
from collections.abc import Iterator

import torch

from treeopt.runtime.drafters.dflash import DFlashHeads
from treeopt.runtime.drafters.parallel import PardModel, PEagleHeads

from .random_drafters import GROUP, MASK
from .slow_drafters import (
    Layer,
    behind_attention,
    in_order,
    known_in_order,
    slow_attention,
    slow_fused,
    slow_mlp,
    slow_model,
    slow_norm,
)

WIDTH = 32


def slow_peagle(heads: PEagleHeads, text, hidden, root, path) -> list[int]:
    """All tokens in the order of the guess as deep as ``path``, whose tokens do not matter: one pass over text and masks."""
    form, config, weights, masks = heads.form, heads.layer.config, heads.weights, len(path)

    def norm(v, name):
        return slow_norm(config, v, weights[f"{name}.weight"])

    states = torch.cat([hidden[:, form.width :], weights["mask_hidden"].flatten().expand(masks, -1)])
    fused = slow_fused(heads, states)
    embedded = heads.embedding[torch.tensor([*text[1:], root, *[MASK] * masks])]
    x = norm(fused, "layers.0.hidden_norm") if form.before_residual else fused
    places = torch.arange(len(x))
    for i in range(config.num_hidden_layers):
        at = f"layers.{i}"
        reads = norm(x, f"{at}.input_layernorm") if i else torch.cat(
            [norm(embedded, f"{at}.input_layernorm"), norm(fused, f"{at}.hidden_norm")], 1
        )  # fmt: skip
        layer = Layer(heads, i)
        x = behind_attention(layer, x + slow_attention(layer, reads, places, reads, places))
    return known_in_order(heads, heads.lm_head @ norm(x[-1], "norm"))


def slow_pard(drafter: PardModel, text, hidden, root, path) -> list[int]:
    """The same for PARD, which reads a mask in place of each token of the path."""
    return slow_model(drafter, text, hidden, root, [MASK] * len(path))


def plainly(heads, i, name, reads):
    """What lies around attention or MLP: nothing."""
    return reads, lambda made: made


def slow_rows(heads: DFlashHeads, hidden: torch.Tensor, root: int, around=plainly) -> torch.Tensor:
    """(block, d) the last layer's rows; made once for all nodes of a step, whose paths they do not see."""
    known, key = heads.__dict__.setdefault("slow_rows", {}), (around, root, hidden.numpy().tobytes())
    if key not in known:
        known[key] = rows_of(heads, hidden, root, around)
    return known[key]


def rows_of(heads, hidden, root, around) -> torch.Tensor:
    form, weights, config, m = heads.form, heads.weights, heads.config, len(hidden)
    context = slow_norm(config, hidden[:, form.width :] @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    block = heads.num_heads + (not form.from_anchor)
    x = heads.embedding[torch.tensor([root, *[form.mask_id] * (block - 1)])]
    places = torch.arange(m + block)
    ahead = places - places[m:, None]  # (block, M + block)
    for i, (causal, window) in enumerate(zip(form.causal, form.windows, strict=True)):
        layer, sees = Layer(heads, i), torch.ones_like(ahead, dtype=torch.bool)
        if causal:
            sees &= ahead <= 0
        if window:
            sees &= ahead > -window
        reads, behind = around(heads, i, "attention_conv", slow_norm(config, x, layer["input_layernorm"]))
        x = x + behind(slow_attention(layer, reads, places[m:], torch.cat([context, reads]), places, sees))
        reads, behind = around(heads, i, "mlp_conv", slow_norm(config, x, layer["post_attention_layernorm"]))
        x = x + behind(slow_mlp(layer, reads))
    return x


def slow_dflash(heads: DFlashHeads, text, hidden, root, path) -> list[int]:
    row = slow_rows(heads, hidden, root)[len(path) + (not heads.form.from_anchor)]
    return known_in_order(heads, heads.lm_head @ slow_norm(heads.config, row, heads.weights["norm.weight"]))


def slow_path(heads, hidden, root, path, around=plainly) -> list[tuple[torch.Tensor, int]]:
    """The normed row of each guess as far as that behind ``path``, and the token before it."""
    normed = slow_norm(heads.config, slow_rows(heads, hidden, root, around), heads.weights["norm.weight"])
    return list(zip(normed[int(not heads.form.from_anchor) :], [root, *path], strict=False))


def slow_guesses(heads, hidden, root, path) -> Iterator[torch.Tensor]:
    """Logits of each guess as far as that behind ``path``."""
    w = heads.weights
    for row, token in slow_path(heads, hidden, root, path):
        known = w["markov_head.markov_w1.weight"][token]
        yield heads.lm_head @ row + w["markov_head.markov_w2.weight"] @ known


def slow_dspark(heads, text, hidden, root, path) -> list[int]:
    *_, logits = slow_guesses(heads, hidden, root, path)
    return known_in_order(heads, logits)


def slow_taps(heads, i, name, reads):
    """The two convolutions around a layer's attention or MLP, whose kernels come of what the first one reads."""
    base, projection = (
        heads.weights[f"layers.{i}.{name}.{part}"] for part in ("base_kernel", "kernel_projection.weight")
    )
    taps, group = base.shape[1], torch.arange(WIDTH) // GROUP
    changes = [(projection @ v).view(2, taps, -1) for v in reads]

    def convolved(side, rows):
        return torch.stack([
            sum((base[side, o] + changes[t][side, o][group]) * rows[t - o] for o in range(min(taps, t + 1)))
            for t in range(len(rows))
        ])  # fmt: skip

    return convolved(0, reads), functools.partial(convolved, 1)


def slow_dflash2(heads, text, hidden, root, path) -> list[int]:
    w = {name.removeprefix("candidate_selector."): weight for name, weight in heads.weights.items()}
    row, token = slow_path(heads, hidden, root, path, slow_taps)[len(path)]
    own = heads.lm_head @ row
    gate = w["predecessor_codebook"][token] * (w["hidden_projection.weight"] @ row)
    scores = {b: float(own[b] + gate @ w["successor_codebook"][b]) for b in in_order(own)[: heads.kept]}
    return sorted(scores, key=lambda b: (-scores[b], b))
