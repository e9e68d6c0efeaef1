"""A Stepper: whatever decodes prompts with a draft, pass by pass. All timing and all benchmarks go through it.

pass    a forward of the target for the prompts that are answered together; the first of a prompt reads it
step    a pass that reads no prompt
draft   a chain, a tree or a dynamic tree; the root alone is plain decoding

treeopt's own decoder is one (`treeopt.runtime.decode`), other runtimes are others. A pass is told in tokens and seconds,
so what decodes may as well be another process, or a server.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.latency.rounds import Visit, Visitor
from treeopt.records.contender import Answer, Block, Prompt
from treeopt.records.origins import Runtime
from treeopt.runtime.stop import SequenceEnd, StopRule
from treeopt.trees.draft import Draft
from treeopt.trees.tree import Tree

if TYPE_CHECKING:
    from treeopt.runtime.setup import Setup
    from treeopt.runtime.target import Target

PLAIN = Tree.chain(0)
MOST_TURNS = 4  # prompts that a row has in a visit before it is given up
STRETCH = 24  # tokens of a visit to an engine: many beside the guesses of a step, few beside what they follow
SHORT = 16  # tokens of a text that steps are warmed up on
LONG_STEP_S = 0.5  # a first step that takes so long is not taken twice
ROUNDS_OF_LAUNCH = 2  # at each context, by one launch of an engine
SHORTEST_CONTEXT = 16  # that rows can be held at [tokens]

NO_STEP = "Timing needs answers of more than one token, but {} prompts gave no step in which {} were answered together."


@dataclass(frozen=True)
class Pass:
    """Tokens and seconds of one pass.

    emitted      : tokens of each prompt that was answered, by its place; what comes behind the end of an answer is cut by
                   who asked
    seconds      : that it took, drafting and choosing included
    reads_prompt : whether it read some prompt or a part of it; such a pass may verify guesses already
    accepted     : guesses accepted of each prompt; where one is missing, all tokens but the last
    forwards     : of the target, where reading took several
    """

    emitted: Mapping[int, Sequence[int]]
    seconds: float
    reads_prompt: bool
    accepted: Mapping[int, int] = field(default_factory=dict)
    forwards: int = 1

    def guesses(self, place: int) -> int:
        """Guesses accepted of a prompt that got tokens."""
        return self.accepted.get(place, len(self.emitted[place]) - 1)


Passes = Generator[Pass, Draft | None, None]  # a draft that is sent is that of those to come


class Stepper(ABC):
    """A decoder or an engine with a target, a drafter, and a rule that says where answers end. Subclasses say what differs.

    setup       : what it decodes with; None where that is not known here
    most_rows   : prompts that it answers together; None for as many as there is memory
    is_stepwise : whether passes are told one by one, and an answer can be left after any
    takes_trees : whether it takes dynamic trees, for one prompt at a time
    about       : what a prediction lacks, in a sentence; empty where guesses are those that treeopt's drafter makes
    as_it_comes : the same engine with nothing forced, where this one is told to be exact
    idle        : the same engine with its drafter there and told to guess nothing, where plain decoding has no drafter
    is_launched : whether its engines are processes, whose launches differ: they are a level of the error
    """

    name: str
    version: str
    setup: Setup | None = None
    most_rows: int | None = None
    is_stepwise: bool = True
    takes_trees: bool = False
    about: str = ""
    as_it_comes: Stepper | None = None
    idle: Stepper | None = None
    is_launched: bool = False

    @property
    def stop(self) -> StopRule:
        """Where answers end."""
        assert self.setup is not None, "who has no setup says it otherwise"
        return self.setup.stop

    @property
    def runtime(self) -> Runtime:
        """The engine, as records have it."""
        return {
            "name": self.name,
            "version": self.version,
            "about": self.about or None,
            "launches": self.is_launched or None,
        }

    def renew(self) -> None:  # noqa: B027 - most are the same each time
        """Launch anew what will answer."""

    @property
    def twin(self) -> Stepper | None:
        """The other kind of plain decoding that is timed and decoded beside this one's; None where there is none."""
        return self.as_it_comes or self.idle

    def prepare(self, prompts: Sequence[Sequence[int]], drafts: Sequence[Draft], rows: int) -> None:  # noqa: B027 - most engines make room by themselves
        """Make room for answering some of these prompts with any of these drafts, so many prompts at a time."""

    @abstractmethod
    def answer(self, prompts: Sequence[Sequence[int]], draft: Draft | None, rows: int = 1) -> Passes:
        """The passes that answer some prompts, so many at a time. A generator that is closed leaves nothing running.

        draft : of the steps. Only treeopt's own decoder takes None, which is plain, and another one that is sent
        """

    def decode(self, prompts: Sequence[Prompt], draft: Draft | None, rows: int = 1) -> list[Block]:
        """Decode some prompts to their ends, so many at a time: a block, whose prompts are by their places here."""
        began, worked = time.perf_counter(), time.process_time()
        ends = [SequenceEnd(self.stop, prompt.limit) for prompt in prompts]
        texts = [list[int]() for _ in prompts]
        answers = [
            Answer(id=prompt.id, group=prompt.group, steps=0, tokens=0, prefilled=0, identical=True, text=text)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        places, passes, prefill_s = [*range(len(prompts))], 0, 0.0
        block = Block(round=0, prompts=places, group=prompts[0].group, tokens=0, steps=0, decode_s=0.0, answers=answers)
        for one in self.answer([prompt.text for prompt in prompts], draft, rows):
            live = [place for place, tokens in one.emitted.items() if tokens and ends[place].reason is None]
            for place in live:
                answer, tokens = answers[place], ends[place].take(one.emitted[place])
                if answer.tokens:
                    answer.steps += 1
                    answer.accepted.append(min(one.guesses(place), len(tokens)))
                else:
                    answer.prefilled = len(tokens)
                answer.tokens += len(tokens)
                texts[place] += tokens
                if len(live) == rows and not one.reads_prompt:
                    block.steps += 1
                    block.tokens += len(tokens)
            passes += one.forwards * bool(live)
            if one.reads_prompt:
                prefill_s += one.seconds
            elif len(live) == rows:
                block.decode_s += one.seconds
        block.passes, block.prefill_s = passes, prefill_s
        block.seconds, block.processor_s = time.perf_counter() - began, time.process_time() - worked
        return [block]


class StepVisits(Visitor):
    """Visits to the steps of treeopt's own decoder, which switches drafts: rows go on from visit to visit, all of them live."""

    def __init__(
        self, stepper: Stepper, prompts: Sequence[Sequence[int]], trees: Sequence[Draft], batch_size: int
    ) -> None:
        super().__init__(trees, batch_size)
        self.stepper, self._prompts, self.drafts = stepper, prompts, [*trees, PLAIN]
        self._passes: Passes | None = None
        self._texts: list[int] = []  # tokens of every prompt and its answer so far
        self._is_new = self._gave_steps = False
        stepper.prepare(prompts, trees, batch_size)

    def warm_up(self) -> tuple[list[float], float]:
        """Seconds of a step with each tree, and of a plain one; of two, since the first finds nothing warm."""
        found, began = [], time.perf_counter()
        for place in range(len(self.drafts)):
            seconds = self.visit(place, (0, 1), 0).step_ms[0] / 1e3
            if seconds < LONG_STEP_S:
                seconds = min(seconds, self.visit(place, (0, 1), 0).step_ms[0] / 1e3)
            found.append(seconds)
        return found, time.perf_counter() - began

    def visit(self, place: int, steps: tuple[int, int], number: int) -> Visit:
        """Some steps with a tree, behind some that are not timed."""
        draft = self.drafts[place]
        (untimed, timed), began, worked = steps, time.perf_counter(), time.process_time()
        if self._passes is None:
            self._open(draft, number)
        step_ms, lengths = [], []
        for n in range(untimed + timed):
            length, one = self._step(draft, number)
            lengths.append(length)
            if n >= untimed:
                step_ms.append(round(1e3 * one.seconds, 5))
        return Visit(
            place=place,
            seconds=time.perf_counter() - began,
            processor_s=time.process_time() - worked,
            step_ms=step_ms,
            lengths=lengths,
        )

    def close(self) -> None:
        if self._passes is not None:
            self._passes.close()
        self._passes = None

    def _open(self, draft: Draft, number: int) -> None:
        self.close()
        count = max(len(self._prompts), MOST_TURNS * self.batch_size)
        asked = list(itertools.islice(itertools.cycle(self._prompts), number, number + count))
        self._texts = list(map(len, asked))
        self._passes = self.stepper.answer(asked, draft, self.batch_size)
        self._is_new, self._gave_steps = True, False

    def _step(self, draft: Draft, number: int) -> tuple[int, Pass]:
        """The mean length of rows before the next step in which all are live, and that step."""
        while True:
            assert self._passes is not None
            try:
                one = self._passes.send(None if self._is_new else draft)
            except StopIteration:
                if not self._gave_steps:
                    raise InvalidInput(NO_STEP.format(len(self._texts), self.batch_size)) from None
                self._open(draft, number)
                continue
            self._is_new = False
            live = [place for place, tokens in one.emitted.items() if tokens]
            length = sum(self._texts[place] - 1 for place in live)
            for place in live:
                self._texts[place] += len(one.emitted[place])
            if not one.reads_prompt and len(live) == self.batch_size:
                self._gave_steps = True
                return length // self.batch_size, one


class StretchVisits(StepVisits):
    """Visits to an engine: those of a round go on from the same texts, to the same length, each for itself.

    texts         : of every context, those that rounds take one after the other
    answer_tokens : mean length of the answers that a step's latency is for

    What a step costs depends on the text before it and on how many guesses were accepted, so the sample of a visit is a mean
    of its steps. In the first of them engines have the drafter read the whole prompt (measured: five times as long as the
    others after 1,500 tokens), which happens once in an answer: it weighs as much as in one of ``answer_tokens``.
    """

    visit_steps = (0, 1)

    def __init__(
        self,
        stepper: Stepper,
        texts: Sequence[Sequence[Sequence[int]]],
        trees: Sequence[Draft],
        batch_size: int,
        *,
        answer_tokens: float = STRETCH,
    ) -> None:
        super().__init__(stepper, [text for some in texts for text in some], trees, batch_size)
        self.texts, self.contexts, self.answer_tokens = texts, len(texts), answer_tokens
        self.per_launch = ROUNDS_OF_LAUNCH if stepper.is_launched else 1
        self._launch = 0  # the number of the one that is up
        self.taken = np.zeros((len(self.drafts), 2))  # steps with each tree, and tokens of a sequence that they emitted

    def warm_up(self) -> tuple[list[float], float]:
        """Seconds of a visit at each context with each tree, and of plain ones: these, and what steps on short texts add."""
        places = range(len(self.drafts))
        self._warm()
        began = time.perf_counter()
        steps = [min(one.seconds for _, one in self._stretch(place, 0, 1, SHORT)) for place in places]
        plain_s = sum(self.visit(places[-1], self.visit_steps, number).seconds for number in range(self.contexts))
        added_s = [STRETCH * self.contexts * (step - steps[-1]) for step in steps]
        return [self.per_launch * (plain_s + more) for more in added_s], time.perf_counter() - began

    def _warm(self) -> None:
        for place in {0, max(len(self.trees) - 1, 0), len(self.trees)}:  # what an engine loads at first is no step
            self._stretch(place, 0, 1, SHORT)

    def visit(self, place: int, steps: tuple[int, int], number: int) -> Visit:
        """A stretch with a tree, from the texts of the round."""
        began, worked = time.perf_counter(), time.process_time()
        if self.stepper.is_launched and (launch := number // (self.contexts * self.per_launch)) != self._launch:
            self._launch = launch
            self.stepper.renew()
            self._warm()
        found = self._stretch(place, number, STRETCH)
        first, *others = [one.seconds for _, one in found]
        emitted = sum(len(tokens) for _, one in found for tokens in one.emitted.values()) / self.batch_size
        self.taken[place] += len(found), emitted
        of_answer = max(len(found), self.answer_tokens * self.taken[place, 0] / self.taken[place, 1])
        mean_s = (first + (of_answer - 1) * sum(others) / len(others)) / of_answer if others else first
        return Visit(
            place=place,
            seconds=time.perf_counter() - began,
            processor_s=None if self.stepper.is_launched else time.process_time() - worked,
            step_ms=[round(1e3 * mean_s, 5)],
            lengths=[length for length, _ in found],
        )

    def _stretch(self, place: int, number: int, tokens: int, most: int = 0) -> list[tuple[int, Pass]]:
        """Two steps or more with all rows live, until these have so many tokens each, with the mean length before each step.

        most : tokens of the texts that are read, the last ones; 0 for all
        """
        draft, stepper, rows = self.drafts[place], self.stepper, self.batch_size
        if place < len(self.trees) and len(draft) == 1:
            stepper = stepper.twin or stepper
        some = self.texts[number % self.contexts]
        for turn in range(MOST_TURNS):
            first = (number // self.contexts + turn) * rows
            texts = [some[i % len(some)][-most:] for i in range(first, first + rows)]
            lengths, found = np.array([len(text) - 1 for text in texts]), list[tuple[int, Pass]]()
            end = int(lengths.sum()) + rows * tokens
            with closing(stepper.answer(texts, draft, rows)) as passes:
                for one in passes:
                    all_live = sum(map(bool, one.emitted.values())) == rows
                    if not one.reads_prompt and all_live:
                        found.append((int(lengths.mean()), one))
                    for row, emitted in one.emitted.items():
                        lengths[row] += len(emitted)
                    if (found and not all_live) or (len(found) > 1 and lengths.sum() >= end):
                        break
            if len(found) > 1 or (found and turn == MOST_TURNS - 1):
                return found
        raise InvalidInput(NO_STEP.format(MOST_TURNS * rows, rows))


def rows_at(context_tokens: int, prompts: Sequence[Sequence[int]], target: Target) -> tuple[list[list[int]], StopRule]:
    """Prompts repeated and cut, and where their rows end, so that rows stay about a context length.

    They begin at different lengths, as rows of real prompts do, and end 1/16 beyond the context; neither
    EOS nor a loop ends them before. Raises InvalidInput for a context that the model does not reach.
    """
    if not SHORTEST_CONTEXT <= context_tokens <= target.context:
        raise InvalidInput(
            f"`contexts` must be {SHORTEST_CONTEXT} to {target.context}, the context of the model, but got "
            f"{context_tokens}."
        )
    half = max(SHORTEST_CONTEXT // 2, context_tokens // 16)
    end = min(context_tokens + half, target.context)
    found = []
    for i, prompt in enumerate(prompts):
        length = max(1, end - 2 * half + round(i * 0.618 % 1 * (half // 2)))
        found.append(list(itertools.islice(itertools.cycle(prompt), length)))
    longest = max(map(len, found))
    return found, StopRule(frozenset(), end - longest, at_loops=False)
