"""Drafters with layers as their files are published: EAGLE-3, P-EAGLE, DFlash, DSpark and DFlash2, each written here from the facts."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.conftest import VOCABULARY
from treeopt.runtime.checkpoints import Base, load_heads
from treeopt.runtime.checkpoints.reading import LoadedHeads
from treeopt.runtime.drafters.dflash import DFlashHeads
from treeopt.runtime.drafters.eagle3 import Eagle3Heads

from .random_drafters import (
    CONFIG,
    FORMS,
    GROUP,
    KEPT,
    MASK,
    RANK,
    SOME,
    THETA,
    random_dflash,
    random_dflash2,
    random_dspark,
    random_eagle3,
    random_peagle,
)
from .slow_drafters import small_model

LAYER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 96, "num_hidden_layers": 1,
         "vocab_size": VOCABULARY}  # fmt: skip
EAGLE3 = {  # by who writes it: prefixes of the tensors of the layer, and of all but the head
    "safeailab": ("midlayer.", ""),
    "modelopt": ("layers.0.", ""),
    "speculators": ("layers.0.", ""),
    "nemo": ("model.layers.0.", "model."),
}


def vocabulary(token_ids: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """What says which tokens are guessed, where they are not all."""
    if token_ids is None:
        return {}
    known = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, token_ids, True)
    return {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": known}


def eagle3_config(layout: str, heads: Eagle3Heads) -> dict[str, object]:
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
    layer, root = EAGLE3[layout]
    found = {}
    for name, weight in heads.weights.items():
        inside = name.startswith("layers.0.")
        outside = name if name == "lm_head.weight" else root + name
        found[layer + name.removeprefix("layers.0.") if inside else outside] = weight.detach().clone()
    found |= vocabulary(heads.token_ids)
    if layout == "modelopt":
        found.pop("t2d", None)
    if layout == "nemo":
        found["model.embed_tokens.weight"] = heads.embedding.clone()
    return found


def block_config(layout: str, heads: DFlashHeads) -> dict[str, object]:
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


def save(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    said = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(said))


def write_eagle3(folder: Path, layout: str, heads: Eagle3Heads | None = None, **changes: object) -> Eagle3Heads:
    heads = heads or random_eagle3()
    save(folder, tensors_in(layout, heads), eagle3_config(layout, heads) | changes)
    return heads


SAYS = {  # what config.json says of P-EAGLE beside what it says of EAGLE-3
    "speculators": {"speculators_model_type": "peagle", "mask_token_id": MASK},
    "nemo": {"parallel_drafting": True, "mask_token_id": MASK},
    "amazon": {"parallel_drafting": True, "ptd_token_id": MASK},
    "modelopt": {"parallel_draft_step": 4, "ptd_token_id": MASK, "mask_token_id": MASK},
}


def write_peagle(folder: Path, layout: str, drop: tuple[str, ...] = (), heads: Any = None, **changes: object) -> Any:
    """As EAGLE-3's drafters are written, with a mask and perhaps more layers and embeddings of its own."""
    heads = heads or random_peagle()
    if layout != "modelopt":
        heads.embedding = heads.embedding + 1
        heads.form = replace(heads.form, own_embedding=True)
    tensors = tensors_in("speculators" if layout == "amazon" else layout, heads)
    if layout == "amazon":
        tensors["mask_hidden"] = tensors["mask_hidden"].flatten()
    if heads.form.own_embedding:
        tensors["model." * (layout == "nemo") + "embed_tokens.weight"] = heads.embedding
    config = eagle3_config(layout, heads)
    says = {"eagle_config": config["eagle_config"] | SAYS[layout]} if layout == "modelopt" else SAYS[layout]
    save(folder, {name: tensors[name] for name in tensors if name not in drop}, config | says | changes)
    return heads


SELECTOR = {"conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": KEPT}
SLIDES = {"causal": (True, True), "windows": (4, None)}
BLOCKS: dict[tuple[str, str], dict[str, Any]] = {  # a form that each layout can say
    ("dflash", "z-lab"): {},
    ("dflash", "nested"): SLIDES,
    ("dflash", "speculators"): {"causal": (True, False), "windows": (4, None), "ids": SOME},
    ("dflash", "deepspec"): {"from_anchor": True, "causal": (True, True)},
    ("dspark", "z-lab"): {},
    ("dspark", "nested"): SLIDES,
    ("dspark", "speculators"): {"ids": SOME},
    ("dspark", "deepspec"): {},
    ("dflash2", "z-lab"): {},
    ("dflash2", "nested"): SLIDES,
}


def write_block(folder: Path, kind: str, layout: str, **changes: object) -> DFlashHeads:
    """A random drafter of blocks, in its files."""
    form, keys = BLOCKS[kind, layout], dict[str, object]()
    if kind == "dflash":
        heads = random_dflash(**form, guesses=5 if layout == "deepspec" else 4)
    elif kind == "dspark":
        heads = random_dspark(**form, from_anchor=True, guesses=5)
        keys = {"markov_rank": RANK, "markov_head_type": "vanilla"}
    else:
        heads, keys = random_dflash2(**form, guesses=4), SELECTOR
    config = block_config(layout, heads)
    if keys and layout == "speculators":
        keys = keys | {"speculators_model_type": kind, "sample_from_anchor": None}
    if keys and "dflash_config" in config:
        config["dflash_config"] = config["dflash_config"] | keys | changes
    else:
        config = config | keys | changes
    tensors = {name: weight.clone() for name, weight in heads.weights.items()}
    save(folder, tensors | vocabulary(heads.token_ids), config)
    return heads


def load(folder: Path, model: Any = None, **options: Any) -> LoadedHeads:
    model = model or small_model()
    base = Base(model.lm_head.weight, model.model.embed_tokens.weight, model.config, torch.float64, **options)
    return load_heads(str(folder), base)


def alter(folder: Path, drop: tuple[str, ...] = (), **changes: torch.Tensor) -> None:
    """Leave out tensors of a file, and add others."""
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name not in drop}
    save_file(tensors | changes, file)


@dataclass(frozen=True)
class Row:
    """A checkpoint: a function that writes it into a folder and returns its heads, and the layout that it is read as."""

    layout: str
    write: Callable[..., Any]


WIDE = replace(FORMS["all"], state_norms=False)  # which excludes one norm of all states
ROWS = {
    **{
        f"eagle-3 {layout}, {name}": Row(
            "eagle-3",
            partial(write_eagle3, layout=layout, heads=random_eagle3(WIDE if name == "all" else form, num_heads=3)),
        )
        for (name, form), layout in zip(FORMS.items(), cycle(EAGLE3), strict=False)
    },
    "p-eagle speculators": Row("p-eagle", partial(write_peagle, layout="speculators")),
    "p-eagle nemo": Row("p-eagle", lambda folder: write_peagle(folder, "nemo", heads=random_peagle(layers=4))),
    "p-eagle amazon": Row("p-eagle", lambda folder: write_peagle(folder, "amazon", heads=random_peagle(layers=1))),
    "p-eagle modelopt": Row(
        "p-eagle", lambda folder: write_peagle(folder, "modelopt", heads=random_peagle(ids=None, kv_heads=4))
    ),
    **{f"{kind} {layout}": Row(kind, partial(write_block, kind=kind, layout=layout)) for kind, layout in BLOCKS},
}
