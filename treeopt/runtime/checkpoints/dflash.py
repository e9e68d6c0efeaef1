"""Read drafters of blocks, DFlash, DFlash2 and DSpark: z-lab's and SpecForge's layout, speculators' and DeepSpec's. DFlash is written, too.

They differ in where config.json says what, in how layers of the target are counted, and in which row of a block makes the first
guess. Where readers of one file draft differently, what is not said is asked for.

d width of the layers · w of the target · L states that are fused · V vocabulary · Vt tokens that are guessed · r rank of a head
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from transformers import Qwen3Config

from treeopt.errors import InvalidInput, Unsupported, quoted
from treeopt.runtime.checkpoints.eagle3 import (
    EMBEDDING,
    HEAD,
    OFFSETS,
    checked_layers,
    count_layers,
    layered,
    settings,
    sizes_of,
    token_ids_of,
    vocabulary_tensors,
)
from treeopt.runtime.checkpoints.files import MODEL_FILES, Settings, StoredTensors
from treeopt.runtime.checkpoints.layer import build_layer_config, described, layers_record
from treeopt.runtime.checkpoints.reading import Checkpoint, Published, Reading
from treeopt.runtime.drafters.dflash import DFlashHeads, Form
from treeopt.runtime.drafters.paths import DFlash2Heads, DSparkHeads

ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
MOST_BLOCK = 64
SELECTOR, MARKOV, CONFIDENCE = "candidate_selector.", "markov_head.", "confidence_head."
OTHERS = r"^(aux_hidden_norms|mask_embedding)|qkv_proj|g_proj|attention_sink"  # tensors of drafters that are not read
SPECULATORS = "aux_hidden_state_layer_ids"  # its layers are those that are entered; others' are those that are left


def recognise_block(stored: StoredTensors) -> Checkpoint | None:
    """Recognise a drafter of blocks, and which it is, by its names; None where it is another."""
    names = {name.removeprefix("model."): name for name in stored.parts}
    model = str(stored.config.get("speculators_model_type"))
    said = model in ARCHITECTURES or "dflash_config" in stored.config
    if not (said or {"hidden_norm.weight", "layers.0.input_layernorm.weight"} <= names.keys()):
        return None
    if others := [name for common, name in names.items() if re.search(OTHERS, common)]:
        raise Unsupported(f"{quoted(others[0])} in {stored.origin} is of a DFlash variant that is not read.")
    told, kind = settings(stored, "dflash_config"), "dflash"
    for key in ("mask_token_id", "target_layer_ids", "block_size"):
        if stored.config.get(key) not in (None, told.get(key)):
            raise told.wrong(key, f"{quoted(stored.config[key])}, as config.json says beside dflash_config")
    if told.get("projector_type") not in (None, "dspark"):
        raise told.wrong("projector_type", "dspark or nothing, for a drafter of blocks to be read", Unsupported)
    if model in ARCHITECTURES:
        kind = model
    elif any(name.startswith(SELECTOR) for name in names):
        kind = "dflash2"
    elif any(name.startswith((MARKOV, CONFIDENCE)) for name in names):
        kind = "dspark"
    count = count_layers(names)
    unread = [names.pop(common) for common in list(names) if common.startswith(CONFIDENCE)]  # no guess depends on it
    return layered(stored, kind, names, partial(_build, told, kind, count), unread)


def _build(told: Settings, kind: str, count: int, reading: Reading) -> Callable[..., DFlashHeads]:
    stored, base = reading.stored, reading.base
    reading.config = told
    d, width, vocab_size, states = sizes_of(reading, told, 1)
    token_ids = token_ids_of(reading, vocab_size)
    form = form_of(told, kind, base.config, width=width, vocab_size=vocab_size, states=states, count=count)
    asked = base.num_heads or form.most_guesses
    if asked > form.most_guesses:
        raise InvalidInput(
            f"`draft_depth` must be at most {form.most_guesses}, since the drafter in {stored.origin} was trained for blocks of "
            f"{form.block} rows, but got {asked}."
        )
    embedding = base.embedding
    if EMBEDDING in reading.names:
        embedding = reading.embedding(EMBEDDING, vocab_size, d)
    elif embedding is None or embedding.shape != (vocab_size, d):
        raise InvalidInput(
            f"{stored.origin} reads the target's input embeddings, of width {d}: pass `model`, which has them."
        )
    told.check_sizes(
        {
            "vocab_size": (vocab_size, "the target's lm_head"),
            "hidden_size": (d, reading.names["fc.weight"]),
            "num_hidden_layers": (count, f"layers.{count - 1}"),
        }
    )
    made, sizes = _kind(reading, told, kind, d, vocab_size)
    return partial(
        made,
        build_layer_config(reading, d, described(told, d, Qwen3Config), count, Qwen3Config),
        form,
        **sizes,
        embedding=embedding,
        lm_head=None if HEAD in reading.names else reading.lm_head(d),
        token_ids=token_ids,
        num_heads=asked,
    )


def _kind(
    reading: Reading, told: Settings, kind: str, d: int, vocab_size: int
) -> tuple[type[DFlashHeads], dict[str, Any]]:
    """The heads of a kind, and the sizes of what they have beside DFlash's layers."""
    if kind == "dflash2":
        if OFFSETS in reading.names:
            raise Unsupported(f"{reading.said(OFFSETS)}: DFlash2 is read where it guesses all of the target's tokens.")
        group = told.number("conv_group_size", 1, d)
        if d % group:
            raise told.wrong("conv_group_size", f"a divisor of the width {d}")
        rank, kept = told.number("selector_rank"), told.number("selector_top_k", 1, vocab_size)
        return DFlash2Heads, {
            "rank": rank,
            "kept": kept,
            "taps": told.number("conv_kernel_size", 1, MOST_BLOCK),
            "group": group,
        }
    if kind == "dflash":
        return DFlashHeads, {}
    if told.get("markov_head_type", "vanilla") != "vanilla":
        raise told.wrong("markov_head_type", "vanilla, for a DSpark drafter to be read", Unsupported)
    return DSparkHeads, {"rank": told.number("markov_rank")}


