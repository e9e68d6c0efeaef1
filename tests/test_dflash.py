"""DFlash: each form against a forward that is written out row by row, transformers' own class, and every layout of its files."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from treeopt.errors import InvalidInput, Unsupported
from treeopt.runtime.checkpoints import Base, load_heads
from treeopt.runtime.drafters.dflash import DFlashHeads, Form

from .conftest import VOCABULARY
from .helpers.slow_drafters import check_proposals, check_ranks, in_order, slow_norm, small_model

THETA, MASK, SOME = 77.0, 8, torch.tensor([0, *range(3, VOCABULARY, 2)])
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "hidden_size": 32, "intermediate_size": 40}
CONFIG = {**SIZES, "max_position_embeddings": 96, "rms_norm_eps": 1e-6, "hidden_act": "silu"}


def random_dflash(
    *,
    causal=(False, False),
    windows=(None, None),
    from_anchor=False,
    ids=None,
    guesses=3,
    block=5,
    seed=0,
    made=DFlashHeads,
    **sizes,
) -> DFlashHeads:
    model = small_model()
    rope = {"rope_type": "default", "rope_theta": THETA}
    config = Qwen3Config(**CONFIG, vocab_size=1, num_hidden_layers=len(causal), rope_parameters=rope)
    heads = made(
        config,
        Form(32, VOCABULARY, (1, 3), MASK, block, from_anchor, causal, windows),
        embedding=model.model.embed_tokens.weight,
        lm_head=None if ids is not None else model.lm_head.weight,
        token_ids=ids,
        num_heads=guesses,
        dtype=torch.float64,
        **sizes,
    )
    generator = torch.Generator().manual_seed(seed)
    for name, weight in heads.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        weight.data = 1 + 0.3 * noise if "norm" in name else 0.4 * noise
    return heads.requires_grad_(False).eval()


class Layer:
    """A layer of the drafter, with the names that `slow_drafters` reads."""

    def __init__(self, heads: DFlashHeads, i: int) -> None:
        self.config = heads.config
        mine = f"layers.{i}."
        self.weights = {
            "layers.0." + name.removeprefix(mine): weight
            for name, weight in heads.weights.items()
            if name.startswith(mine)
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[f"layers.0.{name}.weight"]


def turned(v: torch.Tensor, position: int) -> torch.Tensor:
    half = len(v) // 2
    angle = position * THETA ** (-torch.arange(half, dtype=torch.float64) * 2 / len(v))
    low, high = v[:half], v[half:]
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()])


def slow_attention(layer: Layer, query: torch.Tensor, at: int, seen: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    width, groups, out = 6, 2, []
    for h in range(4):
        mine, theirs = (slice(n * width, (n + 1) * width) for n in (h, h // groups))
        q = turned(slow_norm(layer, layer["self_attn.q_proj"][mine] @ query, layer["self_attn.q_norm"]), at)
        keys = [slow_norm(layer, layer["self_attn.k_proj"][theirs] @ v, layer["self_attn.k_norm"]) for _, v in seen]
        scores = torch.stack([turned(key, place) @ q for key, (place, _) in zip(keys, seen, strict=True)]) / width**0.5
        values = torch.stack([layer["self_attn.v_proj"][theirs] @ v for _, v in seen])
        out.append(scores.softmax(0) @ values)
    return layer["self_attn.o_proj"] @ torch.cat(out)


def plainly(heads, i, name, reads):
    """What lies around attention or MLP: nothing."""
    return reads, lambda made: made


def slow_rows(heads: DFlashHeads, hidden: torch.Tensor, root: int, around=plainly) -> list[torch.Tensor]:
    """The last layer's row of each place of the block; made once for all nodes of a step, whose paths it does not see."""
    known, key = heads.__dict__.setdefault("slow_rows", {}), (around, root, hidden.numpy().tobytes())
    if key not in known:
        known[key] = rows_by_loops(heads, hidden, root, around)
    return known[key]


