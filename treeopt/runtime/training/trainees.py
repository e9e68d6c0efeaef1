"""The modules that a step trains: each turns a batch into a loss and into counts.

The base is frozen here: its hidden states are computed without gradients, or kept in memory where several
epochs read the same ones. Medusa-2, which trains the base too, is in medusa2.py.

B texts · T tokens · n states · d width · V vocabulary · K heads
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from treeopt.runtime.drafters.eagle3 import Eagle3Heads
from treeopt.runtime.drafters.states import places_among
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import Batch, Text, make_batch
from treeopt.runtime.training.losses import NO_LABEL, teacher_loss, text_loss
from treeopt.runtime.training.recipe import EAGLE_3, HYDRA_PLUS, Recipe

CACHE_SHARE = 0.5  # most that hidden states may take of the memory that is free


class Sums(NamedTuple):
    """What a batch gave, summed over its states.

    loss      : ()    what is minimised: already divided by the trials of the whole step
    head_loss : (K,)  [nats]
    hits      : (K,)  states at which a head's first choice is the label
    base_loss : ()    -log p of the text under the base [nats]; 0 where the base is frozen
    base_kl   : ()    KL(original base || base) [nats]
    """

    loss: Tensor
    head_loss: Tensor
    hits: Tensor
    base_loss: Tensor
    base_kl: Tensor


class HeadsTrainee(nn.Module):
    """Medusa-1, Hydra or Hydra++ heads, or EAGLE-3's layer, on a frozen base.

    scores : (n, d) hidden states to (n, V) logits of the base, the teacher of Hydra++ and EAGLE-3
    """

    needs_states = True

    def __init__(self, heads: Any, recipe: Recipe, scores: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.recipe, self.scores = heads, recipe, scores

    def groups(self) -> list[dict[str, Any]]:
        parameters = [p for p in self.heads.parameters() if p.requires_grad]
        return [{"params": parameters, "peak": self.recipe.peak_rate}]

    def forward(self, batch: Batch, hidden: Tensor, trials: Tensor, share: float) -> Sums:
        """The loss of a batch. hidden : (B, T, d) of the base; trials : (K+1,) labels of the whole step."""
        teacher = None
        if self.recipe.defaults.teacher:
            with torch.no_grad():
                teacher = self.scores(batch.states(hidden))
        places, kind = hidden.to(dtype_of(self.heads)), self.recipe.kind
        if kind == EAGLE_3:
            head_loss, hits = count_steps(self.heads, places, batch, teacher=teacher)
        else:
            places = self.heads.prefix(places) if kind == HYDRA_PLUS else places
            head_loss, hits = count_heads(self.heads, batch.states(places), batch, teacher=teacher)
        loss = heads_loss(head_loss, trials, self.recipe)
        return Sums(loss, head_loss.detach(), hits, *torch.zeros(2, dtype=loss.dtype, device=loss.device))


def count_heads(heads: Any, states: Tensor, batch: Batch, *, teacher: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(K,) loss and (K,) hits of the heads on (n, d) states, each summed over those where it has a label.

    teacher : (n, V) logits of the base at the same states; the loss is then against the base's distribution
    """
    tokens = batch.ahead.where(batch.ahead != NO_LABEL, 0)

    def guess(k: int) -> Tensor:
        path = () if heads.kind == "medusa" else (tokens[:, : k + 1],)  # Hydra's read the tokens before their guess
        return heads.logits(states, *path, k)

    return _count(map(guess, range(heads.num_heads)), batch.ahead, teacher)


