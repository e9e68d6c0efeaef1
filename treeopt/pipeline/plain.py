"""The plain answers of a contest: those of its contenders are compared with them, and replayed on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from treeopt.files.notes import note
from treeopt.growth.replay import accepted_lengths, length_counts, record_for, replay_lengths, tells
from treeopt.pipeline.logged import copied_steps
from treeopt.records.contender import Answer, Block, Prompt
from treeopt.records.requestlog import Request, RequestLog
from treeopt.records.rules import SAME_TEXT
from treeopt.records.trace import OF_GUESSES, RankTrace
from treeopt.trees.draft import Draft
from treeopt.trees.tree import IntArray

if TYPE_CHECKING:
    from treeopt.runtime.setup import Setup

AT_ONCE = 16  # answers whose ranks are counted together
Replayed = tuple[
    list[int | None], list[int], list[int]
]  # steps and tokens of each answer; all steps by accepted guesses


@dataclass(frozen=True)
class PlainAnswers:
    """Plain answers to prompts, by their places.

    setup        : what decoded them; None for a server
    record       : what replay needs of them: the drafter's ranks, or a log where text is copied; None for a server
    has_one_text : whether the text is the same with every draft, so that the record can be replayed
    """

    setup: Setup | None
    prompts: Sequence[Prompt]
    texts: Mapping[int, list[int] | str]
    record: RankTrace | RequestLog | None
    has_one_text: bool = True

    @classmethod
    def of(
        cls, setup: Setup | None, drafts: Iterable[Draft], prompts: Sequence[Prompt], answers: Mapping[int, Answer]
    ) -> PlainAnswers:
        """With what the replay of these drafts needs."""
        from treeopt.runtime.measure.ranks import rank_answers
        from treeopt.runtime.memory import with_less_memory

        texts, drafts = {place: answer.text for place, answer in answers.items()}, list(drafts)
        if setup is None:
            return cls(None, prompts, texts, None)
        asked, answered = [prompts[place].text for place in texts], [[*text] for text in texts.values()]
        record: RankTrace | RequestLog
        if any(draft.drafter for draft in drafts):
            room, context = setup.stop.room, setup.target.context
            record = RequestLog.of(Request([*p], a, room(p, context)) for p, a in zip(asked, answered, strict=True))
        else:
            ranked = partial(rank_answers, setup, asked, answered, counts=record_for(drafts))
            record, _ = with_less_memory(lambda rows: ranked(batch_size=rows), AT_ONCE, note)
        return cls(setup, prompts, texts, record, setup.acceptance.record["rule"] in SAME_TEXT)

    @property
    def loop_share(self) -> float | None:
        """Share of the answers that end in a loop; None for a log, whose answers go on in loops, and for a server."""
        return None if self.record is None or isinstance(self.record, RequestLog) else self.record.loop_share()

    def replayed(self, draft: Draft, answers: Mapping[int, Answer], is_replayable: bool) -> Replayed:
        """Steps of each answer by replay, None where there is none, and the tokens that they emit; all steps by accepted guesses."""
        places = np.searchsorted([*self.texts], [*answers])  # in the record
        is_replayable = is_replayable and self.has_one_text
        if self.record is None:
            return [None] * len(places), [0] * len(places), []
        if isinstance(self.record, RequestLog):
            return copied_steps(self.record.select(places), draft, is_replayable)
        prefilled = np.array([answer.prefilled for answer in answers.values()])
        recorded = behind(self.record.select(places), prefilled - 1)
        accepted: list[int] = []
        steps: list[int | None] = [None] * len(places)
        if is_replayable and tells(recorded, draft):
            lengths = accepted_lengths(recorded, draft)
            steps = replay_lengths(recorded, lengths).tolist()
            accepted = length_counts(recorded, lengths, draft.depth).tolist()
        return steps, (recorded.lengths - 1).tolist(), accepted

    def compared(
        self, place: int, answers: Sequence[Answer], replayed_steps: int | None, replayed_tokens: int
    ) -> Answer:
        """The first of the answers to a prompt beside the plain one, which replay emits with so many steps."""
        plain, prompt = self.texts[place], self.prompts[place]
        other = next((answer.text for answer in answers if answer.text != plain), None)
        at, gap = None, None
        if other is not None and self.setup is not None:
            at = next(i for i, (ours, theirs) in enumerate(itertools.zip_longest(other, plain)) if ours != theirs)
            gap = self._gap(tuple(prompt.text), tuple(other[: at + 1]), tuple(plain), at)
        return replace(
            answers[0],
            identical=other is None,
            replayed_steps=replayed_steps,
            replayed_tokens=None if other is None or replayed_steps is None else replayed_tokens,
            first_difference=at,
            logit_gap=gap,
            text=[],
            accepted=[],
        )

    @cached_property
    def _gap(self) -> Callable[..., float | None]:
        """`logit_gap`, once where contenders leave the plain answer in the same way: a long prompt takes seconds."""
        from treeopt.runtime.measure.quality import logit_gap

        assert self.setup is not None, "a server's logits are not known"
        return lru_cache(maxsize=None)(partial(logit_gap, self.setup.target))


def answers_of(blocks: Iterable[Block]) -> dict[int, Answer]:
    """The answers of blocks, by the places of their prompts, in order."""
    pairs = [pair for block in blocks for pair in zip(block.prompts, block.answers, strict=True)]
    return dict(sorted(pairs, key=lambda pair: pair[0]))


def behind(trace: RankTrace, states: IntArray) -> RankTrace:
    """The ranks of a trace without the first so many states of each sequence; its last state stays."""
    begins = np.minimum(trace.starts[:-1] + states, trace.starts[1:] - 1)
    kept = np.arange(len(trace.ranks)) >= np.repeat(begins, trace.lengths)
    starts = np.concatenate([[0], np.cumsum(trace.starts[1:] - begins)])
    known: dict[str, Any] = {name: part[kept] for name in OF_GUESSES if (part := getattr(trace, name)) is not None}
    return RankTrace(starts=starts, **known, meta=trace.meta)
