"""Calibration: answer conversations, keep the hidden states, and count the heads' ranks on them.

The hidden state that a head reads at a state is the one that decoding just computed, so there is no
second pass of the target, and the heads run on many states at once. Answers that are given are read
in one pass instead.

N states of an answer · b rows · T tokens of a row · d width · V vocabulary · K heads
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.runtime.cache import TreeCache
from treeopt.runtime.chat import Tokens
from treeopt.runtime.decode import Decoder, Row, StopRule, capacity_for
from treeopt.runtime.drafters.medusa import MedusaHeads
from treeopt.runtime.prompts import Conversation, PromptSet
from treeopt.runtime.target import Target
from treeopt.trace import MISS, NO_TRIAL, End, RankTrace, SequenceEnd

# Bound the memory of a chunk: states times vocabulary, but at least FEWEST_STATES states, at which a
# matrix product is still efficient (float32 logits over a vocabulary of 128 k: 64 MB). Slices of the
# vocabulary would bound it further, but the true token's logit must come of the same product as those
# that it is compared with, or rounding would change ranks; so a slice would have to be computed twice.
LOGITS_AT_ONCE, FEWEST_STATES = 2**21, 128


def collect_trace(
    target: Target,
    heads: MedusaHeads,
    prompts: PromptSet,
    *,
    batch_size: int = 16,
    stop: StopRule,
    top_k: int = 32,
    given: bool = False,
    meta: dict[str, Any] | None = None,
    progress: Callable[[int], None] = lambda conversations: None,
) -> RankTrace:
    """Answer every conversation greedily, turn by turn, and record at which rank each head had the
    token that came. Every turn is a sequence; the turns of a conversation are a cluster.

    Ranks 0...top_k-1 are told apart. With ``given`` nothing is generated: one pass of the target over
    the given answers. A turn that cannot be asked, for one because the context has no room, ends its
    conversation and is listed under meta["skipped"]. ``progress`` is called with the number of conversations that ended.
    """
    counter = RankCounter(heads, top_k, target if given else None)
    answered: list[list[Row]] = [[] for _ in prompts.conversations]
    skipped: list[dict[str, Any]] = []
    waiting = list(range(len(answered)))
    while waiting:
        turn, asked, answers, at = 1 + len(answered[waiting[0]]), [], [], []
        for i in waiting:
            conversation = prompts.conversations[i]
            try:
                tokens, answer = _ask(target, prompts, conversation, answered[i], turn, given)
            except InvalidInput as error:
                skipped.append({"row": conversation.row, "reason": str(error)})
            else:
                asked.append(tokens)
                answers.append(answer)
                at.append(i)
        if given:
            rows = read_answers(target, asked, answers, batch_size=batch_size, stop=stop, done=counter.add)
        else:
            rows = write_answers(target, asked, batch_size=batch_size, stop=stop, done=counter.add)
        for i, row in zip(at, rows, strict=True):
            answered[i].append(row)
        last = [i for i in waiting if prompts.conversations[i].num_turns == turn or i not in at]
        progress(len(last))
        waiting = [i for i in waiting if i not in set(last)]
    rows = [row for turns in answered for row in turns]
    of = [prompts.conversations[i] for i, turns in enumerate(answered) for _ in turns]
    groups = list(dict.fromkeys(conversation.group for conversation in of))
    target_rank = (
        {"target_rank": np.concatenate([counter.target_ranks(row) for row in rows])} if given else {}
    )
    return RankTrace(
        ranks=np.concatenate([counter.ranks(row) for row in rows]),
        starts=np.concatenate([[0], np.cumsum([len(row.tokens) for row in rows])]),
        tokens=np.concatenate([np.array(row.tokens) for row in rows]),
        prompt_tokens=np.array([row.prompt_tokens for row in rows]),
        end=np.array([row.end for row in rows]),
        group=np.array([groups.index(conversation.group) for conversation in of]),
        cluster=np.repeat(np.arange(len(answered)), [len(turns) for turns in answered]),
        **target_rank,
        meta={
            "top_k": top_k,
            "eos_ids": sorted(stop.eos_ids),
            "max_new_tokens": stop.max_new_tokens,
            "prompt_sha256": [conversation.sha256 for conversation in of],
            "group_names": groups,
            "skipped": skipped,
            **(meta or {}),
        },
    )


def _ask(
    target: Target,
    prompts: PromptSet,
    conversation: Conversation,
    answered: list[Row],
    turn: int,
    given: bool,
) -> tuple[Tokens, Tokens]:
    """The tokens of a turn's prompt, and of its given answer; InvalidInput where it cannot be asked."""
    if given:
        before = [prompts.given_answer(conversation, t) for t in range(turn)]
        tokens, answer = prompts.next_prompt(conversation, before[:-1]), before[-1]
        if not answer:
            raise InvalidInput(f"the given answer to turn {turn} is empty")
    else:
        tokens, answer = prompts.next_prompt(conversation, [row.tokens for row in answered]), ()
    if len(tokens) >= target.context:
        raise InvalidInput(f"the context has no room for turn {turn}")
    return tokens, answer


