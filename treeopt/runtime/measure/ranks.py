"""Calibration: answer conversations, keep the hidden states, and have the drafter count its ranks on them.

The hidden state that a head reads at a state is the one that decoding just computed, so there is no
second pass of the target, and the heads run on many states at once. Answers that are given are read
in one pass instead. Pools of dynamic trees are recorded at every state, where the drafter drafts as it would if decoding had
come there.

N, n states of an answer · K guesses at most · S levels · M nodes of a pool
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.records.contender import Prompt
from treeopt.records.pools import NO_PLACE, RANKS_ALONE, Counts, columns_of
from treeopt.records.trace import End, RankTrace
from treeopt.runtime.decode import Decoder
from treeopt.runtime.drafters.levels import LevelDraft, Pool
from treeopt.runtime.drafters.protocol import GivenText
from treeopt.runtime.drafters.states import ranks_among, states_at_once
from treeopt.runtime.prompts.encoder import Tokens
from treeopt.runtime.prompts.sets import Conversation, PromptSet
from treeopt.runtime.setup import AnswerRow, Setup
from treeopt.runtime.target import Target
from treeopt.trees.draft import MOST_ROWS

NUMBERS_AT_ONCE, MOST_STATES = 2**24, 256  # of the keys of the rows whose pools are drafted together, and rows


def collect_trace(
    setup: Setup,
    prompts: PromptSet,
    *,
    batch_size: int = 16,
    counts: Counts = RANKS_ALONE,
    given: bool = False,
    meta: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] = lambda conversations: None,
) -> RankTrace:
    """Answer every conversation turn by turn, and record at which rank the drafter had the token that came.

    Every turn is a sequence; the turns of a conversation are a cluster. The setup's rule must be lossless.

    given : read the given answers in one pass of the target each; nothing is generated

    A turn that cannot be asked, for one because the context has no room, ends its conversation and is listed
    under meta["skipped"]. ``progress`` is called with the number of conversations that ended.
    """
    counter = RankCounter(setup, counts, given)
    turns = Turns(setup.target, prompts, given, progress)
    for asked, answers in turns.rounds():
        if given:
            rows = read_answers(setup, asked, answers, batch_size=batch_size)
        else:
            rows = write_answers(setup, asked, batch_size)
        for row in rows:
            counter.add(row)
            turns.end(row)
    counter.flush()
    stop = setup.stop
    about = {"eos_ids": sorted(stop.eos_ids), "max_new_tokens": stop.max_new_tokens, **counts.record, **(meta or {})}
    counted = [row for answered in turns.answered for row in answered]
    of = [c for c, answered in zip(prompts.conversations, turns.answered, strict=True) for _ in answered]
    groups = list(dict.fromkeys(conversation.group for conversation in of))
    return RankTrace(
        **arrays_of(counted),
        prompt_tokens=np.array([len(row.prompt) for row in counted]),
        group=np.array([groups.index(conversation.group) for conversation in of]),
        cluster=np.repeat(np.arange(len(turns.answered)), [len(answered) for answered in turns.answered]),
        meta={
            "prompt_sha256": [conversation.sha256 for conversation in of],
            "group_names": groups,
            "skipped": turns.skipped,
            **about,
        },
    )


class Turns:
    """Conversations that are answered turn by turn, each next prompt after the answers before it.

    answered : the rows of each conversation's turns so far
    """

    def __init__(
        self,
        target: Target,
        prompts: PromptSet,
        given: bool = False,
        progress: Callable[[int], None] = lambda conversations: None,
    ) -> None:
        self.target, self.prompts, self.given, self.progress = target, prompts, given, progress
        self.answered: list[list[AnswerRow]] = [[] for _ in prompts.conversations]
        self.skipped: list[dict[str, object]] = []
        self._asked = list(range(len(self.answered)))  # places of the conversations whose prompts are out

    def rounds(self) -> Iterator[tuple[list[Tokens], list[Tokens]]]:
        """The next prompt of every conversation that has one, and the given answers, until all have ended."""
        while self._asked:
            found: dict[int, tuple[Tokens, Tokens]] = {}
            for i in self._asked:
                conversation = self.prompts.conversations[i]
                try:
                    if len(self.answered[i]) < conversation.num_turns:
                        found[i] = self._next(conversation, self.answered[i])
                except InvalidInput as error:
                    self.skipped.append({"row": conversation.row, "reason": str(error)})
                    self.progress(1)
            self._asked = list(found)
            if found:
                yield [prompt for prompt, _ in found.values()], [answer for _, answer in found.values()]

    def end(self, row: AnswerRow) -> None:
        i = self._asked[row.id]
        self.answered[i].append(row)
        self.progress(len(self.answered[i]) == self.prompts.conversations[i].num_turns)

    def _next(self, conversation: Conversation, answered: Sequence[AnswerRow]) -> tuple[Tokens, Tokens]:
        """The tokens of a turn's prompt, and of its given answer; InvalidInput where it cannot be asked."""
        turn, prompts = 1 + len(answered), self.prompts
        if self.given:
            *before, answer = [prompts.given_answer(conversation, t) for t in range(turn)]
            tokens = prompts.next_prompt(conversation, before)
            if not answer:
                raise InvalidInput(f"the given answer to turn {turn} is empty")
        else:
            tokens, answer = prompts.next_prompt(conversation, [row.tokens for row in answered]), ()
        if len(tokens) >= self.target.context:
            raise InvalidInput(f"the context has no room for turn {turn}")
        return tokens, answer


