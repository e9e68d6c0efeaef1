"""Settings of an EAGLE-3 drafter in its config.json, in the forms of SafeAILab, SpecForge, Model Optimizer, speculators and NeMo.

Model Optimizer says some of it in a nested eagle_config, speculators the layer's sizes in a transformer_layer_config, of
which it leaves out what transformers has by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treeopt.errors import InvalidInput, Unsupported, quoted
from treeopt.runtime.checkpoints.files import StoredTensors
from treeopt.runtime.checkpoints.layer import layer_record
from treeopt.runtime.drafters.eagle3 import Eagle3Heads, Form

LAYERS = "eagle_aux_hidden_state_layer_ids"
THETA = (
    10000.0  # base of the rotation where none is said: EAGLE-3's own file for Llama 3.1 says none, the target 500000
)
MOST_LAYERS = 1000
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
}
LENGTHY = ("dynamic", "longrope")  # rotations that depend on the longest text read together


def settings(stored: StoredTensors) -> dict[str, object]:
    """All that config.json says, nested or not; what is null is not said."""
    told: dict[str, object] = {}
    parts: dict[str, Any] = {key: stored.config.get(key) or {} for key in ("transformer_layer_config", "eagle_config")}
    for key, part in parts.items():
        if not isinstance(part, dict):
            raise InvalidInput(f"{key} must be an object, but config.json of {stored.origin} has {quoted(part)}.")
    layer = parts["transformer_layer_config"]
    if layer:
        told |= LEFT_OUT.get(str(layer.get("model_type", "llama")), {})
    for part in (layer, stored.config, parts["eagle_config"]):
        told |= {key: value for key, value in part.items() if value is not None}
    ropes = [rope for key in ("rope_parameters", "rope_scaling") if isinstance(rope := told.get(key), dict)]
    if not any("rope_theta" in rope for rope in (told, *ropes)):
        told["rope_theta"] = THETA
    return told


def check_flags(stored: StoredTensors, told: dict[str, object]) -> None:
    """Raise Unsupported, by name, for a drafter whose guesses are made in a way that is not this one."""
    for key, values in NEEDED.items():
        said = told.get(key, values[0])
        if said not in values or isinstance(said, bool) != isinstance(values[0], bool):
            raise Unsupported(
                f"An EAGLE-3 drafter is read if its {key} is {values[0]}, but config.json of {stored.origin} says "
                f"{quoted(said)}."
            )
    kinds = told.get("layer_types")
    slides = kinds not in (None, ["full_attention"])
    if slides or ("sliding_window" in told and told.get("use_sliding_window") is not False):
        what, value = ("layer_types", kinds) if slides else ("sliding_window", told["sliding_window"])
        raise Unsupported(
            f"An EAGLE-3 drafter is read if it attends to the whole text, but config.json of {stored.origin} says "
            f"{what} {quoted(value)}."
        )
    for key in ("rope_parameters", "rope_scaling"):
        rope = told.get(key)
        if isinstance(rope, dict) and (kind := rope.get("rope_type", rope.get("type"))) in LENGTHY:
            raise Unsupported(
                f"An EAGLE-3 drafter is read if its rotation does not depend on the longest text beside it, but {key} in "
                f"config.json of {stored.origin} is of the type {quoted(kind)}."
            )


def form_of(
    stored: StoredTensors, told: dict[str, object], names: Mapping[str, str], sizes: tuple[int, int, int], *, own: bool
) -> tuple[Form, list[str]]:
    """The form of a drafter, and notes.

    names : its tensors' own names by their common ones
    sizes : columns of fc, width and vocabulary of the target
    own   : whether its embeddings are its own
    """
    columns, width, vocab_size = sizes
    states = columns // width
    if states * width != columns or states < 2:
        raise InvalidInput(
            f"{quoted(names['fc.weight'])} must fuse two or more of the target's states of width {width}, but that in "
            f"{stored.origin} reads {columns} "
            "numbers: pass the `model` that it was trained for."
        )
    state_norms = [f"fc_norm.{i}.weight" for i in range(states)]
    if state_norms[0] in names and (missing := [name for name in state_norms if name not in names]):
        name = names[state_norms[0]].replace(state_norms[0], missing[0])
        raise InvalidInput(
            f"fc_norm must norm each of the {states} states that fc reads, but {quoted(name)} is missing in {stored.origin}."
        )
    norms = {"norm_before_fc": "input_norm.weight" in names, "fc_norm": state_norms[0] in names}
    for key, there in norms.items():
        said = _flag(stored, told, key, there)
        if said != there:
            raise InvalidInput(
                f"config.json of {stored.origin} says {key} {said}, but the file has {'its' if there else 'no'} tensors."
            )
    if all(norms.values()):
        raise InvalidInput(
            f"norm_before_fc and fc_norm exclude each other, but {stored.origin} has the tensors of both."
        )
    form = Form(
        width=width,
        vocab_size=vocab_size,
        states=states,
        layers=_layers(stored, told, states),
        before_residual=_flag(stored, told, "norm_before_residual"),
        fuse_norm=norms["norm_before_fc"],
        state_norms=norms["fc_norm"],
        normed_feedback=_flag(stored, told, "norm_output"),
        fc_bias="fc.bias" in names,
        bias=any(name.endswith("o_proj.bias") for name in names),
        head_norms=any(name.endswith("q_norm.weight") for name in names),
        own_embedding=own,
    )
    notes = []
    if form.normed_feedback and "speculators_model_type" not in told:
        notes.append(
            "config.json says norm_output true, so states are fed back behind the last norm. SpecForge wrote that into "
            "drafters trained the other way too (before its PR #879): if guesses beyond the first are poor, try false."
        )
    return form, notes


def _flag(stored: StoredTensors, told: dict[str, object], key: str, otherwise: bool = False) -> bool:
    value = told.get(key, otherwise)
    if not isinstance(value, bool):
        raise InvalidInput(f"{key} must be true or false, but config.json of {stored.origin} says {quoted(value)}.")
    return value


def _layers(stored: StoredTensors, told: dict[str, object], states: int) -> tuple[int, ...] | None:
    """At whose inputs the target is read; None for the usual layers.

    Some say the layer whose input is read, others the one whose output is, the layer before. SGLang tells them apart by
    the first one, which is 2 or 1.
    """
    said = told.get(LAYERS) or None  # Model Optimizer may say []
    if said is None and states == len(("low", "mid", "high")):
        return None
    if not isinstance(said, list) or not all(type(i) is int and 0 <= i < MOST_LAYERS for i in said):
        raise InvalidInput(
            f"{LAYERS} must be a list of layers, but config.json of {stored.origin} says {quoted(said)} for a drafter that "
            f"reads {states}."
        )
    if len(said) != states:
        raise InvalidInput(
            f"{LAYERS} must name the {states} layers that fc reads, but config.json of {stored.origin} names {len(said)}."
        )
    return tuple(i + (said[0] == 1) for i in said)


def eagle3_config(heads: Eagle3Heads, base: str) -> dict[str, object]:
    """SafeAILab's config.json, and what SGLang and vLLM read beside it."""
    form, layer = heads.form, heads.layer.config
    flags = {
        "norm_before_residual": form.before_residual,
        "norm_before_fc": form.fuse_norm,
        "fc_norm": form.state_norms,
        "norm_output": form.normed_feedback,
        "bias": form.fc_bias,
        "attention_bias": form.bias,
    }
    special: dict[str, object] = {key: value for key, value in flags.items() if value}
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
        "torch_dtype": str(heads.fc.weight.dtype).removeprefix("torch."),
        **special,
        "base_model_name_or_path": base,
    }
