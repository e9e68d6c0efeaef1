"""P-EAGLE and PARD: drafters that guess all depths in one causal pass, over the newly committed tokens and masks behind them.

The row of the last token guesses the one behind it, and the row of the j-th mask the one j places further. Rows of masks are
dropped, and what was accepted is fed again for real. A row sees those before it alone, so that guesses depend on nothing but
the text and their own depth, whatever the number of masks: one record serves all of them.

P-EAGLE is EAGLE-3 with more layers behind its first, which are d wide. A mask is an embedding, and a learnt vector in
place of the target's states (speculators, models/peagle). PARD is a small language model, to which a mask is a token
(Parallel Draft models, pard_infer.py).

b rows · B texts · T tokens of the longest · A states of each · K guesses · L states of the target that are fused
w their width · d width of the layers
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from treeopt.records.trace import MISS
from treeopt.runtime.cache import TreeCache
from treeopt.runtime.drafters.draft_model import DraftModel, ModelDraft
from treeopt.runtime.drafters.eagle3 import Eagle3Heads, Form
from treeopt.runtime.drafters.marginals import MarginalDraft
from treeopt.runtime.drafters.protocol import DRAFT_DEPTH, GivenText
from treeopt.runtime.drafters.states import CausalDraft, Logits, taught_ranks
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import Batch


class MaskedDraft(MarginalDraft, CausalDraft):
    """The rows of a decoder whose drafter reads masks: its ``mask_id``, and ``mask_state`` in place of the target's states."""

    def marginals(self, roots: Tensor, depth: int) -> Tensor:
        one, masks = self.drafter, max(depth - 1, 0)
        if masks:  # they wait behind the root as if they were committed
            behind = [[root, *[one.mask_id] * (masks - 1)] for root in roots.tolist()]
            self._waiting.append((behind, one.mask_state.expand(len(roots), masks, -1)))
            roots = torch.full_like(roots, one.mask_id)
        made, counts = self.feed_waiting(roots)
        self.cache.lengths[:] = [n - masks for n in self.cache.lengths]
        first = torch.tensor(counts, device=self.device)[:, None] - 1 - masks
        rows = torch.arange(len(counts), device=self.device)[:, None]
        return torch.as_tensor(one.logits(made[rows, first + torch.arange(depth, device=self.device)]))


class PEagleHeads(Eagle3Heads):
    """A P-EAGLE drafter, whose config says how many layers there are. ``options`` are those of `Eagle3Heads`."""

    kind = "p-eagle"
    has_marginals = True

    def __init__(self, config: Any, form: Form, *, embedding: Tensor | None, **options: Any) -> None:
        super().__init__(config, form, embedding=embedding, **options)
        self.num_layers: int = config.num_hidden_layers
        self.mask_id: Any = form.mask_id
        self.mask_hidden = nn.Parameter(self.fc.weight.new_zeros((1, 1, self.fc.in_features)))

    @property
    def mask_state(self) -> Tensor:
        """(1, 1, (1 + L) w) what stands for the target's states, the last of which is not read."""
        return F.pad(self.mask_hidden, (self.width, 0))

    def start(self, batch_size: int, capacity: int) -> MaskedDraft:
        return MaskedDraft(self, self.num_layers, batch_size, capacity + self.num_heads - 1, self.embedding.device)

    def read_next(self, following: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(following, self.mask_id), self.fused(self.mask_state).expand_as(states)


class PardModel(DraftModel):
    """A PARD drafter; ``mask_id`` is the token that stands for what is to be guessed."""

    kind = "pard"
    has_marginals = True

    def __init__(self, model: Target, vocab_size: int, *, mask_id: int, num_heads: int = DRAFT_DEPTH) -> None:
        super().__init__(model, vocab_size, num_heads=num_heads)
        self.mask_id, self.mask_state = mask_id, model.lm_head.weight.new_zeros(0)
        self.token_ids = torch.arange(self.draft_vocab_size, device=model.device)

    def start(self, batch_size: int, capacity: int) -> PardDraft:
        return PardDraft(self, batch_size, capacity + self.num_heads - 1)

    def ranks(self, answers: Sequence[GivenText], top_k: int) -> list[NDArray[np.int16]]:
        places = [len(answer.prompt) + len(answer.tokens) - 1 for answer in answers]
        found = taught_ranks(self, answers, places, top_k)
        for answer, ranks in zip(answers, found, strict=True):
            states, depths = np.ogrid[: len(ranks), : self.num_heads]
            ranks[(len(answer.prompt) + states + depths >= self.model.context) & (ranks >= 0)] = MISS
        return found

    def taught(self, hidden: Tensor, batch: Batch) -> Iterator[tuple[Tensor, Logits]]:
        """What the guesses are read from: one pass over the texts, and one for each mask behind the roots of all states.

        A mask sees the text up to its own root, and the masks between.
        """
        places, own = batch.places()
        roots, (rows, width), each = places + 1, batch.tokens.shape, places.shape[1]
        row, text = torch.arange(rows, device=places.device)[:, None], torch.arange(width, device=places.device)
        cache = TreeCache(self.model.num_layers, rows, width + (self.num_heads - 1) * each, self.model.layer_devices)
        seen, positions = [text <= roots[..., None]], [text.expand(rows, -1)]
        cache.begin_prefill([width] * rows)
        states = self.predict(batch.tokens, hidden, positions[0], cache, None)[row, roots]
        cache.lengths, starts = [0] * rows, torch.zeros_like(row)  # so that each mask says what it sees of the text
        itself = torch.eye(each, dtype=torch.bool, device=places.device).expand(rows, -1, -1)
        for k in range(self.num_heads):
            if k:
                seen.append(itself)
                positions.append(roots + k)
                cache.begin_step(each, starts, after=cache.columns)
                mask = self.model.mask(cache, starts, torch.cat(seen, 2), torch.cat(positions, 1))
                states = self.predict(torch.full_like(roots, self.mask_id), states, roots + k, cache, mask)
            yield states[batch.rows, own], self.logits


class PardDraft(MaskedDraft, ModelDraft):
    """PARD's rows of a decoder."""
