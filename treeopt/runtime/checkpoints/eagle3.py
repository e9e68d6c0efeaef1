"""Read and write EAGLE-3's drafter: SafeAILab's and SpecForge's layout, Model Optimizer's, speculators' and NeMo's.

P-EAGLE's drafter is the same with mask_hidden and layers behind the first.

They differ in prefixes (midlayer. or layers.0., with or without model. before all) and in where config.json says what:
Model Optimizer some of it in a nested eagle_config, speculators the layer's sizes in a transformer_layer_config, of which
it leaves out what transformers has by default. Here a tensor has the name that most of them give it, without model. and
with layers.0.; messages have the file's own.

d width of the layer · w of the target · L states that are fused · V vocabulary · Vt tokens that are guessed
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from treeopt.errors import InvalidInput, Unsupported, quoted
from treeopt.runtime.checkpoints.files import MODEL_FILES, Settings, StoredTensors
from treeopt.runtime.checkpoints.layer import FIRST, build_layer_config, described, layers_record
from treeopt.runtime.checkpoints.reading import Checkpoint, Published, Reading
from treeopt.runtime.drafters.eagle3 import Eagle3Heads, Form
from treeopt.runtime.drafters.parallel import PEagleHeads
from treeopt.runtime.drafters.protocol import DRAFT_DEPTH
from treeopt.runtime.drafters.states import Heads
from treeopt.runtime.folder import MOST_LAYERS

LAYOUT, PARALLEL = "eagle-3", "p-eagle"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
VOCABULARY = OFFSETS, KNOWN = "d2t", "t2d"  # of the tokens that are guessed
HIDDEN_NORM = "layers.0.hidden_norm.weight"
MASK = "mask_hidden"
MASK_ID = "ptd_token_id"  # the key that is written; others are read
PREFIXES = {
    "midlayer.": FIRST,
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
WIDE = r"(o_proj|down_proj|layernorm|fc)\.weight$"  # tensors whose rows are as many as the layer is wide
OTHERS = (  # tensors of drafters that are not read, and what they are; the first are P-EAGLE's as well
    (r"(^|\.)layers\.[1-9]", "more than one layer"),
    (r"self_attn\.(q_a|q_b|kv_a|kv_b)_", "latent attention (MLA)"),
    (r"mlp\.(experts|shared_expert|gate\.)", "experts"),
    (r"parallel_draft_heads", "heads that draft in parallel"),
)
LAYERS = "eagle_aux_hidden_state_layer_ids"
# Base of the rotation where none is said: EAGLE-3's own file for Llama 3.1 says none, the target 500000.
THETA = 10000.0
LEFT_OUT: dict[str, dict[str, object]] = {  # by speculators, of a layer's config: transformers' defaults
    "llama": {"num_attention_heads": 32},
    "qwen3": {"num_attention_heads": 32, "head_dim": 128},
}
NEEDED: dict[str, tuple[Any, ...]] = {  # what a flag that changes the guesses may say; the first is the usual
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "partial_rotary_factor": (1.0,),
    "is_causal": (True,),
    "logit_scale": (1.0,),
}
ALONE: dict[str, tuple[Any, ...]] = {  # and what P-EAGLE's is
    "num_hidden_layers": (1,),
    "parallel_draft_step": (1, 0),
    "parallel_drafting": (False,),
}
LISTS = ("architectures", "layer_types")
LENGTHY = ("dynamic", "longrope")  # rotations that depend on the longest text read together
# By field of `Form`: config.json's flag for it, and a pattern of the tensors that tell it where the flag does not.
FLAGS = {
    "before_residual": ("norm_before_residual", ""),
    "fuse_norm": ("norm_before_fc", r"input_norm\.weight"),
    "state_norms": ("fc_norm", r"fc_norm\.\d+\.weight"),
    "normed_feedback": ("norm_output", ""),
    "fc_bias": ("bias", r"fc\.bias"),
    "bias": ("attention_bias", r"layers\.0\.self_attn\.._proj\.bias"),
    "head_norms": ("", r"layers\.0\.self_attn\.._norm\.weight"),
}


def common_name(name: str) -> str:
    """
    >>> common_name("model.layers.0.hidden_norm.weight"), common_name("midlayer.mlp.up_proj.weight")
    ('layers.0.hidden_norm.weight', 'layers.0.mlp.up_proj.weight')
    """
    name = name.removeprefix("model.")
    return next((new + name.removeprefix(old) for old, new in PREFIXES.items() if name.startswith(old)), name)


def recognise_eagle3(stored: StoredTensors) -> Checkpoint | None:
    """Recognise the drafter, or P-EAGLE's, by its names, whatever their prefixes; None where it is another."""
    names: dict[str, str] = {}
    for name in stored.parts:
        names.setdefault(common_name(name), name)
    # EAGLE-1's has neither a norm before its attention nor a vocabulary of its own; DFlash's norm is of all layers.
    fused = "fc.weight" in names and bool({"layers.0.input_layernorm.weight", OFFSETS} & names.keys())
    layer = HIDDEN_NORM in names or any(name.startswith("midlayer.") for name in stored.parts)
    if not (fused or layer) or "hidden_norm.weight" in names:
        return None
    told = settings(stored)
    parallel = is_parallel(told, names)
    for name in stored.parts:
        for pattern, what in OTHERS[parallel:]:
            if re.search(pattern, name):
                raise Unsupported(
                    f"An EAGLE-3 drafter is read if it is one layer with plain attention, but {quoted(name)} in "
                    f"{stored.origin} is of {what}."
                )
    count, layout = count_layers(names), PARALLEL if parallel else LAYOUT
    check_flags(told, count, NEEDED if parallel else NEEDED | ALONE)
    return layered(stored, layout, names, partial(_build, told, count, PEagleHeads if parallel else Eagle3Heads))


