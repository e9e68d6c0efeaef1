"""Reading and writing EAGLE-3's layouts, each written here from the facts, and refusing what is not one."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from treeopt.errors import InvalidInput, Unsupported
from treeopt.runtime.checkpoints import Base, convert, load_heads, save_heads
from treeopt.runtime.drafters.eagle3 import Eagle3Heads
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.target import Target

from .conftest import VOCABULARY, tiny_model
from .helpers.slow_drafters import check_ranks, slow_eagle3
from .helpers.synthetic import check_damage, synthetic
from .test_guesses import FORMS, PLAIN, SOME, random_eagle3, small_model

LAYER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 96, "num_hidden_layers": 1,
         "vocab_size": VOCABULARY}  # fmt: skip
LAYOUTS = {  # where config.json says what, and the prefixes of tensors: (of the layer, of all but the head)
    "safeailab": ("midlayer.", ""),
    "modelopt": ("layers.0.", ""),
    "speculators": ("layers.0.", ""),
    "nemo": ("model.layers.0.", "model."),
}


def config_in(layout: str, heads: Eagle3Heads) -> dict[str, object]:
    form, config = heads.form, heads.layer.config
    counts = {key: getattr(config, key) for key in ("num_hidden_layers", "num_key_value_heads")}
    layer = {**LAYER, **counts, "rope_theta": 77.0}
    told = {
        "draft_vocab_size": heads.draft_vocab_size,
        "norm_before_residual": form.before_residual,
        "norm_before_fc": form.fuse_norm,
        "fc_norm": form.state_norms,
        "norm_output": form.normed_feedback,
        "bias": form.fc_bias,
        "attention_bias": form.bias,
        "eagle_aux_hidden_state_layer_ids": form.layers and list(form.layers),
    }
    flags = {key: value for key, value in told.items() if value}
    if layout == "modelopt":
        return {
            **layer,
            "draft_vocab_size": heads.draft_vocab_size,
            "eagle_config": {**flags, "use_aux_hidden_state": True},
        }
    if layout == "speculators":
        kinds = ["full_attention"] * config.num_hidden_layers
        kind = {"model_type": "qwen3" if form.head_norms else "llama", "layer_types": kinds}
        nested = {"transformer_layer_config": {**layer, **kind}, "target_hidden_size": None}
        return {"speculators_model_type": "eagle3", **nested, **flags}
    return {**layer, "architectures": ["LlamaForCausalLMEagle3"], **flags}


def tensors_in(layout: str, heads: Eagle3Heads) -> dict[str, torch.Tensor]:
    layer, root = LAYOUTS[layout]
    found = {}
    for name, weight in heads.weights.items():
        inside = name.startswith("layers.0.")
        outside = name if name == "lm_head.weight" else root + name
        found[layer + name.removeprefix("layers.0.") if inside else outside] = weight.detach().clone()
    if heads.token_ids is not None:
        found["d2t"] = heads.token_ids - torch.arange(len(heads.token_ids))
        if layout != "modelopt":
            found["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, heads.token_ids, True)
    if layout == "nemo":
        found["model.embed_tokens.weight"] = heads.embedding.clone()
    return found


def write(folder: Path, layout: str, heads: Eagle3Heads, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors_in(layout, heads), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_in(layout, heads) | changes))
    return folder


def base_of(model, **options) -> Base:
    return Base(model.lm_head.weight, model.model.embed_tokens.weight, model.config, torch.float64, **options)


def load(folder: Path, **options):
    return load_heads(str(folder), base_of(small_model(), **options))


def alter(folder: Path, drop: tuple[str, ...] = (), **changes) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name not in drop}
    save_file(tensors | changes, file)


def same_tensors(ours, theirs) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def same(ours: Eagle3Heads, theirs: Eagle3Heads) -> None:
    assert ours.form == theirs.form
    same_tensors(ours.weights, theirs.weights)
    assert torch.equal(ours.lm_head, theirs.lm_head)
    assert (ours.token_ids is None) == (theirs.token_ids is None)
    assert ours.token_ids is None or torch.equal(ours.token_ids, theirs.token_ids)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_layout_is_read_and_written_again(layout, form, tmp_path):
    if form.fuse_norm and form.state_norms:
        form = replace(form, state_norms=False)
    heads = random_eagle3(form, num_heads=3)
    loaded = load(write(tmp_path / "theirs", layout, heads), num_heads=3)
    assert loaded.layout == "eagle-3"
    same(loaded.heads, heads)
    assert loaded.heads.layer.config.rope_parameters["rope_theta"] == 77.0
    assert len(loaded.notes) == (form.normed_feedback and layout != "speculators")
    save_heads(loaded.heads, "eagle-3", tmp_path / "ours", base="a/base")
    same_tensors(load_file(tmp_path / "ours" / "model.safetensors"), tensors_in("safeailab", heads))
    again = load(tmp_path / "ours", num_heads=3)
    same(again.heads, heads)
    assert again.base == "a/base"
    assert again.heads.layer.config.rope_parameters == loaded.heads.layer.config.rope_parameters


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
    folder = write(tmp_path / "theirs", "modelopt", random_eagle3(token_ids=None, shared=True), draft_vocab_size=None)
    loaded = load(folder)
    assert loaded.heads.shares_projection
    assert torch.equal(loaded.heads.lm_head, model.lm_head.weight)
    with pytest.raises(InvalidInput, match="pass it with model"):
        convert(str(folder), "eagle-3", tmp_path / "ours")
    convert(str(folder), "eagle-3", tmp_path / "ours", lm_head=model.lm_head.weight)
    assert torch.equal(load(tmp_path / "ours").heads.lm_head, model.lm_head.weight)


def test_own_embeddings_are_kept_and_copies_of_the_targets_are_not(tmp_path):
    folder = write(tmp_path / "theirs", "nemo", random_eagle3())
    assert not load(folder).heads.form.own_embedding
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
    loaded = load(tmp_path / "with").heads
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
    assert load(write(tmp_path, layout, heads)).heads.form.layers == layers


def test_the_rotation_is_never_the_targets(tmp_path):
    model = tiny_model()
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 500000.0}
    for said, theta in ((None, 10000.0), ({"rope_type": "default", "rope_theta": 5.0}, 5.0)):
        folder = write(tmp_path, "safeailab", random_eagle3(), rope_theta=None, rope_parameters=said)
        assert load_heads(str(folder), base_of(model)).heads.layer.config.rope_parameters["rope_theta"] == theta
    (folder / "config.json").unlink()
    with pytest.raises(InvalidInput, match=r"num_attention_heads must be"):
        load_heads(str(folder), base_of(model))


def test_flags_that_change_nothing_are_taken(tmp_path):
    heads = random_eagle3(replace(PLAIN, layers=None))
    usual = {"sliding_window": 9, "use_sliding_window": False, "logit_scale": 1, "partial_rotary_factor": 1}
    loaded = load(write(tmp_path, "safeailab", heads, **usual, eagle_config={"eagle_aux_hidden_state_layer_ids": []}))
    assert loaded.heads.form.layers is None


def test_speculators_leave_out_what_transformers_has_by_default(tmp_path):
    config = config_in("speculators", random_eagle3())
    del config["transformer_layer_config"]["num_attention_heads"]
    write(tmp_path, "speculators", random_eagle3())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match="num_attention_heads 32 where"):  # 32 is Llama's; these tensors have 4
        load(tmp_path)


# Which target it is for


def test_opening_a_drafter_has_the_target_hand_out_its_layers(tmp_path):
    target = Target(tiny_model())
    write(tmp_path, "safeailab", random_eagle3())
    opened = open_drafter(str(tmp_path), target)
    assert target.layers == (0, 1, 2)
    assert (opened.record["kind"], opened.record["layout"], opened.record["num_heads"]) == ("eagle3", "eagle-3", 5)
    shutil.rmtree(tmp_path)
    write(tmp_path, "safeailab", random_eagle3(replace(PLAIN, layers=None)))
    with pytest.raises(InvalidInput, match="from 7 layers on, but the target has 3"):
        open_drafter(str(tmp_path), target)
    write(tmp_path, "safeailab", random_eagle3(), eagle_aux_hidden_state_layer_ids=[2, 3, 4])
    with pytest.raises(InvalidInput, match="before its layer 4, but unknown has 3 layers"):
        open_drafter(str(tmp_path), target)


def test_a_tokenizer_beside_it_does_not_make_it_a_draft_model(tmp_path):
    write(tmp_path, "speculators", random_eagle3(), architectures=["Eagle3LlamaForCausalLM"])
    (tmp_path / "tokenizer.json").write_text("{}")
    assert open_drafter(str(tmp_path), Target(tiny_model())).drafter.kind == "eagle3"


# What is refused


FLAGS = [  # that would change the guesses
    ({"parallel_drafting": True, "speculators_model_type": "eagle3"}, "parallel_drafting must be False"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state must be True"),
    ({"use_input_layernorm_in_first_layer": 0}, "use_input_layernorm_in_first_layer"),
    ({"num_hidden_layers": True}, "num_hidden_layers must be 1 .* says True"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"sliding_window": 512}, "sliding_window .* says 512"),
    ({"layer_types": ["sliding_attention"]}, "layer_types .* says \\['sliding_attention'\\]"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling .* 'dynamic'"),
]
WRONG = [  # where a config does not describe its file
    ({"norm_before_residual": "yes"}, "norm_before_residual must be true or false"),
    ({"fc_norm": True}, "fc_norm must be false, as the file has no tensors"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 3]}, "must be a list of the 3 layers .* says \\[2, 3\\]"),
    ({"eagle_aux_hidden_state_layer_ids": [2, -3, -1]}, "must be a list of layers"),
    ({"eagle_aux_hidden_state_layer_ids": [0, True, 2]}, "must be a list of layers"),
    ({"eagle_aux_hidden_state_layer_ids": "$(x)"}, "must be a list of the 3 layers"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 3, 10**400]}, "must be a list of layers"),
    ({"eagle_config": [1]}, "eagle_config must be an object"),
    ({"draft_vocab_size": 5}, "draft_vocab_size 5"),
    ({"vocab_size": 38}, "vocab_size 38"),
    ({"hidden_size": 31}, "hidden_size 31"),
    ({"target_hidden_size": 16}, "target_hidden_size 16"),
    ({"num_attention_heads": 10**400}, "whole number"),
    ({"num_attention_heads": None}, "num_attention_heads must be"),
    ({"head_dim": 7}, "must describe the heads"),
    ({"rope_theta": -1.0}, "rotary frequencies"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
    ({"hidden_act": "zzz"}, "must describe the heads"),
]


@pytest.mark.parametrize(
    ("layout", "error", "change", "message"),
    [*(("modelopt", Unsupported, *row) for row in FLAGS), *(("safeailab", InvalidInput, *row) for row in WRONG)],
)
def test_a_config_is_refused_by_the_key_that_is_wrong(layout, error, change, message, tmp_path):
    with pytest.raises(error, match=message) as caught:
        load(write(tmp_path, layout, random_eagle3(), **change))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.0.self_attn.q_a_proj.weight", r"'layers.0.self_attn.q_a_proj.weight' .* latent attention"),
        ("layers.1.self_attn.q_proj.weight", "more than one layer"),
        ("layers.0.mlp.experts.0.up_proj.weight", "experts"),
        ("parallel_draft_heads.0.weight", "heads that draft in parallel"),
    ],
)
def test_other_drafters_are_refused_by_a_tensors_name(name, message, tmp_path):
    write(tmp_path, "modelopt", random_eagle3())
    alter(tmp_path, **{name: torch.ones(1)})
    with pytest.raises(Unsupported, match=message):
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
    write(tmp_path, "safeailab", random_eagle3())
    alter(tmp_path, d2t=d2t.contiguous())
    with pytest.raises(InvalidInput, match=message):
        load(tmp_path)


def test_a_map_without_offsets_is_told(tmp_path):
    write(tmp_path, "modelopt", random_eagle3())
    alter(tmp_path, d2t=torch.zeros(len(SOME), dtype=torch.int64))
    loaded = load(tmp_path)
    assert loaded.heads.token_ids.tolist() == list(range(len(SOME)))
    assert "the first 19 of 37 tokens" in loaded.notes[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_renamed_dropped_or_reshaped_is_refused_by_its_name(layout, tmp_path):
    form = replace(PLAIN, state_norms=True, bias=True, fc_bias=True, head_norms=True)
    tensors = tensors_in(layout, random_eagle3(form))
    write(tmp_path, layout, random_eagle3(), fc_norm=True)

    def may_lack(name: str) -> bool:
        return name in ("t2d", "fc.bias", "model.fc.bias", "model.embed_tokens.weight") and bool(load(tmp_path))

    check_damage(lambda: load(tmp_path), tmp_path / "model.safetensors", tensors, may_lack, itertools.count(), 2)


def test_it_is_no_eagle_1_and_dflash_is_no_eagle_3(tmp_path):
    write(tmp_path, "modelopt", random_eagle3(token_ids=None))
    alter(tmp_path, drop=("layers.0.hidden_norm.weight",))
    with pytest.raises(InvalidInput, match=r"layout 'eagle-3', but 'layers.0.hidden_norm.weight' is missing"):
        load(tmp_path)
    alter(tmp_path, **{"hidden_norm.weight": torch.ones(32)})
    with pytest.raises(InvalidInput, match="mask_token_id"):  # which a drafter of blocks must say
        load(tmp_path)
