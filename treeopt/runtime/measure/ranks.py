"""Calibration: answer conversations, keep the hidden states, and have the drafter count its ranks on them.

The hidden state that a head reads at a state is the one that decoding just computed, so there is no
second pass of the target, and the heads run on many states at once. Answers that are given are read
in one pass instead.

N states of an answer · b rows · T tokens of a row · d width · K guesses at most
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from treeopt.errors import InvalidInput
from treeopt.records.pools import RANKS_ALONE, Counts
from treeopt.records.trace import End, RankTrace
from treeopt.runtime.decode import AnswerRow, Decoder, Setup
from treeopt.runtime.drafters.protocol import Drafter, GivenText
from treeopt.runtime.drafters.states import ranks_among, states_at_once
from treeopt.runtime.measure.pools import PoolRecorder
from treeopt.runtime.measure.unfinished import MOST_BYTES, Unfinished
from treeopt.runtime.prompts.chat import Tokens
from treeopt.runtime.prompts.sets import Conversation, PromptSet
from treeopt.runtime.stop import SequenceEnd, StopRule
from treeopt.runtime.target import Target


def collect_trace(
    setup: Setup,
    prompts: PromptSet,
    *,
    batch_size: int = 16,
    counts: Counts = RANKS_ALONE,
    given: bool = False,
    meta: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] = lambda conversations: None,
    unfinished: Unfinished | None = None,
) -> RankTrace:
    """Answer every conversation turn by turn, and record at which rank the drafter had the token that came.

    Every turn is a sequence; the turns of a conversation are a cluster. The setup's rule must be lossless.

    given : read the given answers in one pass of the target each; nothing is generated
    unfinished : where a state that is not finished is kept while answers are written, and found

    A turn that cannot be asked, for one because the context has no room, ends its conversation and is listed
    under meta["skipped"]. ``progress`` is called with the number of conversations that ended.
    """
    assert setup.drafter is not None, "ranks are those of a drafter"
    counter = RankCounter(setup.drafter, counts, setup.target.device, setup.target if given else None)
    turns = Turns(setup.target, prompts, given)
    saved: Mapping[str, Any] = (unfinished.read() if unfinished else None) or {"turns": [], "decoder": None}
    ended: list[list[AnswerRow]] = []  # of every turn, in the order in which they ended

    def done(row: AnswerRow) -> None:
        ended[-1].append(row)
        counter.add(row)
        progress(turns.is_last(row))

    def keep(decoder: Decoder) -> None:
        if unfinished and unfinished.is_due() and decoder.cache.state_bytes() <= MOST_BYTES:
            known = [[counter.state(row) for row in rows] for rows in ended]
            unfinished.keep({"turns": known, "decoder": decoder.state()})

    while turns.waiting:
        asked, answers = turns.next_prompts()
        n = len(ended)
        ended.append([counter.resume(known, asked) for known in (saved["turns"][n : n + 1] or [[]])[0]])
        progress(sum(map(turns.is_last, ended[-1])))
        if given:
            read_answers(setup, asked, answers, batch_size=batch_size, done=done)
        elif n + 1 >= len(saved["turns"]):
            begun = saved["decoder"] if n + 1 == len(saved["turns"]) else None
            write_answers(setup, asked, batch_size=batch_size, done=done, begun=begun, keep=keep)
        last = sum(map(turns.is_last, ended[-1]))
        progress(turns.take(sorted(ended[-1], key=lambda row: row.id)) - last)
    counter.flush()
    known = {"eos_ids": sorted(setup.stop.eos_ids), "max_new_tokens": setup.stop.max_new_tokens, **counts.record}
    return _trace_of(turns, counter, {**known, **(meta or {})})


def _trace_of(turns: Turns, counter: RankCounter, meta: Mapping[str, Any]) -> RankTrace:
    """The trace of all answers, conversation by conversation."""
    rows = [row for answered in turns.answered for row in answered]
    of = [c for c, answered in zip(turns.prompts.conversations, turns.answered, strict=True) for _ in answered]
    groups = list(dict.fromkeys(conversation.group for conversation in of))
    return RankTrace(
        **counter.arrays(rows),
        prompt_tokens=np.array([row.prompt_tokens for row in rows]),
        end=np.array([row.end for row in rows]),
        group=np.array([groups.index(conversation.group) for conversation in of]),
        cluster=np.repeat(np.arange(len(turns.answered)), [len(answered) for answered in turns.answered]),
        meta={
            "prompt_sha256": [conversation.sha256 for conversation in of],
            "group_names": groups,
            "skipped": turns.skipped,
            **meta,
        },
    )


class Turns:
    """Conversations that are answered turn by turn, each next prompt after the answers before it.

    waiting  : places of the conversations that have another turn
    answered : the rows of each conversation's turns so far
    """

    def __init__(self, target: Target, prompts: PromptSet, given: bool) -> None:
        self.target, self.prompts, self.given = target, prompts, given
        self.answered: list[list[AnswerRow]] = [[] for _ in prompts.conversations]
        self.skipped: list[dict[str, object]] = []
        self.waiting = list(range(len(self.answered)))
        self._asked: list[int] = []  # places of the conversations whose prompts are out

    def next_prompts(self) -> tuple[list[Tokens], list[Tokens]]:
        """The next prompt of every waiting conversation that has one, and the given answer to it."""
        self._asked, found = [], []
        for i in self.waiting:
            conversation = self.prompts.conversations[i]
            try:
                found.append(self._next(conversation, self.answered[i]))
                self._asked.append(i)
            except InvalidInput as error:
                self.skipped.append({"row": conversation.row, "reason": str(error)})
        return [prompt for prompt, _ in found], [answer for _, answer in found]

    def is_last(self, row: AnswerRow) -> bool:
        """Whether an answer to the last prompts ends its conversation."""
        i = self._asked[row.id]
        return 1 + len(self.answered[i]) == self.prompts.conversations[i].num_turns

    def take(self, rows: Sequence[AnswerRow]) -> int:
        """Take the answers to the last prompts; how many conversations ended with them, or could not be asked."""
        for i, row in zip(self._asked, rows, strict=True):
            self.answered[i].append(row)
        before = len(self.waiting)
        self.waiting = [i for i in self._asked if len(self.answered[i]) < self.prompts.conversations[i].num_turns]
        return before - len(self.waiting)

    def _next(self, conversation: Conversation, answered: Sequence[AnswerRow]) -> tuple[Tokens, Tokens]:
        """The tokens of a turn's prompt, and of its given answer; InvalidInput where it cannot be asked."""
        turn, prompts = 1 + len(answered), self.prompts
        if self.given:
            before = [prompts.given_answer(conversation, t) for t in range(turn)]
            tokens, answer = prompts.next_prompt(conversation, before[:-1]), before[-1]
            if not answer:
                raise InvalidInput(f"the given answer to turn {turn} is empty")
        else:
            tokens, answer = prompts.next_prompt(conversation, [row.tokens for row in answered]), ()
        if len(tokens) >= self.target.context:
            raise InvalidInput(f"the context has no room for turn {turn}")
        return tokens, answer