def layered(
    stored: StoredTensors,
    layout: str,
    names: Mapping[str, str],
    build: Callable[[Reading], Callable[..., Heads]],
    unread: Iterable[str] = (),
) -> Checkpoint:
    """The checkpoint of a drafter with layers.

    names  : the file's name of every tensor, by its common one
    unread : others that may lie beside them
    """
    root = "model." if any(name.startswith("model.") for name in stored.parts) else ""
    first = "midlayer." if any(name.startswith(root + "midlayer.") for name in stored.parts) else FIRST

    def prefix(name: str) -> str:
        outside = "" if name in (HEAD, *VOCABULARY) else root
        return outside + (first + name.removeprefix(FIRST) if name.startswith(FIRST) else name)

    beside = (*VOCABULARY, EMBEDDING, *unread)
    return Checkpoint(stored, layout, names, build, VOCABULARY, HEAD not in names, beside, prefix)


def count_layers(names: Iterable[str]) -> int:
    places = (re.match(r"layers\.(\d{1,3})\.", name, re.ASCII) for name in names)
    return 1 + max((int(place[1]) for place in places if place), default=0)


def is_parallel(told: Settings, names: Mapping[str, str]) -> bool:
    """Whether all depths are guessed in one pass, as by P-EAGLE."""
    if "speculators_model_type" in told:
        return told["speculators_model_type"] == "peagle"
    steps = told.get("parallel_draft_step", 1)
    return (
        MASK in names or told.get("parallel_drafting", False) is not False or steps not in ALONE["parallel_draft_step"]
    )


def sizes_of(reading: Reading, told: Settings, least: int) -> tuple[int, int, int, int]:
    """d, w, V and L, which is ``least`` or more; without the target w is d, and V is said."""
    d, lm_head, fc = reading.most_common_size(WIDE), reading.base.lm_head, reading.tensor("fc.weight")
    width, vocab_size = (d, told.number("vocab_size")) if lm_head is None else (lm_head.shape[1], len(lm_head))
    columns = fc.shape[1] if fc.ndim == 2 else 0
    if not width or columns % width or columns < least * width:
        raise InvalidInput(
            f"{reading.said('fc.weight')} must fuse {least} or more of the target's states of width {width}, but it reads "
            f"{columns} numbers: pass the `model` that it was trained for."
        )
    return d, width, vocab_size, columns // width


