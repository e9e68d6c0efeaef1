"""DFlash: some layers that guess a whole block in one pass, from keys and values made of the target's states between its layers.

The target's residual stream behind some of its layers is fused, c = norm(fc [g_1, ..., g_L]). Every layer makes keys and values of
c by its own projections; c itself goes through no layer (DFlash, section 3). The block is the newest token, whose state does not
exist yet, and masks. Its rows attend to the context and to each other, and the row at place p + j guesses the token there,
or the one behind it where the drafter samples from the anchor (DeepSpec). Guesses do not depend on each other, but with
attention in both directions each depends on how wide the block is: a narrower one is another drafter.

b rows · n states of each · L states of the target that are fused · w their width · d width of the layers · B rows of a block
K guesses · H key heads · D their width · V vocabulary · Vt tokens that the drafter guesses
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treeopt.runtime.cache import tree_mask
from treeopt.runtime.drafters.layer import begin_weights, layer_config, rotation_of, zero_linear
from treeopt.runtime.drafters.marginals import MarginalDraft
from treeopt.runtime.drafters.medusa import check_bias
from treeopt.runtime.drafters.states import CausalDraft, Heads, Logits
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import Batch, Text
from treeopt.runtime.training.recipe import Recipe

READ_AT_ONCE = 2**26  # most products of queries and keys that the states of a batch make together
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # of a layer, and (b, heads, B, D) queries, keys and values


@dataclass(frozen=True)
class Form:
    """The ways in which DFlash drafters differ.

    width, vocab_size : w and V, the target's
    layers      : at whose inputs the target is read; the number of its layers stands for the last one's output
    mask_id     : the token that stands for what is to be guessed
    block       : B that it was trained for; wider ones are refused
    from_anchor : whether the newest token's own row guesses too: K = B, else K = B - 1
    causal      : of each layer, whether rows of a block see those before them alone
    windows     : of each layer, how many places back a row sees; None for all
    """

    width: int
    vocab_size: int
    layers: tuple[int, ...]
    mask_id: int
    block: int
    from_anchor: bool
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]

    @property
    def first(self) -> int:
        """The row of a block that makes the first guess."""
        return 0 if self.from_anchor else 1

    @property
    def most_guesses(self) -> int:
        """K of the widest block."""
        return self.block - self.first


class DFlashHeads(Heads):
    """A DFlash drafter that guesses ``num_heads`` tokens in one pass, in a block just as wide.

    config  : a Qwen3Config of its layers
    lm_head : the target's; None where the drafter has its own
    """

    kind = "dflash"
    reads_prompt = has_marginals = True
    layers: Any
    rotary: Any

    def __init__(
        self,
        config: Any,
        form: Form,
        *,
        embedding: Tensor,
        lm_head: Tensor | None = None,
        token_ids: Tensor | None = None,
        num_heads: int,
        **placed: Any,
    ) -> None:
        from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

        super().__init__()
        self.config, self.form, self.num_heads, self.num_layers = config, form, num_heads, config.num_hidden_layers
        self.width, self.vocab_size, self.placed = form.width, form.vocab_size, placed
        self.block_rows = num_heads + form.first  # B, as wide as its guesses need
        self.widest = 0 if all(form.causal) else form.most_guesses
        device = placed.get("device") or "cpu"
        self.register_vocabulary(embedding, lm_head, token_ids, config.hidden_size, **placed)
        with torch.device("meta"):
            self.hidden_norm, self.norm = (Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2))
            self.layers = nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.to(placed.get("dtype"))
        for part in (self.hidden_norm, self.norm, self.layers):
            part.to_empty(device=device)
            for weight in part.parameters():
                nn.init.zeros_(weight)
        self.fc = zero_linear(len(form.layers) * form.width, config.hidden_size, bias=False, **placed)
        # Outside the modules, so that its frequencies stay float32.
        self.__dict__["rotary"] = rotation_of(config, Qwen3RotaryEmbedding).to(device)

    def layers_of(self, num_layers: int) -> Sequence[int]:
        return self.form.layers

    def fused(self, hidden: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(hidden[..., self.width :]))  # behind the target's last state

    def predict(self, following: Tensor, hidden: Tensor, *passed: Any) -> Tensor:
        """Write keys and values of (b, n, d) fused states into the cache; they come out as they are."""
        positions, cache, _ = passed
        for i, (keys, values) in enumerate(self.context(hidden, positions)):
            cache.write(i, keys, values)
        return hidden

    def context(self, fused: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(b, H, n, D) keys and values of each layer, of (b, n, d) fused states."""
        turns = self.rotary(fused, positions)
        for layer in self.layers:
            yield keys_values(layer, fused, turns)

    def block(self, roots: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """(b, B, d) rows of the block behind the (b,) roots, at (b, B) positions; `logits` guesses from them.

        attend : what the block's queries read of the context and of its own keys and values, (b, heads, B, D)
        """
        tokens = torch.full_like(positions, self.form.mask_id)
        tokens[:, 0] = roots
        x = F.embedding(tokens, self.embedding)
        turns = self.rotary(x, positions)

        def attended(read: Tensor, i: int, layer: Any) -> Tensor:
            attention = layer.self_attn
            queries = turned(attention.q_norm(by_head(attention.q_proj(read), attention)), turns)
            made = attend(i, queries, *keys_values(layer, read, turns))
            return attention.o_proj(made.transpose(1, 2).flatten(2))

        for i, layer in enumerate(self.layers):
            made = self.between(layer, "attention_conv", layer.input_layernorm(x), partial(attended, i=i, layer=layer))
            x = x + made
            x = x + self.between(layer, "mlp_conv", layer.post_attention_layernorm(x), layer.mlp)
        return x

    def between(self, layer: Any, name: str, read: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """(b, B, d) what attention or MLP makes of the rows; ``name`` is that of the convolutions around it, if there are."""
        return part(read)

    def logits(self, states: Tensor) -> Tensor:
        """Logits of the tokens that rows of a block guess: (..., d) to (..., Vt)."""
        return F.linear(self.norm(states), self.lm_head)

    def start(self, batch_size: int, capacity: int) -> BlockState:
        return BlockDraft(self, batch_size, capacity)

    def taught(self, hidden: Tensor, batch: Batch) -> Iterator[tuple[Tensor, Logits]]:
        rows = self.rows(hidden, batch)
        for k in range(self.num_heads):
            yield rows[:, k], self.logits

    def rows(self, hidden: Tensor, batch: Batch) -> Tensor:
        """(n, K, d) the guessing rows of the blocks of all the batch's states, each over the context of its own text."""
        (texts, width), heads, block = hidden.shape[:2], self.config.num_attention_heads, self.block_rows
        known = [*self.context(self.fused(hidden), torch.arange(width, device=hidden.device)[None])]
        # Of as many states that their blocks are no longer together than the texts.
        most = min(width // block, READ_AT_ONCE // (2 * heads * texts * block * width))
        parts = [(at, self.read(known, part)) for at, part in batch.parts(max(1, most))]
        places = torch.cat([at for at, _ in parts]).argsort().to(hidden.device)
        return torch.cat([rows for _, rows in parts])[places, self.form.first :]

    def read(self, known: Sequence[tuple[Tensor, Tensor]], batch: Batch) -> Tensor:
        """(n, B, d) rows of the blocks of a batch's states; those of a text are one pass, and see no other block's rows.

        known : of each layer, (texts, H, T, D) keys and values of the texts' states
        """
        columns, own = batch.places()  # (texts, A), (n,)
        (texts, each), device = columns.shape, columns.device
        context, steps = torch.arange(known[0][0].shape[2], device=device), torch.arange(self.block_rows, device=device)
        positions = columns[..., None] + 1 + steps  # (texts, A, B)
        places = torch.cat([context.expand(texts, -1), positions.flatten(1)], 1)  # of keys
        back = positions.flatten(1)[..., None] - places[:, None]  # (texts, A B, T + A B)
        before = (context <= columns[..., None]).repeat_interleave(len(steps), 1)
        alone = torch.eye(each, dtype=torch.bool, device=device)

        def mask(causal: bool, window: int | None) -> Tensor:
            block = (alone[:, None, :, None] & itself(steps, causal=causal)[:, None]).flatten(2).flatten(0, 1)
            seen = torch.cat([before, block.expand(texts, -1, -1)], 2)
            return (seen if window is None else seen & (back < window))[:, None]

        masks = [mask(*kind) for kind in zip(self.form.causal, self.form.windows, strict=True)]

        def attend(i: int, *block: Tensor) -> Tensor:
            queries, keys, values = (part.unflatten(0, (texts, each)).transpose(1, 2).flatten(2, 3) for part in block)
            keys, values = (torch.cat(both, 2) for both in zip(known[i], (keys, values), strict=True))
            made = F.scaled_dot_product_attention(queries, keys, values, masks[i], enable_gqa=True)
            return made.unflatten(2, (each, -1)).transpose(1, 2).flatten(0, 1)

        roots = batch.tokens[torch.arange(texts, device=device)[:, None], columns + 1]
        rows = self.block(roots.flatten(), positions.flatten(0, 1), attend)
        return rows.unflatten(0, (texts, each))[batch.rows, own]


class BlockState(CausalDraft):
    """The rows of a decoder: keys and values of the committed tokens' states, and the block's behind them, which are not kept."""

    _last: tuple[Any, Any] = None, None  # the roots that rows were asked for last, and these

    def __init__(self, drafter: DFlashHeads, batch_size: int, capacity: int) -> None:
        room = capacity + drafter.block_rows
        super().__init__(drafter, drafter.num_layers, batch_size, room, drafter.embedding.device)

    def rows(self, roots: Tensor) -> Tensor:
        """(b, K, d) the guessing rows of the block behind the (b,) roots; one pass, though a record asks for them again."""
        if self._last[0] is roots:
            return torch.as_tensor(self._last[1])
        self.catch_up(roots)
        heads, steps = self.drafter, torch.arange(self.drafter.block_rows, device=self.device)
        self.cache.begin_step(len(steps), self.starts)
        kinds = zip(heads.form.causal, heads.form.windows, strict=True)
        masks = [tree_mask(self.cache, self.starts, itself(steps, causal=one), steps, window) for one, window in kinds]

        def attend(i: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(
                queries, *self.cache.write(i, keys, values), masks[i], enable_gqa=True
            )

        self._last = roots, heads.block(roots, self.starts + steps, attend)[:, heads.form.first :]
        return torch.as_tensor(self._last[1])


class BlockDraft(MarginalDraft, BlockState):
    """The draft of guesses that do not depend on each other."""

    def marginals(self, roots: Tensor, depth: int) -> Tensor:
        return torch.as_tensor(self.drafter.logits(self.rows(roots)[:, :depth]))


def itself(steps: Tensor, *, causal: bool) -> Tensor:
    """(B, B) which rows of a block each row sees."""
    return steps[:, None] >= steps if causal else torch.ones_like(steps[:, None] >= steps)


def by_head(projected: Tensor, attention: Any) -> Tensor:
    """(b, n, heads * D) to (b, heads, n, D)."""
    return projected.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)


def keys_values(layer: Any, read: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(b, H, n, D) keys, normed and turned to their positions, and values of (b, n, d) vectors."""
    attention = layer.self_attn
    keys, values = (by_head(project(read), attention) for project in (attention.k_proj, attention.v_proj))
    return turned(attention.k_norm(keys), turns), values


def turned(vectors: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """(b, heads, n, D) turned by the cosines and sines of their positions, (b, n, D) (RoPE)."""
    cos, sin = (part[:, None] for part in turns)
    low, high = vectors.chunk(2, -1)
    return vectors * cos + torch.cat([-high, low], -1) * sin


def layers_to_read(num_layers: int) -> tuple[int, ...]:
    """At whose inputs a drafter that is trained here reads the target: three, from low to high, where there are as many.

    >>> [layers_to_read(n) for n in (1, 2, 4, 7, 30)]
    [(1,), (1, 2), (1, 2, 4), (2, 4, 5), (2, 16, 28)]
    """
    low, high = (2, num_layers - 2) if num_layers > 6 else (1, num_layers)
    middle = num_layers // 2 + (num_layers > 6)
    return tuple(sorted({low, max(middle, 1), high}))


@torch.no_grad()
def untrained(target: Target, recipe: Recipe, lm_head: Tensor, texts: Sequence[Text]) -> DFlashHeads:
    """Layers to train, whose attention and MLP add nothing at first. The mask is the token that the texts have least often."""
    from transformers import Qwen3Config

    check_bias(target)
    width, count = target.width, recipe.layers
    config = layer_config(target.config, width, layers=count, family=Qwen3Config)
    tokens = np.concatenate([np.zeros(0, dtype=np.int64), *(text.tokens for text in texts)])
    mask_id = int(np.bincount(tokens, minlength=target.vocab_size).argmin())
    layers, block, none = layers_to_read(target.num_layers), recipe.num_heads + 1, (None,) * count
    form = Form(width, target.vocab_size, layers, mask_id, block, False, (False,) * count, none)
    heads = DFlashHeads(
        config,
        form,
        embedding=target.model.get_input_embeddings().weight,
        lm_head=lm_head,
        num_heads=recipe.num_heads,
        dtype=lm_head.dtype,
        device=lm_head.device,
    )
    begin_weights(heads, target)
    return heads
