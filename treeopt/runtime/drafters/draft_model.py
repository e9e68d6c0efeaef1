"""A small language model that drafts for the target.

The draft model reads text and nothing of the target, so a place of its cache holds a *token*: the prompt's are
fed with the prompt, and what waits for the next tree step are the committed tokens and its root. The guess
after the token at position p needs that position inside the draft's own context; where it is not, there is no
guess: -1 in a tree, MISS in the ranks. Its passes still run, at the last position that the context has.

b live rows · n tokens to feed · E nodes of a level · T nodes of the tree · P tokens of a prompt · N of an answer
K guesses at most · V the target's vocabulary · Vt tokens that both models have
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.errors import InvalidInput, quoted
from treeopt.records.trace import MISS
from treeopt.runtime.cache import TreeCache
from treeopt.runtime.drafters.protocol import DRAFT_DEPTH, Drafter, GivenText
from treeopt.runtime.drafters.states import CausalDraft, batches, ranks_among
from treeopt.runtime.target import DTYPES, Target, load_target


class DraftModel(Drafter):
    """A causal LM with the target's tokens, run once per level of the tree.

    Leviathan et al. 2023 and Chen et al. 2023 draft a chain with it; here every expanding node is drafted for.

    model      : the draft, which is never the target's own object
    vocab_size : V; guesses are of the first min(V, the draft's rows) tokens
    """

    kind = "draft-model"

    def __init__(self, model: Target, vocab_size: int, *, num_heads: int = DRAFT_DEPTH) -> None:
        self.model, self.vocab_size, self.num_heads = model, vocab_size, num_heads

    @property
    def draft_vocab_size(self) -> int:
        return min(self.vocab_size, self.model.vocab_size)

    def start(self, batch_size: int, capacity: int) -> ModelDraft:
        return ModelDraft(self, batch_size, capacity)

    def fused(self, hidden: Tensor) -> Tensor:
        return hidden

    def predict(self, tokens: Tensor, hidden: Tensor, positions: Tensor, cache: TreeCache, mask: Any) -> Tensor:
        """(b, n) tokens and their places in the text to (b, n, d), d the draft's own width; ``hidden`` is not read."""
        tokens = tokens.clamp(0, self.model.vocab_size - 1)  # -1 for no guess; tokens only the target has
        return self.model.hidden(tokens, positions.clamp_max(self.model.context - 1), cache, mask)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., d) to (..., Vt)."""
        return self.model.logits(hidden)[..., : self.draft_vocab_size]

    @torch.inference_mode()
    def ranks(self, answers: Sequence[GivenText], top_k: int) -> list[NDArray[np.int16]]:
        """(N, K) of each answer, from one pass over prompt and answer.

        A guess depends on the true tokens before it and not on the state that it was made at, so that
        ranks[t, k-1] is the rank of token t + k of the answer, counted from 0.
        """
        texts = [[*answer.prompt, *answer.tokens[:-1]][: self.model.context] for answer in answers]
        found, last = [np.zeros((0, 0), dtype=np.int16)] * len(answers), self.model.vocab_size - 1
        for batch in batches([len(text) for text in texts]):
            # Tokens that only the target has are read as the draft's last one.
            read = self.model.read([[min(token, last) for token in texts[i]] for i in batch])
            for i, hidden in zip(batch, read, strict=True):
                answer, states = answers[i], hidden[len(answers[i].prompt) : len(texts[i])]
                ranks = torch.full((len(answer.tokens) + self.num_heads,), MISS)
                ranks[: len(states)] = self.token_ranks(answer, states, top_k)
                windows = ranks.unfold(0, self.num_heads, 1)[: len(answer.tokens)]
                labels = answer.labels(self.num_heads)
                found[i] = torch.where(labels < 0, labels, windows).to(torch.int16).numpy()
        return found

    def token_ranks(self, answer: GivenText, states: Tensor, top_k: int) -> Tensor:
        """(n,) rank of the answer's tokens behind its first, by the (n, d) states before each; MISS where none can tell."""
        tokens = torch.tensor(answer.tokens[1 : 1 + len(states)], dtype=torch.long, device=states.device)
        known = torch.arange(self.draft_vocab_size, device=states.device)
        return ranks_among(self.logits, states, tokens, top_k, self.model.vocab_size, known).cpu()


class ModelDraft(CausalDraft):
    """The draft model's rows of a decoder. The target's hidden states are dropped as they come."""

    ahead = 0

    def __init__(self, drafter: DraftModel, batch_size: int, capacity: int) -> None:
        super().__init__(drafter, drafter.model.num_layers, batch_size, capacity, drafter.model.device)

    def mask(self, starts: Tensor, ancestors: Tensor, depths: Tensor) -> Any:
        return self.drafter.model.mask(self.cache, starts, ancestors, depths)

    def prefill(self, prompts: Sequence[Sequence[int]], hidden: Tensor) -> None:
        super().prefill(prompts, hidden[..., :0])

    def extend(self, tokens: Sequence[Sequence[int]], hidden: Tensor, paths: Sequence[Sequence[int]]) -> None:
        super().extend(tokens, hidden[..., :0], paths)

    def scores(self, logits: Tensor) -> Tensor:
        return self.drafter.model.scores(logits)

    def named(self, guesses: Tensor, depth: int | Tensor) -> Tensor:
        # The root is the cache's last token; the nodes of this level are ``depth`` places behind it.
        context, lengths = self.drafter.model.context, self.cache.lengths
        if max(lengths) + self.drafter.num_heads <= context:
            return guesses
        roots = torch.tensor(lengths, device=self.device).view(-1, *[1] * (guesses.ndim - 1)) - 1
        return guesses.masked_fill(roots + depth >= context, -1)


def load_draft_model(
    path_or_id: str, target: Target, *, num_heads: int = DRAFT_DEPTH, trust_remote_code: bool = False
) -> DraftModel:
    """A draft model from a folder or a hub id, on the target's device and in its number format.

    Raises InvalidInput unless it has the target's tokens.
    """
    dtype = next((name for name, kind in DTYPES.items() if kind == target.dtype), None)
    placed = {"dtype": dtype, "device": str(target.device)}
    draft = load_target(path_or_id, option="`drafter`", trust_remote_code=trust_remote_code, **placed)
    check_same_tokenizer(target, draft)
    return DraftModel(draft, target.vocab_size, num_heads=num_heads)


def check_same_tokenizer(target: Target, draft: Target) -> None:
    """Raise InvalidInput, by the first difference, unless both tokenizers give the same tokens the same ids.

    The rows of the two lm_heads may differ: models pad them as they like.
    """
    for model in (target, draft):
        if model.tokenizer is None:
            raise InvalidInput(f"A draft model must have the target's tokens, but {model.name} has no tokenizer.")
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours != theirs:
        token = min(ours.items() ^ theirs.items(), key=lambda entry: (entry[1], entry[0]))[0]
        raise InvalidInput(
            f"A draft model must have the target's tokens, but the id of {quoted(token)} is {ours.get(token)} in "
            f"{target.name} and {theirs.get(token)} in {draft.name}: take a draft of the target's own family."
        )