def count_steps(
    heads: Eagle3Heads, hidden: Tensor, batch: Batch, *, teacher: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same of EAGLE-3's layer on (B, T, ...) states, unrolled over its own steps (EAGLE-3, figure 6).

    Step k at a place reads what step k - 1 predicted there and the true token, and attends to the true pairs up to it
    and to its own earlier steps, as it does when it decodes. Tokens that it does not guess have no label.
    """
    ahead, ids = batch.ahead, heads.token_ids
    if ids is not None:
        places = places_among(ahead, ids)
        ahead = torch.where(ids[places] == ahead, places, NO_LABEL)
        teacher = None if teacher is None else teacher[:, ids]
    return _count(map(heads.logits, unrolled(heads, hidden, batch)), ahead, teacher)


def unrolled(heads: Eagle3Heads, hidden: Tensor, batch: Batch) -> Iterator[Tensor]:
    """(n, d) that each of K steps predicts at the batch's n states.

    The first step is made at all places, since the later ones attend to it. These are made where they are asked for.
    """
    tokens, device = batch.tokens, batch.tokens.device
    (rows, width), keys = tokens.shape, DynamicCache()
    before = torch.ones((width, width), dtype=torch.bool, device=device).tril()
    everywhere = torch.arange(width, device=device).expand(rows, -1)
    first = heads.predict(tokens.roll(-1, 1), heads.fused(hidden), everywhere, keys, before.expand(rows, 1, -1, -1))
    yield batch.states(first)
    places, own = batch.places()  # (B, A), (n,)
    states = _at(first, places)
    itself = torch.eye(places.shape[1], dtype=torch.bool, device=device).expand(rows, -1, -1)
    for k in range(1, heads.num_heads):
        following = _at(tokens.roll(-(k + 1), 1), places)
        mask = torch.cat([before[places], *[itself] * k], -1)[:, None]
        states = heads.predict(following, states, places + k, keys, mask)
        yield states[batch.rows, own]


def _at(values: Tensor, places: Tensor) -> Tensor:
    """(B, T, ...) at (B, A) places of each row."""
    return values[torch.arange(len(places), device=places.device)[:, None], places]


def _count(guesses: Iterable[Tensor], ahead: Tensor, teacher: Tensor | None) -> tuple[Tensor, Tensor]:
    """(K,) loss and (K,) hits of the (n, Vt) logits of each head, by the (n, K+1) tokens ahead."""
    losses, hits = [], []
    for k, logits in enumerate(guesses):
        labels = ahead[:, k + 1]
        if teacher is None:
            losses.append(text_loss(logits, labels))
        else:  # the base guesses the label of head k at the state k + 1 places on, which is of the same text
            losses.append(teacher_loss(logits, teacher.roll(-(k + 1), 0), labels))
        hits.append((logits.argmax(-1) == labels).sum())
    return torch.stack(losses), torch.stack(hits)


def heads_loss(head_loss: Tensor, trials: Tensor, recipe: Recipe) -> Tensor:
    """sum_k decay**k times the mean loss of head k from 1 (Medusa, equation 1), which is 0 without a trial."""
    weights = recipe.defaults.decay ** torch.arange(1, len(trials), dtype=torch.float64)
    return (weights.to(head_loss) * head_loss / trials[1:].clamp_min(1)).sum()


def dtype_of(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


class FrozenStates:
    """Hidden states of the frozen base for batches of some texts."""

    def __init__(self, target: Target, texts: Sequence[Text]) -> None:
        self.target, self.texts = target, texts
        self._kept: list[Tensor] = []

    @property
    def fit(self) -> bool:
        """Whether the memory that is free takes the states of all texts."""
        import psutil

        places = sum(len(text.tokens) for text in self.texts)
        needed = places * self.target.state_width * self.target.dtype.itemsize
        return bool(needed <= CACHE_SHARE * psutil.virtual_memory().available)

    @torch.no_grad()
    def keep(self, batch_size: int) -> None:
        """Compute them once and keep them in memory, in batches that depend on the texts alone."""
        kept: dict[int, Tensor] = {}
        order = sorted(range(len(self.texts)), key=lambda i: len(self.texts[i].tokens))
        for begin in range(0, len(order), batch_size):
            places = order[begin : begin + batch_size]
            hidden = self._compute(make_batch([self.texts[i] for i in places], 0, self.target.device))
            for row, i in enumerate(places):
                kept[i] = hidden[row, : len(self.texts[i].tokens)].cpu().clone()
        self._kept = [kept[i] for i in range(len(self.texts))]

    def of(self, places: Sequence[int], batch: Batch) -> Tensor:
        """(B, T, d) of the texts at some places, which ``batch`` holds; what padding has is arbitrary."""
        if not self._kept:
            return self._compute(batch)
        kept = [self._kept[i] for i in places]
        return nn.utils.rnn.pad_sequence(kept, batch_first=True).to(self.target.device)

    def usual_rms(self, texts: int = 8) -> float:
        """Root mean square of the numbers in the states of the first texts."""
        batch = make_batch(self.texts[:texts], 0, self.target.device)
        return float(batch.states(self._compute(batch)).double().square().mean().sqrt())

    @torch.no_grad()
    def _compute(self, batch: Batch) -> Tensor:
        return self.target.states(input_ids=batch.tokens, use_cache=False)
