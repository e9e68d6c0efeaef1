"""P-EAGLE and PARD: each form against passes over the whole text and the masks behind it, and every layout of their files."""

import itertools
import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from treeopt import demo
from treeopt.errors import InvalidInput, Unsupported
from treeopt.runtime.acceptance.rules import Sampling
from treeopt.runtime.checkpoints import save_heads
from treeopt.runtime.drafters import states as states_module
from treeopt.runtime.drafters.eagle3 import Form
from treeopt.runtime.drafters.layer import layer_config
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.drafters.parallel import PardModel, PEagleHeads
from treeopt.runtime.drafters.protocol import TreeTensors
from treeopt.runtime.session import by_rejection
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import Text, make_batch
from treeopt.runtime.training.losses import count
from treeopt.trees.tree import Tree

from .conftest import VOCABULARY, tiny_model
from .helpers.slow_drafters import check_proposals, check_ranks, in_order, slow_norm, small_model
from .test_checkpoints_eagle3 import config_in, load, tensors_in
from .test_draft_model import KINDS, other_model
from .test_guesses import FORMS, PLAIN, SOME, random
from .test_train import states_of

MASK = 8


def random_peagle(form: Form = PLAIN, *, layers=2, kv_heads=2, ids=SOME, width=32, guesses=4, seed=0) -> PEagleHeads:
    model = small_model()
    torch.manual_seed(seed)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "head_dim": 8}
    config = layer_config(model.config, width, layers=layers, **sizes)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 77.0}
    heads = PEagleHeads(
        config,
        replace(form, mask_id=MASK),
        embedding=model.model.embed_tokens.weight if width == 32 else torch.randn(VOCABULARY, width),
        token_ids=ids,
        num_heads=guesses,
        dtype=torch.float64,
    )
    random(heads, seed)
    torch.nn.init.normal_(heads.mask_hidden)
    return heads


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


def pard(model: torch.nn.Module, guesses: int = 4) -> PardModel:
    return PardModel(Target(model), VOCABULARY, mask_id=MASK, num_heads=guesses)


@torch.inference_mode()
def slow_pard(drafter: PardModel, text, hidden, root, path) -> list[int]:
    """The same for PARD, by a pass without a cache; none beyond its context."""
    model, tokens = drafter.model, [*text, root, *[MASK] * len(path)]
    if len(tokens) > model.context:
        return []
    ids = torch.tensor([tokens]).clamp_max(model.vocab_size - 1)
    states = model.decoder(input_ids=ids, use_cache=False).last_hidden_state
    return in_order(model.lm_head(states[0, -1])[: drafter.vocab_size])


RESIDUAL = replace(PLAIN, before_residual=True)
LAYERS, KEYS, IDS = itertools.cycle([2, 1, 4, 3]), itertools.cycle([2, 4, 1]), itertools.cycle([SOME, None])
CASES = {
    **{
        f"p-eagle {name}, {layers} layers": (
            partial(random_peagle, form, layers=layers, kv_heads=keys, ids=ids, seed=layers),
            slow_peagle,
        )
        for (name, form), layers, keys, ids in zip(FORMS.items(), LAYERS, KEYS, IDS, strict=False)
    },
    "p-eagle, narrower": (partial(random_peagle, width=24, layers=3), slow_peagle),
    "p-eagle, one guess": (partial(random_peagle, guesses=1), slow_peagle),
    **{f"pard {kind}": (lambda kind=kind: pard(tiny_model(kind, seed=7)), slow_pard) for kind in KINDS},
    "pard, one guess": (lambda: pard(tiny_model(), 1), slow_pard),
    "pard, other": (lambda: pard(other_model()), slow_pard),
    "pard, fewer tokens": (lambda: pard(other_model(vocab_size=30)), slow_pard),
    "pard, more tokens": (lambda: pard(other_model(vocab_size=45)), slow_pard),
    "pard, short context": (lambda: pard(other_model(context=13)), slow_pard),
}


@pytest.mark.parametrize("name", CASES)
class TestAgainstWholePasses:
    def test_every_node_is_guessed_as_for_it_alone(self, name):
        make, slow = CASES[name]
        with torch.inference_mode():
            check_proposals(make(), slow, seed=len(name))

    def test_packed_ranks_are_those_of_passes_one_by_one(self, name):
        make, slow = CASES[name]
        with torch.inference_mode():
            check_ranks(make(), slow, seed=0)


@pytest.mark.parametrize("name", ["p-eagle plain, 2 layers", "pard llama", "pard mistral"])
def test_ranks_do_not_depend_on_how_many_states_are_read_together(name, monkeypatch):
    monkeypatch.setattr(states_module, "SEEN_AT_ONCE", 60)
    monkeypatch.setattr(states_module, "TOKENS_AT_ONCE", 24)
    make, slow = CASES[name]
    with torch.inference_mode():
        check_ranks(make(), slow, seed=1)


def test_every_weight_learns():
    heads, target = random_peagle(RESIDUAL, layers=3).requires_grad_(True), Target(tiny_model())
    target.read_layers(heads.layers_of(3))
    texts = [Text(np.random.default_rng(n).integers(0, VOCABULARY, n), 3, "") for n in (9, 12)]
    batch = make_batch(texts, heads.num_heads, "cpu")
    count(heads, states_of(target, batch), batch)[0].sum().backward()
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in heads.parameters())