@dataclass(frozen=True)
class Prompt:
    """The prompt of one sequence: its tokens, and the conversation that it is a turn of."""

    tokens: tuple[int, ...]
    sha256: str
    group: str
    cluster: int


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


def write_answers(
    setup: Setup,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    done: Callable[[AnswerRow], None],
    begun: Mapping[str, Any] | None = None,
    keep: Callable[[Decoder], None] = lambda decoder: None,
) -> None:
    """Have the target answer by plain decoding; ``done`` takes every row, with its hidden states, when it ends.

    The states of the prompts are kept too where the drafter reads them.

    begun : the state of a decoder of these prompts to go on from · keep : is called after every step
    """
    if not prompts:
        return
    decoder = Decoder.for_prompts(replace(setup, drafter=None), prompts, batch_size=batch_size)
    decoder.keep_states = True
    decoder.keep_prompts = setup.drafter is not None and setup.drafter.reads_prompt
    decoder.start(enumerate(prompts))
    if begun is not None:
        decoder.resume(begun, prompts)
    while not decoder.is_done:
        decoder.refill()
        if decoder.live:
            decoder.step()
        for row in decoder.finished:
            done(row)
        decoder.finished.clear()
        keep(decoder)


@torch.inference_mode()
def read_answers(
    setup: Setup,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    batch_size: int,
    done: Callable[[AnswerRow], None],
) -> list[AnswerRow]:
    """Rows of given answers as if the target had written them, by one pass over each (teacher forcing)."""
    target, rows = setup.target, []
    keep_prompts = setup.drafter is not None and setup.drafter.reads_prompt
    for begin in range(0, len(prompts), batch_size):
        batch = []
        for i in range(begin, min(begin + batch_size, len(prompts))):
            row = AnswerRow(i, prompts[i], SequenceEnd(setup.stop, target.context - len(prompts[i])), end=End.LIMIT)
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