def rows_by_loops(heads, hidden, root, around) -> list[torch.Tensor]:
    """By loops over rows, layers and heads."""
    form, weights, m = heads.form, heads.weights, len(hidden)
    context = [slow_norm(heads, weights["fc.weight"] @ h[32:], weights["hidden_norm.weight"]) for h in hidden]
    block = heads.num_heads + (not form.from_anchor)
    x = [heads.embedding[token] for token in [root, *[form.mask_id] * (block - 1)]]
    for i, (causal, window) in enumerate(zip(form.causal, form.windows, strict=True)):
        layer = Layer(heads, i)
        reads, behind = around(heads, i, "attention_conv", [slow_norm(layer, v, layer["input_layernorm"]) for v in x])
        sources = [*enumerate(context), *((m + j, v) for j, v in enumerate(reads))]
        made = []
        for j in range(block):
            seen = [
                (place, v)
                for place, v in sources
                if not (causal and place > m + j) and not (window and m + j - place >= window)
            ]
            made.append(slow_attention(layer, reads[j], m + j, seen))
        x = [v + added for v, added in zip(x, behind(made), strict=True)]
        reads = [slow_norm(layer, v, layer["post_attention_layernorm"]) for v in x]
        reads, behind = around(heads, i, "mlp_conv", reads)
        gate, up, down = (layer[f"mlp.{name}_proj"] for name in ("gate", "up", "down"))
        made = [down @ (torch.nn.functional.silu(gate @ v) * (up @ v)) for v in reads]
        x = [v + added for v, added in zip(x, behind(made), strict=True)]
    return x


def slow_dflash(heads: DFlashHeads, text, hidden, root, path) -> list[int]:
    rows = slow_rows(heads, hidden, root)
    row = rows[len(path) + (not heads.form.from_anchor)]
    order = in_order(heads.lm_head @ slow_norm(heads, row, heads.weights["norm.weight"]))
    return order if heads.token_ids is None else [int(heads.token_ids[i]) for i in order]


CAUSAL = [(False, False), (True, True), (True, False)]
WINDOWS = [(None, None), (3, None), (6, 6)]
FORMS = [
    {"causal": causal, "windows": windows, "from_anchor": anchor, "ids": ids, "guesses": guesses}
    for (causal, windows, anchor), ids, guesses in zip(
        itertools.product(CAUSAL, WINDOWS, (False, True)),
        itertools.cycle([None, SOME]),
        itertools.cycle([3, 1, 4]),
        strict=False,
    )
]


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_ranks_and_guesses_are_those_of_a_forward_that_is_written_out(number):
    heads = random_dflash(**FORMS[number], seed=number)
    with torch.inference_mode():
        check_ranks(heads, slow_dflash, seed=number)
        check_proposals(heads, slow_dflash, seed=number, steps=3)


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
        own = torch.stack([slow_norm(heads, row, heads.weights["norm.weight"]) for row in ours])
    torch.testing.assert_close(made, own, rtol=1e-4, atol=1e-4)  # its norms and rotations are float32


# Files.


def config_in(layout: str, heads: DFlashHeads) -> dict[str, object]:
    form, layer = heads.form, {**CONFIG, "num_hidden_layers": len(heads.form.causal), "rope_theta": THETA}
    ids, windows = list(form.layers), [window for window in form.windows if window]
    kinds = [f"{'sliding' if window else 'full'}_attention" for window in form.windows]
    slides = {"layer_types": kinds, "sliding_window": windows[0]} if windows else {}
    if layout == "speculators":
        return {
            "speculators_model_type": "dflash",
            "aux_hidden_state_layer_ids": ids,
            "mask_token_id": MASK,
            "block_size": form.block,
            "sample_from_anchor": form.from_anchor,
            "transformer_layer_config": {**layer, **slides, "model_type": "qwen3"},
        }
    if layout == "deepspec":
        told = {"target_layer_ids": [i - 1 for i in ids], "mask_token_id": MASK, "block_size": form.block}
        return {"architectures": ["Qwen3DSparkModel"], **layer, **slides, **told, "is_causal": form.causal[0]}
    nested = {"target_layer_ids": [i - 1 for i in ids], "mask_token_id": MASK}
    block, flag = {"block_size": form.block}, {"causal": form.causal[0]}
    if layout == "nested":
        nested, block = nested | block | flag, {}
    return {"architectures": ["DFlashDraftModel"], **layer, **slides, **block, "dflash_config": nested}


