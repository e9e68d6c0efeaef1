"""Drafters with weights that read the target's hidden states: heads, and the rows of a decoder for them.

Some need the last state alone. Others attend to the text before a guess, by a cache of their own that is fed with every
committed token once. A place of the cache belongs to a state: to a committed token with its hidden state, and the token that
follows it. A state is fed when a tree step drafts: then the root, which follows the last committed token, is known. Guesses are
written behind and never kept: what was accepted is fed again with the target's own hidden states, in the pass that the
new root needs anyway.

b live rows · B texts · n, N states · K heads · d width of the target · V vocabulary of the target · Vt tokens that heads guess
E nodes of a level
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from treeopt.records.trace import MISS
from treeopt.runtime.cache import TreeCache, tree_mask
from treeopt.runtime.drafters.levels import LevelDraft
from treeopt.runtime.drafters.protocol import Drafter, Frontier, GivenText, rank_of
from treeopt.runtime.target import padded
from treeopt.runtime.training.batches import Batch, Text, make_batch

Logits = Callable[[Tensor], Tensor]

# Bound the memory of a chunk: states times vocabulary, but at least FEWEST_STATES states, at which a
# matrix product is still efficient (float32 logits over a vocabulary of 128 k: 64 MB). Slices of the
# vocabulary would bound it further, but the true token's logit must come of the same product as those
# that it is compared with, or rounding would change ranks; so a slice would have to be computed twice.
LOGITS_AT_ONCE, FEWEST_STATES = 2**21, 128
TOKENS_AT_ONCE = 8192  # most vectors, padding included, of one pass over given texts
SEEN_AT_ONCE = 2**24  # most entries of the attention mask of a layer's pass over states, its own keys not counted


class Heads(nn.Module, Drafter):
    """The base of drafters with weights that read the target's hidden states, and that can be stored and trained.

    width             : of the target's states
    shares_projection : whether guesses are made with the target's own lm_head
    token_ids         : (Vt,) target id of each token that they guess, ascending; None where they guess all
    embedding         : (V, d) input embeddings of those that read tokens; None for a drafter that is only written again
    lm_head           : (V, d) the target's, or (Vt, d) of their own

    All weights are zero at first. The storage of the target's tensors is used; they are neither trained nor in the state
    dict. A constructor's ``placed`` are dtype and device.
    """

    width: int
    token_ids: Tensor | None
    embedding: Tensor
    lm_head: Tensor
    shares_projection = False

    def register_vocabulary(
        self, embedding: Tensor | None, lm_head: Tensor | None, token_ids: Tensor | None, width: int, **placed: Any
    ) -> None:
        """Take the embeddings, and a lm_head: the target's, or where that is None one of their own that reads (..., width)."""
        given = None if embedding is None else embedding.detach().to(**placed)
        known = None if token_ids is None else token_ids.to(placed.get("device"))
        self.register_buffer("embedding", given, persistent=False)
        self.register_buffer("token_ids", known, persistent=False)
        self.shares_projection = lm_head is not None
        if lm_head is None:
            rows = self.vocab_size if token_ids is None else len(token_ids)
            self.lm_head = nn.Parameter(torch.zeros((rows, width), **placed))
        else:
            self.register_buffer("lm_head", lm_head.detach().to(**placed), persistent=False)

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size if self.token_ids is None else len(self.token_ids)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def weights(self) -> dict[str, Tensor]:
        """Its own, by their names in most checkpoints: fc.weight, layers.0.self_attn.q_proj.weight, ..."""
        found: dict[str, Tensor] = {name.removeprefix("layer.model."): own for name, own in self.named_parameters()}
        if "lm_head" in found:
            found["lm_head.weight"] = found.pop("lm_head")
        return found

    def layers_of(self, num_layers: int) -> Sequence[int]:
        """At whose inputs a target of so many layers is read, besides its last state."""
        return ()

    def fused(self, hidden: Tensor) -> Tensor:
        """The (b, n, d) states that `predict` takes, of the target's (b, n, ...)."""
        return hidden

    def predict(self, following: Tensor, hidden: Tensor, *passed: Any) -> Tensor:
        """The layer of drafters that have one: (b, n) tokens and the (b, n, d) states before each to (b, n, d).

        passed : positions, cache and mask, as `OneLayer` takes them
        """
        raise NotImplementedError

    def taught(self, hidden: Tensor, batch: Batch) -> Iterator[tuple[Tensor, Logits]]:
        """What each of K guesses at a batch's n states is read from, (n, ...), and the function that makes (..., Vt) of it.

        hidden : (B, T or T - 1, ...) of the batch's texts; their true tokens are read as far as the guess
        """
        raise NotImplementedError

    def ranks(self, answers: Sequence[GivenText], top_k: int) -> list[NDArray[np.int16]]:
        return taught_ranks(self, answers, [len(answer.hidden) for answer in answers], top_k)


