"""The base model: any transformers causal LM with a decoder, softmax attention and an lm_head.

n rows · T new tokens per row · d width · V vocabulary
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from treeopt import demo
from treeopt.errors import InvalidInput, Unsupported, quoted
from treeopt.runtime.cache import TreeCache, tree_mask
from treeopt.runtime.folder import check_folder, check_weights, find_model, loadable

ATTENTION = ("sdpa", "eager")  # the implementations that take a tree mask
LAYERS = {"full_attention", "sliding_attention"}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Target:
    """A causal LM split into its decoder and its vocabulary projection.

    Raises Unsupported, by name, for models whose layers cannot verify a tree.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, name: str = "unknown", revision: str | None = None
    ) -> None:
        self.model, self.tokenizer, self.name, self.revision = model, tokenizer, name, revision
        config = model.config.get_text_config()
        check_support(model, config)
        self.config = config
        self.decoder, self.lm_head = model.get_decoder(), model.get_output_embeddings()
        self.device, self.dtype = self.lm_head.weight.device, self.lm_head.weight.dtype
        self.vocab_size, self.width = self.lm_head.weight.shape
        self.num_layers: int = config.num_hidden_layers
        self.layer_devices = layer_devices(model, self.num_layers)
        kinds = getattr(config, "layer_types", None) or ["uniform"]
        window = getattr(config, "sliding_window", None)
        self._windows = {k: None if k == "full_attention" else window for k in dict.fromkeys(kinds)}
        self.context = context_limit(config)
        self.eos_ids = eos_ids(model, tokenizer)
        self.passes = 0  # forwards of the decoder so far
        self._hooks: list[Any] = []
        self.read_layers(())

    def read_layers(self, layers: Sequence[int]) -> None:
        """Have `hidden` hand out the residual stream at the inputs of these layers too.

        Layers count from 0; the number of layers stands for the last one's output, before the final norm. Raises
        Unsupported for a decoder that is no list of layers, and InvalidInput for layers that it does not have.
        """
        for hook in self._hooks:
            hook.remove()
        self.layers, self._hooks = tuple(layers), []
        self._between: dict[int, Tensor] = {}  # what was read there in the last pass
        found: Any = getattr(self.model.get_decoder(), "layers", None)
        if self.layers and not isinstance(found, nn.ModuleList):
            raise Unsupported(
                "This drafter reads what goes from one of the target's layers to the next, but "
                f"{type(self.model).__name__} has no list of layers."
            )
        for layer in self.layers:
            if not 0 <= layer <= self.num_layers:
                raise InvalidInput(
                    f"The drafter reads the target before its layer {layer}, but {self.name} has {self.num_layers} "
                    "layers: pass the `model` that the drafter was trained for."
                )
            self._hooks.append(self._hook(found, layer))

    def _hook(self, layers: nn.ModuleList, layer: int) -> Any:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            self._between[layer] = args[0] if args else kwargs["hidden_states"]

        def behind(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._between[layer] = output[0] if isinstance(output, tuple) else output

        if layer < self.num_layers:
            return layers[layer].register_forward_pre_hook(before, with_kwargs=True)
        return layers[layer - 1].register_forward_hook(behind)

    def states(self, **inputs: Any) -> Tensor:
        """Hidden states as `hidden` hands them out, by the decoder's own arguments."""
        last = self.decoder(**inputs).last_hidden_state
        if not self.layers:
            return last
        between = [self._between[layer].to(last.device) for layer in self.layers]
        self._between.clear()
        return torch.cat([last, *between], -1)

    def hidden(self, tokens: Tensor, positions: Tensor, cache: TreeCache, mask: Any) -> Tensor:
        """(n, T, d) last hidden states of (n, T) tokens, after the final norm; behind them the residual stream at `layers`."""
        self.passes += 1
        return self.states(
            input_ids=tokens, position_ids=positions, past_key_values=cache, attention_mask=mask, use_cache=True
        )

    def read(self, texts: Sequence[Sequence[int]], cache: TreeCache | None = None) -> Tensor:
        """Hidden states of whole texts, each by itself: (rows, longest, d), padded on the right.

        cache : takes them as new rows. Causal attention keeps padding from the real tokens, and what follows overwrites its keys
        """
        tokens = padded(texts).to(self.device)
        rows, longest = tokens.shape
        cache = TreeCache(self.num_layers, rows, longest, self.layer_devices) if cache is None else cache
        cache.begin_prefill(list(map(len, texts)))
        return self.hidden(tokens, torch.arange(longest, device=self.device).expand(rows, -1), cache, None)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., d) to (..., V). Scales and soft caps, which keep the order, are left out: `scores` has them."""
        return self.lm_head(hidden[..., : self.width])

    def scores(self, logits: Tensor) -> Tensor:
        """(..., V) logits as the model itself gives them, for probabilities: scaled and soft-capped."""
        config = self.config
        scaling = getattr(config, "logits_scaling", None)  # Granite, MiniCPM3, HyperCLOVA X
        factor = getattr(config, "logit_scale", None)  # Cohere
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma, nanochat
        if scaling is not None:
            logits = logits * scaling if config.model_type == "hyperclovax" else logits / scaling
        if factor is not None:
            logits = logits * factor
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def scored(self, hidden: Tensor) -> Tensor:
        """(..., d) to the (..., V) `scores`."""
        return self.scores(self.logits(hidden))

    def mask(self, cache: TreeCache, starts: Tensor, ancestors: Tensor, depths: Tensor) -> Any:
        """The attention mask of a pass in the form that this model takes; None for plain causal."""
        masks = {}
        for kind, window in self._windows.items():
            mask = tree_mask(cache, starts, ancestors, depths, window)
            if mask is not None:  # what is added to the scores, made once: every layer would make it of a bool
                dtype = cache.dtype or self.dtype
                mask = mask.new_zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
            masks[kind] = mask
        if len(masks) == 1:
            return next(iter(masks.values()))
        return None if all(mask is None for mask in masks.values()) else masks


def padded(texts: Sequence[Sequence[int]]) -> Tensor:
    """(rows, longest) token ids, zeros on the right.

    >>> padded([[1, 2], [3]]).tolist()
    [[1, 2], [3, 0]]
    """
    longest = max(map(len, texts))
    return torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], dtype=torch.long)


def load_target(
    path_or_id: str,
    *,
    dtype: str | None = None,
    device: str | None = None,
    device_map: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    option: str = "`model`",
) -> Target:
    """A model and its tokenizer from a folder, a GGUF file or a hub id, in evaluation mode; or "demo" or "smollm2".

    dtype is one of `DTYPES`; None is float32 on a CPU and the checkpoint's own elsewhere. device_map
    ("auto", ...) lets accelerate place the layers; without either it is a CUDA device where there is one.
    """
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if device_map is not None:
        if device is not None:
            raise InvalidInput("`device` and `device_map` exclude each other.")
        if importlib.util.find_spec("accelerate") is None:
            raise Unsupported("`device_map` needs accelerate. Install it with: pip install accelerate")
    folder = demo.MODEL if path_or_id == demo.NAME else find_model(path_or_id, option)
    device = check_device(device)
    wanted = wanted_dtype(dtype, "several" if device_map else device) or "auto"
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if folder is not None and not trust_remote_code:
        common["local_files_only"] = True
    placed: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
    with loadable(f"{option} must be a loadable {'model id or ' * (folder is None)}folder", path_or_id):
        if folder is not None:
            check_folder(folder)
        place = path_or_id if folder is None else str(folder)
        AutoConfig.from_pretrained(place, **common)  # what is no model is not refused for its tokenizer
        with loadable(f"{option} must have its tokenizer beside the weights, a tokenizer.json for example", path_or_id):
            tokenizer = AutoTokenizer.from_pretrained(place, **common)
        model, found = AutoModelForCausalLM.from_pretrained(
            place, dtype=wanted, output_loading_info=True, **placed, **common
        )
        check_weights(found["missing_keys"], option, path_or_id)
        model = model if placed else model.to(device)
        model.eval().requires_grad_(False)
        if model.dtype == torch.float64:  # which grouped products of experts do not take
            model.set_experts_implementation("eager")
        title = demo.TITLE if path_or_id == demo.NAME else path_or_id
        target = Target(model, tokenizer, name=title, revision=revision)
        with torch.inference_mode():
            target.read([[0, 0]])  # what a config says wrongly may be seen in a pass alone
        return target


def check_device(device: str | None) -> str:
    """The device, by default a CUDA one where there is one; InvalidInput where torch does not have it."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device).tolist()  # which "meta" cannot
    except (RuntimeError, AssertionError) as error:
        raise InvalidInput(f"`device` must be one that torch has here, but {device}: {error}") from None
    return device


