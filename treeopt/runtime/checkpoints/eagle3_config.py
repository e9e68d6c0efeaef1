"""Settings of an EAGLE-3 drafter in its config.json, in the forms of SafeAILab, SpecForge, Model Optimizer, speculators and NeMo.

Model Optimizer says some of it in a nested eagle_config, speculators the layer's sizes in a transformer_layer_config, of
which it leaves out what transformers has by default.
"""

from __future__ import annotations

from typing import Any

from treeopt.errors import InvalidInput, Unsupported
from treeopt.runtime.checkpoints.files import Settings, StoredTensors
from treeopt.runtime.checkpoints.layer import ATTENTION, layer_record
from treeopt.runtime.checkpoints.reading import Reading, short
from treeopt.runtime.drafters.eagle3 import Eagle3Heads, Form
from treeopt.runtime.folder import MOST_LAYERS

LAYERS = "eagle_aux_hidden_state_layer_ids"
# Base of the rotation where none is said: EAGLE-3's own file for Llama 3.1 says none, the target 500000.
THETA = 10000.0
LEFT_OUT: dict[str, dict[str, object]] = {  # by speculators, of a layer's config: transformers' defaults
    "llama": {"num_attention_heads": 32},
    "qwen3": {"num_attention_heads": 32, "head_dim": 128},
}
NEEDED: dict[str, tuple[Any, ...]] = {  # what a flag that changes the guesses may say; the first is the usual
    "num_hidden_layers": (1,),
    "parallel_draft_step": (1, 0),
    "parallel_drafting": (False,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "partial_rotary_factor": (1.0,),
    "is_causal": (True,),
    "logit_scale": (1.0,),
    "layer_types": (["full_attention"],),
}
LENGTHY = ("dynamic", "longrope")  # rotations that depend on the longest text read together
# By field of `Form`: config.json's flag for it, and the tensor that tells it where the flag does not.
FLAGS = {
    "before_residual": ("norm_before_residual", ""),
    "fuse_norm": ("norm_before_fc", "input_norm.weight"),
    "state_norms": ("fc_norm", "fc_norm.0.weight"),
    "normed_feedback": ("norm_output", ""),
    "fc_bias": ("bias", "fc.bias"),
    "bias": ("attention_bias", ATTENTION + "o_proj.bias"),
    "head_norms": ("", ATTENTION + "q_norm.weight"),
}


def settings(stored: StoredTensors) -> Settings:
    """All that config.json says, nested or not; what is null is not said."""
    told, config = Settings(stored.origin, {}), stored.config
    for key in ("transformer_layer_config", "eagle_config"):
        if not isinstance(config.get(key) or {}, dict):
            raise config.wrong(key, "an object")
    if layer := config.get("transformer_layer_config") or {}:
        told.update(LEFT_OUT.get(str(layer.get("model_type", "llama")), {}))
    for part in (layer, config, config.get("eagle_config") or {}):
        told.update((key, value) for key, value in part.items() if value is not None)
    ropes = [rope for key in ("rope_parameters", "rope_scaling") if isinstance(rope := told.get(key), dict)]
    if not any("rope_theta" in rope for rope in (told, *ropes)):
        told["rope_theta"] = THETA
    return told


def check_flags(told: Settings) -> None:
    """Raise Unsupported, by name, for a drafter whose guesses are made in a way that is not this one."""

    def refuse(key: str, rule: str) -> None:
        raise told.wrong(key, f"{rule} for an EAGLE-3 drafter to be read", Unsupported)

    for key, values in NEEDED.items():
        said = told.get(key, values[0])
        if said not in values or isinstance(said, bool) != isinstance(values[0], bool):
            refuse(key, str(values[0]))
    if "sliding_window" in told and told.get("use_sliding_window") is not False:
        refuse("sliding_window", "absent")
    for key in ("rope_parameters", "rope_scaling"):
        rope = told.get(key)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in LENGTHY:
            refuse(key, "a rotation that does not depend on the longest text beside it")


def form_of(reading: Reading, width: int, vocab_size: int, *, own: bool) -> Form:
    """The form of a drafter by its tensors and config.json, for a target of this width and vocabulary.

    own : whether its embeddings are its own
    """
    told, names, origin = reading.config, reading.names, reading.stored.origin
    states = reading.tensors["fc.weight"].shape[1] // width
    flags = {}
    for field, (key, tensor) in FLAGS.items():
        there, said = tensor in names, told.get(key, tensor in names)
        if not tensor or field in ("fuse_norm", "state_norms"):
            if not isinstance(said, bool):
                raise told.wrong(key, "true or false")
            if tensor and said != there:
                raise told.wrong(key, "true" if there else "false, as the file has no tensors for it")
        flags[field] = there if tensor else said
    if flags["fuse_norm"] and flags["state_norms"]:
        raise InvalidInput(f"norm_before_fc and fc_norm exclude each other, but {origin} has the tensors of both.")
    if flags["normed_feedback"] and "speculators_model_type" not in told:
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
    if not isinstance(said, list) or len(said) != states:
        raise told.wrong(LAYERS, f"a list of the {states} layers that fc reads")
    if not all(type(i) is int and 0 <= i < MOST_LAYERS for i in said):
        raise told.wrong(LAYERS, f"a list of layers from 0 to {MOST_LAYERS - 1}")
    return tuple(i + (said[0] == 1) for i in said)


def eagle3_config(heads: Eagle3Heads, base: str) -> dict[str, object]:
    """SafeAILab's config.json, and what SGLang and vLLM read beside it."""
    form, layer = heads.form, heads.layer.config
    special: dict[str, object] = {key: True for field, (key, _) in FLAGS.items() if key and getattr(form, field)}
    if form.layers is not None:
        assert form.layers[0] != 1, "readers would take it for an output"
        special["eagle_config"] = {LAYERS: list(form.layers)}
    if form.width != layer.hidden_size:
        special["target_hidden_size"] = form.width
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **layer_record(layer),
        "vocab_size": heads.vocab_size,
        "draft_vocab_size": heads.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": short(heads.fc.weight.dtype),
        **special,
        "base_model_name_or_path": base,
    }