def rank_answers(
    setup: Setup, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, batch_size: int, counts: Counts
) -> RankTrace:
    """The ranks of answers to prompts, one to each, that something else wrote."""
    assert setup.drafter is not None, "ranks are those of a drafter"
    counter = RankCounter(setup.drafter, counts, setup.target.device)
    rows = read_answers(setup, prompts, answers, batch_size=batch_size, done=counter.add)
    counter.flush()
    return RankTrace(**counter.arrays(rows), end=np.array([row.end for row in rows]), meta=counts.record)


class RankCounter:
    """Gathers the states of ended rows and has the drafter count its ranks on whole chunks of them.

    With a ``target`` it also counts at which rank the target itself had every token.

    found : by the identity of every row, once flushed, arrays of its N states: "ranks" (N, K), the last state has no trial;
            "target_rank" (N,); "pool_places", see `treeopt.records.pools`
    """

    def __init__(self, drafter: Drafter, counts: Counts, device: torch.device, target: Target | None = None) -> None:
        self.drafter, self.counts, self.device, self.target = drafter, counts, device, target
        self.recorder = PoolRecorder(drafter, counts.levels, counts.topks) if counts.levels else None
        self.found: dict[int, dict[str, NDArray[Any]]] = {}  # of ended rows by id(row)
        self._pending: list[tuple[AnswerRow, GivenText]] = []

    def arrays(self, rows: Sequence[AnswerRow]) -> dict[str, NDArray[Any]]:
        """A trace's arrays of what happened at each state of some rows."""
        found = [self.found[id(row)] for row in rows]
        return {
            "starts": np.concatenate([[0], np.cumsum([len(row.tokens) for row in rows])]),
            "tokens": np.concatenate([np.array(row.tokens) for row in rows]),
            **{name: np.concatenate([arrays[name] for arrays in found]) for name in found[0]},
        }

    def add(self, row: AnswerRow) -> None:
        """Take the states of an ended row; its own references to them are dropped."""
        hidden = torch.stack([hidden[i] for hidden, i in row.states[: len(row.tokens)]])
        if row.prompt_states is not None:
            hidden = torch.cat([row.prompt_states, hidden])
        row.states, row.prompt_states = [], None
        assert row.end is not None, "only ended rows come here"
        self._pending.append((row, GivenText(row.prompt, row.tokens, row.end, hidden)))
        if sum(len(answer.hidden) for _, answer in self._pending) >= states_at_once(self.drafter.vocab_size):
            self.flush()

    def state(self, row: AnswerRow) -> dict[str, object]:
        """An ended row with what is known of it, as plain values and tensors; `resume` takes it."""
        found = self.found.get(id(row))
        hidden = next((answer.hidden for other, answer in self._pending if other is row), None)
        return {
            "id": row.id,
            "tokens": list(row.tokens),
            "accepted": list(row.accepted),
            "end": int(row.end or 0),
            "found": None if found is None else {name: torch.from_numpy(array) for name, array in found.items()},
            "hidden": hidden,
        }

    def resume(self, known: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> AnswerRow:
        """The row of a state, counted or waiting as it was; called in the order in which rows ended."""
        end, prompt = End(known["end"]), prompts[known["id"]]
        row = AnswerRow(
            known["id"], prompt, SequenceEnd(StopRule(frozenset(), 1)), known["tokens"], known["accepted"], end
        )
        if known["found"] is not None:
            self.found[id(row)] = {name: array.numpy() for name, array in known["found"].items()}
        else:
            self._pending.append((row, GivenText(prompt, row.tokens, end, known["hidden"].to(self.device))))
        return row

    def flush(self) -> None:
        """Count the ranks of the rows that are still waiting."""
        if not self._pending:
            return
        rows, answers = [row for row, _ in self._pending], [answer for _, answer in self._pending]
        for row, answer, ranks in zip(rows, answers, self.drafter.ranks(answers, self.counts.top_k), strict=True):
            found = {"ranks": ranks}
            if self.target is not None:
                found["target_rank"] = self._target_ranks(self.target, answer)
            if self.recorder is not None:
                found |= self.recorder.record(answer)
            self.found[id(row)] = found
        self._pending.clear()

    def _target_ranks(self, target: Target, answer: GivenText) -> NDArray[np.int16]:
        states, tokens = answer.state_hidden, torch.tensor(answer.tokens, device=answer.hidden.device)
        own = ranks_among(
            lambda h: target.scores(target.logits(h)), states, tokens, self.counts.top_k, target.vocab_size
        )
        return own.to("cpu", torch.int16).numpy()