def write(folder, layout, heads, **changes):
    folder.mkdir(exist_ok=True)
    tensors = {name: weight.clone() for name, weight in heads.weights.items()}
    if heads.token_ids is not None:
        tensors["d2t"] = heads.token_ids - torch.arange(len(heads.token_ids))
        tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, heads.token_ids, True)
    save_file(tensors, folder / "model.safetensors")
    config = {key: value for key, value in (config_in(layout, heads) | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder, **options):
    model = small_model()
    base = Base(model.lm_head.weight, model.model.embed_tokens.weight, model.config, torch.float64, **options)
    return load_heads(str(folder), base)


LAYOUTS = {  # and a form that each can say; test_block_paths has them written and read again
    "z-lab": {},
    "nested": {"causal": (True, True), "windows": (4, None)},
    "speculators": {"causal": (True, False), "windows": (4, None), "ids": SOME},
    "deepspec": {"from_anchor": True, "causal": (True, True)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_narrower_block_is_another_drafter_and_a_wider_one_is_refused(tmp_path, layout):
    own = random_dflash(**LAYOUTS[layout], guesses=5 if layout == "deepspec" else 4)
    folder = write(tmp_path, layout, own)
    most = own.form.most_guesses
    with pytest.raises(
        InvalidInput, match=rf"draft_depth must be at most {most}.*blocks of 5 rows, but got {most + 1}"
    ):
        load(folder, num_heads=most + 1)
    hidden = torch.randn(6, 96, dtype=torch.float64)
    whole, narrow = (slow_rows(load(folder, num_heads=n).heads, hidden, 7) for n in (most, 2))
    row = own.form.first
    assert torch.allclose(whole[row], narrow[row]) == all(own.form.causal)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
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
    ],
)
def test_what_config_json_does_not_say_or_says_wrongly_is_asked_for(tmp_path, changes, said):
    folder = write(tmp_path, "z-lab", random_dflash(guesses=4), **changes)
    with pytest.raises((InvalidInput, Unsupported), match=said) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("aux_hidden_norms.0.weight", {}, "aux_hidden_norms.0.weight.*is of a DFlash variant"),
        ("layers.0.self_attn.qkv_proj.weight", {}, "qkv_proj.weight.*is of a DFlash variant"),
        (None, {"projector_type": "domino"}, "projector_type must be dspark or nothing"),
    ],
)
def test_other_block_drafters_are_refused_by_name(tmp_path, name, changes, said):
    folder = write(tmp_path, "z-lab", random_dflash(guesses=4), **changes)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | ({name: torch.zeros(2, 2)} if name else {}), folder / "model.safetensors")
    with pytest.raises(Unsupported, match=said):
        load(folder)


def test_layers_of_the_target_that_are_not_said_are_spread_evenly(tmp_path):
    told = {"dflash_config": {"mask_token_id": 2}, "num_target_layers": 64}
    folder = write(tmp_path, "z-lab", random_dflash(guesses=4), **told)
    assert load(folder).heads.form.layers == (2, 62)  # behind layers 1 and N - 3, by the issue's own example of five


def test_without_the_target_there_is_nothing_to_read(tmp_path):
    with pytest.raises(InvalidInput, match=r"reads the target's input embeddings, of width 32: pass"):
        load_heads(str(write(tmp_path, "z-lab", random_dflash(guesses=4), vocab_size=VOCABULARY)), Base())
