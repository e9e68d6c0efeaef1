"""Hydra heads: like Medusa's, but every head also reads the tokens that were guessed before its own; and their checkpoints.

Head i reads the hidden state of y_t and the target's input embeddings of y_{t+1}...y_{t+1+i}, one after the
other, and guesses y_{t+2+i} (Hydra, section 3). Its first block takes them to the target's width,
R x + SiLU(W x); further ones are Medusa's, x + SiLU(W x); its vocabulary projection has a bias. Hydra++
(section 4) first sends the hidden states of the whole text through one decoder layer, the prefix layer.

Files are hydra_lm_head.pt and the same tensors in safetensors. Names: hydra_mlp.{i}.{j} and hydra_lm_head.{i}; in Hydra++,
whose dropout takes the even places, the blocks are .1 .3 .5 ... and the projections .1. The prefix layer is a whole LlamaModel
under prefix_embeding_layer (sic). The blocks after a head's first are one module in the published code: a pickle's tensors then
share storage.

N states · K heads · L blocks · d width · V vocabulary · F inner width of the prefix layer · b live rows
E expanding nodes of a level
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treeopt.errors import Unsupported, quoted
from treeopt.runtime.checkpoints.files import StoredTensors
from treeopt.runtime.checkpoints.layer import FREQUENCIES, LAYER, build_layer_config
from treeopt.runtime.checkpoints.reading import ROUNDING, Checkpoint, Published, Reading, check_names
from treeopt.runtime.drafters.layer import OneLayer, layer_config, zero_linear
from treeopt.runtime.drafters.levels import LevelDraft
from treeopt.runtime.drafters.protocol import DrafterState, Frontier
from treeopt.runtime.drafters.states import CausalDraft, Heads, Logits, StateDraft
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import Batch
from treeopt.runtime.training.recipe import Recipe


class HydraHead(nn.Module):
    """Head i: (i+2) d numbers to logits."""

    def __init__(self, i: int, num_layers: int, width: int, vocab_size: int, **placed: Any) -> None:
        super().__init__()
        self.linear = zero_linear((i + 2) * width, width, **placed)
        self.res_connection = zero_linear((i + 2) * width, width, **placed)
        self.blocks = nn.ModuleList(zero_linear(width, width, **placed) for _ in range(num_layers - 1))
        self.lm_head = zero_linear(width, vocab_size, **placed)

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., (i+2) d) to (..., V)."""
        x = self.res_connection(inputs) + F.silu(self.linear(inputs))
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.lm_head(x)


class HydraHeads(Heads):
    """K heads that read the path before their guess; with a prefix layer they are Hydra++.

    embedding : (V or more, d) the target's input embeddings
    prefix    : config of the prefix layer (see `layer_config`); None for plain Hydra
    """

    def __init__(
        self, num_heads: int, num_layers: int, vocab_size: int, *, embedding: Tensor, prefix: Any = None, **placed: Any
    ) -> None:
        super().__init__()
        self.num_heads, self.num_layers, self.token_ids = num_heads, num_layers, None
        self.vocab_size, self.width = vocab_size, embedding.shape[1]
        self.kind, self.reads_prompt = "hydra" if prefix is None else "hydra++", prefix is not None
        self.register_buffer("embedding", embedding.detach().to(**placed), persistent=False)
        self.heads = nn.ModuleList(HydraHead(i, num_layers, self.width, vocab_size, **placed) for i in range(num_heads))
        self.prefix_layer = None if prefix is None else OneLayer(prefix, normed=True, **placed)

    def prefix(self, hidden: Tensor) -> Tensor:
        """The (b, T, d) states of whole texts, padded on the right, as the heads read them."""
        return hidden if self.prefix_layer is None else self.prefix_layer(hidden)

    def taught(self, hidden: Tensor, batch: Batch) -> Iterator[tuple[Tensor, Logits]]:
        read, path = batch.states(self.prefix(hidden)), batch.ahead.clamp_min(0)
        for k, head in enumerate(self.heads):
            read = torch.cat([read, F.embedding(path[:, k], self.embedding)], 1)
            yield read, head

    def predict(self, following: Tensor, hidden: Tensor, *passed: Any) -> Tensor:
        assert self.prefix_layer is not None, "plain Hydra has no layer"
        return self.prefix_layer(hidden, *passed)

    def start(self, batch_size: int, capacity: int) -> DrafterState:
        if self.prefix_layer is None:
            return HydraDraft(self)
        return PrefixDraft(self, 1, batch_size, capacity, self.embedding.device)


class PathDraft(LevelDraft):
    """The base of both drafts: a head reads the state before the root and the tokens of the path."""

    states: Tensor  # (b, E, ...) read by the nodes of the level that was expanded last

    def logits(self, level: Frontier, tokens: Tensor) -> Tensor:
        guesses = F.embedding(tokens, self.drafter.embedding)
        self.states = torch.cat([level.inherit(self.states), guesses], -1)  # (b, E, (i+2) d)
        return self.drafter.heads[level.depth](self.states)