@torch.inference_mode()
def taught_ranks(
    drafter: Any, answers: Sequence[GivenText], places: Sequence[int], top_k: int
) -> list[NDArray[np.int16]]:
    """The ranks that `Drafter.ranks` counts, by the guesses of ``taught`` at all states of several answers.

    places : how many tokens of each answer and of the end of its prompt ``taught`` reads, its last token not counted
    """
    found = [answer.labels(drafter.num_heads) for answer in answers]
    for some in batches(places):
        hidden, labels = pad([answers[i].hidden for i in some]), torch.cat([found[i] for i in some])
        batch = make_batch([_text(answers[i], places[i]) for i in some], drafter.num_heads, hidden.device)
        for states, part in batch.parts(max(1, SEEN_AT_ONCE // batch.tokens.numel())):
            for k, (read, logits) in enumerate(drafter.taught(hidden, part)):
                tried = (labels[states, k] >= 0).nonzero()[:, 0]
                true, read = labels[states[tried], k].to(read.device), read[tried.to(read.device)]
                ranks = ranks_among(logits, read, true, top_k, drafter.vocab_size, drafter.token_ids)
                labels[states[tried], k] = ranks.cpu()
        for i, ranks in zip(some, labels.split([len(answers[i].tokens) for i in some]), strict=True):
            found[i] = ranks
    return [ranks.to(torch.int16).numpy() for ranks in found]


def _text(answer: GivenText, places: int) -> Text:
    """The tokens at so many last places of an answer with its prompt, and the one behind them."""
    tokens = [*answer.prompt, *answer.tokens][-places - 1 :]
    return Text(np.array(tokens, dtype=np.int32), len(tokens) - len(answer.tokens), "")


class StateDraft(LevelDraft):
    """The hidden state of every row's last committed token: (b, d)."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.hidden = drafter, torch.empty(0)

    def prefill(self, prompts: Sequence[Sequence[int]], hidden: Tensor) -> None:
        new = one_of_each(hidden, [len(prompt) - 1 for prompt in prompts])
        self.hidden = torch.cat([self.hidden, new]) if len(self.hidden) else new

    def extend(self, tokens: Sequence[Sequence[int]], hidden: Tensor, paths: Sequence[Sequence[int]]) -> None:
        self.hidden = one_of_each(hidden, [path[-1] for path in paths])

    def read(self, answer: GivenText) -> None:
        self._of_text = answer.state_hidden

    def seek(self, states: Sequence[int]) -> None:
        self.hidden = self._of_text[states[0] : states[-1] + 1]

    def keep(self, order: Sequence[int]) -> None:
        self.hidden = self.hidden[torch.tensor(order, dtype=torch.long, device=self.hidden.device)]

    def clear(self) -> None:
        self.hidden = torch.empty(0)


def one_of_each(states: Tensor, places: Sequence[int]) -> Tensor:
    """(b, n, ...) to the (b, ...) at one place of each row; nothing is copied where all rows have the same."""
    if len(set(places)) == 1:
        return states[:, places[0]]
    rows = torch.arange(len(places), device=states.device)
    return states[rows, torch.tensor(places, device=states.device)]


def pad(parts: Sequence[Tensor]) -> Tensor:
    """(n, ...) of each row to (b, longest, ...), zeros on the right."""
    return nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def states_at_once(vocab_size: int) -> int:
    return max(LOGITS_AT_ONCE // vocab_size, FEWEST_STATES)


def ranks_among(
    logits: Logits, states: Tensor, tokens: Tensor, top_k: int, vocab_size: int, token_ids: Tensor | None = None
) -> Tensor:
    """(n,) rank of each of (n,) tokens among the ``logits`` of (n, ...) states, some of which are computed together.

    token_ids : (Vt,) tokens that the logits are for, ascending, if not all; MISS for any other
    """
    at_once, known = states_at_once(vocab_size), places_among(tokens, token_ids)
    chunks = zip(states.split(at_once), known.split(at_once), strict=True)
    ranks = torch.cat([rank_of(logits(part), true, top_k) for part, true in chunks])
    return ranks if token_ids is None else torch.where(token_ids[known] == tokens, ranks, MISS)


def places_among(tokens: Tensor, token_ids: Tensor | None) -> Tensor:
    """Places of tokens among (Vt,) ascending ids, None for all tokens there are; of one that is not there, any."""
    return tokens if token_ids is None else torch.searchsorted(token_ids, tokens).clamp_max(len(token_ids) - 1)


def batches(lengths: Sequence[int]) -> list[list[int]]:
    """Places of texts of similar lengths that are read together, at most TOKENS_AT_ONCE with their padding.

    >>> batches([3000, 9000, 2500])
    [[2, 0], [1]]
    """
    found: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if found and (len(found[-1]) + 1) * lengths[i] <= TOKENS_AT_ONCE:
            found[-1].append(i)
        else:
            found.append([i])
    return found


class CausalDraft(LevelDraft):
    """The base of such drafters' rows: the cache, and the states that are not yet in it.

    ahead : how many places a token lies ahead of that of the state it is fed with: 0 where places are tokens'
    """

    ahead = 1

    def __init__(self, drafter: Any, num_layers: int, batch_size: int, capacity: int, device: torch.device) -> None:
        self.drafter, self.device = drafter, device
        self.cache = TreeCache(num_layers, batch_size, capacity)
        # Of every step since the last that drafted: each row's committed tokens, and (b, n, d) their states.
        self._waiting: list[tuple[Sequence[Sequence[int]], Tensor]] = []
        self.starts = torch.empty(0)  # (b, 1) the cache's lengths since `catch_up`

    def mask(self, starts: Tensor, ancestors: Tensor, depths: Tensor) -> Any:
        """The attention mask of a pass in the form that `predict` takes; None for plain causal."""
        return tree_mask(self.cache, starts, ancestors, depths, None)

    def prefill(self, prompts: Sequence[Sequence[int]], hidden: Tensor) -> None:
        """Feed all states of new rows but the last ones, which wait for their roots."""
        tokens, last = padded(prompts).to(self.device), [len(prompt) - 1 for prompt in prompts]
        counts = [len(prompt) - self.ahead for prompt in prompts]
        if n := max(counts):
            self.cache.begin_prefill(counts)
            positions = torch.arange(n, device=self.device).expand(len(counts), -1)
            following, states = tokens[:, self.ahead : self.ahead + n], self.drafter.fused(hidden[:, :n])
            self.drafter.predict(following, states, positions, self.cache, None)
        else:
            self.cache.lengths += counts
        self._merge(
            [(prompt[n:], hidden[i, n : n + 1]) for i, (prompt, n) in enumerate(zip(prompts, last, strict=True))]
        )

    def extend(self, tokens: Sequence[Sequence[int]], hidden: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Committed tokens of a step; they wait for the next tree step. A plain step does no more than this."""
        if hidden.shape[1] > 1 and hidden.shape[2]:  # of a tree: without those that were not accepted
            rows = torch.arange(len(paths), device=self.device)[:, None]
            hidden = hidden[rows, padded(paths).to(self.device)]
        self._waiting.append((tokens, hidden))

    def _merge(self, new: Sequence[tuple[Sequence[int], Tensor]] = ()) -> None:
        """Join what several steps committed, and tokens and (n, d) states of new rows, padded on the right."""
        if len(self._waiting) == 1 and not new:
            return
        steps = [[(t, h[i, : len(t)]) for i, t in enumerate(tokens)] for tokens, h in self._waiting]
        rows = [([*chain(*t)], torch.cat(h)) for t, h in (zip(*of, strict=True) for of in zip(*steps, strict=True))]
        tokens, hidden = zip(*rows, *new, strict=True)
        self._waiting = [(tokens, pad(hidden))]

    def catch_up(self, roots: Tensor) -> Tensor:
        """Feed the waiting states, now that the (b,) roots are known: (b, ...) output of `predict` at each row's last state."""
        made, waiting = self.feed_waiting(roots)
        return one_of_each(made, [count - 1 for count in waiting])

    def feed_waiting(self, roots: Tensor) -> tuple[Tensor, list[int]]:
        """Feed the waiting states: (b, n, ...) outputs of `predict`, and how many of them each row has.

        A long row beside one with more to feed may lack the room for all at once: then there are several passes.
        """
        assert self._waiting, "every step commits a token, so something waits"
        self._merge()
        tokens, hidden = self._waiting.pop()
        waiting = [len(of_row) for of_row in tokens]
        following = padded([[*t[1:], root] for t, root in zip(tokens, roots.tolist(), strict=True)]).to(self.device)
        made, fed, n = [], 0, max(waiting)
        while fed < n:
            size = min(n - fed, max(self.cache.capacity - max(self.cache.lengths), 1))
            part, steps = slice(fed, fed + size), torch.arange(size, device=self.device)
            starts = torch.tensor(self.cache.lengths, device=self.device)[:, None]
            self.cache.begin_step(size, starts)
            mask = self.mask(starts, torch.ones((size, size), dtype=torch.bool, device=self.device).tril(), steps)
            states = self.drafter.fused(hidden[:, part])
            made.append(self.drafter.predict(following[:, part], states, starts + steps, self.cache, mask))
            for i, count in enumerate(waiting):
                self.cache.lengths[i] += min(max(count - fed, 0), size)
            fed += size
        self.starts = torch.tensor(self.cache.lengths, device=self.device)[:, None]
        return torch.cat(made, 1) if len(made) > 1 else made[0], waiting

    def begin(self, roots: Tensor, depth: int) -> None:
        self.states = self.catch_up(roots)[:, None]  # (b, E, ...) that guesses behind the expanded nodes are read from

    def logits(self, level: Frontier, tokens: Tensor) -> Tensor:
        if level.depth:
            self.states = self.feed_level(level, tokens, level.inherit(self.states))
        return self.drafter.logits(self.states)

    def feed_level(self, level: Frontier, tokens: Tensor, hidden: Any) -> Tensor:
        """One pass over the expanding nodes of a level below the root, whose place is already the cache's: (b, E, ...).

        tokens : (b, E) theirs; hidden : (b, E, d) what the drafter has instead of the target's state before each
        """
        self.cache.begin_step(level.nodes, self.starts, after=level.first - 1)
        mask = self.mask(self.starts, level.ancestors, level.beyond)
        positions = (self.starts + (level.depth - 1)).expand(-1, level.nodes)
        return self.drafter.predict(tokens, hidden, positions, self.cache, mask)

    def read(self, answer: GivenText) -> None:
        self.clear()
        text = [*answer.prompt, *answer.tokens]
        hidden = answer.hidden if self.drafter.reads_prompt else answer.hidden.new_empty((len(text), 0))
        self.prefill([text[: len(text) + self.ahead - 1]], hidden[None])
        self._sought: Sequence[int] = ()
        self._answer, self._width = answer, self._waiting[0][1].shape[-1]
        self._rooted = len(answer.prompt) - self.ahead  # places before the first state's root

    def seek(self, states: Sequence[int]) -> None:
        answer = self._answer
        if states != self._sought:  # else every row has its text still: guesses are written behind it
            self.cache.lengths = [self._rooted + states[-1]]
            self.cache.keep([0] * len(states))
            self._sought = states
        self.cache.lengths = [self._rooted + t for t in states]
        before = [*answer.prompt[-1:], *answer.tokens]  # the token of each state
        hidden = answer.state_hidden[states[0] : states[-1] + 1, None, : self._width]
        self._waiting = [([before[t : t + 1] for t in states], hidden)]

    def keep(self, order: Sequence[int]) -> None:
        self.cache.keep(order)
        index = torch.tensor(order, dtype=torch.long, device=self.device)
        self._waiting = [([tokens[i] for i in order], hidden[index]) for tokens, hidden in self._waiting]

    def clear(self) -> None:
        self.cache.clear()
        self._waiting = []
