"""A contest: drafts decode the same prompts, in turn, through a journal, and become the contenders of a benchmark.

turn   a block of prompts in one round by one contender; contenders have a block one after the other, in random order
round  all prompts by every contender

A contender stops as soon as its speed beside the chosen one is settled, and the contest ends when all are. Where rounds are
launches, which differ, every contender has all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from treeopt.files.journal import Journal
from treeopt.files.notes import note
from treeopt.files.storage import document, typed
from treeopt.latency.rounds import processor_share
from treeopt.pipeline.entrants import AT_ONE, Entrant
from treeopt.pipeline.plain import PlainAnswers, answers_of
from treeopt.records.benchmark import AS_IT_COMES, CHOSEN, FEWEST_LAUNCHES, Benchmark, block_prompts, paired, ratio_of
from treeopt.records.contender import Block, Contender, Prompt, Quality
from treeopt.records.origins import OURS, Provenance
from treeopt.report.terminal import Advance, progress
from treeopt.report.verdict import times
from treeopt.trees.draft import Draft
from treeopt.trees.tree import Tree

if TYPE_CHECKING:
    from treeopt.runtime.stepper import Stepper
    from treeopt.runtime.target import Target

Blocks = dict[str, list[Block]]  # what each contender decoded, in the order of its turns


def contest(
    stepper: Stepper,
    drafts: Mapping[str, Draft | Entrant],
    prompts: Sequence[Prompt],
    *,
    batch_size: int = 1,
    rounds: int | None = None,
    folder: Path | None = None,
    origin: Provenance | None = None,
    time_limit_s: float | None = None,
) -> Benchmark:
    """Decode these drafts on these prompts, beside plain decoding: texts, steps, their replay, and tokens per second.

    drafts : by name, with predictions where they are known. Others are judged beside the one that is named "chosen";
             without it an engine's are beside the first, and those of treeopt's own decoder decode all prompts
    rounds : times that each decodes every prompt at most; by default 1, or 3 launches
    folder : of the journal, by which the same contest goes on after a kill
    origin : where the figures come from; the engine is added
    time_limit_s : seconds of decoding after which it ends, where rounds are no launches

    Where memory runs out the batch size is halved.
    """
    from treeopt.runtime.memory import with_less_memory

    entrants = {name: draft if isinstance(draft, Entrant) else Entrant(draft) for name, draft in drafts.items()}
    rounds = rounds or (FEWEST_LAUNCHES if stepper.is_launched else 1)
    limit_s = None if stepper.is_launched else time_limit_s
    entrants = {"plain": AT_ONE, **entrants}
    whole = Contest(stepper, entrants, prompts, batch_size, origin or Provenance.here(), limit_s)
    with TemporaryDirectory(prefix="treeopt-") as temporary:

        def decoded(rows: int) -> Blocks:
            return replace(whole, batch_size=rows).decoded(rounds, folder or Path(temporary))

        blocks, rows = with_less_memory(decoded, batch_size, note)
    return replace(whole, batch_size=rows).benchmark(blocks)


@dataclass(frozen=True)
class Contest:
    """Who decodes what; plain decoding is among the entrants."""

    stepper: Stepper
    entrants: Mapping[str, Entrant]
    prompts: Sequence[Prompt]
    batch_size: int = 1
    origin: Provenance = field(default_factory=Provenance)
    time_limit_s: float | None = None

    @cached_property
    def judged(self) -> str:
        """The name of the contender that decodes as the plan has it."""
        names, chosen = list(self.entrants), self.entrants.get(CHOSEN)
        if chosen is None:
            return names[1] if self.stepper.name != OURS and len(names) > 1 else CHOSEN
        decoding = chosen.draft, chosen.stepper
        return next(name for name, entrant in self.entrants.items() if (entrant.draft, entrant.stepper) == decoding)

    @cached_property
    def contenders(self) -> Mapping[str, Entrant]:
        """The entrants that decode: all, but for the chosen one where another entrant decodes the same."""
        return {name: entrant for name, entrant in self.entrants.items() if name != CHOSEN or self.judged == CHOSEN}

    @cached_property
    def rivals(self) -> set[str]:
        """Contenders with another draft than the judged one."""
        judged = self.contenders.get(self.judged)
        return {name for name, entrant in self.contenders.items() if judged and entrant.draft != judged.draft}

    def settled(self, blocks: Blocks) -> set[str]:
        """Rivals that these blocks show to be slower or faster than the judged contender, or as fast."""
        if self.stepper.is_launched:
            return set()
        ratios = {name: ratio_of(paired(blocks[self.judged], blocks[name])) for name in self.rivals}
        return {name for name, ratio in ratios.items() if ratio and ratio.is_settled}

    def is_late(self, blocks: Blocks) -> bool:
        """Whether decoding has taken its limit, or would with one more block by all."""
        seconds = sum(block.seconds or 0.0 for some in blocks.values() for block in some)
        turns = max(len(blocks["plain"]), 1)
        return self.time_limit_s is not None and seconds * (turns + 1) / turns > self.time_limit_s

    @cached_property
    def from_here(self) -> Provenance:
        """The origin, with the engine where that is another than treeopt's own decoder."""
        is_ours = self.stepper.name == OURS
        return self.origin if is_ours else replace(self.origin, engine=self.stepper.runtime)

    def decoded(self, rounds: int, folder: Path) -> Blocks:
        """The blocks of all turns, through a journal."""
        drafts = {name: entrant.draft for name, entrant in self.contenders.items()}
        self.stepper.prepare([prompt.text for prompt in self.prompts], list(drafts.values()), self.batch_size)
        key = {
            **replace(self.from_here, time=None, command=None).record,
            "rounds": rounds,
            "trees": {name: draft.record for name, draft in drafts.items()},
            "prompts": [prompt.id or prompt.text for prompt in self.prompts],
            "max_new_tokens": self.stepper.stop.max_new_tokens,
            "batch_size": self.batch_size,
        }
        journal = Journal(folder / f"batch-size-{self.batch_size}", key)
        title, total = f"Decoding with {len(drafts)} contenders", len(self.prompts) * len(drafts) * rounds
        with progress(title, total) as advance:
            blocks = interleaved(self, rounds, journal, advance)
        self.stepper.prepare([], [], 1)  # what it holds is free for reading the answers
        return blocks

    def standing(self, blocks: Blocks) -> str | None:
        """The speed of the judged contender so far, for a progress bar; None where launches tell it at the end."""
        speedup = ratio_of(paired(blocks.get(self.judged, []), blocks["plain"]))
        return None if speedup is None or self.stepper.is_launched else f"Decoding: {times(speedup)} plain"

    def turn(self, name: str, places: Sequence[int], number: int) -> list[Block]:
        """What a contender decodes of the prompts of these places, in the round of that number."""
        entrant = self.contenders[name]
        stepper = entrant.stepper or self.stepper
        blocks = stepper.decode([self.prompts[place] for place in places], entrant.draft, self.batch_size)
        for block in blocks:
            block.round, block.prompts = number, [places[i] for i in block.prompts]
        return blocks

    def benchmark(self, blocks: Blocks) -> Benchmark:
        """The contenders that were decoded, beside each other."""
        setup, first = self.stepper.setup, [block for block in blocks["plain"] if block.round == 0]
        drafts = [
            entrant.draft for entrant in self.contenders.values() if entrant.is_replayable or entrant.draft.drafter
        ]
        plain = PlainAnswers.of(setup, drafts, self.prompts, answers_of(first))
        result = Benchmark(
            contenders=tuple(self._contender(name, blocks, plain) for name in self.contenders),
            max_new_tokens=self.stepper.stop.max_new_tokens,
            provenance=self.from_here,
            judged=self.judged,
            time_limit_s=self.time_limit_s if self.is_late(blocks) and len(plain.texts) < len(self.prompts) else None,
        )
        if setup is None:
            return result
        times = [(block.seconds or 0.0, block.processor_s) for some in blocks.values() for block in some]
        return replace(
            result,
            dtype=str(setup.target.dtype).removeprefix("torch."),
            quality=None if plain.has_one_text else self._quality(setup.target, blocks, plain),
            loop_share=plain.loop_share,
            processor_share=processor_share(times) if setup.target.device.type == "cpu" else None,
        )

    def _contender(self, name: str, blocks: Blocks, plain: PlainAnswers) -> Contender:
        """Answers and steps are those of the first round; an answer is the plain one if it is in all rounds."""
        entrant, is_served = self.contenders[name], self.stepper.setup is None
        rounds = [list(some) for _, some in itertools.groupby(blocks[name], key=lambda block: block.round)]
        answers, draft = [answers_of(some) for some in rounds], _widened(entrant, blocks[name])
        steps, emitted, accepted = plain.replayed(draft, answers[0], entrant.is_replayable)
        return Contender(
            name=name,
            batch_size=self.batch_size,
            draft=draft,
            sequences=[
                plain.compared(place, [some[place] for some in answers if place in some], steps[i], emitted[i])
                for i, place in enumerate(answers[0])
            ],
            blocks=[block.timed for block in blocks[name] if block.decode_s],
            passes=None if is_served else sum(block.passes or 0 for block in rounds[0]),
            prefill_s=None if is_served else sum(block.prefill_s or 0.0 for block in blocks[name]),
            predicted_tokens_per_step=entrant.predicted,
            accepted=accepted_counts(rounds[0]),
            replayed_accepted=accepted,
            predicted_accepted=entrant.predicted_accepted,
            spread=is_served,
        )

    def _quality(self, target: Target, blocks: Blocks, plain: PlainAnswers) -> dict[str, Quality]:
        """How likely every contender's texts are to the target, and how far they are from the plain ones."""
        from treeopt.runtime.measure.quality import measure_quality
        from treeopt.runtime.memory import with_less_memory

        def judged(rows: int) -> dict[str, Quality]:
            found = {}
            for name, some in blocks.items():
                answers = answers_of([block for block in some if block.round == 0])
                found[name] = measure_quality(
                    target,
                    [self.prompts[place].text for place in answers],
                    [[*answer.text] for answer in answers.values()],
                    [[*plain.texts[place]] for place in answers],
                    conversations=[self.prompts[place].cluster for place in answers],
                    batch_size=rows,
                )
            return found

        with progress("Judging the texts", None):
            return with_less_memory(judged, self.batch_size, note)[0]


