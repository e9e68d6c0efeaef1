"""Drafters of random weights against the slow way, one node at a time over the whole text, in every form that they have."""

import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from treeopt.errors import InvalidInput, Unsupported
from treeopt.runtime.drafters import states as states_module
from treeopt.runtime.drafters.eagle3 import Eagle3Heads, Form
from treeopt.runtime.drafters.hydra import HydraHeads
from treeopt.runtime.drafters.layer import EagleHeads, OneLayer, layer_config
from treeopt.runtime.drafters.states import batches
from treeopt.runtime.target import Target, compile_target
from treeopt.runtime.training.batches import Text, make_batch
from treeopt.runtime.training.losses import count
from treeopt.runtime.training.opening import make_heads
from treeopt.runtime.training.recipe import Recipe

from .conftest import VOCABULARY, tiny_model
from .helpers.slow_drafters import (
    check_proposals,
    check_ranks,
    slow_eagle,
    slow_eagle3,
    slow_hydra,
    slow_model,
    small_model,
)
from .test_draft_model import DRAFTERS, other_model
from .test_mtp import drafting, slow_mtp
from .test_train import states_of

PLAIN = Form(width=32, vocab_size=VOCABULARY, layers=(0, 1, 2))
FORMS = {
    "plain": PLAIN,
    "two-states": replace(PLAIN, states=2, layers=(2, 0)),
    "norm_before_residual": replace(PLAIN, before_residual=True),
    "norm_before_fc": replace(PLAIN, fuse_norm=True),
    "fc_norm": replace(PLAIN, state_norms=True),
    "norm_output": replace(PLAIN, normed_feedback=True),
    "bias": replace(PLAIN, fc_bias=True, bias=True),
    "q_norm": replace(PLAIN, head_norms=True),
    "all": Form(32, VOCABULARY, 3, (0, 1, 2), True, False, True, True, True, True, True),
}
SOME = torch.tensor([0, 1, 2, 5, *range(8, 31, 2), 33, 34, 36])  # of the tokens


def random(heads, seed=0):
    """Random weights all over, the norms' too."""
    torch.manual_seed(seed)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.3)
    return heads.eval().requires_grad_(False)


def random_hydra(num_heads, num_layers) -> HydraHeads:
    return random(make_heads(Target(small_model()), Recipe("hydra", num_heads, num_layers)))


def random_eagle(num_heads=5, *, bias=True) -> EagleHeads:
    model = small_model()
    ends = {"embedding": model.model.embed_tokens.weight, "lm_head": model.lm_head.weight}
    config = layer_config(model.config, model.config.hidden_size)
    return random(EagleHeads(config, **ends, bias=bias, num_heads=num_heads, dtype=torch.float64))


def random_eagle3(form=PLAIN, *, num_heads=4, token_ids=SOME, width=32, shared=False) -> Eagle3Heads:
    """A layer of another width than the target's if asked."""
    model = small_model()
    torch.manual_seed(0)
    heads = Eagle3Heads(
        layer_config(model.config, width, num_attention_heads=4, num_key_value_heads=2, head_dim=8),
        form,
        embedding=model.model.embed_tokens.weight if width == 32 else torch.randn(VOCABULARY, width),
        lm_head=model.lm_head.weight if shared else None,
        token_ids=token_ids,
        num_heads=num_heads,
        dtype=torch.float64,
    )
    return random(heads)


CASES = {  # how a drafter is made, and the slow way
    "hydra 1": (partial(random_hydra, 4, 1), slow_hydra),
    "hydra 3": (partial(random_hydra, 2, 3), slow_hydra),
    "eagle": (random_eagle, slow_eagle),
    "eagle without bias": (partial(random_eagle, 2, bias=False), slow_eagle),
    "eagle, one guess": (partial(random_eagle, 1), slow_eagle),
    **{f"eagle3 {name}": (partial(random_eagle3, form), slow_eagle3) for name, form in FORMS.items()},
    "eagle3, narrower": (partial(random_eagle3, width=24), slow_eagle3),
    "eagle3, all tokens": (partial(random_eagle3, token_ids=None), slow_eagle3),
    "eagle3, the target's head": (partial(random_eagle3, token_ids=None, shared=True), slow_eagle3),
    **{f"mtp {kind}": (lambda kind: drafting(kind)[1], slow_mtp, kind) for kind in ("deepseek_v3", "glm4_moe")},
}


CASES |= {name: (make, slow_model) for name, make in DRAFTERS.items()}


def made(name):
    make, slow, *options = CASES[name]
    return make(*options), slow