class HydraDraft(PathDraft, StateDraft):
    """The rows of a decoder: the state of the last committed token is all that plain Hydra needs."""

    def begin(self, roots: Tensor, depth: int) -> None:
        self.states = self.hidden[:, None]


class PrefixDraft(PathDraft, CausalDraft):
    """The rows of a decoder for Hydra++: newly committed states go through the prefix layer once a tree step."""


@torch.no_grad()
def untrained(
    target: Target, recipe: Recipe, lm_head: Tensor, _: object, hidden_rms: Callable[[], float]
) -> HydraHeads:
    """Heads to train, which begin as the target's own (V, d) head: see `treeopt.records.drafters.DrafterKind`.

    Their logits are exactly the target's. With a prefix layer they are the target's times a number above 0 for each
    state, since the layer ends in a norm: the same order (if the head has no bias), and about the same numbers where
    ``hidden_rms`` is the usual root mean square of the target's hidden states.
    """
    vocab_size, width = lm_head.shape
    embedding, bias = target.model.get_input_embeddings().weight.detach(), getattr(target.lm_head, "bias", None)
    prefix: Any = layer_config(target.config, width) if recipe.kind == "hydra++" else None
    sizes, read = (recipe.num_heads, recipe.layers, vocab_size), {"embedding": embedding, "prefix": prefix}
    made = HydraHeads(*sizes, **read, dtype=lm_head.dtype, device=lm_head.device)
    for head in made.heads:
        assert isinstance(head, HydraHead)
        head.res_connection.weight[:, :width].fill_diagonal_(1)
        head.lm_head.weight.copy_(lm_head)
        if bias is not None:
            head.lm_head.bias.copy_(bias)
    for name, weight in made.prefix_layer.weights.items() if made.prefix_layer is not None else ():
        if weight.ndim == 1:
            weight.fill_(hidden_rms() if name == "norm.weight" else 1.0)
        elif "o_proj" not in name and "down_proj" not in name:  # these are zero: the layer passes on
            weight.normal_(std=prefix.initializer_range)
    return made


PREFIX = "prefix_embeding_layer."
EMBEDDING = "input_embed_fn.weight"
PREFIX_NAMES = (*LAYER, "layers.0.input_layernorm.weight", "norm.weight")
PREFIX_EMBEDDING = "embed_tokens.weight"
UNUSED = (PREFIX_EMBEDDING, FREQUENCIES)  # tensors of the prefix layer on which no guess depends
FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
ARCHITECTURES = {"hydra": "mlp", "hydra++": "prefix-mlp"}
NAME = re.compile(r"(hydra_mlp|hydra_lm_head)\.(0|[1-9]\d{0,3})\.((?:0|[1-9]\d{0,3})\.)?[a-z_.]+", re.ASCII)
KNOWN = {  # what config.json may say where another word would change the guesses
    "hydra_head_arch": ("'mlp' or 'prefix-mlp'", tuple(ARCHITECTURES.values())),
    "hidden_state_offset": ("0", (0,)),
    "grounded_heads": ("true, which has heads read the guesses before them", (True,)),
}


def head_names(layout: str, i: int, num_layers: int) -> Iterator[tuple[str, str]]:
    """Every tensor of head i: (its name in a checkpoint, its name in a `HydraHead`)."""
    first, step, projection = (1, 2, ".1") if layout == "hydra++" else (0, 1, "")
    pairs = [(f"hydra_mlp.{i}.{first}.{name}", name) for name in ("linear", "res_connection")]
    pairs += [(f"hydra_mlp.{i}.{first + step * j}.linear", f"blocks.{j - 1}") for j in range(1, num_layers)]
    for theirs, ours in (*pairs, (f"hydra_lm_head.{i}{projection}", "lm_head")):
        for kind in ("weight", "bias"):
            yield f"{theirs}.{kind}", f"{ours}.{kind}"


