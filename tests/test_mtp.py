"""MTP heads against transformers' own layer, run over the whole text for every guess."""

import json
import shutil
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from treeopt import demo
from treeopt.errors import InvalidInput, Unsupported
from treeopt.runtime.decode import decode
from treeopt.runtime.drafters.mtp import MTP, MtpHeads, load_mtp
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target, load_target
from treeopt.trees.tree import Tree

from .conftest import CONTEXT, HEADS, VOCABULARY, random_prompts, tiny_model
from .helpers.slow_drafters import check_ranks, in_order

KINDS = ["deepseek_v3", "glm4_moe"]
LAYERS = 2
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.6,
    "eos_token_id": [3, 5],
    "bos_token_id": None,
    "pad_token_id": 0,
    "experts_implementation": "eager",  # the others are not for float64
}
LATENT = {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}
OWN = {  # DeepSeek-V3's latent keys and values are of different widths
    "deepseek_v3": {"num_key_value_heads": 4, **LATENT},
    "glm4_moe": {"num_key_value_heads": 2, "head_dim": 8, "use_qk_norm": True},
}
NORMS = ("enorm", "hnorm", "shared_head.norm")


def random_model(kind, *, layers=LAYERS, attention="sdpa", **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {**COMMON, **OWN[kind], "num_hidden_layers": layers, "attn_implementation": attention, **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    model.generation_config.eos_token_id = [3, 5]
    return model.double().eval().requires_grad_(False)


@cache
def drafting(kind, attention="sdpa") -> tuple[Target, MtpHeads]:
    """A target with its layer. All weights are random; in a vocabulary of 37 its guesses are right often enough."""
    model = random_model(kind, attention=attention)
    torch.manual_seed(1)
    mtp = MtpModel(model, 1).requires_grad_(False)
    mtp.layers.double()
    for weight in mtp.layers.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.3)
    target = Target(model)
    return target, MtpHeads(mtp.eval(), target, num_heads=HEADS)


def slow_mtp(heads, text, hidden, root, path):
    """All tokens in the order in which the layer guesses them below ``path``: transformers' own pass, from the start."""
    tokens, states = [*text[1:], root], hidden
    for token in [*path, None]:
        positions = torch.arange(1, len(tokens) + 1)[None]
        embedded = torch.nn.functional.embedding(torch.tensor([tokens]), heads.embedding)
        mask = torch.ones((len(tokens), len(tokens)), dtype=torch.bool).tril()[None, None]
        after = heads.layer(embedded, states[None], heads.rotary(embedded, positions), mask, positions, None)[0, -1]
        states = torch.cat([states, after[None]])
        tokens.append(token)
    return in_order(heads.lm_head @ after)


@pytest.mark.parametrize("kind", KINDS)
def test_the_target_says_what_transformers_says(kind):
    target, _ = drafting(kind)
    (row,) = decode(target, None, [[4, 9, 1]], batch_size=1, stop=StopRule(frozenset(), 20, at_loops=False))
    text = [4, 9, 1]
    for _ in range(20):
        text.append(int(target.model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    assert row.tokens == text[3:]


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    return published(request.param, tmp_path_factory.mktemp("mtp") / request.param)


def published(kind, folder, **changes):
    """A folder as they are published: the layer behind the last one, its experts apart, with copies of what it shares."""
    model = random_model(kind, layers=LAYERS + 1, **changes)
    width = model.config.hidden_size
    model.save_pretrained(folder)
    tensors, start = load_file(folder / "model.safetensors"), f"model.layers.{LAYERS}."
    assert any(name.startswith(f"{start}mlp.experts.3.") for name in tensors)
    torch.manual_seed(2)
    tensors |= {f"{start}{name}.weight": 1 + 0.3 * torch.randn(width, dtype=torch.float64) for name in NORMS}
    tensors[f"{start}eh_proj.weight"] = torch.randn(width, 2 * width, dtype=torch.float64)
    tensors[f"{start}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors[f"{start}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("num_mtp_layers", None)
    (folder / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1})
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL / name, folder / name)
    return folder


def test_the_layer_is_read_from_the_targets_checkpoint(checkpoint):
    target = load_target(str(checkpoint), dtype="float64", device="cpu")
    before = target.config.to_dict()
    opened = open_drafter(MTP, target, depth=3)
    heads, tensors, start = opened.drafter, load_file(checkpoint / "model.safetensors"), f"model.layers.{LAYERS}."
    assert opened.record == {"kind": "mtp", "id": "mtp", "sha256": None, "num_heads": 3, "num_layers": 1}
    own = dict(heads.layer.named_parameters())
    for ours, theirs in [("enorm", "enorm"), ("hnorm", "hnorm"), ("post_norm", "shared_head.norm"), ("eh_proj",) * 2]:
        assert torch.equal(own.pop(f"{ours}.weight"), tensors[f"{start}{theirs}.weight"]), ours
    gate_up = own.pop("mtp_block.mlp.experts.gate_up_proj")
    assert torch.equal(gate_up[2, :16], tensors[f"{start}mlp.experts.2.gate_proj.weight"])
    assert torch.equal(gate_up[2, 16:], tensors[f"{start}mlp.experts.2.up_proj.weight"])
    own.pop("mtp_block.mlp.experts.down_proj")
    for name, weight in own.items():
        assert torch.equal(weight, tensors[start + name.removeprefix("mtp_block.")]), name
    shared = {target.lm_head.weight.data_ptr(), target.model.get_input_embeddings().weight.data_ptr()}
    assert {heads.lm_head.data_ptr(), heads.embedding.data_ptr()} == shared
    assert target.config.to_dict() == before
    assert target.model.config.name_or_path == str(checkpoint)
    check_ranks(heads, slow_mtp, seed=1)
    prompts, stop = random_prompts(1), StopRule(target.eos_ids, 20, at_loops=False)
    rows = decode(target, heads, prompts, Tree.chain(3), batch_size=2, stop=stop)
    plain = decode(target, None, prompts, batch_size=2, stop=stop)
    assert [row.tokens for row in rows] == [row.tokens for row in plain]


def test_the_layer_takes_the_targets_number_format(checkpoint):
    target = load_target(str(checkpoint), dtype="bfloat16", device="cpu")
    heads = load_mtp(MTP, target)
    assert {weight.dtype for weight in heads.parameters()} == {torch.bfloat16}
    rows = decode(target, heads, [[4, 5]], Tree.chain(2), batch_size=1, stop=StopRule(frozenset(), 8, at_loops=False))
    assert len(rows[0].tokens) == 8


DAMAGE = {
    "missing": (lambda t, start: t.pop(f"{start}hnorm.weight"), "hnorm"),
    "no layer": (
        lambda t, start: [t.pop(name) for name in list(t) if name.startswith(start)],
        "were left out of this copy",
    ),
    "shape": (
        lambda t, start: t.update({f"{start}eh_proj.weight": torch.ones(32, 32)}),
        "whose weights fit config.json, but",
    ),
    "nan": (lambda t, start: t[f"{start}enorm.weight"].fill_(torch.nan), r"must be finite, but enorm\.weight"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_layer_is_refused(checkpoint, tmp_path, damage):
    folder, (change, message) = tmp_path / "$(touch x)", DAMAGE[damage]
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors, f"model.layers.{LAYERS}.")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    target = load_target(str(folder), dtype="float64", device="cpu")
    with pytest.raises(InvalidInput, match=message):
        load_mtp(MTP, target)


SMALL = {"hidden_size": 16, "intermediate_size": 8, "moe_intermediate_size": 8, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY,
         "pad_token_id": 0}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "sizes", "changes", "message"),
    [
        ("qwen3", SMALL, {}, "MTP layer like that of deepseek_v3 or glm4_moe, but y is qwen3"),
        ("glm4_moe", None, {"num_mtp_layers": 0}, "needs a target with one MTP layer, but y has 0"),
        ("glm4_moe", None, {"num_mtp_layers": 3}, "with one MTP layer, but y has 3"),
        ("glm4_moe", None, {"quantization_config": {"quant_method": "fp8"}}, "not quantized, but y is quantized"),
        ("glm4_moe", None, None, "on one device"),
    ],
)
def test_layers_that_cannot_be_run_are_refused_by_name(kind, sizes, changes, message):
    from accelerate.hooks import ModelHook, add_hook_to_module
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **sizes) if sizes else None
    target = Target(random_model(kind) if config is None else AutoModelForCausalLM.from_config(config), name="y")
    if changes is None:
        add_hook_to_module(target.decoder, ModelHook())
    for name, value in (changes or {}).items():
        setattr(target.config, name, value)
    with pytest.raises(Unsupported, match=message):
        open_drafter(MTP, target)


@pytest.mark.parametrize("name", ["mtp:", "mtp:3"])
def test_other_words_behind_mtp_are_refused(name):
    with pytest.raises(InvalidInput, match="must be mtp alone"):
        open_drafter(name, Target(tiny_model()))