def turn_prompts(prompts: PromptSet, trace: RankTrace) -> list[Prompt]:
    """The prompt of every sequence of a trace, with the trace's own answers to the turns before it."""
    known = {conversation.sha256: conversation for conversation in prompts.conversations}
    found = []
    for s, (sha256, cluster) in enumerate(zip(trace.meta["prompt_sha256"], trace.clusters, strict=True)):
        conversation = known[sha256]
        first = int(np.searchsorted(trace.clusters, cluster))
        tokens = prompts.next_prompt(conversation, trace.texts[first:s])
        found.append(Prompt(tokens, sha256, conversation.group, int(cluster)))
    return found


def write_answers(setup: Setup, prompts: Sequence[Sequence[int]], batch_size: int) -> Iterator[AnswerRow]:
    """The rows of plain answers, with the hidden states that the drafter reads, as they end."""
    decoder = Decoder(setup, records=True)
    for _ in decoder.answer(prompts, None, batch_size):
        yield from decoder.finished
        decoder.finished.clear()


@torch.inference_mode()
def read_answers(
    setup: Setup, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, batch_size: int
) -> Iterator[AnswerRow]:
    """Rows of given answers as if the target had written them, by one pass over each (teacher forcing)."""
    keep_prompts = setup.drafter is not None and setup.drafter.reads_prompt
    for begin in range(0, len(prompts), batch_size):
        batch = [setup.row(i, prompts[i], answers[i]) for i in range(len(prompts))[begin : begin + batch_size]]
        # The last token's state is of no use: its pass would only yield what comes after the answer.
        hidden = setup.target.read([[*row.prompt, *row.tokens[:-1]] for row in batch])  # (b, T, d)
        for states, row in zip(hidden, batch, strict=True):
            row.watch.reason = row.end or End.LIMIT
            first = len(row.prompt) - 1
            row.states = [(states, first + t) for t in range(len(row.tokens))]
            row.prompt_states = states[:first] if keep_prompts else None
            yield row


def rank_answers(
    setup: Setup, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, batch_size: int, counts: Counts
) -> RankTrace:
    """The ranks of answers to prompts, one to each, that something else wrote."""
    counter, rows = RankCounter(setup, counts, given=False), []
    for row in read_answers(setup, prompts, answers, batch_size=batch_size):
        counter.add(row)
        rows.append(row)
    counter.flush()
    return RankTrace(**arrays_of(rows), meta=counts.record)


def arrays_of(rows: Sequence[AnswerRow]) -> dict[str, Any]:
    """A trace's arrays of what happened at each state of some rows that were counted."""
    found = {name: np.concatenate([row.found[name] for row in rows]) for name in rows[0].found}
    return {
        "starts": np.cumsum([0, *(len(row.tokens) for row in rows)]),
        "end": np.array([row.end for row in rows]),
        "tokens": np.concatenate([np.array(row.tokens) for row in rows]),
        **found,
    }


class RankCounter:
    """Gathers the states of ended rows and has the drafter count its ranks on whole chunks of them.

    Every row, once flushed, has under ``found`` arrays of its N states: "ranks" (N, K), the last state has no trial;
    of ``given`` answers "target_rank" (N,), which the target itself had; those of `PoolRecorder`, see `treeopt.records.pools`.
    """

    def __init__(self, setup: Setup, counts: Counts, given: bool) -> None:
        assert setup.drafter is not None, "ranks are those of a drafter"
        self.setup, self.drafter, self.counts, self.given = setup, setup.drafter, counts, given
        self.recorder = PoolRecorder(setup.drafter, counts)
        self._pending: list[AnswerRow] = []

    def add(self, row: AnswerRow) -> None:
        """Take an ended row, whose states are dropped when they are counted."""
        self._pending.append(row)
        waiting = sum(len(one.states) + len(one.prompt) * (one.prompt_states is not None) for one in self._pending)
        if waiting >= states_at_once(self.drafter.vocab_size):
            self.flush()

    def flush(self) -> None:
        answers = [row.text() for row in self._pending]
        every = self.drafter.ranks(answers, self.counts.top_k) if answers else []
        for row, answer, ranks in zip(self._pending, answers, every, strict=True):
            row.found = {"ranks": ranks, **self.recorder.record(answer)}
            if self.given:
                states, tokens = answer.state_hidden, torch.tensor(answer.tokens, device=answer.hidden.device)
                own = ranks_among(self.setup.target.scored, states, tokens, self.counts.top_k, self.drafter.vocab_size)
                row.found["target_rank"] = own.to("cpu", torch.int16).numpy()
        self._pending.clear()