def interleaved(contest: Contest, rounds: int, journal: Journal, advance: Advance) -> Blocks:
    """Block by block, decoded by all contenders in random order in every round, but for those that stop.

    journal : the blocks of an earlier run of the same contest, and where new ones go
    """
    documents, blocks = journal.documents(), {name: list[Block]() for name in contest.contenders}
    places, always = blocks_of(contest.prompts, contest.batch_size), {"plain", AS_IT_COMES, contest.judged}
    mixed = np.random.default_rng(0).permutation(len(places)).tolist()  # the first of them are of all groups
    for n, (number, b) in enumerate(itertools.product(range(rounds), mixed)):
        settled = contest.settled(blocks)
        if n and (contest.is_late(blocks) or (settled and settled == contest.rivals)):
            break
        if n < len(documents):
            turns = typed(dict[str, list[Block]], documents[n], journal.folder)
        else:
            going = [name for name in contest.contenders if name in always or name not in settled]
            if n == len(documents) or n % len(places) == 0:
                contest.stepper.renew()
                for name in going:  # warm up
                    contest.turn(name, places[b], number)
            names = np.random.default_rng([0, number, b]).permutation(going).tolist()
            turns = {name: contest.turn(name, places[b], number) for name in names}
            journal.append(document(turns))
        for name, some in turns.items():
            blocks[name] += some
        advance(len(places[b]) * len(blocks), contest.standing(blocks))
    return blocks