def recognise_hydra(stored: StoredTensors) -> Checkpoint | None:
    """Tell Hydra's layouts apart and count, by the tensors' names; None where nothing says Hydra."""
    config, matches = stored.config, [match for name in stored.parts if (match := NAME.fullmatch(name))]
    if "hydra_num_heads" not in config and not any(name.startswith(("hydra_", PREFIX)) for name in stored.parts):
        return None
    for key, (rule, known) in KNOWN.items():
        if config.get(key) not in (None, *known):
            raise config.wrong(key, f"{rule}, for Hydra heads to be read", Unsupported)
    dropout = any(match[1] == "hydra_lm_head" and match[3] for match in matches)
    layout = "hydra++" if dropout or any(name.startswith(PREFIX) for name in stored.parts) else "hydra"
    num_heads = 1 + max((int(match[2]) for match in matches), default=0)
    last = max((int(match[3][:-1]) for match in matches if match[1] == "hydra_mlp" and match[3]), default=0)
    num_layers = 1 + (last // 2 if layout == "hydra++" else last)

    prefix = [PREFIX + name for name in PREFIX_NAMES if layout == "hydra++"]
    unused = [PREFIX + name for name in UNUSED if layout == "hydra++" and PREFIX + name in stored.parts]

    def names() -> Iterator[str]:
        yield from [*(name for name in (EMBEDDING,) if name in stored.parts), *prefix]
        for i in range(num_heads):
            yield from (theirs for theirs, _ in head_names(layout, i, num_layers))

    found = check_names(
        stored,
        names(),
        f"{num_heads} heads of {num_layers} blocks{' and a prefix layer' if prefix else ''} in the layout {layout!r}",
        known=[*(match[0] for match in matches), *prefix, EMBEDDING],
        optional=unused,
    )
    inside = {name.removeprefix(PREFIX): name for name in (*found, *unused)}
    return Checkpoint(stored, layout, inside, partial(_build, layout, (num_heads, num_layers)), UNUSED)


def _build(
    layout: str, counts: tuple[int, int], reading: Reading
) -> tuple[HydraHeads, Iterable[tuple[str, torch.nn.Parameter]]]:
    """Check the tensors of recognised heads, those too that no guess depends on."""
    (num_heads, num_layers), base, names = counts, reading.base, reading.names
    config, notes, tensors = reading.config, reading.notes, reading.tensors
    reading.count_notes((config.get("hydra_num_heads"), config.get("hydra_num_layers")), *counts)
    if config.get("hydra_head_arch") not in (None, ARCHITECTURES[layout]):
        said = config["hydra_head_arch"]
        notes.append(f"config.json says hydra_head_arch {said}, the tensors are those of {ARCHITECTURES[layout]}.")
    unused = reading.floats([name for name in UNUSED if name in names])
    frequencies = unused.get(FREQUENCIES)
    width = reading.most_common_size(r"^hydra_mlp\.")
    vocab_size = reading.most_common_size(r"^hydra_lm_head\.")
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys((EMBEDDING, PREFIX_EMBEDDING), (vocab_size, width))
    of_heads = [dict(head_names(layout, i, num_layers)) for i in range(num_heads)]
    for i, of_head in enumerate(of_heads):
        for theirs, ours in of_head.items():
            inputs = (i + 2) * width if ours.startswith(("linear", "res_connection")) else width
            outputs = vocab_size if ours.startswith("lm_head") else width
            shapes[theirs] = (outputs, inputs) if ours.endswith("weight") else (outputs,)
    what = f"{num_heads} heads of width {width}"
    reading.check_shapes(shapes, what, tensors | unused)
    first = list(of_heads[0])
    config.check_sizes({"hidden_size": (width, first[0]), "vocab_size": (vocab_size, first[-2])})

    prefix = None
    if layout == "hydra++":
        like, make = base.config, partial(OneLayer, normed=True)
        prefix = build_layer_config(
            reading, width, f"{what} and a prefix layer", like=like, make=make, frequencies=frequencies
        )
        if like is None:
            notes.append("Without the target's config the prefix layer has Llama's usual rotary base and norm epsilon.")
    own, sizes = reading.embedding(EMBEDDING), (num_heads, num_layers, vocab_size)
    heads = HydraHeads(*sizes, embedding=own, prefix=prefix, dtype=reading.dtype, device=base.device)
    if heads.prefix_layer is not None and frequencies is not None:
        used = heads.prefix_layer.model.rotary_emb.inv_freq.cpu()
        reading.check_shapes({FREQUENCIES: tuple(used.shape)}, "a prefix layer", unused)
        if base.config is not None and not torch.allclose(frequencies.float(), used, rtol=ROUNDING, atol=0.0):
            name = quoted(names[FREQUENCIES])
            notes.append(f"{name} has other rotary frequencies than the target's config says: the config's are used.")
    return heads, _weights(heads).items()


def _weights(heads: HydraHeads) -> dict[str, torch.nn.Parameter]:
    """The heads' own weights by their published names; those of the prefix layer without its prefix."""
    found: dict[str, torch.nn.Parameter] = {}
    for i, head in enumerate(heads.heads):
        weights = dict(head.named_parameters())
        found |= {theirs: weights[ours] for theirs, ours in head_names(heads.kind, i, heads.num_layers)}
    return found if heads.prefix_layer is None else found | heads.prefix_layer.weights


def publish_hydra(heads: HydraHeads, layout: str, base: str, lm_head: Tensor | None) -> Published:
    weights: dict[str, Tensor] = {EMBEDDING: heads.embedding, **_weights(heads)}
    if heads.prefix_layer is not None:
        weights[PREFIX_EMBEDDING] = heads.embedding
        weights[FREQUENCIES] = heads.prefix_layer.model.rotary_emb.inv_freq
    inside = (*PREFIX_NAMES, *UNUSED)
    tensors = {PREFIX + name if name in inside else name: weight for name, weight in weights.items()}
    config = {
        "hydra_num_heads": heads.num_heads,
        "hydra_num_layers": heads.num_layers,
        "hydra_head_arch": ARCHITECTURES[heads.kind],
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": base,
    }
    return Published(FILES[layout.endswith("-pt")], tensors, config)
