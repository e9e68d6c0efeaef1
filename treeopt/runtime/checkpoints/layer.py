"""The tensors of one Llama layer in a checkpoint, the config that they and config.json make, and EAGLE-1's drafter.

That is such a layer without input norm, and no lm_head of its own, but perhaps a copy of the target's; EAGLE-2 shares its layout.

d width · nh query heads and nk key heads of width hd · F inner width
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from transformers import LlamaConfig

from treeopt.errors import InvalidInput, quoted
from treeopt.runtime.checkpoints.files import MODEL_FILES, Settings, StoredTensors
from treeopt.runtime.checkpoints.reading import DESCRIBES, Checkpoint, Published, Reading, is_copy, most_common, short
from treeopt.runtime.drafters.layer import TAKEN, EagleHeads, layer_config
from treeopt.runtime.drafters.protocol import DRAFT_DEPTH
from treeopt.runtime.folder import loadable

FIRST = "layers.0."
MATRICES = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
TOLD = ("num_attention_heads", "head_dim", *TAKEN)  # not by tensors
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
SIZES = {"num_attention_heads": MATRICES[0], "num_key_value_heads": MATRICES[1], "intermediate_size": MATRICES[4]}


def build_layer_config(reading: Reading, width: int, like: Any, layers: int = 1, family: Any = LlamaConfig) -> Any:
    """Config of some layers: sizes from the tensors of the first, all else like in ``like``."""
    origin, names = reading.stored.origin, [FIRST + name for name in MATRICES]
    for name in names:
        if reading.tensor(name).ndim != 2:
            shape = tuple(reading.tensors[name].shape)
            raise InvalidInput(f"{reading.said(name)} must be a matrix, but it has the shape {shape}.")
    heads = getattr(like, "num_attention_heads", None)
    if not heads:
        lacks = "the target is not there: pass `model`" if like is None else "the target's config has none either"
        raise InvalidInput(
            f"The number of attention heads of the layer in {origin} must be num_attention_heads in config.json beside it or in "
            f"the target's, but it is not in the first, and {lacks}."
        )
    head_width = getattr(like, "head_dim", None) or max(1, width // heads)
    query_rows, key_rows, value_rows, _, gate, up, _ = (len(reading.tensors[name]) for name in names)
    for name, rows in zip(names[:3], (query_rows, key_rows, value_rows), strict=True):
        if head_width < 2 or head_width % 2 or not rows or rows % head_width or query_rows % rows:
            raise InvalidInput(
                f"The attention of a layer must have whole heads, of width {head_width} by 'head_dim' or 'num_attention_heads', and a whole "
                f"multiple of them for queries, but {reading.said(name)} has {rows} rows beside the {query_rows} of queries."
            )
    config = layer_config(
        like,
        width,
        layers=layers,
        family=family,
        num_attention_heads=query_rows // head_width,
        num_key_value_heads=key_rows // head_width,
        head_dim=head_width,
        intermediate_size=most_common([gate, up, reading.tensors[names[6]].shape[1]]),
    )
    reading.config.check_sizes(
        {key: (getattr(config, key), reading.names[FIRST + name]) for key, name in SIZES.items()}
    )
    return config


def described(config: Settings, width: int, family: Any = LlamaConfig) -> Any:
    """The config of a layer by what config.json says."""
    given = {key: config[key] for key in (*TOLD, *ROPE) if config.get(key) is not None}
    config.number("num_attention_heads")
    if "head_dim" in given:
        config.number("head_dim", 2)
    if "rms_norm_eps" in given:
        config.number("rms_norm_eps", 0, kind=int | float)
    with loadable(DESCRIBES, str(config.origin)):
        return family(hidden_size=width, **given)


def layers_record(heads: Any, config: Any, architecture: str, base: str) -> dict[str, object]:
    """What config.json says of a drafter with layers of this config, for readers that know it by this architecture."""
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    return {
        "architectures": [architecture],
        "model_type": config.model_type,
        **{key: getattr(config, key) for key in ("hidden_size", "intermediate_size", "num_key_value_heads", *TOLD)},
        "num_hidden_layers": config.num_hidden_layers,
        "rope_theta": theta,
        **({} if rope.get("rope_type", "default") == "default" else {"rope_scaling": rope}),
        "vocab_size": heads.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": short(heads.fc.weight.dtype),
        "base_model_name_or_path": base,
    }


EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
NOTE = "EAGLE-1 and EAGLE-2 share this layout: a static tree, as EAGLE-1 has, is measured and planned."
WIDE = r"(o_proj|down_proj|norm|fc)\.(weight|bias)$"  # tensors whose rows are as many as the layer is wide


def recognise_eagle(stored: StoredTensors) -> Checkpoint | None:
    """Recognise the drafter by its names; None where it is another."""
    if not all(any(name.startswith(start) for name in stored.parts) for start in ("fc.", "layers.0.")):
        return None
    names = {name: name for name in stored.parts}
    return Checkpoint(stored, "eagle-1", names, _build_eagle, shares=True, others=(EMBEDDING, HEAD))


def _build_eagle(reading: Reading) -> Callable[..., EagleHeads]:
    base, config = reading.base, reading.config
    reading.notes.append(NOTE)
    width = reading.most_common_size(WIDE)
    copy = reading.tensors.get(HEAD)  # as vLLM's checkpoints have
    lm_head = copy if copy is not None and base.lm_head is None else reading.lm_head(width)
    if copy is not None and not is_copy(copy, lm_head):
        raise InvalidInput(
            f"{reading.said(HEAD)} must be a copy of the target's lm_head, with which EAGLE-1 guesses, but it differs: pass the "
            "`model` that the drafter was trained for."
        )
    embedding = reading.embedding(EMBEDDING, len(lm_head), width)
    config.check_sizes({"hidden_size": (width, "fc.weight"), "vocab_size": (len(lm_head), EMBEDDING)})
    like = base.config if config.get("num_attention_heads") is None else described(config, width)
    layer = build_layer_config(reading, width, like)
    bias, said = "fc.bias" in reading.names, config.get("bias", True)
    if said is not None and said is not bias:
        means = f"says bias {quoted(said)}" if "bias" in config else "lacks bias, which means true in EAGLE"
        reading.notes.append(f"config.json {means}, but fc has {'one' if bias else 'none'} in the file, which decides.")
    ends = {"embedding": embedding, "lm_head": lm_head}
    return partial(EagleHeads, layer, **ends, bias=bias, num_heads=base.num_heads or DRAFT_DEPTH)


def publish_eagle(heads: EagleHeads, layout: str, base: str, lm_head: Tensor | None) -> Published:
    config = layers_record(heads, heads.layer.config, "LlamaForCausalLM", base) | {"bias": heads.fc.bias is not None}
    return Published(MODEL_FILES[0], {EMBEDDING: heads.embedding, **heads.weights}, config)
