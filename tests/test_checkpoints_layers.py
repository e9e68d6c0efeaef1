"""Drafters with layers, one contract for all their layouts: read as they were meant, written again, and refused where they are damaged.

EAGLE-3, P-EAGLE, DFlash, DSpark and DFlash2.
"""

import itertools
import json
import resource
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from treeopt.errors import InvalidInput, TreeoptError, Unsupported
from treeopt.records.drafters import WRITTEN
from treeopt.runtime.checkpoints import save_heads
from treeopt.runtime.decode import decode
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target
from treeopt.trees.tree import Tree

from .conftest import VOCABULARY
from .helpers.layouts import ROWS, alter, load, write_block, write_eagle3, write_peagle
from .helpers.random_drafters import RANK
from .helpers.slow_drafters import config_of, small_model
from .helpers.synthetic import check_damage


def same_tensors(ours, theirs) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def same(ours, theirs) -> None:
    for name in ("kind", "form", "num_heads", "num_layers"):
        assert getattr(ours, name) == getattr(theirs, name), name
    same_tensors(ours.weights, theirs.weights)
    assert torch.equal(ours.lm_head, theirs.lm_head)
    assert torch.equal(ours.embedding, theirs.embedding)
    assert (ours.token_ids is None) == (theirs.token_ids is None)
    assert ours.token_ids is None or torch.equal(ours.token_ids, theirs.token_ids)


def rotation(heads) -> dict[str, object]:
    return config_of(heads).rope_parameters


@pytest.mark.parametrize("name", ROWS)
def test_a_layout_is_read_as_it_was_meant_and_written_again(name, tmp_path):
    row = ROWS[name]
    own = row.write(tmp_path / "its")
    read = load(tmp_path / "its", num_heads=own.num_heads)
    assert read.layout == row.layout
    same(read.heads, own)
    assert rotation(read.heads)["rope_theta"] == 77.0
    if row.layout in WRITTEN:
        save_heads(read.heads, row.layout, tmp_path / "ours", base="someone/a-model")
        again = load(tmp_path / "ours", num_heads=own.num_heads)
        same(again.heads, own)
        assert (again.base, rotation(again.heads)) == ("someone/a-model", rotation(read.heads))


DAMAGED = ["eagle-3 nemo, q_norm", "dspark nested"]  # the others take long
EVERY = {
    "eagle-3 safeailab, all": 1,
    "eagle-3 modelopt, norm_output": 1,
    "p-eagle amazon": 1,
    "dflash nested": 1,
    "dflash2 nested": 1,
}


@pytest.mark.parametrize(
    ("name", "every"),
    [*((name, 3) for name in DAMAGED), *(pytest.param(*row, marks=pytest.mark.long) for row in EVERY.items())],
)
def test_a_tensor_renamed_dropped_or_reshaped_is_refused_by_its_name(name, every, tmp_path):
    """In the suite a third of the seven changes to each tensor, other ones to the next."""
    ROWS[name].write(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)

    def may_lack(name: str) -> bool:
        if name == "d2t" and "t2d" not in tensors:  # the head is then said to be of another vocabulary
            with pytest.raises(InvalidInput, match=r"d2t|draft_vocab_size"):
                load(tmp_path)
            return True
        return name.removeprefix("model.") in ("t2d", "fc.bias", "embed_tokens.weight") and bool(load(tmp_path))

    names = [name for name in tensors if not name.startswith("layers.1.")]
    check_damage(lambda: load(tmp_path), file, tensors, may_lack, itertools.count(), every, names)


