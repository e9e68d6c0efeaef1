"""Drafters that guess all depths in one pass, the slow way: over the whole text and the masks behind it, row by row.

M tokens of a text so far
"""

import functools
from collections.abc import Iterator

import torch

from treeopt.runtime.drafters.dflash import DFlashHeads
from treeopt.runtime.drafters.parallel import PardModel, PEagleHeads

from .random_drafters import GROUP, MASK, RANK, THETA
from .slow_drafters import in_order, slow_norm

WIDTH = 32


def rotated(v: torch.Tensor, theta: float) -> torch.Tensor:
    """(M, D) at the positions 0...M-1."""
    half = v.shape[1] // 2
    angle = torch.arange(len(v))[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) * 2 / v.shape[1])
    low, high = v[:, :half], v[:, half:]
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], 1)


def slow_peagle(heads: PEagleHeads, text, hidden, root, path) -> list[int]:
    """All tokens in the order of the guess as deep as ``path``, whose tokens do not matter: one pass over text and masks."""
    form, config, weights = heads.form, heads.layer.config, heads.weights

    def norm(v, name):
        return slow_norm(heads.layer, v, weights[f"{name}.weight"])

    def project(rows, name, part=slice(None)):
        bias = weights.get(f"{name}_proj.bias")
        made = rows @ weights[f"{name}_proj.weight"][part].T
        return made if bias is None else made + bias[part]

    def attended(rows, at):
        out = []
        for h in range(4):
            mine, theirs = (slice(8 * n, 8 * n + 8) for n in (h, h * config.num_key_value_heads // 4))
            query, key = project(rows, f"{at}.q", mine), project(rows, f"{at}.k", theirs)
            if form.head_norms:
                query, key = norm(query, f"{at}.q_norm"), norm(key, f"{at}.k_norm")
            query, key = (rotated(v, config.rope_parameters["rope_theta"]) for v in (query, key))
            ahead = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
            scores = (query @ key.T / 8**0.5).masked_fill(ahead, -torch.inf)
            out.append(scores.softmax(1) @ project(rows, f"{at}.v", theirs))
        return project(torch.cat(out, 1), f"{at}.o")

    masks = len(path)
    states = torch.cat([hidden[:, form.width :], weights["mask_hidden"].flatten().expand(masks, -1)])
    if form.fuse_norm:
        states = norm(states, "input_norm")
    if form.state_norms:
        parts = states.split(form.width, 1)
        states = torch.cat([norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], 1)
    fused = states @ weights["fc.weight"].T + (weights["fc.bias"] if form.fc_bias else 0)
    embedded = heads.embedding[torch.tensor([*text[1:], root, *[MASK] * masks])]
    x = norm(fused, "layers.0.hidden_norm") if form.before_residual else fused
    for i in range(config.num_hidden_layers):
        at = f"layers.{i}"
        reads = norm(x, f"{at}.input_layernorm") if i else torch.cat(
            [norm(embedded, f"{at}.input_layernorm"), norm(fused, f"{at}.hidden_norm")], 1
        )  # fmt: skip
        x = x + attended(reads, f"{at}.self_attn")
        z = norm(x, f"{at}.post_attention_layernorm")
        gate, up = (project(z, f"{at}.mlp.{name}") for name in ("gate", "up"))
        x = x + project(torch.nn.functional.silu(gate) * up, f"{at}.mlp.down")
    order = in_order(heads.lm_head @ norm(x[-1], "norm"))
    return order if heads.token_ids is None else [int(heads.token_ids[i]) for i in order]


@torch.inference_mode()
def slow_pard(drafter: PardModel, text, hidden, root, path) -> list[int]:
    """The same for PARD, by a pass without a cache; none beyond its context."""
    model, tokens = drafter.model, [*text, root, *[MASK] * len(path)]
    if len(tokens) > model.context:
        return []
    ids = torch.tensor([tokens]).clamp_max(model.vocab_size - 1)
    states = model.decoder(input_ids=ids, use_cache=False).last_hidden_state
    return in_order(model.lm_head(states[0, -1])[: drafter.vocab_size])


class Layer:
    """A layer of the drafter, with the names that `slow_drafters` reads."""

    def __init__(self, heads: DFlashHeads, i: int) -> None:
        self.config = heads.config
        mine = f"layers.{i}."
        self.weights = {
            "layers.0." + name.removeprefix(mine): weight
            for name, weight in heads.weights.items()
            if name.startswith(mine)
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[f"layers.0.{name}.weight"]


def turned(v: torch.Tensor, position: int) -> torch.Tensor:
    half = len(v) // 2
    angle = position * THETA ** (-torch.arange(half, dtype=torch.float64) * 2 / len(v))
    low, high = v[:half], v[half:]
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()])


def slow_attention(layer: Layer, query: torch.Tensor, at: int, seen: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    width, groups, out = 6, 2, []
    for h in range(4):
        mine, theirs = (slice(n * width, (n + 1) * width) for n in (h, h // groups))
        q = turned(slow_norm(layer, layer["self_attn.q_proj"][mine] @ query, layer["self_attn.q_norm"]), at)
        keys = [slow_norm(layer, layer["self_attn.k_proj"][theirs] @ v, layer["self_attn.k_norm"]) for _, v in seen]
        scores = torch.stack([turned(key, place) @ q for key, (place, _) in zip(keys, seen, strict=True)]) / width**0.5
        values = torch.stack([layer["self_attn.v_proj"][theirs] @ v for _, v in seen])
        out.append(scores.softmax(0) @ values)
    return layer["self_attn.o_proj"] @ torch.cat(out)


def plainly(heads, i, name, reads):
    """What lies around attention or MLP: nothing."""
    return reads, lambda made: made


def slow_rows(heads: DFlashHeads, hidden: torch.Tensor, root: int, around=plainly) -> list[torch.Tensor]:
    """The last layer's row of each place of the block; made once for all nodes of a step, whose paths it does not see."""
    known, key = heads.__dict__.setdefault("slow_rows", {}), (around, root, hidden.numpy().tobytes())
    if key not in known:
        known[key] = rows_by_loops(heads, hidden, root, around)
    return known[key]


def rows_by_loops(heads, hidden, root, around) -> list[torch.Tensor]:
    """By loops over rows, layers and heads."""
    form, weights, m = heads.form, heads.weights, len(hidden)
    context = [slow_norm(heads, weights["fc.weight"] @ h[32:], weights["hidden_norm.weight"]) for h in hidden]
    block = heads.num_heads + (not form.from_anchor)
    x = [heads.embedding[token] for token in [root, *[form.mask_id] * (block - 1)]]
    for i, (causal, window) in enumerate(zip(form.causal, form.windows, strict=True)):
        layer = Layer(heads, i)
        reads, behind = around(heads, i, "attention_conv", [slow_norm(layer, v, layer["input_layernorm"]) for v in x])
        sources = [*enumerate(context), *((m + j, v) for j, v in enumerate(reads))]
        made = []
        for j in range(block):
            seen = [
                (place, v)
                for place, v in sources
                if not (causal and place > m + j) and not (window and m + j - place >= window)
            ]
            made.append(slow_attention(layer, reads[j], m + j, seen))
        x = [v + added for v, added in zip(x, behind(made), strict=True)]
        reads = [slow_norm(layer, v, layer["post_attention_layernorm"]) for v in x]
        reads, behind = around(heads, i, "mlp_conv", reads)
        gate, up, down = (layer[f"mlp.{name}_proj"] for name in ("gate", "up", "down"))
        made = [down @ (torch.nn.functional.silu(gate @ v) * (up @ v)) for v in reads]
        x = [v + added for v, added in zip(x, behind(made), strict=True)]
    return x


def slow_dflash(heads: DFlashHeads, text, hidden, root, path) -> list[int]:
    rows = slow_rows(heads, hidden, root)
    row = rows[len(path) + (not heads.form.from_anchor)]
    order = in_order(heads.lm_head @ slow_norm(heads, row, heads.weights["norm.weight"]))
    return order if heads.token_ids is None else [int(heads.token_ids[i]) for i in order]


def slow_path(heads, hidden, root, path, around=None) -> list[tuple[torch.Tensor, int]]:
    """The normed row of each guess as far as that behind ``path``, and the token before it."""
    rows = slow_rows(heads, hidden, root, *([around] if around else []))
    normed = [slow_norm(heads, row, heads.weights["norm.weight"]) for row in rows]
    return list(zip(normed[not heads.form.from_anchor :], [root, *path], strict=False))


def slow_guesses(heads, hidden, root, path) -> Iterator[torch.Tensor]:
    """Logits of each guess as far as that behind ``path``."""
    w = heads.weights
    state = torch.zeros(RANK, dtype=torch.float64)
    for row, token in slow_path(heads, hidden, root, path):
        latent = known = w["markov_head.markov_w1.weight"][token]
        if "markov_head.gate_proj.weight" in w:
            gate = w["markov_head.gate_proj.weight"] @ torch.cat([row, known]) + w["markov_head.gate_proj.bias"]
            latent = known / (1 + (-gate).exp())
        if "markov_head.joint_proj.weight" in w:
            joint = (
                w["markov_head.joint_proj.weight"] @ torch.cat([state, known, row]) + w["markov_head.joint_proj.bias"]
            )
            stays = 1 / (1 + (-joint[:RANK]).exp())
            state = stays * state + (1 - stays) * joint[RANK : 2 * RANK].tanh()
            latent = joint[2 * RANK :].tanh()
        yield heads.lm_head @ row + w["markov_head.markov_w2.weight"] @ latent


def slow_dspark(heads, text, hidden, root, path) -> list[int]:
    *_, logits = slow_guesses(heads, hidden, root, path)
    order = in_order(logits)
    return order if heads.token_ids is None else [int(heads.token_ids[i]) for i in order]


def slow_taps(heads, i, name, reads):
    """The two convolutions around a layer's attention or MLP, whose kernels come of what the first one reads."""
    base, projection = (
        heads.weights[f"layers.{i}.{name}.{part}"] for part in ("base_kernel", "kernel_projection.weight")
    )
    taps, group = base.shape[1], torch.arange(WIDTH) // GROUP
    changes = [(projection @ v).view(2, taps, -1) for v in reads]

    def convolved(side, rows):
        return [
            sum((base[side, o] + changes[t][side, o][group]) * rows[t - o] for o in range(min(taps, t + 1)))
            for t in range(len(rows))
        ]

    return convolved(0, reads), functools.partial(convolved, 1)


def slow_dflash2(heads, text, hidden, root, path) -> list[int]:
    w = {name.removeprefix("candidate_selector."): weight for name, weight in heads.weights.items()}
    row, token = slow_path(heads, hidden, root, path, slow_taps)[len(path)]
    own = heads.lm_head @ row
    gate = w["predecessor_codebook"][token] * (w["hidden_projection.weight"] @ row)
    scores = {b: float(own[b] + gate @ w["successor_codebook"][b]) for b in in_order(own)[: heads.kept]}
    return sorted(scores, key=lambda b: (-scores[b], b))