def _build(told: Settings, count: int, kind: type[Eagle3Heads], reading: Reading) -> Callable[..., Eagle3Heads]:
    base, names, tensors = reading.base, reading.names, reading.tensors
    reading.config = told
    d, width, vocab_size, states = sizes_of(reading, told, 2)
    token_ids = token_ids_of(reading, vocab_size)
    rows = vocab_size if token_ids is None else len(token_ids)
    embedding, own = _embedding(reading, vocab_size, d)
    form = form_of(reading, width, vocab_size, states, own=own)
    if kind is PEagleHeads:
        form = replace(form, mask_id=told.mask_id(MASK_ID, vocab_size))
        while reading.tensor(MASK).ndim < 3:
            tensors[MASK] = tensors[MASK][None]
    told.check_sizes(
        {
            "hidden_size": (d, names["fc.weight"]),
            "vocab_size": (vocab_size, names.get(KNOWN, "the target's lm_head")),
            "draft_vocab_size": (rows, names.get(HEAD, "the target's lm_head")),
            "target_hidden_size": (width, names["fc.weight"]),
            "num_hidden_layers": (count, f"layers.{count - 1}"),
        }
    )
    tied = told.get("tie_word_embeddings") is True and own
    return partial(
        kind,
        build_layer_config(reading, d, described(told, d), count),
        form,
        embedding=embedding,
        lm_head=None if HEAD in names or token_ids is not None else embedding if tied else reading.lm_head(d),
        token_ids=token_ids,
        num_heads=base.num_heads or DRAFT_DEPTH,
    )


def token_ids_of(reading: Reading, vocab_size: int) -> Tensor | None:
    """(Vt,) the target's ids of the tokens that are guessed, ascending; None where they are all of V."""
    if OFFSETS not in reading.names and KNOWN not in reading.names:
        return None
    names, offsets, said = reading.names, reading.integers(OFFSETS), reading.said(OFFSETS)
    ids = torch.arange(len(offsets)) + offsets
    outside = int(offsets.min()) < 0 or int(offsets.max()) >= vocab_size or int(ids.max()) >= vocab_size
    if outside or bool((ids.diff() <= 0).any()):
        raise InvalidInput(f"{said} must lead to ascending token ids below the target's {vocab_size}, but it does not.")
    if KNOWN in names:
        known = reading.stored.read(names[KNOWN])
        wanted = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        if known.dtype != torch.bool or not torch.equal(known, wanted):
            raise InvalidInput(
                f"{reading.said(KNOWN)} must say of each of the target's {vocab_size} tokens whether "
                f"{quoted(names[OFFSETS])} leads to it, but it says otherwise."
            )
    if len(ids) == vocab_size:
        return None
    if not offsets.any():
        reading.notes.append(
            f"All of {quoted(names[OFFSETS])} is 0: the drafter guesses the first {len(ids)} of {vocab_size} tokens. "
            "That is also what a file looks like whose tokens were never written."
        )
    return ids


def _embedding(reading: Reading, vocab_size: int, d: int) -> tuple[Tensor | None, bool]:
    """The drafter's embeddings and whether they are its own; None where none are there, so that it cannot guess."""
    target = reading.base.embedding
    if own := EMBEDDING in reading.names:
        chosen = reading.embedding(EMBEDDING, vocab_size, d)
        return chosen, chosen is reading.tensors[EMBEDDING]
    if target is not None and target.shape[1] != d:
        raise InvalidInput(
            f"{reading.stored.origin} holds a layer of width {d} without {EMBEDDING}, so it needs a target of this width, "
            f"but that has {target.shape[1]}: pass the `model` that it was trained for."
        )
    return target, own


def settings(stored: StoredTensors, nested: str = "eagle_config") -> Settings:
    """All that config.json says, nested or not; what is null is not said."""
    told, config = Settings(stored.origin, {}), stored.config
    for key in ("transformer_layer_config", nested):
        if not isinstance(config.get(key) or {}, dict):
            raise config.wrong(key, "an object")
    if layer := config.get("transformer_layer_config") or {}:
        told.update(LEFT_OUT.get(str(layer.get("model_type", "llama")), {}))
    for part in (layer, config, config.get(nested) or {}):
        told.update((key, value) for key, value in part.items() if value is not None)
    for key in LISTS:
        if not isinstance(words := told.get(key, []), list) or not all(isinstance(word, str) for word in words):
            raise told.wrong(key, "a list of words")
    ropes = {key: rope for key in ("rope_parameters", "rope_scaling") if isinstance(rope := told.get(key), dict)}
    for key, rope in ropes.items():
        if str(rope.get("rope_type", rope.get("type"))) in LENGTHY:
            raise told.wrong(key, "a rotation that does not depend on the longest text beside it", Unsupported)
    if not any("rope_theta" in rope for rope in (told, *ropes.values())):
        told["rope_theta"] = THETA
    return told


