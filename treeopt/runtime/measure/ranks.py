"""Calibration: answer conversations, keep the hidden states, and have the drafter count its ranks on them.

The hidden state that a head reads at a state is the one that decoding just computed, so there is no
second pass of the target, and the heads run on many states at once. Answers that are given are read
in one pass instead.

N states of an answer · b rows · T tokens of a row · d width · K guesses at most
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from treeopt.errors import InvalidInput
from treeopt.records.trace import End, RankTrace
from treeopt.runtime.acceptance.greedy import Acceptance
from treeopt.runtime.decode import Decoder, Row, capacity_for
from treeopt.runtime.drafters.protocol import Answer, Drafter
from treeopt.runtime.drafters.states import states_at_once
from treeopt.runtime.prompts.chat import Tokens
from treeopt.runtime.prompts.sets import Conversation, PromptSet
from treeopt.runtime.ranking import rank_of
from treeopt.runtime.stop import SequenceEnd, StopRule
from treeopt.runtime.target import Target


def collect_trace(
    target: Target,
    drafter: Drafter,
    prompts: PromptSet,
    *,
    batch_size: int = 16,
    stop: StopRule,
    acceptance: Acceptance | None = None,
    top_k: int = 32,
    given: bool = False,
    meta: dict[str, Any] | None = None,
    progress: Callable[[int], None] = lambda conversations: None,
) -> RankTrace:
    """Answer every conversation turn by turn, and record at which rank the drafter had the token that came.
    Every turn is a sequence; the turns of a conversation are a cluster.

    acceptance : a lossless rule that the target's own tokens are chosen by; greedy by default

    Ranks 0...top_k-1 are told apart. With ``given`` nothing is generated: one pass of the target over
    the given answers. A turn that cannot be asked, for one because the context has no room, ends its
    conversation and is listed under meta["skipped"]. ``progress`` is called with the number of conversations that ended.
    """
    counter = RankCounter(drafter, top_k, target if given else None)
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "stop": stop,
        "done": counter.add,
        "keep_prompts": drafter.reads_prompt,
    }
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
            rows = read_answers(target, asked, answers, **options)
        else:
            rows = write_answers(target, asked, acceptance=acceptance, **options)
        for i, row in zip(at, rows, strict=True):
            answered[i].append(row)
        last = [i for i in waiting if prompts.conversations[i].num_turns == turn or i not in at]
        progress(len(last))
        waiting = [i for i in waiting if i not in set(last)]
    rows = [row for turns in answered for row in turns]
    of = [prompts.conversations[i] for i, turns in enumerate(answered) for _ in turns]
    groups = list(dict.fromkeys(conversation.group for conversation in of))
    target_rank = {"target_rank": np.concatenate([counter.target_ranks(row) for row in rows])} if given else {}
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
    target: Target, prompts: PromptSet, conversation: Conversation, answered: list[Row], turn: int, given: bool
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
    keep_prompts: bool = False,
    acceptance: Acceptance | None = None,
) -> list[Row]:
    """Decode plainly; ``done`` takes every row, with its hidden states, when it ends.

    keep_prompts : keep those of the prompts too
    """
    if not prompts:
        return []
    decoder = Decoder(
        target,
        None,
        batch_size=batch_size,
        capacity=capacity_for(prompts, stop, target),
        stop=stop,
        keep_states=True,
        keep_prompts=keep_prompts,
        most_nodes=1,
        acceptance=acceptance,
    )
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
    keep_prompts: bool = False,
) -> list[Row]:
    """The same rows as if the target had written the answers, by one pass over each (teacher forcing)."""
    rows = []
    for begin in range(0, len(prompts), batch_size):
        batch = []
        for i in range(begin, min(begin + batch_size, len(prompts))):
            row = Row(i, prompts[i], SequenceEnd(stop, target.context - len(prompts[i])), end=End.LIMIT)
            for token in answers[i]:
                if not row.emit(token):
                    break
            row.end = End.LIMIT if row.end is None else row.end
            batch.append(row)
        # The last token's state is of no use: its pass would only yield what comes after the answer.
        texts = [[*prompts[row.id], *row.tokens[:-1]] for row in batch]
        hidden = target.read(texts)  # (b, T, d)
        for i, row in enumerate(batch):
            first = row.prompt_tokens - 1
            row.states = [(hidden[i], first + t) for t in range(len(row.tokens))]
            row.prompt_states = hidden[i, :first] if keep_prompts else None
            done(row)
        rows += batch
    return rows


class RankCounter:
    """Gathers the states of ended rows and has the drafter count its ranks on whole chunks of them.

    With a ``target`` it also counts at which rank the target itself had every token.
    """

    def __init__(self, drafter: Drafter, top_k: int, target: Target | None = None) -> None:
        self.drafter, self.top_k, self.target = drafter, top_k, target
        self._ranks: dict[int, NDArray[np.int16]] = {}  # by the row's identity
        self._target_ranks: dict[int, NDArray[np.int16]] = {}
        self._pending: list[tuple[Row, Answer]] = []

    def add(self, row: Row) -> None:
        """Take the states of an ended row; its own references to them are dropped."""
        hidden = torch.stack([hidden[i] for hidden, i in row.states[: len(row.tokens)]])
        if row.prompt_states is not None:
            hidden = torch.cat([row.prompt_states, hidden])
        row.states, row.prompt_states = [], None
        assert row.end is not None, "only ended rows come here"
        self._pending.append((row, Answer(row.prompt, row.tokens, row.end, hidden)))
        if sum(len(answer.hidden) for _, answer in self._pending) >= states_at_once(self.drafter.vocab_size):
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
        rows, answers = [row for row, _ in self._pending], [answer for _, answer in self._pending]
        for row, found in zip(rows, self.drafter.ranks(answers, self.top_k), strict=True):
            self._ranks[id(row)] = found
        if self.target is not None:
            at_once = states_at_once(self.target.vocab_size)
            for row, answer in self._pending:
                chunks = zip(
                    answer.state_hidden.split(at_once), torch.tensor(answer.tokens).split(at_once), strict=True
                )
                own = torch.cat([rank_of(self.target.scores(self.target.logits(h)), y, self.top_k) for h, y in chunks])
                self._target_ranks[id(row)] = own.to("cpu", torch.int16).numpy()
        self._pending.clear()
