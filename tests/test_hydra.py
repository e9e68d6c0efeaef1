"""Hydra and Hydra++ heads against the slow way, one node at a time over the whole text."""

import pytest
import torch

from treeopt.runtime.drafters import states as states_module
from treeopt.runtime.drafters.hydra import HydraHeads
from treeopt.runtime.ranking import top_candidates

from .conftest import tiny_model
from .slow_drafters import check_proposals, check_ranks, slow_hydra


def random_heads(num_heads=3, num_layers=1, *, prefix=False, seed=0) -> HydraHeads:
    """Random weights all over, the norms' too."""
    model = tiny_model()
    torch.manual_seed(seed)
    heads = HydraHeads.untrained(
        model.model.embed_tokens.weight,
        model.lm_head.weight,
        num_heads,
        num_layers,
        like=model.config if prefix else None,
    )
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.3)
    return heads.eval().requires_grad_(False)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize(("num_layers", "num_heads"), [(1, 4), (3, 2)])
def test_every_node_is_guessed_as_for_it_alone(prefix, num_layers, num_heads):
    """A head deeper than there are is -1; rows are ragged, come and go, and plain steps draft nothing."""
    check_proposals(random_heads(num_heads, num_layers, prefix=prefix), slow_hydra, seed=num_layers)


@pytest.mark.parametrize("prefix", [False, True])
def test_ranks_are_those_of_the_slow_way(prefix, monkeypatch):
    heads = random_heads(3, 2, prefix=prefix)
    check_ranks(heads, slow_hydra, seed=0)
    monkeypatch.setattr(states_module, "FEWEST_STATES", 2)
    monkeypatch.setattr(states_module, "LOGITS_AT_ONCE", 0)
    monkeypatch.setattr(states_module, "TOKENS_AT_ONCE", 12)
    check_ranks(heads, slow_hydra, seed=1)


def test_plain_hydra_needs_no_prompt_and_hydra_plus_plus_does():
    plain, prefixed = random_heads(), random_heads(prefix=True)
    assert (plain.kind, plain.reads_prompt) == ("hydra", False)
    assert (prefixed.kind, prefixed.reads_prompt) == ("hydra++", True)
    hidden = torch.randn(2, 5, plain.width, dtype=torch.float64)
    assert plain.prefix(hidden) is hidden


@pytest.mark.parametrize("num_layers", [1, 4])
def test_untrained_heads_are_the_targets_own_head(num_layers):
    """Whatever is guessed before: the path's part of the first block is zero."""
    model = tiny_model()
    bias = torch.randn(model.lm_head.out_features, dtype=torch.float64)
    heads = HydraHeads.untrained(
        model.model.embed_tokens.weight, model.lm_head.weight, 3, num_layers, lm_head_bias=bias
    )
    hidden = torch.randn(50, heads.width, dtype=torch.float64)
    expected = hidden @ model.lm_head.weight.T + bias
    for i in range(3):
        path = torch.randint(heads.vocab_size, (50, i + 1))
        torch.testing.assert_close(heads.logits(hidden, path, i), expected, rtol=1e-12, atol=1e-12)
    assert heads.embedding.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_an_untrained_prefix_layer_keeps_the_order_of_the_targets_head():
    """It ends in a norm: its states are the target's but for a factor above 0, which hidden_rms brings near 1."""
    model = tiny_model()
    tokens = torch.randint(model.config.vocab_size, (3, 20))
    hidden = model.model(tokens).last_hidden_state
    usual = float(hidden.pow(2).mean().sqrt())
    heads = HydraHeads.untrained(
        model.model.embed_tokens.weight, model.lm_head.weight, 2, 4, like=model.config, hidden_rms=usual
    )
    made = heads.prefix(hidden)
    factors = (made / hidden).flatten(0, 1)  # (n, d)
    torch.testing.assert_close(factors, factors[:, :1].expand_as(factors), rtol=1e-6, atol=0.0)
    assert bool(((factors > 0.8) & (factors < 1.25)).all())
    own = model.lm_head(hidden).flatten(0, 1)
    guessed = heads.logits(made.flatten(0, 1), tokens.flatten()[:, None], 0)
    assert torch.equal(top_candidates(guessed, 20), top_candidates(own, 20))


@pytest.mark.parametrize("prefix", [False, True])
def test_heads_can_be_trained(prefix):
    """Gradients reach every weight after one step of each, and neither the embeddings nor the target."""
    model = tiny_model()
    heads = HydraHeads.untrained(
        model.model.embed_tokens.weight, model.lm_head.weight, 2, 2, like=model.config if prefix else None
    )
    tokens = torch.randint(model.config.vocab_size, (2, 9))
    hidden = model.model(tokens).last_hidden_state
    optimizer = torch.optim.SGD(heads.parameters(), lr=0.5)
    losses = []
    for _ in range(4):
        states = heads.prefix(hidden)[:, :6].flatten(0, 1)
        path = torch.stack([tokens[:, 1:7], tokens[:, 2:8]], 2).flatten(0, 1)
        loss = sum(
            torch.nn.functional.cross_entropy(
                heads.logits(states, path[:, : i + 1], i), tokens[:, i + 2 : i + 8].flatten()
            )
            for i in range(2)
        )
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0]
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in heads.parameters())
    assert not heads.embedding.requires_grad
    assert "embedding" not in heads.state_dict()


def test_rotary_frequencies_keep_their_precision():
    """In bfloat16 the position 1000 would be off by whole turns."""
    heads = random_heads(prefix=True)
    exact = heads.prefix_layer.model.rotary_emb.inv_freq.clone()
    heads.bfloat16()
    assert heads.prefix_layer.weights["norm.weight"].dtype == torch.bfloat16
    assert heads.prefix_layer.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(heads.prefix_layer.model.rotary_emb.inv_freq, exact)


def test_a_row_padded_on_the_right_is_read_as_alone():
    heads = random_heads(prefix=True)
    hidden = torch.randn(2, 9, heads.width, dtype=torch.float64)
    torch.testing.assert_close(heads.prefix(hidden)[:1, :5], heads.prefix(hidden[:1, :5]), rtol=1e-6, atol=1e-6)