def check_flags(told: Settings, count: int, needed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise Unsupported, by name, for a drafter of ``count`` layers whose guesses are made in a way that is not this one."""

    def refuse(key: str, rule: str) -> None:
        raise told.wrong(key, f"{rule} for an EAGLE-3 drafter to be read", Unsupported)

    for key, values in {**needed, "layer_types": (["full_attention"] * count,)}.items():
        said = told.get(key, values[0])
        if said not in values or isinstance(said, bool) != isinstance(values[0], bool):
            refuse(key, str(values[0]))
    if "sliding_window" in told and told.get("use_sliding_window") is not False:
        refuse("sliding_window", "absent")


def form_of(reading: Reading, width: int, vocab_size: int, states: int, *, own: bool) -> Form:
    """The form of a drafter by its tensors and config.json, for a target of this width and vocabulary.

    own : whether its embeddings are its own
    """
    told, names, origin, flags = reading.config, reading.names, reading.stored.origin, {}
    for field, (key, tensor) in FLAGS.items():
        there = any(re.fullmatch(tensor, name) for name in names)
        said = told.get(key, there)
        if not tensor or field in ("fuse_norm", "state_norms"):
            if not isinstance(said, bool):
                raise told.wrong(key, "true or false")
            if tensor and said != there:
                raise told.wrong(key, "true" if there else "false, as the file has no tensors for it")
        flags[field] = there if tensor else said
    if flags["fuse_norm"] and flags["state_norms"]:
        raise InvalidInput(f"norm_before_fc and fc_norm exclude each other, but {origin} has the tensors of both.")
    if flags["normed_feedback"] and "speculators_model_type" not in told and MASK not in names:
        reading.notes.append(
            "config.json says norm_output true, so states are fed back behind the last norm. SpecForge wrote that into "
            "drafters trained the other way too (before its PR #879): if guesses beyond the first are poor, try false."
        )
    return Form(width, vocab_size, states, _layers(told, states), **flags, own_embedding=own)


def _layers(told: Settings, states: int) -> tuple[int, ...] | None:
    """At whose inputs the target is read; None for the usual layers.

    Some say the layer whose input is read, others the one whose output is, the layer before. SGLang tells them apart by
    the first one, which is 2 or 1.
    """
    said = told.get(LAYERS) or None  # Model Optimizer may say []
    if said is None and states == len(("low", "mid", "high")):
        return None
    layers = checked_layers(told, LAYERS, said, states)
    return tuple(i + (layers[0] == 1) for i in layers)


def checked_layers(told: Settings, key: str, layers: Any, states: int, least: int = 0) -> list[int]:
    """The layers of the target that are said under a key, which must be one for each state."""
    if not isinstance(layers, list) or len(layers) != states:
        raise told.wrong(key, f"a list of the {states} layers that fc reads")
    if not all(type(i) is int and least <= i < MOST_LAYERS for i in layers):
        raise told.wrong(key, f"a list of layers from {least} to {MOST_LAYERS - 1}")
    return layers


def vocabulary_tensors(heads: Any) -> dict[str, Tensor]:
    """What says which of the target's tokens are guessed; nothing where they are all."""
    if heads.token_ids is None:
        return {}
    ids = heads.token_ids.cpu()
    known = torch.zeros(heads.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return {OFFSETS: ids - torch.arange(len(ids)), KNOWN: known}


def publish_eagle3(heads: Eagle3Heads, layout: str, base: str, lm_head: Tensor | None = None) -> Published:
    """SafeAILab's names of tensors, NeMo's for P-EAGLE, and its config.json with what SGLang and vLLM read beside it.

    The embeddings are there where they are not the target's.
    """
    tensors: dict[str, Tensor] = {HEAD: heads.lm_head}
    first = "midlayer." if heads.form.mask_id is None else FIRST
    for name, weight in heads.weights.items():
        tensors[first + name.removeprefix(FIRST) if name.startswith(FIRST) else name] = weight
    if heads.form.own_embedding:
        tensors[EMBEDDING] = heads.embedding
    form, layer = heads.form, heads.layer.config
    special: dict[str, object] = {key: True for field, (key, _) in FLAGS.items() if key and getattr(form, field)}
    if form.layers is not None:
        assert form.layers[0] != 1, "readers would take it for an output"
        special["eagle_config"] = {LAYERS: list(form.layers)}
    if form.width != layer.hidden_size:
        special["target_hidden_size"] = form.width
    if form.mask_id is not None:
        special |= {"parallel_drafting": True, MASK_ID: form.mask_id}
    said = layers_record(heads, layer, "LlamaForCausalLMEagle3", base)
    said |= {"draft_vocab_size": heads.draft_vocab_size, **special}
    return Published(MODEL_FILES[0], tensors | vocabulary_tensors(heads), said)