# What config.json says


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
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": "8"}}, "scaled by at most"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
    ({"hidden_act": "zzz"}, "must describe the heads"),
]
BLOCK = [
    ({"mask_token_id": VOCABULARY, "dflash_config": {}}, "mask_token_id must be a whole number from 0 to"),
    ({"mask_token_id": 7}, "mask_token_id must be 7, as config.json says beside dflash_config"),
    ({"dflash_config": {"mask_token_id": 2, "target_layer_ids": [0]}}, "a list of the 2 layers that fc reads"),
    ({"dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, -1]}}, "a list of layers from 0 to"),
    ({"dflash_config": [2]}, "dflash_config must be an object"),
    ({"block_size": 1}, "block_size must be a whole number from 2 to"),
    ({"block_size": None}, "block_size must be a whole number"),
    ({"sample_from_anchor": "yes"}, "sample_from_anchor must be true or false"),
    ({"is_causal": 1}, "is_causal must be true or false"),
    ({"use_sliding_window": True, "sliding_window": 8}, "layer_types must say which layers slide"),
    ({"layer_types": ["full_attention"]}, "layer_types must be a list of full_attention or sliding_attention"),
    ({"layer_types": ["sliding_attention"] * 2}, "sliding_window must be a whole number"),
    ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "engines disagree .* say is_causal"),
    ({"head_dim": 8}, "whole heads, of width 8 by"),
    ({"head_dim": 7}, "must describe the heads"),
    ({"head_dim": None}, "whole heads, of width 128 by"),
    ({"num_hidden_layers": 3}, "it says num_hidden_layers 3"),
    ({"vocab_size": 9}, "it says vocab_size 9"),
]
OF_KIND = [
    ("dspark", {"markov_rank": None}, "markov_rank must be a whole number"),
    ("dspark", {"markov_rank": RANK + 1}, "markov_head.markov_w1.weight' must have the shape"),
    ("dspark", {"markov_head_type": "rnn"}, "markov_head_type must be vanilla"),
    ("dspark", {"target_layer_ids": [0, -2]}, "a list of layers from -1 to"),
    (
        "dspark",
        {"sample_from_anchor": False, "block_size": 1},
        "block_size must be 5, as config.json says beside dflash_config",
    ),
    ("dflash2", {"selector_top_k": None}, "selector_top_k must be a whole number"),
    ("dflash2", {"selector_top_k": VOCABULARY + 1}, "selector_top_k must be a whole number"),
    ("dflash2", {"selector_rank": RANK + 1}, "candidate_selector.predecessor_codebook' must have the shape"),
    ("dflash2", {"conv_kernel_size": 3}, "base_kernel' must have the shape"),
    ("dflash2", {"conv_group_size": 5}, "conv_group_size must be a divisor of the width 32"),
    ("dflash2", {"conv_group_size": 16}, "kernel_projection.weight' must have the shape"),
    ("dflash2", {"target_layer_ids": [0, -1]}, "a list of layers from 0 to"),
]
PARALLEL = [
    ((), {"ptd_token_id": None}, "ptd_token_id must be a whole number from 0 to 36, but .* says None"),
    ((), {"ptd_token_id": VOCABULARY}, "ptd_token_id must be a whole number"),
    ((), {"pard_token": 3}, "pard_token must be 8, as ptd_token_id is"),
    (("mask_hidden",), {}, "layout 'p-eagle', but 'mask_hidden' is missing"),
    (("layers.1.input_layernorm.weight",), {}, "'layers.1.input_layernorm.weight' is missing"),
    ((), {"num_hidden_layers": 3}, "it says num_hidden_layers 3 where 'layers.1'"),
    ((), {"sliding_window": 8}, "sliding_window must be absent"),
    ((), {"layer_types": ["sliding_attention"] * 2}, "layer_types must be .*'full_attention', 'full_attention'"),
    ((), {"speculators_model_type": "eagle3"}, "more than one layer"),
    (("mask_hidden",), {"parallel_drafting": None}, "more than one layer"),
]
MODELOPT, Z_LAB = partial(write_eagle3, layout="modelopt"), partial(write_block, kind="dflash", layout="z-lab")
CASES = [
    *((MODELOPT, *row) for row in FLAGS),
    *((partial(write_eagle3, layout="safeailab"), *row) for row in WRONG),
    *((Z_LAB, *row) for row in BLOCK),
    *((partial(write_block, kind=kind, layout="z-lab"), *row) for kind, *row in OF_KIND),
    *((partial(write_peagle, layout="amazon", drop=drop), *row) for drop, *row in PARALLEL),
]


@pytest.mark.parametrize(("write", "changes", "said"), CASES)
def test_a_config_is_refused_by_the_key_that_is_wrong(write, changes, said, tmp_path):
    write(tmp_path, **changes)
    with pytest.raises((InvalidInput, Unsupported), match=said) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


VALUES = [None, 0, -1, 1, 3, 2**31, 2**40, 10**30, 1.5, 1e308, "x", [], [1], {}, {"a": [1]}, True]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "attention_factor": 1.0}
MORE = ("rope_scaling", "rope_parameters", "sliding_window", "layer_types", "num_target_layers", "target_hidden_size", "partial_rotary_factor",
        "attention_bias", "draft_vocab_size", "dtype")  # fmt: skip


def one_field_changed(config: dict) -> list[dict]:
    """Configs that differ in one field, nested ones too; a null is a field that is not there."""
    found = []
    for key in (*config, *MORE):
        value = config.get(key)
        found += [config | {key: other} for other in VALUES if other != value]
        if isinstance(value, dict):
            found += [config | {key: inner} for inner in one_field_changed(value)]
    return found


@pytest.mark.parametrize(
    "name", ["dspark z-lab", *(pytest.param(n, marks=pytest.mark.slow) for n in ROWS if n != "dspark z-lab")]
)
def test_a_field_of_any_value_is_read_or_refused_in_words(name, tmp_path, request):
    """In the suite every 40th change of one layout. What is read can be run, and memory is bounded."""
    ROWS[name].write(tmp_path)
    file, every = tmp_path / "config.json", 1 if request.node.get_closest_marker("slow") else 40
    config = json.loads(file.read_text()) | {"rope_parameters": YARN}
    changed, target = one_field_changed(config), Target(small_model())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + 2**20  # KiB
    for config in changed[::every]:
        file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
        try:
            drafter = open_drafter(str(tmp_path), target).drafter
            decode(target, drafter, [[4, 9, 1]], Tree.chain(1), batch_size=1, stop=StopRule(frozenset(), 3))
        except TreeoptError:
            pass
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < most, config


@pytest.mark.parametrize(
    ("write", "name", "said"),
    [
        (MODELOPT, "layers.0.self_attn.q_a_proj.weight", "q_a_proj.weight' .* latent attention"),
        (MODELOPT, "layers.1.self_attn.q_proj.weight", "more than one layer"),
        (MODELOPT, "layers.0.mlp.experts.0.up_proj.weight", "experts"),
        (MODELOPT, "parallel_draft_heads.0.weight", "heads that draft in parallel"),
        (Z_LAB, "aux_hidden_norms.0.weight", "weight.*is of a DFlash variant"),
        (Z_LAB, "layers.0.self_attn.qkv_proj.weight", "is of a DFlash variant"),
    ],
)
def test_other_drafters_are_refused_by_a_tensors_name(write, name, said, tmp_path):
    write(tmp_path)
    alter(tmp_path, **{name: torch.ones(1)})
    with pytest.raises(Unsupported, match=said):
        load(tmp_path)
