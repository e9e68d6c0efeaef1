"""EAGLE-3's layouts: what is its own beside the contract of drafters with layers (test_checkpoints_layers)."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from treeopt.errors import InvalidInput, Unsupported
from treeopt.runtime.checkpoints import convert, save_heads
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.target import Target

from .conftest import VOCABULARY, tiny_model
from .helpers.layouts import alter, eagle3_config, load, write_eagle3
from .helpers.random_drafters import FORMS, PLAIN, SOME, random_eagle3
from .helpers.slow_drafters import check_ranks, slow_eagle3, small_model
from .helpers.synthetic import synthetic
from .test_checkpoints_layers import same, same_tensors


def read(folder, layout, heads=None, **changes):
    write_eagle3(folder, layout, heads, **changes)
    return load(folder)


def test_the_synthetic_checkpoint_is_read_without_its_target_and_converted(tmp_path):
    source = synthetic("eagle3_safetensors")
    loaded, _ = convert(str(source), "eagle-3", tmp_path / "ours")
    assert loaded.heads.form.layers is None
    assert loaded.heads.layer.config.rope_parameters["rope_theta"] == 10000.0
    same_tensors(*(load_file(folder / "model.safetensors") for folder in (tmp_path / "ours", source)))
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["draft_vocab_size"] == 12
    assert "eagle_config" not in config
    with pytest.raises(Unsupported, match=r"'eagle3' heads, whose layouts are eagle-3"):
        convert(str(source), "eagle-1", tmp_path / "other")


def test_heads_that_borrow_the_targets_projection_need_it(tmp_path):
    model = small_model()
    folder = tmp_path / "theirs"
    loaded = read(folder, "modelopt", random_eagle3(token_ids=None, shared=True), draft_vocab_size=None)
    assert loaded.heads.shares_projection
    assert torch.equal(loaded.heads.lm_head, model.lm_head.weight)
    with pytest.raises(InvalidInput, match="pass it with model"):
        convert(str(folder), "eagle-3", tmp_path / "ours")
    convert(str(folder), "eagle-3", tmp_path / "ours", lm_head=model.lm_head.weight)
    assert torch.equal(load(tmp_path / "ours").heads.lm_head, model.lm_head.weight)


def test_own_embeddings_are_kept_and_copies_of_the_targets_are_not(tmp_path):
    folder = tmp_path / "theirs"
    assert not read(folder, "nemo").heads.form.own_embedding
    alter(folder, **{"model.embed_tokens.weight": torch.randn(VOCABULARY, 32, dtype=torch.float64)})
    loaded = load(folder)
    assert loaded.heads.form.own_embedding
    assert "not a copy of the target's" in loaded.notes[0]
    save_heads(loaded.heads, "eagle-3", tmp_path / "ours", base="x")
    assert torch.equal(load(tmp_path / "ours").heads.embedding, loaded.heads.embedding)


def test_a_narrower_layer_has_embeddings_of_its_own(tmp_path):
    heads = random_eagle3(width=24)
    save_heads(heads, "eagle-3", tmp_path / "without", base="x")
    with pytest.raises(InvalidInput, match=r"a layer of width 24 without embed_tokens\.weight"):
        load(tmp_path / "without")
    heads.form = replace(heads.form, own_embedding=True)
    save_heads(heads, "eagle-3", tmp_path / "with", base="x")
    loaded = load(tmp_path / "with", num_heads=4).heads
    same(loaded, heads)
    assert json.loads((tmp_path / "with" / "config.json").read_text())["target_hidden_size"] == 32
    check_ranks(loaded, slow_eagle3, seed=5)


@pytest.mark.parametrize(
    ("said", "layers"), [([1, 2, 3], (2, 3, 4)), ([2, 3, 4], (2, 3, 4)), ([0, 1, 3], (0, 1, 3)), ([3, 2, 1], (3, 2, 1))]
)
@pytest.mark.parametrize("layout", ["safeailab", "modelopt", "speculators"])
def test_layers_are_told_by_their_inputs_or_by_their_outputs(said, layers, layout, tmp_path):
    """The first output is 1 where the first input is 2."""
    heads = random_eagle3(replace(PLAIN, layers=tuple(said)))
    assert read(tmp_path, layout, heads).heads.form.layers == layers


def test_the_rotation_is_never_the_targets(tmp_path):
    model = tiny_model()
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 500000.0}
    for said, theta in ((None, 10000.0), ({"rope_type": "default", "rope_theta": 5.0}, 5.0)):
        write_eagle3(tmp_path, "safeailab", rope_theta=None, rope_parameters=said)
        assert load(tmp_path, model).heads.layer.config.rope_parameters["rope_theta"] == theta
    (tmp_path / "config.json").unlink()
    with pytest.raises(InvalidInput, match=r"num_attention_heads must be"):
        load(tmp_path, model)


def test_flags_that_change_nothing_are_taken(tmp_path):
    heads = random_eagle3(replace(PLAIN, layers=None))
    usual = {"sliding_window": 9, "use_sliding_window": False, "logit_scale": 1, "partial_rotary_factor": 1}
    loaded = read(tmp_path, "safeailab", heads, **usual, eagle_config={"eagle_aux_hidden_state_layer_ids": []})
    assert loaded.heads.form.layers is None


def test_speculators_leave_out_what_transformers_has_by_default(tmp_path):
    config = eagle3_config("speculators", random_eagle3())
    del config["transformer_layer_config"]["num_attention_heads"]
    write_eagle3(tmp_path, "speculators")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match="num_attention_heads 32 where"):  # 32 is Llama's; these tensors have 4
        load(tmp_path)


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (SOME - torch.arange(len(SOME)) - 1, "ascending token ids"),
        ((SOME - torch.arange(len(SOME))).flip(0), "ascending token ids"),
        ((SOME - torch.arange(len(SOME))) * 2, "ascending token ids below the target's 37"),
        (torch.full((len(SOME),), 2**63 - 1), "ascending token ids"),
        ((SOME - torch.arange(len(SOME))).int(), "int64 numbers, .* it is int32"),
        ((SOME - torch.arange(len(SOME)))[None], r"shape \(1, 19\)"),
        (SOME[:3] - torch.arange(3), "t2d"),
        (torch.zeros(0, dtype=torch.int64), "int64 numbers"),
        (torch.zeros(len(SOME), dtype=torch.int64), "'t2d' .* must say of each"),
    ],
)
def test_a_damaged_map_of_tokens_is_refused(d2t, message, tmp_path):
    write_eagle3(tmp_path, "safeailab")
    alter(tmp_path, d2t=d2t.contiguous())
    with pytest.raises(InvalidInput, match=message):
        load(tmp_path)


def test_a_map_without_offsets_is_told(tmp_path):
    write_eagle3(tmp_path, "modelopt")
    alter(tmp_path, d2t=torch.zeros(len(SOME), dtype=torch.int64))
    loaded = load(tmp_path)
    assert loaded.heads.token_ids.tolist() == list(range(len(SOME)))
    assert "the first 19 of 37 tokens" in loaded.notes[0]


def test_it_is_no_eagle_1_and_dflash_is_no_eagle_3(tmp_path):
    write_eagle3(tmp_path, "modelopt", random_eagle3(token_ids=None))
    alter(tmp_path, drop=("layers.0.hidden_norm.weight",))
    with pytest.raises(InvalidInput, match=r"layout 'eagle-3', but 'layers.0.hidden_norm.weight' is missing"):
        load(tmp_path)
    alter(tmp_path, **{"hidden_norm.weight": torch.ones(32)})
    with pytest.raises(InvalidInput, match="mask_token_id"):  # which a drafter of blocks must say
        load(tmp_path)


def test_opening_a_drafter_has_the_target_hand_out_its_layers(tmp_path):
    target = Target(tiny_model())
    write_eagle3(tmp_path, "safeailab")
    opened = open_drafter(str(tmp_path), target)
    assert target.layers == (0, 1, 2)
    assert (opened.record["kind"], opened.record["layout"], opened.record["num_heads"]) == ("eagle3", "eagle-3", 5)
    shutil.rmtree(tmp_path)
    write_eagle3(tmp_path, "safeailab", random_eagle3(replace(PLAIN, layers=None)))
    with pytest.raises(InvalidInput, match="from 7 layers on, but the target has 3"):
        open_drafter(str(tmp_path), target)
    write_eagle3(tmp_path, "safeailab", random_eagle3(), eagle_aux_hidden_state_layer_ids=[2, 3, 4])
    with pytest.raises(InvalidInput, match="before its layer 4, but unknown has 3 layers"):
        open_drafter(str(tmp_path), target)


def test_a_tokenizer_beside_it_does_not_make_it_a_draft_model(tmp_path):
    write_eagle3(tmp_path, "speculators", random_eagle3(), architectures=["Eagle3LlamaForCausalLM"])
    (tmp_path / "tokenizer.json").write_text("{}")
    assert open_drafter(str(tmp_path), Target(tiny_model())).drafter.kind == "eagle3"


@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
def test_where_engines_feed_back_other_states_is_told(layout, tmp_path):
    """SpecForge wrote norm_output into files whose drafters were trained without."""
    assert len(read(tmp_path, layout, random_eagle3(FORMS["norm_output"])).notes) == (layout != "speculators")
    assert read(tmp_path, layout).notes == ()
