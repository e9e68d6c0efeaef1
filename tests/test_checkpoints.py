"""Reading published head layouts, and refusing what is not one."""

import pytest
import torch
from safetensors.torch import save_file

from treeopt.errors import InvalidInput
from treeopt.runtime.checkpoints import load_medusa, save_medusa
from treeopt.runtime.drafters.medusa import MedusaHeads

from .conftest import SHARED


@pytest.mark.parametrize("num_layers", [1, 2])
def test_heads_survive_their_file(tmp_path, num_layers):
    torch.manual_seed(0)
    heads = MedusaHeads(3, num_layers, 8, 11)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    save_medusa(heads, tmp_path, base="tiny")
    loaded = load_medusa(tmp_path)
    assert (loaded.num_heads, loaded.num_layers, loaded.width, loaded.vocab_size) == (3, num_layers, 8, 11)
    hidden = torch.randn(4, 8)
    for k in range(3):
        assert torch.equal(loaded.logits(hidden, k), heads.logits(hidden, k))


def test_untrained_heads_are_the_targets_own_head():
    """ResBlocks start as the identity (Medusa, section 2.2)."""
    lm_head, hidden = torch.randn(11, 8), torch.randn(4, 8)
    heads = MedusaHeads.like_lm_head(lm_head, 2)
    torch.testing.assert_close(heads.logits(hidden, 1), hidden @ lm_head.T)


@pytest.mark.parametrize("layout", ["medusa_v01_pt", "medusa_v01_safetensors", "medusa_v01_two_layers_pt"])
def test_published_layouts_load_with_their_own_head_count(layout):
    folder = SHARED / "synthetic_ckpt" / layout
    if not folder.exists():
        pytest.skip("no synthetic checkpoints beside the project")
    heads = load_medusa(folder)
    assert heads.width == 16
    assert heads.vocab_size == 40
    assert heads.num_layers == (2 if "two_layers" in layout else 1)
    assert heads.logits(torch.randn(2, 16), heads.num_heads - 1).shape == (2, 40)


def tensors(heads=2):
    made = {}
    for k in range(heads):
        made |= {f"{k}.0.linear.weight": torch.zeros(8, 8), f"{k}.0.linear.bias": torch.zeros(8)}
        made[f"{k}.1.weight"] = torch.zeros(11, 8)
    return made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("1.1.weight"), "1.1.weight has shape None"),
        (lambda t: t.update({"0.0.linear.bias": torch.zeros(9)}), "0.0.linear.bias"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(1)}), "it has lm_head.weight"),
        (lambda t: t.clear(), "no tensors"),
        (lambda t: (t.pop("0.1.weight"), t.pop("1.1.weight")), "share the target's lm_head"),
        (lambda t: t.update({"1.1.weight": torch.zeros(12, 8)}), "1.1.weight"),
    ],
)
def test_other_tensors_are_refused_by_name(tmp_path, change, message):
    made = tensors()
    change(made)
    save_file(made, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(InvalidInput, match=message):
        load_medusa(tmp_path)


def test_missing_truncated_and_executable_files_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="does not exist"):
        load_medusa(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="has neither"):
        load_medusa(tmp_path)
    path = tmp_path / "medusa_lm_head.safetensors"
    save_file(tensors(), path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InvalidInput, match="not readable as one"):
        load_medusa(path)
    torch.save(tensors(), tmp_path / "medusa_lm_head.pt")
    assert load_medusa(tmp_path / "medusa_lm_head.pt").num_heads == 2
    torch.save(Executes(), tmp_path / "bad.pt")
    with pytest.raises(InvalidInput, match="not readable as one"):
        load_medusa(tmp_path / "bad.pt")


class Executes:
    def __reduce__(self):
        return (pytest.fail, ("the checkpoint was executed",))


def test_all_heads_at_once_are_each_head():
    torch.manual_seed(0)
    heads = MedusaHeads(4, 2, 8, 11).double()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(5, 8, dtype=torch.float64)
    for depth in (1, 3, 4):
        expected = torch.stack([heads.logits(hidden, k) for k in range(depth)], dim=1)
        torch.testing.assert_close(heads.first_logits(hidden, depth), expected)
