"""Drafters the slow way, one node at a time and without any cache, and what every fast one must agree with.

M tokens of a text so far · d width
"""

from __future__ import annotations

import random

import numpy as np
import torch

from treeopt.records.trace import MISS, NO_TRIAL, End
from treeopt.runtime.drafters.protocol import Answer, TreeTensors
from treeopt.trees.tree import Tree

from .conftest import VOCABULARY, tiny_model

CPU = torch.device("cpu")
TREES = [
    Tree.chain(3),
    Tree.dense([3, 2]),
    Tree.from_choices([[0], [2], [5], [0, 1], [2, 0], [2, 3], [0, 1, 0], [2, 3, 1], [2, 0, 2], [2, 3, 1, 0]]),
    Tree.from_choices([[1], [1, 0], [1, 0, 4], [1, 0, 4, 0], [1, 0, 4, 1]]),
    Tree.chain(0),
]


def slow_layer(layer, x: torch.Tensor, *, normed: bool) -> torch.Tensor:
    """A Llama layer over (M, d) vectors at the positions 0...M-1, written out: the last row's output, (d,)."""
    config, weights = layer.config, {name: weight.detach() for name, weight in layer.weights.items()}

    def norm(v, name):
        return v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * weights[name]

    def rotated(v, positions):  # (n, hd) at (n,)
        half = config.head_dim // 2
        theta = config.rope_parameters["rope_theta"]
        angle = positions[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) * 2 / config.head_dim)
        a, b = v[:, :half], v[:, half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 1)

    def of(name):
        return weights[f"layers.0.{name}.weight"]

    inputs = norm(x, "layers.0.input_layernorm.weight") if normed else x
    width, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    positions, out = torch.arange(len(x), dtype=torch.float64), []
    for h in range(config.num_attention_heads):
        mine, theirs = (slice(h * width, (h + 1) * width), slice(h // groups * width, (h // groups + 1) * width))
        query = rotated(inputs[-1:] @ of("self_attn.q_proj")[mine].T, positions[-1:])[0]
        keys = rotated(inputs @ of("self_attn.k_proj")[theirs].T, positions)
        scores = keys @ query / width**0.5
        values = inputs @ of("self_attn.v_proj")[theirs].T
        out.append(scores.softmax(0) @ values)
    y = x[-1] + of("self_attn.o_proj") @ torch.cat(out)
    z = norm(y, "layers.0.post_attention_layernorm.weight")
    inner = torch.nn.functional.silu(of("mlp.gate_proj") @ z) * (of("mlp.up_proj") @ z)
    y = y + of("mlp.down_proj") @ inner
    return norm(y, "norm.weight") if normed else y


def slow_hydra(heads, text: list[int], hidden: torch.Tensor, root: int, path: list[int]) -> list[int]:
    """All tokens in the order in which the head below ``path`` guesses them, after a text of states (M, d)."""
    state = hidden[-1] if heads.prefix_layer is None else slow_layer(heads.prefix_layer, hidden, normed=True)
    head = heads.heads[len(path)]
    x = torch.cat([state, *(heads.embedding[token] for token in [root, *path])])
    y = head.res_connection.weight @ x + head.res_connection.bias
    y = y + torch.nn.functional.silu(head.linear.weight @ x + head.linear.bias)
    for block in head.blocks:
        y = y + torch.nn.functional.silu(block.weight @ y + block.bias)
    return in_order(head.lm_head.weight @ y + head.lm_head.bias)


def slow_eagle(heads, text: list[int], hidden: torch.Tensor, root: int, path: list[int]) -> list[int]:
    """The same for EAGLE: the whole text and the path again for every guess."""
    pairs = [(token, state) for token, state in zip([*text[1:], root], hidden, strict=True)]
    for token in [*path, None]:
        x = torch.stack([torch.cat([heads.embedding[token], state]) for token, state in pairs])
        x = x @ heads.fc.weight.T + (0 if heads.fc.bias is None else heads.fc.bias)
        state = slow_layer(heads.layer, x, normed=False)
        pairs.append((token, state))
    return in_order(heads.lm_head @ state)


def in_order(logits: torch.Tensor) -> list[int]:
    scores = logits.float().tolist()
    return sorted(range(len(scores)), key=lambda token: (-scores[token], token))


class Text:
    """Random tokens and the hidden states that a small model has for them."""

    def __init__(self, model, rng: random.Random, length: int) -> None:
        self.tokens = [rng.randrange(VOCABULARY) for _ in range(length)]
        self.hidden = model.model(torch.tensor([self.tokens])).last_hidden_state[0]


def pad_rows(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@torch.inference_mode()
def check_proposals(heads, slow, *, seed: int, steps: int = 6) -> None:
    """Ragged rows that come and go, plain steps between tree steps: every node is what the slow way says."""
    rng, model, trees = random.Random(seed), tiny_model(), [tree for tree in TREES if tree.depth <= heads.num_heads]
    draft = heads.start(4, 90)
    rows: list[tuple[Text, int]] = []  # text and how much of it is committed

    def fill(prompts: list[int]) -> None:
        new = [(Text(model, rng, 60), length) for length in prompts]
        draft.prefill([t.tokens[:n] for t, n in new], pad_rows([t.hidden[:n] for t, n in new]))
        rows.extend(new)

    fill([7, 1, 12])
    for step in range(steps):
        tree = trees[(seed + step) % len(trees)]
        roots = torch.tensor([text.tokens[n] for text, n in rows])
        if step % 3 != 2:  # a plain step does not draft
            parts: list[str] = []
            tokens = draft.propose(TreeTensors.of(tree, CPU), roots, parts.append)
            assert parts == [f"draft {d}" for d in range(tree.depth)]
            for (text, n), row in zip(rows, tokens.tolist(), strict=True):
                check_row(heads, slow, tree, text, n, row)
        counts = [rng.choice([1, 1, 2, 4]) for _ in rows]
        parts_of = [slice(n, n + count) for (_, n), count in zip(rows, counts, strict=True)]
        tokens = [t.tokens[p] for (t, _), p in zip(rows, parts_of, strict=True)]
        # The pass had rows that are not accepted, before and behind those that are.
        width = 9 if max(counts) > 1 else 1
        paths = [[0, *sorted(rng.sample(range(1, width), count - 1))] for count in counts]
        hidden = torch.full((len(rows), width, rows[0][0].hidden.shape[1]), torch.nan, dtype=torch.float64)
        for states, path, (text, _), part in zip(hidden, paths, rows, parts_of, strict=True):
            states[path] = text.hidden[part]
        draft.extend(tokens, hidden, paths)
        rows[:] = [(text, n + count) for (text, n), count in zip(rows, counts, strict=True)]
        if step == 1:
            order = [2, 0]
            draft.keep(order)
            rows[:] = [rows[i] for i in order]
            fill([3, 9])
        if step == 3:
            order = [0, 3, 2]
            draft.keep(order)
            rows[:] = [rows[i] for i in order]
    draft.clear()
    rows.clear()
    fill([5])
    tokens = draft.propose(TreeTensors.of(trees[0], CPU), torch.tensor([rows[0][0].tokens[5]]), lambda _: None)
    check_row(heads, slow, trees[0], *rows[0], tokens[0].tolist())


def check_row(heads, slow, tree, text, n, row) -> None:
    root, orders = text.tokens[n], {}  # of the children of one node
    assert row[0] == root
    for node in range(1, len(tree)):
        parent = int(tree.parents[node])
        path: list[int] = []  # tokens from below the root to the parent
        while parent:
            path.insert(0, row[parent])
            parent = int(tree.parents[parent])
        if tuple(path) not in orders:
            orders[tuple(path)] = slow(heads, text.tokens[:n], text.hidden[:n], root, path)
        assert row[node] == orders[tuple(path)][tree.ranks[node]], (node, path)


@torch.inference_mode()
def check_ranks(heads, slow, *, seed: int, top_k: int = 20) -> None:
    """Answers of many lengths and ends together, against the order in which the slow way has the true token."""
    rng, model = random.Random(seed), tiny_model()
    answers, expected = [], []
    for prompt, n, end in [(4, 6, End.EOS), (1, 9, End.LIMIT), (11, 1, End.LIMIT), (2, 2, End.EOS), (6, 4, End.LIMIT)]:
        text = Text(model, rng, prompt + n)
        first = 0 if heads.reads_prompt else prompt - 1
        answers.append(Answer(text.tokens[:prompt], text.tokens[prompt:], end, text.hidden[first : prompt + n - 1]))
        table = np.zeros((n, heads.num_heads), dtype=np.int16)
        for t in range(n):
            for k in range(1, heads.num_heads + 1):
                at = prompt + t  # tokens before the root
                if t == n - 1 or (t + k >= n and end is not End.EOS):
                    table[t, k - 1] = NO_TRIAL
                elif t + k >= n:
                    table[t, k - 1] = MISS
                else:
                    true = text.tokens[at + 1 : at + k]
                    order = slow(heads, text.tokens[:at], text.hidden[:at], text.tokens[at], true)
                    rank = order.index(text.tokens[at + k])
                    table[t, k - 1] = rank if rank < top_k else MISS
        expected.append(table)
    found = heads.ranks(answers, top_k)
    assert [table.dtype for table in found] == [np.int16] * len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert sum(int((table >= 0).sum()) for table in expected) > 5  # enough of them are trials
    assert heads.ranks([], top_k) == []
