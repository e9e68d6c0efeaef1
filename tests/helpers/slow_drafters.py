"""Drafters the slow way, one node at a time and without any cache, and what every fast one must agree with.

M tokens of a text so far · d width
"""

import random
from functools import cache, partial

import numpy as np
import torch

from tests.conftest import VOCABULARY, tiny_model
from treeopt.records.trace import MISS, NO_TRIAL, End
from treeopt.runtime.drafters.protocol import GivenText, TreeTensors
from treeopt.runtime.drafters.states import Heads
from treeopt.trees.tree import Tree

CPU = torch.device("cpu")
TREES = [
    Tree.chain(3),
    Tree.dense([3, 2]),
    Tree.from_choices([[0], [2], [5], [0, 1], [2, 0], [2, 3], [0, 1, 0], [2, 3, 1], [2, 0, 2], [2, 3, 1, 0]]),
    Tree.from_choices([[1], [1, 0], [1, 0, 4], [1, 0, 4, 0], [1, 0, 4, 1]]),
    Tree.chain(0),
]


@cache
@torch.inference_mode(False)
def small_model():
    return tiny_model()


def config_of(heads):
    """The sizes of a drafter's layers."""
    return heads.config if hasattr(heads, "config") else heads.layer.config


class Layer:
    """A layer of a drafter: its weights by their names within it, and its sizes."""

    def __init__(self, heads, i: int = 0) -> None:
        self.config, at = config_of(heads), f"layers.{i}."
        self.weights = {name.removeprefix(at): w.detach() for name, w in heads.weights.items() if name.startswith(at)}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[f"{name}.weight"]


def slow_norm(config, v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * weight.detach()


def rotated(v: torch.Tensor, places: torch.Tensor, theta: float) -> torch.Tensor:
    """(n, D) vectors, turned as at places (n,)."""
    half = v.shape[1] // 2
    angle = places[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) * 2 / v.shape[1])
    low, high = v[:, :half], v[:, half:]
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], 1)


