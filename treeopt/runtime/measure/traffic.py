"""The bytes that a plain step has to read: weights, and the keys and values of its rows.

Decoding few rows is bound by memory, so a step cannot be faster than these bytes over the bandwidth; how
near a plain step comes tells a fast runtime from a slow one. Where ranks share a target, they are those of one.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from treeopt.latency.paired import median_latency
from treeopt.records.profile import StepTiming
from treeopt.runtime import ranks
from treeopt.runtime.drafters.protocol import Drafter
from treeopt.runtime.target import Target


def weight_bytes(target: Target, drafter: Drafter) -> dict[str, int]:
    """Bytes of the target's weights, of the drafter's own, and of those that a plain step reads.

    An embedding that is not the lm_head too is read by the row, and left out of the last.
    """
    theirs = _storages(target.model)
    own = {place: n for place, n in _storages(drafter).items() if place not in theirs}
    whole = sum(theirs.values())
    embedding = target.model.get_input_embeddings().weight
    tied = embedding.data_ptr() == target.lm_head.weight.data_ptr()
    return {"target": whole, "heads": sum(own.values()), "plain_step": whole if tied else whole - embedding.nbytes}


def bandwidth_floor(target: Target, plain: StepTiming, *, weights: int, gb_per_s: float) -> dict[str, Any]:
    """The least time of a plain step at a bandwidth [ms], and how many times as long it took."""
    config, itemsize = target.config, target.lm_head.weight.element_size()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * target.num_layers * heads * width * itemsize // ranks.count()
    keys = per_token * plain.batch_size * plain.context_tokens
    floor_ms = 1e3 * (weights + keys) / (gb_per_s * 1e9)
    return {
        "batch_size": plain.batch_size,
        "context_tokens": plain.context_tokens,
        "gb_per_s": gb_per_s,
        "weight_bytes": weights,
        "cache_bytes": keys,
        "floor_ms": floor_ms,
        "plain_over_floor": median_latency(plain.step_ms).ms / floor_ms,
    }


def _storages(owner: Any) -> dict[int, int]:
    """Address and bytes of the weights of a module, or of a draft model's; nothing for drafters without weights."""
    module = owner if isinstance(owner, nn.Module) else getattr(getattr(owner, "model", None), "model", None)
    parameters = module.parameters() if isinstance(module, nn.Module) else ()
    return {tensor.data_ptr(): tensor.nbytes for tensor in map(ranks.here, parameters)}
