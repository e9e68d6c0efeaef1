"""Hydra heads: like Medusa's, but every head also reads the tokens that were guessed before its own; and their checkpoints.

Head i reads the hidden state of y_t and the target's input embeddings of y_{t+1}...y_{t+1+i}, one after the
other, and guesses y_{t+2+i} (Hydra, section 3). Its first block takes them to the target's width,
R x + SiLU(W x); further ones are Medusa's, x + SiLU(W x); its vocabulary projection has a bias.

Files are hydra_lm_head.pt and the same tensors in safetensors. Names: hydra_mlp.{i}.{j} and hydra_lm_head.{i}. The blocks after a
head's first are one module in the published code: a pickle's tensors then share storage.

N states · K heads · L blocks · d width · V vocabulary · b live rows · E expanding nodes of a level
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treeopt.errors import Unsupported
from treeopt.runtime.checkpoints.files import StoredTensors
from treeopt.runtime.checkpoints.reading import Checkpoint, Published, Reading, check_names
from treeopt.runtime.drafters.layer import zero_linear
from treeopt.runtime.drafters.protocol import Frontier
from treeopt.runtime.drafters.states import Heads, Logits, StateDraft
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import Batch
from treeopt.runtime.training.recipe import Recipe


class HydraHeads(Heads):
    """K heads that read the path before their guess. Modules have the names that they have in checkpoints.

    embedding : (V or more, d) the target's input embeddings
    """

    kind = "hydra"
    hydra_mlp: Any  # of each head its blocks
    hydra_lm_head: Any

    def __init__(self, num_heads: int, num_layers: int, vocab_size: int, *, embedding: Tensor, **placed: Any) -> None:
        super().__init__()
        self.num_heads, self.num_layers, self.token_ids = num_heads, num_layers, None
        self.vocab_size, self.width = vocab_size, embedding.shape[1]
        self.register_buffer("embedding", embedding.detach().to(**placed), persistent=False)

        def block(head: int, layer: int) -> nn.Module:
            inputs = self.width if layer else (head + 2) * self.width
            made = nn.ModuleDict({"linear": zero_linear(inputs, self.width, **placed)})
            if layer == 0:
                made["res_connection"] = zero_linear(inputs, self.width, **placed)
            return made

        self.hydra_mlp = nn.ModuleList(
            nn.ModuleList(block(k, layer) for layer in range(num_layers)) for k in range(num_heads)
        )
        self.hydra_lm_head = nn.ModuleList(zero_linear(self.width, vocab_size, **placed) for _ in range(num_heads))

    def logits(self, read: Tensor, k: int) -> Tensor:
        """Logits of head k (from 0): (..., (k+2) d) to (..., V)."""
        first, *others = self.hydra_mlp[k]
        x = first["res_connection"](read) + F.silu(first["linear"](read))
        for block in others:
            x = x + F.silu(block["linear"](x))
        return torch.as_tensor(self.hydra_lm_head[k](x))

    def taught(self, hidden: Tensor, batch: Batch) -> Iterator[tuple[Tensor, Logits]]:
        read, path = batch.states(hidden), batch.ahead.clamp_min(0)
        for k in range(self.num_heads):
            read = torch.cat([read, F.embedding(path[:, k], self.embedding)], 1)
            yield read, partial(self.logits, k=k)

    def start(self, batch_size: int, capacity: int) -> StateDraft:
        return HydraDraft(self)


class HydraDraft(StateDraft):
    """The rows of a decoder: a head reads the state before the root and the tokens of the path.

    states : (b, E, ...) read by the nodes of the level that was expanded last
    """

    states: Tensor

    def begin(self, roots: Tensor, depth: int) -> None:
        self.states = self.hidden[:, None]

    def logits(self, level: Frontier, tokens: Tensor) -> Tensor:
        guesses = F.embedding(tokens, self.drafter.embedding)
        self.states = torch.cat([level.inherit(self.states), guesses], -1)  # (b, E, (i+2) d)
        return torch.as_tensor(self.drafter.logits(self.states, level.depth))


@torch.no_grad()
def untrained(target: Target, recipe: Recipe, lm_head: Tensor, _: object) -> HydraHeads:
    """Heads to train, which begin as the target's own (V, d) head: see `treeopt.records.drafters.DrafterKind`.

    Their logits are exactly the target's.
    """
    vocab_size, width = lm_head.shape
    embedding, bias = target.model.get_input_embeddings().weight.detach(), getattr(target.lm_head, "bias", None)
    sizes = (recipe.num_heads, recipe.layers, vocab_size)
    made = HydraHeads(*sizes, embedding=embedding, dtype=lm_head.dtype, device=lm_head.device)
    for (first, *_), head in zip(made.hydra_mlp, made.hydra_lm_head, strict=True):
        first["res_connection"].weight[:, :width].fill_diagonal_(1)
        head.weight.copy_(lm_head)
        if bias is not None:
            head.bias.copy_(bias)
    return made


PREFIX = "prefix_embeding_layer."  # (sic) of Hydra++
EMBEDDING = "input_embed_fn.weight"
FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
NAME = re.compile(r"(hydra_mlp|hydra_lm_head)\.(0|[1-9]\d{0,3})\.((?:0|[1-9]\d{0,3})\.)?[a-z_.]+", re.ASCII)
KNOWN = {  # what config.json may say where another word would change the guesses
    "hydra_head_arch": ("'mlp'", ("mlp",)),
    "hidden_state_offset": ("0", (0,)),
    "grounded_heads": ("true, which has heads read the guesses before them", (True,)),
}


def weight_names(num_heads: int, num_layers: int) -> Iterator[str]:
    """The names of `HydraHeads.weights`."""
    for k in range(num_heads):
        parts = [f"hydra_mlp.{k}.0.res_connection", *(f"hydra_mlp.{k}.{layer}.linear" for layer in range(num_layers))]
        for part in (*parts, f"hydra_lm_head.{k}"):
            yield from (f"{part}.weight", f"{part}.bias")


def recognise_hydra(stored: StoredTensors) -> Checkpoint | None:
    """Recognise and count heads by the tensors' names; None where nothing says Hydra."""
    config, matches = stored.config, [match for name in stored.parts if (match := NAME.fullmatch(name))]
    prefixed = next((name for name in stored.parts if name.startswith(PREFIX)), None)
    if "hydra_num_heads" not in config and not (prefixed or any(name.startswith("hydra_") for name in stored.parts)):
        return None
    if prefixed or any(match[1] == "hydra_lm_head" and match[3] for match in matches):
        raise Unsupported(
            f"{stored.origin} holds Hydra++ heads, which read the text by a layer of their own: they are not read."
        )
    for key, (rule, known) in KNOWN.items():
        if config.get(key) not in (None, *known):
            raise config.wrong(key, f"{rule}, for Hydra heads to be read", Unsupported)
    num_heads = 1 + max((int(match[2]) for match in matches), default=0)
    num_layers = 1 + max((int(match[3][:-1]) for match in matches if match[3]), default=0)

    found = check_names(
        stored,
        chain([EMBEDDING] * (EMBEDDING in stored.parts), weight_names(num_heads, num_layers)),
        f"{num_heads} heads of {num_layers} blocks in the layout 'hydra'",
        known=[*(match[0] for match in matches), EMBEDDING],
    )
    return Checkpoint(stored, "hydra", {name: name for name in found}, partial(_build, num_heads, num_layers))


def _build(num_heads: int, num_layers: int, reading: Reading) -> Callable[..., HydraHeads]:
    config = reading.config
    counts = config.get("hydra_num_heads"), config.get("hydra_num_layers")
    reading.count_notes(counts, num_heads, num_layers)
    width = reading.most_common_size(r"^hydra_mlp\.")
    vocab_size = reading.most_common_size(r"^hydra_lm_head\.")
    config.check_sizes(
        {"hidden_size": (width, "hydra_mlp.0.0.linear.weight"), "vocab_size": (vocab_size, "hydra_lm_head.0.weight")}
    )
    embedding = reading.embedding(EMBEDDING, vocab_size, width)
    return partial(HydraHeads, num_heads, num_layers, vocab_size, embedding=embedding)


def publish_hydra(heads: HydraHeads, layout: str, base: str, lm_head: Tensor | None) -> Published:
    config = {
        "hydra_num_heads": heads.num_heads,
        "hydra_num_layers": heads.num_layers,
        "hydra_head_arch": "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": base,
    }
    return Published(FILES[layout.endswith("-pt")], {EMBEDDING: heads.embedding, **heads.weights}, config)