def slow_attention(layer: Layer, queries, at, rows, places, sees=None) -> torch.Tensor:
    """(Q, d) what attention makes of queries (Q, ...) at places (Q,) that see rows (M, ...) at theirs, by default those before."""
    config, out = layer.config, []
    width, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    sees = places <= at[:, None] if sees is None else sees

    def project(rows, name, part=slice(None)):
        made = rows @ layer[f"self_attn.{name}_proj"][part].T
        bias = layer.weights.get(f"self_attn.{name}_proj.bias")
        made = made if bias is None else made + bias[part]
        norm = layer.weights.get(f"self_attn.{name}_norm.weight")
        return made if norm is None else slow_norm(config, made, norm)

    for h in range(config.num_attention_heads):
        mine, theirs = (slice(n * width, (n + 1) * width) for n in (h, h // groups))
        theta = config.rope_parameters["rope_theta"]
        query = rotated(project(queries, "q", mine), at, theta)
        scores = query @ rotated(project(rows, "k", theirs), places, theta).T / width**0.5
        out.append(scores.masked_fill(~sees, -torch.inf).softmax(1) @ project(rows, "v", theirs))
    return project(torch.cat(out, 1), "o")


def slow_mlp(layer: Layer, z: torch.Tensor) -> torch.Tensor:
    gate, up, down = (layer[f"mlp.{name}_proj"] for name in ("gate", "up", "down"))
    return (torch.nn.functional.silu(z @ gate.T) * (z @ up.T)) @ down.T


def behind_attention(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    """y and what the layer adds to it behind its attention."""
    return y + slow_mlp(layer, slow_norm(layer.config, y, layer["post_attention_layernorm"]))


def slow_layer(layer: Layer, reads: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """(d,) the last row's output of a layer whose attention reads (M, ...) rows, one after the other."""
    places = torch.arange(len(reads))
    return behind_attention(layer, residual + slow_attention(layer, reads[-1:], places[-1:], reads, places)[0])


def slow_hydra(heads, text: list[int], hidden: torch.Tensor, root: int, path: list[int]) -> list[int]:
    """All tokens in the order in which the head below ``path`` guesses them, after a text of states (M, d)."""

    def made(name: str, read: torch.Tensor) -> torch.Tensor:
        return heads.weights[f"{name}.weight"] @ read + heads.weights[f"{name}.bias"]

    k = len(path)
    x = torch.cat([hidden[-1], *(heads.embedding[token] for token in [root, *path])])
    x = made(f"hydra_mlp.{k}.0.res_connection", x) + torch.nn.functional.silu(made(f"hydra_mlp.{k}.0.linear", x))
    for layer in range(1, heads.num_layers):
        x = x + torch.nn.functional.silu(made(f"hydra_mlp.{k}.{layer}.linear", x))
    return in_order(made(f"hydra_lm_head.{k}", x))


def slow_eagle(heads, text: list[int], hidden: torch.Tensor, root: int, path: list[int]) -> list[int]:
    """The same for EAGLE: the whole text and the path again for every guess."""
    layer, pairs = Layer(heads), list(zip([*text[1:], root], hidden, strict=True))
    for token in [*path, None]:
        x = torch.stack([torch.cat([heads.embedding[token], state]) for token, state in pairs])
        x = x @ heads.fc.weight.T + (0 if heads.fc.bias is None else heads.fc.bias)
        state = slow_layer(layer, x, x[-1])
        pairs.append((token, state))
    return in_order(heads.lm_head @ state)


def slow_eagle3(heads, text: list[int], hidden: torch.Tensor, root: int, path: list[int]) -> list[int]:
    """The same for EAGLE-3; tokens that it does not know are left out."""
    return known_in_order(heads, slow_eagle3_logits(heads, text, hidden, root, path))


def slow_eagle3_logits(heads, text: list[int], hidden: torch.Tensor, root: int, path: list[int]) -> torch.Tensor:
    """(Vt,) logits of the guess behind ``path``, in every form."""
    form, layer, last = heads.form, Layer(heads), heads.weights["norm.weight"]
    norm = partial(slow_norm, layer.config)
    pairs = list(zip([*text[1:], root], slow_fused(heads, hidden[:, form.width :]), strict=True))
    for token in [*path, None]:
        normed = [norm(state, layer["hidden_norm"]) for _, state in pairs]
        embedded = [norm(heads.embedding[token], layer["input_layernorm"]) for token, _ in pairs]
        inputs = torch.stack([torch.cat(pair) for pair in zip(embedded, normed, strict=True)])
        state = slow_layer(layer, inputs, normed[-1] if form.before_residual else pairs[-1][1])
        pairs.append((token, norm(state, last) if form.normed_feedback else state))
    return heads.lm_head @ norm(state, last)


def slow_fused(heads, states: torch.Tensor) -> torch.Tensor:
    """(M, d) what EAGLE-3 and P-EAGLE make of the target's states between its layers."""
    form, weights, norm = heads.form, heads.weights, partial(slow_norm, config_of(heads))
    if form.fuse_norm:
        states = norm(states, weights["input_norm.weight"])
    if form.state_norms:
        parts = states.split(form.width, 1)
        states = torch.cat([norm(part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], 1)
    return states @ weights["fc.weight"].T + (weights["fc.bias"] if form.fc_bias else 0)


def in_order(logits: torch.Tensor) -> list[int]:
    scores = logits.float().tolist()
    return sorted(range(len(scores)), key=lambda token: (-scores[token], token))


def known_in_order(heads, logits: torch.Tensor) -> list[int]:
    """The target's tokens in the order of the logits of those that the drafter knows."""
    order = in_order(logits)
    return order if heads.token_ids is None else [int(heads.token_ids[i]) for i in order]


@torch.inference_mode()
def slow_model(drafter, text: list[int], hidden: torch.Tensor, root: int, path: list[int]) -> list[int]:
    """The same for a draft model, by a pass without a cache; none after a text beyond its context."""
    model, tokens = drafter.model, [*text, root, *path]
    if len(tokens) > model.context:
        return []
    ids = torch.tensor([tokens]).clamp_max(model.vocab_size - 1)
    states = model.decoder(input_ids=ids, use_cache=False).last_hidden_state
    return in_order(model.lm_head(states[0, -1])[: drafter.vocab_size])


class Text:
    """Random tokens and the hidden states that a small model has for them, with those that the drafter reads between."""

    def __init__(self, model, rng: random.Random, length: int, drafter, letters: int) -> None:
        self.tokens = [rng.randrange(letters) for _ in range(length)]
        if not isinstance(drafter, Heads):
            self.hidden = torch.zeros(length, 5, dtype=torch.float64)
            return
        output = model.model(torch.tensor([self.tokens]), output_hidden_states=True)
        layers = getattr(getattr(drafter, "form", None), "layers", ())
        self.hidden = torch.cat([output.last_hidden_state[0], *(output.hidden_states[i][0] for i in layers)], 1)


def pad_rows(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@torch.inference_mode()
def check_proposals(heads, slow, *, seed: int, steps: int = 6, trees=TREES, letters: int = VOCABULARY) -> None:
    """Ragged rows that come and go, plain steps between tree steps: every node is what the slow way says, -1 for nothing."""
    rng, model, trees = random.Random(seed), small_model(), [tree for tree in trees if tree.depth <= heads.num_heads]
    draft = heads.start(4, 90)
    rows: list[tuple[Text, int]] = []  # text and how much of it is committed

    def fill(prompts: list[int]) -> None:
        new = [(Text(model, rng, 60, heads, letters), length) for length in prompts]
        draft.prefill([t.tokens[:n] for t, n in new], pad_rows([t.hidden[:n] for t, n in new]))
        rows.extend(new)

    fill([7, 1, 12])
    for step in range(steps):
        tree = trees[(seed + step) % len(trees)]
        roots = torch.tensor([text.tokens[n] for text, n in rows])
        if step % 3 != 2:  # a plain step does not draft
            tokens = draft.propose(TreeTensors.of(tree, CPU), roots)
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
    tokens = draft.propose(TreeTensors.of(trees[0], CPU), torch.tensor([rows[0][0].tokens[5]]))
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
        order, rank = orders[tuple(path)], tree.ranks[node]
        assert row[node] == (order[rank] if rank < len(order) else -1), (node, path)


@torch.inference_mode()
def check_ranks(heads, slow, *, seed: int, top_k: int = 20, letters: int = VOCABULARY, enough: int = 5) -> None:
    """Answers of many lengths and ends together, against the order in which the slow way has the true token."""
    rng, model = random.Random(seed), small_model()
    answers, expected = [], []
    for prompt, n, end in [(4, 6, End.EOS), (1, 9, End.LIMIT), (11, 1, End.LIMIT), (2, 2, End.EOS), (6, 4, End.LIMIT)]:
        text = Text(model, rng, prompt + n, heads, letters)
        first = 0 if heads.reads_prompt else prompt - 1
        answers.append(GivenText(text.tokens[:prompt], text.tokens[prompt:], end, text.hidden[first : prompt + n - 1]))
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
                    true_token = text.tokens[at + k]
                    rank = order.index(true_token) if true_token in order else top_k
                    table[t, k - 1] = rank if rank < top_k else MISS
        expected.append(table)
    found = heads.ranks(answers, top_k)
    assert [table.dtype for table in found] == [np.int16] * len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert sum(int((table >= 0).sum()) for table in expected) > enough  # of them are trials
    assert heads.ranks([], top_k) == []