def blocks_of(prompts: Sequence[Prompt], batch_size: int) -> list[list[int]]:
    """Places of the prompts that are decoded together: of one group, whole conversations."""
    wanted = block_prompts(batch_size)
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].group)
    blocks: list[list[int]] = []
    for (group, _), turns in itertools.groupby(order, key=lambda i: (prompts[i].group, prompts[i].cluster)):
        if blocks and len(blocks[-1]) < wanted and prompts[blocks[-1][0]].group == group:
            blocks[-1].extend(turns)
        else:
            blocks.append(list(turns))
    return blocks


def accepted_counts(blocks: Sequence[Block]) -> list[int]:
    """Steps that accepted 0, 1, ... guesses."""
    counted = [np.array(block.counted) for block in blocks if block.counted]
    each = [n for block in blocks for answer in block.answers for n in answer.accepted]
    counts: list[int] = (np.sum(counted, 0) if counted else np.bincount(each)).tolist()
    return counts


def _widened(entrant: Entrant, blocks: Sequence[Block]) -> Draft:
    """The entrant's draft, or the longest chain that was accepted: of options that name no draft, and of guesses that were split
    into tokens again.
    """
    draft, counted = entrant.draft, max(len(block.counted) for block in blocks)
    if counted and len(draft) == 1:
        return Tree.chain(counted - 1)
    if counted or entrant.is_replayable or draft.drafter:
        return draft
    most = max(len(accepted_counts(blocks)) - 1, *(a.prefilled - 1 for block in blocks for a in block.answers))
    return draft if most <= draft.depth else Tree.chain(most)