class PoolRecorder:
    """Records the pools of a drafter, for several topk up to so many levels, and its trees over marginals."""

    def __init__(self, drafter: Any, counts: Counts) -> None:
        self.drafter, self.widths, self.topks = drafter, counts.widths, counts.topks
        self.levels, self.depth = (min(most, drafter.num_heads) for most in (counts.levels, counts.depth))
        self._rows = self._capacity = 0

    @torch.inference_mode()
    def record(self, answer: GivenText) -> dict[str, NDArray[Any]]:
        """Arrays of the N states of an answer, as a trace has them: "pool_places" and "marginal_places"."""
        if not self.levels and not self.depth:
            return {}
        draft: Any = self._sought(len(answer.prompt) + len(answer.tokens))
        draft.read(answer)
        depth, kinds = self.depth, ("pool_places", "marginal_places")
        found = {name: list[Tensor]() for name in kinds}
        labels, roots = answer.labels(max(self.levels, depth)), torch.tensor(answer.tokens)
        for begin in reversed(range(0, len(roots), self._rows)):  # see `LevelDraft.seek`
            states = range(begin, min(begin + self._rows, len(roots)))
            own, true = (part[states.start : states.stop].to(answer.hidden.device) for part in (roots, labels))
            if self.levels:
                draft.seek(states)
                pools = draft.grow(self.levels, self.topks, own)
                places = [true_places(pool, true, self.levels) for pool in pools]
                found["pool_places"].append(torch.stack(places, 1).cpu())
            if depth:
                draft.seek(states)
                found["marginal_places"].append(draft.true_nodes(own, true[:, :depth], self.widths))
        return {name: torch.cat(parts[::-1]).numpy() for name, parts in found.items() if parts}

    def _sought(self, tokens: int) -> LevelDraft:
        """Rows with room for a text of so many tokens."""
        capacity = tokens + 1 + max(self.levels - 1, 0) * sum(self.topks)
        if capacity > self._capacity:
            width = getattr(self.drafter, "width", 0) or self.drafter.model.width
            layers = 1 if not hasattr(self.drafter, "model") else self.drafter.model.num_layers
            self._rows = min(max(NUMBERS_AT_ONCE // (capacity * width * layers), 1), MOST_STATES)
            self._capacity, self._draft = capacity, self.drafter.start(self._rows, capacity)
        found: LevelDraft = self._draft
        return found


def true_places(pool: Pool, labels: Tensor, levels: int) -> Tensor:
    """(n, S (S + 1) / 2) uint8 places of the true path's nodes, by the (n, S) tokens that come; below 0 for none."""
    (n, size), device = pool.scores.shape, pool.scores.device
    found = torch.full((n, columns_of(levels).stop), NO_PLACE, dtype=torch.uint8, device=device)
    node = torch.full((n, 1), -1, device=device)  # the true path's of the level above; the root
    alive = torch.ones((n, 1), dtype=torch.bool, device=device)
    ends = torch.bincount(pool.depths)[1:].cumsum(0)
    for depth in range(1, levels + 1):
        is_true = (pool.parents == node) & (pool.tokens == labels[:, depth - 1, None]) & (pool.depths == depth)
        alive = alive & is_true.any(1, keepdim=True) & (labels[:, depth - 1, None] >= 0)
        node = is_true.to(torch.uint8).argmax(1, keepdim=True)
        score = pool.scores.gather(1, node)
        before = (pool.scores > score) | ((pool.scores == score) & (torch.arange(size, device=device) < node))
        places = before.cumsum(1)[:, ends[depth - 1 :] - 1]  # (n, S - depth + 1) among the nodes of the first s levels
        places = torch.where(alive & (places <= MOST_ROWS - 2), places, NO_PLACE).to(torch.uint8)
        found[:, [columns_of(s).start + depth - 1 for s in range(depth, levels + 1)]] = places
    return found