@pytest.mark.parametrize("name", CASES)
class TestAgainstTheSlowWay:
    def test_every_node_is_guessed_as_for_it_alone(self, name):
        """A head deeper than there are is -1; rows are ragged, come and go, and plain steps draft nothing."""
        check_proposals(*made(name), seed=len(name))

    def test_ranks_are_those_of_the_slow_way(self, name):
        check_ranks(*made(name), seed=0)


@pytest.mark.parametrize("name", ["hydra 3", "eagle", "eagle3 plain"])
def test_ranks_do_not_depend_on_how_many_states_are_read_together(name, monkeypatch):
    monkeypatch.setattr(states_module, "SEEN_AT_ONCE", 60)
    monkeypatch.setattr(states_module, "FEWEST_STATES", 2)
    monkeypatch.setattr(states_module, "LOGITS_AT_ONCE", 0)
    monkeypatch.setattr(states_module, "TOKENS_AT_ONCE", 12 if "hydra" in name else 24)
    check_ranks(*made(name), seed=1)


@pytest.mark.parametrize("name", ["hydra 3", "eagle", "eagle3 plain"])
def test_every_weight_learns_and_those_of_the_target_are_shared(name):
    heads, model = made(name)[0].requires_grad_(True), small_model()
    assert not {"embedding", *(["lm_head"] if heads.shares_projection else [])} & set(heads.state_dict())
    assert heads.embedding.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    target = Target(tiny_model())
    target.read_layers(heads.layers_of(3))
    texts = [Text(np.random.default_rng(n).integers(0, VOCABULARY, n), 3, "") for n in (9, 12, 15)]
    batch = make_batch(texts, heads.num_heads, "cpu")
    count(heads, states_of(target, batch), batch)[0].sum().backward()
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in heads.parameters())


def test_texts_are_read_in_batches_of_like_lengths(monkeypatch):
    monkeypatch.setattr(states_module, "TOKENS_AT_ONCE", 10)
    assert batches([5, 1, 30, 4, 3, 2]) == [[1, 5, 4], [3, 0], [2]]
    assert batches([]) == []


def test_a_layer_needs_frequencies_of_its_width():
    model = tiny_model()
    config = layer_config(model.config, model.config.hidden_size)
    config.rope_parameters = {"rope_type": "default", "rope_theta": -1.0}
    with pytest.raises(InvalidInput, match="4 finite rotary frequencies"):
        OneLayer(config)


def test_the_usual_layers_are_three_from_seven_layers_on():
    heads = random_eagle3(replace(PLAIN, layers=None))
    assert [heads.layers_of(n) for n in (7, 8, 32)] == [(2, 3, 4), (2, 4, 5), (2, 16, 29)]
    with pytest.raises(InvalidInput, match="from 7 layers on, but the target has 6"):
        heads.layers_of(6)


def test_rotary_frequencies_keep_their_precision():
    """In bfloat16 the position 1000 would be off by whole turns."""
    layer = random_eagle().layer
    exact = layer.model.rotary_emb.inv_freq.clone()
    layer.bfloat16()
    assert {weight.dtype for weight in layer.model.parameters()} == {torch.bfloat16}
    assert layer.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(layer.model.rotary_emb.inv_freq, exact)


# The target's states between its layers


def test_the_target_hands_out_what_goes_from_layer_to_layer(any_target):
    target = Target(any_target.model)
    tokens = torch.randint(VOCABULARY, (1, 20))
    plain = target.read(tokens.tolist())
    expected = target.model.model(tokens, output_hidden_states=True).hidden_states  # the last one behind the final norm
    for layers in [(0, 1, 2), (3,), (2, 3, 0), ()]:
        target.read_layers(layers)
        hidden = target.read(tokens.tolist())
        assert hidden.shape[-1] == 32 * (1 + len(layers))
        assert torch.equal(hidden[..., :32], plain)
        for part, layer in zip(hidden[..., 32:].split(32, -1), layers, strict=False):
            part = target.decoder.norm(part) if layer == 3 else part
            torch.testing.assert_close(part, expected[layer], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(target.logits(hidden), target.lm_head(plain))
    assert not any(layer._forward_pre_hooks for layer in target.model.model.layers)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_compiled_target_hands_out_the_same_states():
    target = Target(tiny_model())
    target.read_layers((0, 2, 3))
    texts = torch.randint(VOCABULARY, (2, 9)).tolist()
    with torch.inference_mode():
        plain = target.read(texts)
        compile_target(target)
        torch.testing.assert_close(target.read(texts), plain)


def test_layers_that_a_target_does_not_have_are_refused():
    target = Target(tiny_model())
    for layer in (4, -1, 10**6):
        with pytest.raises(InvalidInput, match=f"before its layer {layer}, but unknown has 3 layers"):
            target.read_layers((1, layer))
    with pytest.raises(Unsupported, match="GPT2LMHeadModel has no list of layers"):
        Target(other_model()).read_layers((1,))
