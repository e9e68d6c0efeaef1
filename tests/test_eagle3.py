"""EAGLE-3 against the slow way, in every form, and the target's states between its layers."""

import shutil
from dataclasses import replace
from functools import cache

import pytest
import torch

from treeopt.errors import InvalidInput, Unsupported
from treeopt.runtime.compiled import compile_target
from treeopt.runtime.drafters import eagle as eagle_module
from treeopt.runtime.drafters import states as states_module
from treeopt.runtime.drafters.eagle3 import Eagle3Heads, Form, default_layers
from treeopt.runtime.drafters.layer import layer_config
from treeopt.runtime.target import Target

from .conftest import VOCABULARY, tiny_model
from .slow_drafters import check_proposals, check_ranks, slow_eagle3

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
small_model = cache(tiny_model)
SOME = torch.tensor([0, 1, 2, 5, *range(8, 31, 2), 33, 34, 36])  # of the tokens


def random_eagle3(form=PLAIN, *, num_heads=4, token_ids=SOME, width=32, shared=False, seed=0) -> Eagle3Heads:
    """Random weights all over, of a layer of another width than the target's if asked."""
    model = small_model()
    torch.manual_seed(seed)
    config = layer_config(model.config, width, heads=4, key_heads=2, head_width=8)
    embedding = model.model.embed_tokens.weight if width == 32 else torch.randn(VOCABULARY, width)
    heads = Eagle3Heads(
        config,
        form,
        embedding=embedding,
        lm_head=model.lm_head.weight if shared else None,
        token_ids=token_ids,
        num_heads=num_heads,
        dtype=torch.float64,
    )
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.3)
    return heads.eval().requires_grad_(False)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_node_is_guessed_as_for_it_alone(form):
    check_proposals(random_eagle3(form), slow_eagle3, seed=len(form.layers or ()))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_ranks_are_those_of_the_slow_way(form):
    check_ranks(random_eagle3(form), slow_eagle3, seed=0)


def test_ranks_do_not_depend_on_how_many_states_are_read_together(monkeypatch):
    monkeypatch.setattr(eagle_module, "SEEN_AT_ONCE", 60)
    monkeypatch.setattr(states_module, "FEWEST_STATES", 2)
    monkeypatch.setattr(states_module, "LOGITS_AT_ONCE", 0)
    monkeypatch.setattr(states_module, "TOKENS_AT_ONCE", 24)
    check_ranks(random_eagle3(), slow_eagle3, seed=1)


@pytest.mark.parametrize("options", [{"width": 24}, {"token_ids": None}, {"token_ids": None, "shared": True}])
def test_a_drafter_may_be_narrower_than_its_target_know_all_tokens_and_borrow_its_head(options):
    heads = random_eagle3(**options)
    assert heads.shares_projection == options.get("shared", False)
    check_proposals(heads, slow_eagle3, seed=1)
    check_ranks(heads, slow_eagle3, seed=2)


def test_the_usual_layers_are_three_from_seven_layers_on():
    heads = random_eagle3(replace(PLAIN, layers=None))
    for n in range(7, 100):
        low, middle, high = heads.layers_of(n)
        assert (low, middle, high) == default_layers(n)
        assert 2 == low < middle < high < n
    with pytest.raises(InvalidInput, match="from 7 layers on, but the target has 6"):
        heads.layers_of(6)


# The target


def residual(target: Target, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The states before every layer and behind the last one, by running the layers one after the other."""
    model, found = target.model.model, []
    states, positions = model.embed_tokens(tokens), torch.arange(tokens.shape[1])[None]
    n, window = tokens.shape[1], getattr(target.config, "sliding_window", None)
    kinds = getattr(target.config, "layer_types", None)
    for i, layer in enumerate(model.layers):
        found.append(states)
        slides = window is not None and (kinds is None or kinds[i] == "sliding_attention")
        back = torch.arange(n)[:, None] - torch.arange(n)
        mask = torch.zeros(n, n, dtype=states.dtype).masked_fill(
            (back < 0) | (slides & (back >= (window or n))), -torch.inf
        )
        states = layer(states, attention_mask=mask[None, None], position_embeddings=model.rotary_emb(states, positions))
    return [*found, states]


def test_the_target_hands_out_what_goes_from_layer_to_layer(any_target):
    target = Target(any_target.model)
    tokens = torch.randint(VOCABULARY, (1, 20))
    plain = target.read(tokens.tolist())
    expected = residual(target, tokens)
    for layers in [(0, 1, 2), (3,), (2, 3, 0), ()]:
        target.read_layers(layers)
        hidden = target.read(tokens.tolist())
        assert target.state_width == hidden.shape[-1] == 32 * (1 + len(layers))
        assert torch.equal(hidden[..., :32], plain)
        for part, layer in zip(hidden[..., 32:].split(32, -1), layers, strict=True) if layers else ():
            torch.testing.assert_close(part, expected[layer], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(target.logits(hidden), target.lm_head(plain))
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in target.model.model.layers)


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


def test_a_decoder_without_a_list_of_layers_is_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    target = Target(GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=2, n_head=2)).eval())
    target.read_layers(())
    with pytest.raises(Unsupported, match="GPT2LMHeadModel has no list of layers"):
        target.read_layers((1,))
