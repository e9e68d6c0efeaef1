"""A contest: drafts decode the same prompts, in turn, through a journal, and become the contenders of a benchmark.

turn   a block of prompts in one round by one contender; contenders have a block one after the other, in random order
round  all prompts by every contender that has not stopped, since it loses by far (`slower`)
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

from treeopt.files.journal import Advance, Journal
from treeopt.files.notes import note
from treeopt.files.storage import document, typed
from treeopt.latency.rounds import processor_share
from treeopt.pipeline.entrants import AT_ONE, Entrant
from treeopt.pipeline.plain import PlainAnswers, answers_of
from treeopt.records.benchmark import AS_IT_COMES, FEWEST_LAUNCHES, LOOKS, Benchmark, loses_by_far, paired
from treeopt.records.contender import Block, Contender, Predicted, Prompt, Quality
from treeopt.records.origins import OURS, Provenance
from treeopt.report.terminal import progress
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
    ranks: int = 1,
    folder: Path | None = None,
    origin: Provenance | None = None,
) -> Benchmark:
    """Decode these drafts on these prompts, beside plain decoding: texts, steps, their replay, and tokens per second.

    drafts : by name, with predictions where they are known. One that is named "chosen" stops others that lose by far to it
    rounds : times that each decodes every prompt; by default 1, or 3 launches
    ranks  : that are recorded of the plain answers, at least
    folder : of the journal, by which the same contest goes on after a kill
    origin : where the figures come from; the engine is added

    Where memory runs out the batch size is halved.
    """
    from treeopt.runtime.memory import with_less_memory

    entrants = {name: draft if isinstance(draft, Entrant) else Entrant(draft) for name, draft in drafts.items()}
    rounds = rounds or (FEWEST_LAUNCHES if stepper.is_launched else 1)
    whole = Contest(stepper, {"plain": AT_ONE, **entrants}, prompts, batch_size, ranks, origin or Provenance.here())
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
    ranks: int = 1
    origin: Provenance = field(default_factory=Provenance)

    @cached_property
    def from_here(self) -> Provenance:
        """The origin, with the engine where that is another than treeopt's own decoder."""
        is_ours = self.stepper.name == OURS
        return self.origin if is_ours else replace(self.origin, engine=self.stepper.runtime)

    def decoded(self, rounds: int, folder: Path) -> Blocks:
        """The blocks of all turns, through a journal."""
        drafts = {name: entrant.draft for name, entrant in self.entrants.items()}
        self.stepper.prepare([prompt.text for prompt in self.prompts], list(drafts.values()), self.batch_size)
        key = {
            **replace(self.from_here, time=None, command=None).record,
            "rounds": rounds,
            "trees": {name: draft.record for name, draft in drafts.items()},
            "prompts": [prompt.id or prompt.text for prompt in self.prompts],
            "max_new_tokens": self.stepper.stop.max_new_tokens,
            "batch_size": self.batch_size,
            "looks": LOOKS,
        }
        journal = Journal(folder / f"batch-size-{self.batch_size}", key)
        title, total = f"Decoding with {len(drafts)} contenders", len(self.prompts) * len(drafts) * rounds
        with progress(title, total) as advance:
            blocks = interleaved(self, rounds, journal, advance)
        self.stepper.prepare([], [], 1)  # what it holds is free for reading the answers
        return blocks

    def turn(self, name: str, places: Sequence[int], number: int) -> list[Block]:
        """What a contender decodes of the prompts of these places, in the round of that number."""
        entrant = self.entrants[name]
        stepper = entrant.stepper or self.stepper
        blocks = stepper.decode([self.prompts[place] for place in places], entrant.draft, self.batch_size)
        for block in blocks:
            block.round, block.prompts = number, [places[i] for i in block.prompts]
        return blocks

    def benchmark(self, blocks: Blocks) -> Benchmark:
        """The contenders that were decoded, beside each other."""
        setup, first = self.stepper.setup, [block for block in blocks["plain"] if block.round == 0]
        drafts = [entrant.draft for entrant in self.entrants.values() if entrant.is_replayable or entrant.draft.drafter]
        plain = PlainAnswers.of(setup, drafts, self.prompts, answers_of(first), self.ranks)
        result = Benchmark(
            contenders=tuple(self._contender(name, blocks, plain) for name in self.entrants),
            max_new_tokens=self.stepper.stop.max_new_tokens,
            provenance=self.from_here,
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
        entrant, is_served = self.entrants[name], self.stepper.setup is None
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
            predicted=Predicted.of(entrant.predicted),
            accepted=accepted_counts(rounds[0]),
            replayed_accepted=accepted,
            predicted_accepted=entrant.predicted_accepted,
            spread=is_served,
            stopped=len(blocks[name]) < len(blocks["plain"]),
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
    documents, blocks = journal.documents(), {name: list[Block]() for name in contest.entrants}
    drafts, going = {name: entrant.draft for name, entrant in contest.entrants.items()}, list(contest.entrants)
    places = blocks_of(contest.prompts, contest.batch_size)
    mixed = np.random.default_rng(0).permutation(len(places)).tolist()  # the first of them are of all groups
    order = list(itertools.product(range(rounds), mixed))
    looks = {len(order) // part for part in LOOKS}
    for n, (number, b) in enumerate(order):
        if n in looks:
            lost = slower(blocks)
            going = [name for name in going if name not in lost or drafts[name] == drafts["chosen"]]
        if n < len(documents):
            turns = typed(dict[str, list[Block]], documents[n], journal.folder)
        else:
            if n == len(documents) or n % len(places) == 0:
                contest.stepper.renew()
                for name in going:  # warm up
                    contest.turn(name, places[b], number)
            names = np.random.default_rng([0, number, b]).permutation(going).tolist()
            turns = {name: contest.turn(name, places[b], number) for name in names}
            journal.append(document(turns))
        for name, some in turns.items():
            blocks[name] += some
        advance(len(places[b]) * len(drafts))
    return blocks


def blocks_of(prompts: Sequence[Prompt], batch_size: int) -> list[list[int]]:
    """Places of the prompts that are decoded together: of one group, whole conversations.

    Only steps with all rows live are timed, so a block is long enough to refill them.
    """
    wanted = 1 if batch_size == 1 else 2 * batch_size
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].group)
    blocks: list[list[int]] = []
    for (group, _), turns in itertools.groupby(order, key=lambda i: (prompts[i].group, prompts[i].cluster)):
        if blocks and len(blocks[-1]) < wanted and prompts[blocks[-1][0]].group == group:
            blocks[-1].extend(turns)
        else:
            blocks.append(list(turns))
    return blocks


def slower(blocks: Blocks) -> set[str]:
    """Contenders that are shown to be slower than the chosen draft by what was decoded; never plain decoding."""
    chosen = blocks.get("chosen", [])
    rivals = {name: some for name, some in blocks.items() if name not in ("chosen", "plain", AS_IT_COMES)}
    return {name for name, some in rivals.items() if loses_by_far(paired(some, chosen))}


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
