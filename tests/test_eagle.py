"""EAGLE-1 against the slow way, one node at a time over the whole text."""

import pytest
import torch

from treeopt.errors import InvalidInput
from treeopt.runtime.drafters import eagle as eagle_module
from treeopt.runtime.drafters import states as states_module
from treeopt.runtime.drafters.eagle import EagleHeads
from treeopt.runtime.drafters.layer import OneLayer, layer_config
from treeopt.runtime.drafters.states import batches

from .conftest import tiny_model
from .slow_drafters import check_proposals, check_ranks, slow_eagle


def random_eagle(num_heads=5, *, bias=True, seed=0) -> EagleHeads:
    model = tiny_model()
    torch.manual_seed(seed)
    config = layer_config(model.config, model.config.hidden_size)
    heads = EagleHeads(
        config,
        embedding=model.model.embed_tokens.weight,
        lm_head=model.lm_head.weight,
        bias=bias,
        num_heads=num_heads,
        dtype=torch.float64,
    )
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.3)
    return heads.eval().requires_grad_(False)


@pytest.mark.parametrize(("num_heads", "bias"), [(5, True), (2, False)])
def test_every_node_is_guessed_as_for_it_alone(num_heads, bias):
    check_proposals(random_eagle(num_heads, bias=bias), slow_eagle, seed=num_heads)


def test_ranks_are_those_of_the_slow_way(monkeypatch):
    heads = random_eagle(4)
    check_ranks(heads, slow_eagle, seed=0)
    monkeypatch.setattr(eagle_module, "SEEN_AT_ONCE", 60)  # a few states are unrolled at a time
    monkeypatch.setattr(states_module, "FEWEST_STATES", 2)
    monkeypatch.setattr(states_module, "LOGITS_AT_ONCE", 0)
    monkeypatch.setattr(states_module, "TOKENS_AT_ONCE", 24)
    check_ranks(heads, slow_eagle, seed=1)


def test_one_guess_needs_no_unrolling():
    check_ranks(random_eagle(1), slow_eagle, seed=2)


def test_it_shares_the_targets_weights_and_trains_its_own():
    heads = random_eagle().requires_grad_(True)
    assert (heads.kind, heads.num_layers, heads.shares_projection) == ("eagle", 1, True)
    assert heads.reads_prompt
    model = tiny_model()
    assert not set(heads.state_dict()) & {"embedding", "lm_head"}
    tokens = torch.randint(model.config.vocab_size, (2, 9))
    hidden = model.model(tokens).last_hidden_state
    loss = (heads.predict(tokens[:, 1:], hidden[:, :-1]) - hidden[:, 1:]).pow(2).mean()
    loss.backward()
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in heads.parameters())


def test_texts_are_read_in_batches_of_like_lengths(monkeypatch):
    monkeypatch.setattr(states_module, "TOKENS_AT_ONCE", 10)
    lengths = [5, 1, 30, 4, 3, 2]
    found = batches(lengths)
    assert sorted(i for batch in found for i in batch) == list(range(6))
    assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 10 for batch in found)
    assert [i for batch in found for i in batch] == [1, 5, 4, 3, 0, 2]
    assert batches([]) == []


def test_a_layer_needs_frequencies_of_its_width():
    model = tiny_model()
    config = layer_config(model.config, model.config.hidden_size)
    config.rope_parameters = {"rope_type": "default", "rope_theta": -1.0}
    with pytest.raises(InvalidInput, match="4 finite rotary frequencies"):
        OneLayer(config, normed=True)