def device_name(device: torch.device) -> str:
    """A device as records have it, an accelerator with its model: latencies of one are not another's.

    >>> device_name(torch.device("cpu"))
    'cpu'
    """
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def wanted_dtype(dtype: str | None, device: str) -> torch.dtype | None:
    """One of `DTYPES` by name; without a name float32 on a CPU, and None, the checkpoint's own, elsewhere."""
    if dtype is not None and dtype not in DTYPES:
        raise InvalidInput(f"`dtype` must be one of {', '.join(DTYPES)}, but got {dtype!r}.")
    return DTYPES[dtype] if dtype else torch.float32 if device == "cpu" else None


def layer_devices(model: Any, num_layers: int) -> list[torch.device] | None:
    """Device of every layer where a device map spreads them; None where all are on one."""
    layers = getattr(model.get_decoder(), "layers", None)
    if not getattr(model, "hf_device_map", None) or layers is None:
        return None
    return [next(layers[i].parameters()).device for i in range(num_layers)]


def check_support(model: Any, config: Any) -> None:
    """Raise Unsupported where a layer cannot branch, the attention cannot take a tree mask, or parts are on no device."""
    name = type(model).__name__
    strange = sorted(set(getattr(config, "layer_types", None) or []) - LAYERS)
    alibi = getattr(config, "alibi", False) or config.model_type == "bloom"
    if alibi or "local" in str(getattr(config, "attention_layers", "")):
        raise Unsupported(
            f"A tree mask must be all that attention depends on, but {name} uses ALiBi or local attention."
        )
    if strange or getattr(model, "_is_stateful", False):
        kind = ", ".join(strange) or "recurrent"
        raise Unsupported(f"A tree needs softmax attention in every layer, but {name} has {kind} layers.")
    if config._attn_implementation not in ATTENTION:
        raise Unsupported(
            f"The attention implementation must take a tree mask ({', '.join(ATTENTION)}), but "
            f"{name} uses {config._attn_implementation}: call model.set_attn_implementation('sdpa')."
        )
    if model.get_output_embeddings() is None:
        raise Unsupported(f"The target must be a causal LM with an lm_head, but {name} has none.")
    if {"disk", "meta"} & set(map(str, (getattr(model, "hf_device_map", None) or {}).values())):
        raise Unsupported("`device_map` put parts of the model on disk: use a smaller `dtype` or more devices.")


def context_limit(config: Any) -> int:
    """Tokens of the longest sequence.

    The RoPE types "dynamic" and "longrope" pick their frequencies by the longest position of the batch,
    so beyond their boundary batch and tree would change the text: the context ends there.
    """
    limit = int(getattr(config, "max_position_embeddings", None) or 2**20)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            named = "original_max_position_embeddings"
            limit = min(limit, int(parameters.get(named) or getattr(config, named, None) or limit))
    return limit


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """All tokens that end a sequence, by the generation config, the config or the tokenizer."""
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found = ids if isinstance(ids, list | tuple) else [ids]
            if not all(type(one) is int for one in found):
                raise InvalidInput(f"eos_token_id must be the ids of tokens, but the model has {quoted(ids)}.")
            return frozenset(one for one in found if one >= 0)  # -1 stands for none
    return frozenset()
