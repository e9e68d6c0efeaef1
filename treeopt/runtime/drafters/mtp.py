"""MTP heads: the layer for multi-token prediction that a target's own checkpoint has behind its last one.

The target's last hidden state f_j of token j and the embedding of the token after it are normed and joined,
eh_proj [enorm(e_{j+1}), hnorm(f_j)], and go through a decoder layer of the target's kind, which attends to the pairs
before it; the shared head guesses token j + 2 from what its last norm makes of that (DeepSeek-V3, section 2.2). Engines
use the layer again for deeper guesses: its own state behind its last norm then takes the place of the target's, as in EAGLE.

transformers and SGLang (python/sglang/srt/models/deepseek_nextn.py at 0114f9c9, glm4_moe_nextn.py at 008b79d2) do as is done here.
vLLM sets the embedding of the first pair to 0, though its inputs are shifted by then and training had it (vLLM's issue 33299),
and feeds back GLM-4.5's state from before the norm (glm4_moe_mtp.py at 028aedf6).

transformers loads these layers for some families, and drops them for the others.
"""

import copy
import re
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_layers import MtpModel

from treeopt.errors import InvalidInput, Unsupported, quoted
from treeopt.runtime.checkpoints.files import find_checkpoint, find_tensors
from treeopt.runtime.drafters.layer import UnrolledHeads
from treeopt.runtime.drafters.protocol import DRAFT_DEPTH
from treeopt.runtime.folder import loadable
from treeopt.runtime.target import Target

MTP = "mtp"  # what --drafter calls them
FAMILIES = ("deepseek_v3", "glm4_moe")


class MtpHeads(UnrolledHeads):
    """A target's MTP layer; it guesses ``num_heads`` tokens ahead.

    mtp : of this target, with one layer
    """

    kind = "mtp"

    def __init__(self, mtp: MtpModel, target: Target, *, num_heads: int = DRAFT_DEPTH) -> None:
        super().__init__()
        self.num_heads, self.vocab_size, self.width = num_heads, target.vocab_size, target.width
        embedding = target.model.get_input_embeddings().weight
        self.register_vocabulary(embedding, target.lm_head.weight, None, self.width)
        mtp.config._attn_implementation = "sdpa"  # which is causal without a mask
        (self.layer,), self.rotary = mtp.layers, mtp.rotary_emb

    def predict(self, following: Tensor, hidden: Tensor, *passed: Any) -> Tensor:
        layer, embedded, (positions, cache, *mask) = self.layer, F.embedding(following, self.embedding), passed
        states = layer.mtp_block(
            layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(hidden)], -1)),
            position_embeddings=self.rotary(embedded, positions),
            position_ids=positions,
            attention_mask=mask[0] if mask else None,
            past_key_values=cache,
        )
        return layer.post_norm(states)

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.lm_head)


def load_mtp(name: str, target: Target, num_heads: int = DRAFT_DEPTH) -> MtpHeads:
    """The MTP layer in the checkpoint that the target was loaded from; ``name`` is `MTP`.

    Raises Unsupported, saying what is missing, where transformers or treeopt cannot run it.
    """
    check_support(target)
    folder, layer = find_checkpoint(target.name, target.revision), f"model.layers.{target.num_layers}."
    if not any(stored.startswith(layer) for stored in find_tensors(folder).parts):
        raise InvalidInput(
            f"`drafter={name}` needs the weights of an MTP layer, {layer}*, but {target.name} has none: they were left "
            "out of this copy. Use the original checkpoint."
        )
    # transformers knows the published models' layers by their numbers, and looks for the newest revision.
    model = copy.copy(target.model)
    model.config = copy.copy(target.model.config)
    model.config.name_or_path, model.config.dtype = str(folder), target.dtype
    model._keys_to_ignore_on_load_unexpected = {re.escape(layer)}
    with loadable(f"`drafter={name}` needs an MTP layer whose weights fit config.json", target.name):
        mtp = MtpModel.from_pretrained(model, device_map={"": target.device})
    for weight, values in mtp.layers[0].state_dict().items():
        if not bool(values.isfinite().all()):
            raise InvalidInput(f"The weights of an MTP layer must be finite, but {weight} in {target.name} is not.")
    return MtpHeads(mtp.eval().requires_grad_(False), target, num_heads=num_heads)


def check_support(target: Target) -> None:
    """Raise Unsupported unless transformers has the target's MTP layer and it can be run here."""
    config, why = target.config, ""
    count = getattr(config, "num_mtp_layers", None)
    if config.model_type not in FAMILIES:
        why = f"an MTP layer like that of {' or '.join(FAMILIES)}, but {target.name} is {config.model_type}."
    elif count != 1:
        why = f"a target with one MTP layer, but {target.name} has {quoted(count)}."
    elif getattr(config, "quantization_config", None) is not None:
        why = f"weights that are not quantized, but {target.name} is quantized: use a copy in bfloat16."
    elif target.layer_devices is not None or hasattr(target.decoder, "_hf_hook"):
        why = f"the target on one device, but {target.name} is spread: use `device`."
    if why:
        raise Unsupported(f"`drafter={MTP}` needs {why}")
