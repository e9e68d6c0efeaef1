"""One contract for drafters of random weights: ranks and guesses are those of the slow way, one node at a time over the whole text."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

from treeopt.errors import InvalidInput, Unsupported
from treeopt.runtime.drafters import states as states_module
from treeopt.runtime.drafters.draft_model import DraftModel
from treeopt.runtime.drafters.layer import OneLayer, layer_config
from treeopt.runtime.drafters.protocol import Drafter, TreeTensors
from treeopt.runtime.drafters.states import batches
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import Text, make_batch
from treeopt.runtime.training.losses import count
from treeopt.trees.tree import Tree

from .conftest import VOCABULARY, tiny_model
from .helpers.random_drafters import (
    CONFIG,
    FORMS,
    KEPT,
    KINDS,
    MASK,
    OTHERS,
    PLAIN,
    SOME,
    THETA,
    other_model,
    pard,
    random_dflash,
    random_dflash2,
    random_dspark,
    random_eagle,
    random_eagle3,
    random_hydra,
    random_peagle,
    seeded,
)
from .helpers.slow_blocks import slow_dflash, slow_dflash2, slow_dspark, slow_pard, slow_peagle, slow_rows
from .helpers.slow_drafters import (
    TREES,
    check_proposals,
    check_ranks,
    in_order,
    slow_eagle,
    slow_eagle3,
    slow_hydra,
    slow_model,
    slow_norm,
    small_model,
)
from .test_mtp import drafting, slow_mtp
from .test_train import states_of


@dataclass(frozen=True)
class Row:
    """How a drafter is made, and the slow way of it; ``steps`` are those whose proposals are checked."""

    make: Callable[[], Drafter]
    slow: Callable[..., list[int]]
    steps: int = 6


def block_forms(**cycles: list) -> dict[str, dict]:
    """Every direction, window and first row of a block, with each of the other options in turn."""
    causal, windows = [(False, False), (True, True), (True, False)], [(None, None), (3, None), (6, 6)]
    others = zip(*map(itertools.cycle, cycles.values()), strict=False)
    found = {}
    for i, (block, other) in enumerate(zip(itertools.product(causal, windows, (False, True)), others, strict=False)):
        found[str(i)] = dict(zip(("causal", "windows", "from_anchor", *cycles), (*block, *other), strict=True), seed=i)
    return found


DFLASH = block_forms(ids=[None, SOME], guesses=[3, 1, 4])
DSPARK = block_forms(guesses=[3, 1, 4], ids=[None, SOME, None])
DFLASH2 = block_forms(guesses=[3, 1, 4], taps=[2, 3], kept=[KEPT, 16, 1, 20])
CASES = {
    "hydra 1": Row(partial(random_hydra, 4, 1), slow_hydra),
    "hydra 3": Row(partial(random_hydra, 2, 3), slow_hydra),
    "eagle": Row(random_eagle, slow_eagle),
    "eagle without bias": Row(partial(random_eagle, 2, bias=False), slow_eagle),
    "eagle, one guess": Row(partial(random_eagle, 1), slow_eagle),
    **{f"eagle3 {name}": Row(partial(random_eagle3, form), slow_eagle3) for name, form in FORMS.items()},
    "eagle3, narrower": Row(partial(random_eagle3, width=24), slow_eagle3),
    "eagle3, all tokens": Row(partial(random_eagle3, token_ids=None), slow_eagle3),
    "eagle3, the target's head": Row(partial(random_eagle3, token_ids=None, shared=True), slow_eagle3),
    **{f"mtp {kind}": Row(lambda kind=kind: drafting(kind)[1], slow_mtp) for kind in ("deepseek_v3", "glm4_moe")},
    **{f"draft model {kind}": Row(partial(seeded, kind), slow_model) for kind in KINDS},
    **{
        f"p-eagle {name}": Row(
            partial(random_peagle, form, layers=1 + (i + 1) % 4, ids=(SOME, None)[i % 2]), slow_peagle
        )
        for i, (name, form) in enumerate(FORMS.items())
    },
    "p-eagle, narrower": Row(partial(random_peagle, width=24, layers=3, kv_heads=4), slow_peagle),
    "p-eagle, one guess": Row(partial(random_peagle, guesses=1, kv_heads=1), slow_peagle),
    **{f"pard {kind}": Row(lambda kind=kind: pard(tiny_model(kind, seed=7)), slow_pard) for kind in KINDS},
    "pard, one guess": Row(lambda: pard(tiny_model(), 1), slow_pard),
    **{f"dflash {i}": Row(partial(random_dflash, **form), slow_dflash, 3) for i, form in DFLASH.items()},
    **{f"dspark {i}": Row(partial(random_dspark, **form), slow_dspark, 3) for i, form in DSPARK.items()},
    **{f"dflash2 {i}": Row(partial(random_dflash2, **form), slow_dflash2, 3) for i, form in DFLASH2.items()},
}
for name, sizes in {"other": {}, **OTHERS}.items():
    CASES[f"draft model, {name}"] = Row(lambda s=sizes: DraftModel(Target(other_model(**s)), VOCABULARY), slow_model)
    CASES[f"pard, {name}"] = Row(lambda s=sizes: pard(other_model(**s)), slow_pard)
SUITE = ("hydra 3", "eagle", "eagle3 all", "eagle3, narrower", "mtp glm4_moe", "draft model qwen3", "draft model, short",
         "p-eagle all", "pard mistral", "pard, short", "dflash 4", "dflash 15", "dspark 5", "dspark 7", "dflash2 6")  # fmt: skip
ROWS = [pytest.param(row, id=name, marks=[] if name in SUITE else pytest.mark.long) for name, row in CASES.items()]


@pytest.mark.parametrize("row", ROWS)
class TestAgainstTheSlowWay:
    def test_every_node_is_guessed_as_for_it_alone(self, row):
        """A head deeper than there are is -1; rows are ragged, come and go, and plain steps draft nothing."""
        drafter = row.make()
        trees = [tree for tree in TREES if tree.max_rank < drafter.draft_vocab_size]
        with torch.inference_mode():
            check_proposals(drafter, row.slow, seed=drafter.num_heads, steps=row.steps, trees=trees)

    def test_ranks_are_those_of_the_slow_way(self, row):
        drafter = row.make()
        with torch.inference_mode():
            enough = 5 if row.steps == 6 else -1  # a block's guesses are rarely right
            check_ranks(drafter, row.slow, seed=0, top_k=min(20, drafter.draft_vocab_size), enough=enough)


@pytest.mark.parametrize("name", ["hydra 3", "eagle", "eagle3 plain", "p-eagle plain", "pard mistral"])
def test_ranks_do_not_depend_on_how_many_states_are_read_together(name, monkeypatch):
    monkeypatch.setattr(states_module, "SEEN_AT_ONCE", 60)
    monkeypatch.setattr(states_module, "FEWEST_STATES", 2)
    monkeypatch.setattr(states_module, "LOGITS_AT_ONCE", 0)
    monkeypatch.setattr(states_module, "TOKENS_AT_ONCE", 12 if "hydra" in name else 24)
    with torch.inference_mode():
        check_ranks(CASES[name].make(), CASES[name].slow, seed=1)


@pytest.mark.parametrize("name", ["hydra 3", "eagle", "eagle3 plain", "p-eagle norm_before_residual"])
def test_every_weight_learns_and_those_of_the_target_are_shared(name):
    heads, model = CASES[name].make().requires_grad_(True), small_model()
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


# Masks and blocks


def test_guesses_depend_on_their_depth_but_neither_on_how_deep_others_are_nor_on_masks_that_were_read_before():
    """Else the passes above would compare what no mask changes."""
    for name in ("p-eagle plain", "pard llama"):
        drafter, slow = CASES[name].make(), CASES[name].slow
        hidden = torch.randn(6, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        orders = [tuple(slow(drafter, [1, 2, 3, 4, 5, 6], hidden, 7, [9] * depth)) for depth in range(4)]
        assert len(set(orders)) == 4
        draft = drafter.start(1, 20)
        draft.prefill([[1, 2, 3, 4, 5, 6]], hidden[None])
        state = draft.cache.lengths[:], list(draft._waiting)
        with torch.inference_mode():
            for depth in (4, 2, 1, 3):
                draft.cache.lengths, draft._waiting = state[0][:], list(state[1])
                logits = draft.marginals(torch.tensor([7]), depth)[0]
                ids = drafter.token_ids
                assert [tuple(ids[in_order(row)].tolist()) for row in logits] == orders[:depth]


def test_a_proposal_takes_one_pass_and_plain_steps_take_none():
    drafter = pard(tiny_model())
    draft = drafter.start(2, 60)
    with torch.inference_mode():
        draft.prefill([[1, 2, 3], [4]], torch.zeros(2, 3, 5))
        drafter.model.passes = 0
        for _ in range(3):
            draft.extend([[5], [6]], torch.zeros(2, 1, 5), [[0], [0]])
        draft.propose(TreeTensors.of(Tree.dense([3, 2, 1]), torch.device("cpu")), torch.tensor([7, 8]))
    assert drafter.model.passes == 1


def test_masks_of_a_long_row_beside_one_with_more_to_feed_stay_in_their_room():
    drafter, plan = pard(tiny_model()), TreeTensors.of(Tree.chain(4), torch.device("cpu"))
    draft, long = drafter.start(2, 39 + 5), [1 + i % 30 for i in range(39)]
    texts = [[1, 2], long]
    with torch.inference_mode():
        draft.prefill([[1, 2]], torch.zeros(1, 2, 5))
        for i in range(30):
            draft.extend([[i]], torch.zeros(1, 1, 5), [[0]])
            texts[0].append(i)
        draft.prefill([long], torch.zeros(1, 39, 5))
        drafter.model.passes = 0
        found = draft.propose(plan, torch.tensor([33, 33]))
        assert drafter.model.passes > 1  # there is no room for all that waits at once
        for text, row in zip(texts, found.tolist(), strict=True):
            assert row == [33, *(slow_pard(drafter, text, None, 33, [0] * depth)[0] for depth in range(4))]


def test_a_guess_depends_on_the_one_before():
    """Else the forward above would compare what no path changes."""
    hidden = torch.randn(6, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for heads, slow in ((random_dspark(), slow_dspark), (random_dflash2(), slow_dflash2)):
        orders = {path: tuple(slow(heads, [], hidden, 7, path)) for path in itertools.product([3, 4, 5], repeat=2)}
        assert len(set(orders.values())) >= 3
        assert len({orders[first, 3] for first in (3, 4, 5)}) == 1


def test_transformers_own_class_makes_the_same_rows():
    library = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    heads = random_dflash(guesses=4)
    config = library.MuseGlimmerAssistantConfig(
        **CONFIG,
        num_hidden_layers=2,
        layer_types=["full_attention"] * 2,
        block_size=5,
        target_layer_ids=[0, 2],
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )
    theirs = library.MuseGlimmerAssistantModel(config).double().eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    theirs.load_state_dict({names.get(name, name): weight for name, weight in heads.weights.items()})
    hidden, root = torch.randn(1, 7, 96, dtype=torch.float64), 12
    block = heads.embedding[torch.tensor([[root, MASK, MASK, MASK, MASK]])]
    with torch.inference_mode():
        made = theirs(block, hidden[..., 32:]).last_hidden_state[0]
        ours = slow_rows(heads, hidden[0], root)
        own = slow_norm(heads.config, ours, heads.weights["norm.weight"])
    torch.testing.assert_close(made, own, rtol=1e-4, atol=1e-4)  # its norms and rotations are float32


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


def test_layers_that_a_target_does_not_have_are_refused():
    target = Target(tiny_model())
    for layer in (4, -1, 10**6):
        with pytest.raises(InvalidInput, match=f"before its layer {layer}, but unknown has 3 layers"):
            target.read_layers((1, layer))
    with pytest.raises(Unsupported, match="GPT2LMHeadModel has no list of layers"):
        Target(other_model()).read_layers((1,))