def test_guesses_depend_on_their_depth_but_neither_on_how_deep_others_are_nor_on_masks_that_were_read_before():
    """Else the passes above would compare what no mask changes."""
    for name in ("p-eagle plain, 2 layers", "pard llama"):
        make, slow = CASES[name]
        drafter, hidden = make(), torch.randn(6, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
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


# Files.


LAYOUTS = {"speculators": {}, "nemo": {"layers": 4}, "amazon": {"layers": 1}, "modelopt": {"ids": None, "kv_heads": 4}}
SAYS = {  # what config.json says beside that of EAGLE-3
    "speculators": {"speculators_model_type": "peagle", "mask_token_id": MASK},
    "nemo": {"parallel_drafting": True, "mask_token_id": MASK},
    "amazon": {"parallel_drafting": True, "ptd_token_id": MASK},
    "modelopt": {"parallel_draft_step": 4, "ptd_token_id": MASK, "mask_token_id": MASK},
}


def write(folder, layout, heads, drop=(), **changes):
    """As EAGLE-3's drafters are written, with more layers, a mask and embeddings."""
    folder.mkdir(exist_ok=True)
    tensors = tensors_in("speculators" if layout == "amazon" else layout, heads)
    if layout == "amazon":
        tensors["mask_hidden"] = tensors["mask_hidden"].flatten()
    if layout != "modelopt":
        tensors["model." * (layout == "nemo") + "embed_tokens.weight"] = heads.embedding + 1
    save_file({name: tensors[name] for name in tensors if name not in drop}, folder / "model.safetensors")
    config = config_in(layout, heads)
    says = {"eagle_config": config["eagle_config"] | SAYS[layout]} if layout == "modelopt" else SAYS[layout]
    told = {key: value for key, value in (config | says | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(told))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_as_it_was_meant_and_written_again(tmp_path, layout):
    own = random_peagle(RESIDUAL, **LAYOUTS[layout])
    found = load(write(tmp_path / "its", layout, own), num_heads=4)
    save_heads(found.heads, "p-eagle", tmp_path / "ours", base="someone/a-model")
    stored = [load_file(tmp_path / folder / "model.safetensors") for folder in ("its", "ours")]
    assert len({len(tensors) for tensors in stored}) == 1 + (layout == "modelopt" and own.token_ids is not None)
    hidden = torch.randn(6, 128, dtype=torch.float64)
    expected = replace(own.form, own_embedding=layout != "modelopt")
    own.embedding = own.embedding + expected.own_embedding
    for one in (found, load(tmp_path / "ours", num_heads=4)):
        heads = one.heads
        assert (one.layout, heads.kind, heads.form) == ("p-eagle", "p-eagle", expected)
        assert (heads.num_heads, heads.num_layers) == (4, own.num_layers)
        assert {name: weight.tolist() for name, weight in heads.weights.items()} == {
            name: weight.tolist() for name, weight in own.weights.items()
        }
        assert torch.equal(heads.embedding, own.embedding)
        guessed = [slow_peagle(drafter, [1] * 6, hidden, 7, [0, 0]) for drafter in (heads, own)]
        assert guessed[0] == guessed[1]


@pytest.mark.parametrize(
    ("changes", "drop", "said"),
    [
        ({"ptd_token_id": None}, (), "ptd_token_id must be a whole number from 0 to 36, but .* says None"),
        ({"ptd_token_id": VOCABULARY}, (), "ptd_token_id must be a whole number"),
        ({"pard_token": 3}, (), "pard_token must be 8, as ptd_token_id is"),
        ({}, ("mask_hidden",), "layout 'p-eagle', but 'mask_hidden' is missing"),
        ({}, ("layers.1.input_layernorm.weight",), "'layers.1.input_layernorm.weight' is missing"),
        ({"num_hidden_layers": 3}, (), "it says num_hidden_layers 3 where 'layers.1'"),
        ({"sliding_window": 8}, (), "sliding_window must be absent"),
        ({"layer_types": ["sliding_attention"] * 2}, (), "layer_types must be .*'full_attention', 'full_attention'"),
        ({"speculators_model_type": "eagle3"}, (), "more than one layer"),
        ({"parallel_drafting": None}, ("mask_hidden",), "more than one layer"),
    ],
)
def test_what_a_file_does_not_say_or_says_wrongly_is_refused_by_name(tmp_path, changes, drop, said):
    folder = write(tmp_path, "amazon", random_peagle(), drop, **changes)
    with pytest.raises((InvalidInput, Unsupported), match=said) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def write_pard(folder, **told):
    tiny_model(dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL / name, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | told))
    return Target(tiny_model(), AutoTokenizer.from_pretrained(folder), name="big")


def test_a_causal_lm_that_says_its_mask_is_pard(tmp_path):
    target = write_pard(tmp_path, pard_token=MASK, spd_type="pard")
    opened = open_drafter(str(tmp_path), target, depth=3)
    assert (opened.record["kind"], opened.record["num_heads"], opened.drafter.mask_id) == ("pard", 3, MASK)
    assert isinstance(opened.drafter, PardModel)
    with pytest.raises(InvalidInput, match=r"needs a draft model that guesses token by token.*of the kind pard"):
        by_rejection(opened.drafter, target, Sampling())


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"spd_type": "pard"}, "pard_token must be a whole number from 0 to 36, but .* says None"),
        ({"pard_token": VOCABULARY}, "pard_token must be a whole number from 0 to 36"),
        ({"pard_token": MASK, "ptd_token_id": 3}, f"ptd_token_id must be {MASK}, as pard_token is"),
        ({"pard_token": MASK, "spd_type": ["pard"]}, "spd_type must be pard"),
        ({"pard_token": MASK, "spd_type": "pard2"}, "is a PARD-2 drafter"),
    ],
)
def test_pard_files_that_do_not_tell_enough_are_refused(tmp_path, told, said):
    target = write_pard(tmp_path, **told)
    with pytest.raises((InvalidInput, Unsupported), match=said):
        open_drafter(str(tmp_path), target)
