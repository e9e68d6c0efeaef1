"""DFlash, DSpark, DFlash2 and PARD: what is their own beside the contract of drafters with layers (test_checkpoints_layers)."""

import shutil

import pytest
import torch
from transformers import AutoTokenizer

from treeopt import demo
from treeopt.errors import InvalidInput, Unsupported
from treeopt.runtime.acceptance.rules import Sampling
from treeopt.runtime.checkpoints import Base, load_heads
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.drafters.parallel import PardModel
from treeopt.runtime.session import by_rejection
from treeopt.runtime.target import Target

from .conftest import VOCABULARY, tiny_model
from .helpers.layouts import BLOCKS, alter, load, write_block
from .helpers.random_drafters import MASK, SOME
from .helpers.slow_blocks import slow_rows
from .helpers.synthetic import edit_json


@pytest.mark.parametrize("layout", [layout for kind, layout in BLOCKS if kind == "dflash"])
def test_a_narrower_block_is_another_drafter_and_a_wider_one_is_refused(tmp_path, layout):
    form = write_block(tmp_path, "dflash", layout).form
    most = form.most_guesses
    with pytest.raises(InvalidInput, match=rf"draft_depth must be at most {most}.*5 rows, but got {most + 1}"):
        load(tmp_path, num_heads=most + 1)
    hidden = torch.randn(6, 96, dtype=torch.float64)
    whole, narrow = (slow_rows(load(tmp_path, num_heads=n).heads, hidden, 7) for n in (most, 2))
    assert torch.allclose(whole[form.first], narrow[form.first]) == all(form.causal)


def test_layers_of_the_target_that_are_not_said_are_spread_evenly(tmp_path):
    write_block(tmp_path, "dflash", "z-lab", dflash_config={"mask_token_id": 2}, num_target_layers=64)
    assert load(tmp_path).heads.form.layers == (2, 62)  # behind layers 1 and N - 3


def test_a_projector_of_another_kind_is_refused(tmp_path):
    write_block(tmp_path, "dflash", "z-lab", projector_type="domino")
    with pytest.raises(Unsupported, match="projector_type must be dspark or nothing"):
        load(tmp_path)


def test_without_the_target_there_is_nothing_to_read(tmp_path):
    write_block(tmp_path, "dflash", "z-lab", vocab_size=VOCABULARY)
    with pytest.raises(InvalidInput, match=r"reads the target's input embeddings, of width 32: pass"):
        load_heads(str(tmp_path), Base())


def test_a_confidence_head_is_not_read(tmp_path):
    own = write_block(tmp_path, "dspark", "z-lab")
    alter(tmp_path, **{"confidence_head.proj.weight": torch.zeros(1, 32)})
    assert load(tmp_path).heads.weights.keys() == own.weights.keys()


def test_the_embeddings_may_be_among_what_dspark_reads(tmp_path):
    write_block(tmp_path, "dspark", "z-lab", target_layer_ids=[-1, 2])
    assert load(tmp_path).heads.form.layers == (0, 3)
    write_block(tmp_path, "dspark", "speculators", aux_hidden_state_layer_ids=[-1, 2])
    with pytest.raises(InvalidInput, match="a list of layers from 0 to"):
        load(tmp_path)


def test_a_dflash2_that_guesses_some_tokens_alone_is_refused(tmp_path):
    own = write_block(tmp_path, "dflash2", "z-lab")
    alter(tmp_path, **{"d2t": SOME - torch.arange(len(SOME)), "lm_head.weight": own.lm_head[SOME]})
    with pytest.raises(Unsupported, match="d2t"):
        load(tmp_path)


# PARD


def write_pard(folder, **told):
    tiny_model(dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL / name, folder)
    edit_json(folder / "config.json", **told)
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
