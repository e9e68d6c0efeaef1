"""Small drafters of random weights, in every form that they have, for the target `small_model`."""

from dataclasses import replace

import torch
from transformers import Qwen3Config

from tests.conftest import CONTEXT, VOCABULARY, tiny_model
from treeopt.runtime.drafters.dflash import DFlashHeads
from treeopt.runtime.drafters.dflash import Form as BlockForm
from treeopt.runtime.drafters.draft_model import DraftModel
from treeopt.runtime.drafters.eagle3 import Eagle3Heads, Form
from treeopt.runtime.drafters.hydra import HydraHeads
from treeopt.runtime.drafters.layer import EagleHeads, layer_config
from treeopt.runtime.drafters.parallel import PardModel, PEagleHeads
from treeopt.runtime.drafters.paths import DFlash2Heads, DSparkHeads
from treeopt.runtime.target import Target
from treeopt.runtime.training.opening import make_heads
from treeopt.runtime.training.recipe import Recipe

from .slow_drafters import small_model

PLAIN = Form(width=32, vocab_size=VOCABULARY, layers=(0, 1, 2))
FORMS = {
    "plain": PLAIN,
    "two-states": replace(PLAIN, states=2, layers=(2, 0)),
    "norm_before_residual": replace(PLAIN, before_residual=True),
    "norm_before_fc": replace(PLAIN, fuse_norm=True),
    "fc_norm": replace(PLAIN, state_norms=True),
    "norm_output": replace(PLAIN, normed_feedback=True),
    "bias": replace(PLAIN, fc_bias=True, bias=True),
    "q_norm": replace(PLAIN, head_norms=True),
    "all": Form(32, VOCABULARY, 3, (0, 1, 2), True, False, True, True, True, True, True),
}
SOME = torch.tensor([0, 1, 2, 5, *range(8, 31, 2), 33, 34, 36])  # of the tokens
THETA, MASK = 77.0, 8  # base of the rotation, and the token that masks are
KINDS = ["llama", "llama-eager", "qwen3", "mistral"]
OTHERS = {
    "short": {"context": 13},
    "fewer tokens": {"vocab_size": 30},
    "more tokens": {"vocab_size": 45},
}  # of `other_model`
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "hidden_size": 32, "intermediate_size": 40}
CONFIG = {**SIZES, "max_position_embeddings": 96, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
RANK, KEPT, GROUP = 5, 6, 8  # of DSpark and DFlash2


def random(heads, seed=0):
    """Random weights all over, the norms' too."""
    torch.manual_seed(seed)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.3)
    return heads.eval().requires_grad_(False)


def random_hydra(num_heads, num_layers) -> HydraHeads:
    return random(make_heads(Target(small_model()), Recipe("hydra", num_heads, num_layers)))


def random_eagle(num_heads=5, *, bias=True) -> EagleHeads:
    model = small_model()
    ends = {"embedding": model.model.embed_tokens.weight, "lm_head": model.lm_head.weight}
    config = layer_config(model.config, model.config.hidden_size)
    return random(EagleHeads(config, **ends, bias=bias, num_heads=num_heads, dtype=torch.float64))


def random_eagle3(form=PLAIN, *, num_heads=4, token_ids=SOME, width=32, shared=False) -> Eagle3Heads:
    """A layer of another width than the target's if asked."""
    model = small_model()
    torch.manual_seed(0)
    heads = Eagle3Heads(
        layer_config(model.config, width, num_attention_heads=4, num_key_value_heads=2, head_dim=8),
        form,
        embedding=model.model.embed_tokens.weight if width == 32 else torch.randn(VOCABULARY, width),
        lm_head=model.lm_head.weight if shared else None,
        token_ids=token_ids,
        num_heads=num_heads,
        dtype=torch.float64,
    )
    return random(heads)


def random_peagle(form: Form = PLAIN, *, layers=2, kv_heads=2, ids=SOME, width=32, guesses=4, seed=0) -> PEagleHeads:
    model = small_model()
    torch.manual_seed(seed)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "head_dim": 8}
    config = layer_config(model.config, width, layers=layers, **sizes)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 77.0}
    heads = PEagleHeads(
        config,
        replace(form, mask_id=MASK),
        embedding=model.model.embed_tokens.weight if width == 32 else torch.randn(VOCABULARY, width),
        token_ids=ids,
        num_heads=guesses,
        dtype=torch.float64,
    )
    random(heads, seed)
    torch.nn.init.normal_(heads.mask_hidden)
    return heads


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
        BlockForm(32, VOCABULARY, (1, 3), MASK, block, from_anchor, causal, windows),
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


def random_dspark(**form):
    heads = random_dflash(made=DSparkHeads, rank=RANK, **form)
    heads.markov_head["markov_w2"].weight *= 8  # so that the path decides
    return heads


def random_dflash2(*, kept=KEPT, **form):
    heads = random_dflash(made=DFlash2Heads, rank=RANK, kept=kept, group=GROUP, **form)
    heads.candidate_selector.successor_codebook *= 8  # so that it decides
    return heads


def other_model(vocab_size: int = VOCABULARY, context: int = CONTEXT, layers: int = 2) -> torch.nn.Module:
    """A random draft model of another width, and without a list of layers: GPT-2, whose places are learned."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(4)
    sizes = {"vocab_size": vocab_size, "n_positions": context, "n_embd": 24, "n_layer": layers, "n_head": 3}
    others = {"initializer_range": 0.6, "bos_token_id": None, "eos_token_id": 3, "attn_implementation": "sdpa"}
    return GPT2LMHeadModel(GPT2Config(**sizes, **others)).double().eval().requires_grad_(False)


def seeded(kind: str) -> DraftModel:
    return DraftModel(Target(tiny_model(kind, seed=7)), VOCABULARY)


def pard(model: torch.nn.Module, guesses: int = 4) -> PardModel:
    return PardModel(Target(model), VOCABULARY, mask_id=MASK, num_heads=guesses)