@dataclass(frozen=True)
class Prompt:
    """What a sequence answers: its tokens, and the conversation that it is a turn of."""

    tokens: tuple[int, ...]
    sha256: str
    group: str
    cluster: int


def turn_prompts(prompts: PromptSet, trace: RankTrace) -> list[Prompt]:
    """The prompt of every sequence of a trace, with the trace's own answers to the turns before it."""
    assert trace.tokens is not None, "a trace that was collected has tokens"
    known = {conversation.sha256: conversation for conversation in prompts.conversations}
    answers = [answer.tolist() for answer in np.split(trace.tokens, trace.starts[1:-1])]
    found = []
    for s, (sha256, cluster) in enumerate(zip(trace.meta["prompt_sha256"], trace.clusters, strict=True)):
        conversation = known[sha256]
        first = int(np.searchsorted(trace.clusters, cluster))
        tokens = prompts.next_prompt(conversation, answers[first:s])
        found.append(Prompt(tokens, sha256, conversation.group, int(cluster)))
    return found


def write_answers(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    stop: StopRule,
    done: Callable[[Row], None],
) -> list[Row]:
    """Decode plainly; ``done`` takes every row, with its hidden states, when it ends."""
    if not prompts:
        return []
    decoder = Decoder(target, None, batch_size=batch_size, capacity=capacity_for(prompts, stop, target),
                      stop=stop, keep_states=True, most_nodes=1)  # fmt: skip
    decoder.start(enumerate(prompts))
    rows: list[Row] = []
    while not decoder.is_done:
        decoder.refill()
        if decoder.live:
            decoder.step()
        for row in decoder.finished:
            done(row)
        rows += decoder.finished
        decoder.finished.clear()
    return sorted(rows, key=lambda row: row.id)


@torch.inference_mode()
def read_answers(
    target: Target,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    batch_size: int,
    stop: StopRule,
    done: Callable[[Row], None],
) -> list[Row]:
    """The same rows as if the target had written the answers, by one pass over each (teacher forcing)."""
    rows = []
    for begin in range(0, len(prompts), batch_size):
        batch = []
        for i in range(begin, min(begin + batch_size, len(prompts))):
            watch = SequenceEnd(stop.eos_ids, stop.max_new_tokens, target.context - len(prompts[i]),
                                stop_at_loops=stop.at_loops)  # fmt: skip
            row = Row(i, len(prompts[i]), watch, end=End.LIMIT)
            for token in answers[i]:
                if not row.emit(token):
                    break
            row.end = End.LIMIT if row.end is None else row.end
            batch.append(row)
        # The last token's state is of no use: its pass would only yield what comes after the answer.
        texts = [[*prompts[row.id], *row.tokens[:-1]] for row in batch]
        width = max(map(len, texts))
        tokens = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts], device=target.device)
        cache = TreeCache(target.num_layers, len(batch), width, target.layer_devices)
        cache.begin_prefill(list(range(len(batch))), list(map(len, texts)), target.device)
        positions = torch.arange(width, device=target.device).expand(len(batch), -1)
        hidden = target.hidden(tokens, positions, cache, None)  # (b, T, d)
        for i, row in enumerate(batch):
            first = row.prompt_tokens - 1
            row.states = [(hidden[i], first + t) for t in range(len(row.tokens))]
            done(row)
        rows += batch
    return rows