def form_of(told: Settings, kind: str, target: Any, *, width: int, vocab_size: int, states: int, count: int) -> Form:
    """The form of a drafter by config.json.

    target : config of the model that it guesses for, if at hand; states : L; count : layers of the drafter
    """
    mask_id = told.mask_id("mask_token_id", vocab_size)
    by_class = "Qwen3DSparkModel" in told.get("architectures", [])  # DeepSpec's DFlash has DSpark's rows
    from_anchor = told.get("sample_from_anchor", by_class or kind == "dspark")
    if not isinstance(from_anchor, bool):
        raise told.wrong("sample_from_anchor", "true or false")
    block = told.number("block_size", 1 if from_anchor else 2, MOST_BLOCK)
    windows = _windows(told, count)
    layers = _layers(told, target, states, embedded=kind == "dspark")
    return Form(width, vocab_size, layers, mask_id, block, from_anchor, _causal(told, windows), windows)


def _windows(told: Settings, count: int) -> tuple[int | None, ...]:
    if "layer_types" not in told and told.get("use_sliding_window"):
        raise told.wrong("use_sliding_window", "false, or layer_types must say which layers slide")
    kinds = told.get("layer_types", ["full_attention"] * count)
    known = {"full_attention": None, "sliding_attention": told.get("sliding_window")}
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in known for kind in kinds):
        raise told.wrong("layer_types", f"a list of full_attention or sliding_attention for {count} layers")
    if "sliding_attention" in kinds:
        known["sliding_attention"] = told.number("sliding_window")
    return tuple(known[kind] for kind in kinds)


def _causal(told: Settings, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Whether rows of a block see those before them alone, in each layer.

    Where layers slide and nothing is said, vLLM takes those for causal, z-lab's own code and transformers do not.
    """
    for key in ("is_causal", "causal", "sliding_window_non_causal"):
        said = told.get(key)
        if said is not None and not isinstance(said, bool):
            raise told.wrong(key, "true or false")
    said = told.get("is_causal", told.get("causal"))
    if said is not None:
        return (said,) * len(windows)
    if not any(windows):
        return (False,) * len(windows)
    slides = not told.get("sliding_window_non_causal", False)
    if "sliding_window_non_causal" not in told and "speculators_model_type" not in told:
        raise Unsupported(
            f"Some layers of the drafter in {told.origin} have a sliding window, and engines disagree whether rows of a block "
            "then see those behind them: say is_causal in its config.json, true or false."
        )
    return tuple(window is not None and slides for window in windows)


def _layers(told: Settings, target: Any, states: int, *, embedded: bool) -> tuple[int, ...]:
    """At whose inputs the target is read. Most files say the layers whose output is, one less; -1 is the embeddings."""
    said, entered = told.get("target_layer_ids"), told.get(SPECULATORS)
    key, beyond = (SPECULATORS, 0) if entered is not None else ("target_layer_ids", 1)
    if (found := entered if entered is not None else said) is None:
        if "num_target_layers" not in told and target is None:
            raise told.wrong("target_layer_ids", "said, or num_target_layers")
        count = told.number("num_target_layers") if "num_target_layers" in told else target.num_hidden_layers
        last = count - 3
        found = [count // 2] if states == 1 else [round(1 + i * (last - 1) / (states - 1)) for i in range(states)]
    return tuple(i + beyond for i in checked_layers(told, key, found, states, -beyond if embedded else 0))


def publish_block(heads: DFlashHeads, layout: str, base: str, lm_head: Tensor | None = None) -> Published:
    """z-lab's files, with the rows and directions that its readers would else have to guess."""
    form, said = heads.form, layers_record(heads, heads.config, ARCHITECTURES[layout], base)
    said |= {
        "block_size": form.block,
        "sample_from_anchor": form.from_anchor,
        **({"is_causal": form.causal[0]} if len(set(form.causal)) == 1 else {"sliding_window_non_causal": False}),
        "dflash_config": {"target_layer_ids": [i - 1 for i in form.layers], "mask_token_id": form.mask_id},
    }
    if any(form.windows):
        said["layer_types"] = [f"{'full' if window is None else 'sliding'}_attention" for window in form.windows]
        said["sliding_window"] = max(window or 0 for window in form.windows)
    return Published(MODEL_FILES[0], {**heads.weights, **vocabulary_tensors(heads)}, said)