class RankCounter:
    """Gathers the states of ended rows and runs the heads on whole chunks of them.

    With a ``target`` it also counts at which rank the target itself had every token.
    """

    def __init__(self, heads: MedusaHeads, top_k: int, target: Target | None = None) -> None:
        self.heads, self.top_k, self.target = heads, top_k, target
        self.chunk = max(LOGITS_AT_ONCE // heads.vocab_size, FEWEST_STATES)
        self._ranks: dict[int, NDArray[np.int16]] = {}  # by the row's identity
        self._target_ranks: dict[int, NDArray[np.int16]] = {}
        self._pending: list[tuple[Row, Tensor, Tensor]] = []  # row, (N, d), (N, K) labels

    def add(self, row: Row) -> None:
        """Take the states of an ended row; its own references to them are dropped."""
        hidden = torch.stack([hidden[i] for hidden, i in row.states[: len(row.tokens)]])
        row.states = []
        self._pending.append((row, hidden, labels_of(row, self.heads.num_heads)))
        if sum(len(hidden) for _, hidden, _ in self._pending) >= self.chunk:
            self._flush()

    def ranks(self, row: Row) -> NDArray[np.int16]:
        """(N, K) ranks; the last state has no trial."""
        self._flush()
        return self._ranks[id(row)]

    def target_ranks(self, row: Row) -> NDArray[np.int16]:
        """(N,) rank of each token at the target itself."""
        self._flush()
        return self._target_ranks[id(row)]

    def _flush(self) -> None:
        if not self._pending:
            return
        hidden = torch.cat([h for _, h, _ in self._pending])
        labels = torch.cat([labels for _, _, labels in self._pending])
        tokens = torch.tensor([token for row, _, _ in self._pending for token in row.tokens])
        chunks = list(zip(hidden.split(self.chunk), labels.split(self.chunk), strict=True))
        found = torch.cat([count_ranks(self.heads, h, y, self.top_k) for h, y in chunks])
        sizes = [len(h) for _, h, _ in self._pending]
        for (row, _, _), part in zip(self._pending, found.split(sizes), strict=True):
            self._ranks[id(row)] = part.numpy()
        if self.target is not None:
            split = zip(hidden.split(self.chunk), tokens.split(self.chunk), strict=True)
            own = torch.cat([rank_of(self.target.logits(h), y, self.top_k) for h, y in split])
            for (row, _, _), part in zip(self._pending, own.to("cpu", torch.int16).split(sizes), strict=True):
                self._target_ranks[id(row)] = part.numpy()
        self._pending.clear()


def labels_of(row: Row, num_heads: int) -> Tensor:
    """(N, K) the token that head k has to guess at each state; MISS or NO_TRIAL past the end."""
    n = len(row.tokens)
    beyond = MISS if row.end is End.EOS else NO_TRIAL
    padded = torch.tensor([*row.tokens, *[beyond] * num_heads])
    labels = torch.stack([padded[k : n + k] for k in range(1, num_heads + 1)], dim=1)
    labels[-1] = NO_TRIAL  # no step is taken at the last state
    return labels


@torch.inference_mode()
def rank_of(logits: Tensor, tokens: Tensor, top_k: int) -> Tensor:
    """(N,) rank of each token among (N, V) logits: #(greater) + #(equal, smaller id), never sorted.

    MISS from top_k on.
    """
    logits, label = logits.float(), tokens.to(logits.device)[:, None]
    true = logits.gather(1, label)
    rank = (logits > true).sum(1)
    ties = (logits == true).sum(1) > 1
    if ties.any():
        ids = torch.arange(logits.shape[1], device=logits.device)
        rank[ties] += ((logits[ties] == true[ties]) & (ids < label[ties])).sum(1)
    return torch.where(rank < top_k, rank, MISS)


@torch.inference_mode()
def count_ranks(heads: MedusaHeads, hidden: Tensor, labels: Tensor, top_k: int) -> Tensor:
    """(N, d) states and (N, K) labels to (N, K) int16 ranks: counted, never sorted.

    rank = #(logit greater) + #(logit equal, smaller id); MISS from top_k on, and for tokens that the heads do
    not know; labels below 0 stay.
    """
    labels = labels.to(hidden.device)
    rows, known = heads.draft_ids(labels.clamp_min(0))  # (N, K) both
    ranks = [rank_of(heads.logits(hidden, k), rows[:, k], top_k) for k in range(heads.num_heads)]
    ranks_or_miss = torch.where(known, torch.stack(ranks, dim=1), MISS)
    return torch.where(labels < 0, labels, ranks_or_miss).to("cpu", torch.int16)
