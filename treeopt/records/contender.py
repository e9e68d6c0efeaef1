"""What real decoding with one tree measured: a contender of ``bench.json``, its answers and its timed blocks.

steps    decoding steps summed over rows; a step of a batch of b live rows counts b times
passes   forwards of the target, prefills included
block    prompts that were decoded together with one contender; contenders are interleaved by block
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.records.agreement import SUMS, agree, at_place, rounding, shares, within
from treeopt.records.bootstrap import conversation_draws, drawn_rates, stderr
from treeopt.trees.dynamic import DynamicTree
from treeopt.trees.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Block:
    """Timed steps (all rows live) of one contender on one block of prompts in one round."""

    round: int
    prompts: list[int]
    tokens: int
    steps: int
    decode_s: float
    group: str = ""  # a block's prompts are all of one group

    def check(self, depth: int) -> None:
        """Raise InvalidInput where a tree of that depth cannot have emitted so much."""
        within(0, round=self.round, steps=self.steps, decode_s=self.decode_s)
        within(self.steps, self.steps * (1 + depth), tokens=self.tokens)
        if (self.decode_s > 0) != (self.steps > 0):
            raise InvalidInput(f"{self.steps} timed steps cannot take {self.decode_s:.6g} s (decode_s).")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a contender decoded for one prompt, beside the plain answer and the replay.

    prefilled : tokens that the pass over the prompt emitted, which is no step; engines may verify guesses in it
    """

    id: str  # of the conversation
    steps: int
    tokens: int
    identical: bool
    replayed_steps: int | None = None
    group: str = ""
    first_difference: int | None = None  # place of the first token that differs
    logit_gap: float | None = None  # between the two tokens there, at the target
    prefilled: int = 1

    @property
    def emitted(self) -> int:
        """Tokens that the steps emitted."""
        return self.tokens - self.prefilled

    def check(self, depth: int, max_new_tokens: int | None) -> None:
        """Raise InvalidInput where a tree of that depth cannot have given such an answer."""
        within(0, steps=self.steps, replayed_steps=self.replayed_steps, logit_gap=self.logit_gap)
        within(1, 1 + depth, prefilled=self.prefilled)
        within(self.prefilled + self.steps, self.prefilled + self.steps * (1 + depth), tokens=self.tokens)
        within(1, inf if max_new_tokens is None else max_new_tokens, tokens=self.tokens)
        within(0, self.tokens, first_difference=self.first_difference)
        if self.identical and self.first_difference is not None:
            raise InvalidInput(f"an identical answer cannot differ at token {self.first_difference}.")
        if self.identical and self.replayed_steps is not None:
            within(self.replayed_steps, self.replayed_steps * (1 + depth), **{"tokens - prefilled": self.emitted})


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Tokens per step, predicted in three ways; None where unknown.

    product  : as if guesses were right or wrong independently of each other
    joint    : averaged over all states
    replayed : as decoding goes, with its standard error
    """

    product: float | None = None
    joint: float | None = None
    replayed: float | None = None
    replayed_stderr: float | None = None


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What the target thinks of a contender's texts, and how far they are from the reference: plain answers."""

    log_likelihood_nats_per_token: float
    log_likelihood_nats_per_token_stderr: float
    difference_nats_per_token: float
    difference_nats_per_token_stderr: float
    changed_answers_share: float
    changed_tokens_share: float
    answers: int | None = None
    tokens: int | None = None
    reference_tokens: int | None = None
    reference_log_likelihood_nats_per_token: float | None = None
    reference_log_likelihood_nats_per_token_stderr: float | None = None

    def check(self, contender: Contender) -> None:
        """Raise InvalidInput where the figures contradict one another, or the contender's."""
        within(0, 1, changed_answers_share=self.changed_answers_share, changed_tokens_share=self.changed_tokens_share)
        within(0, reference_tokens=self.reference_tokens, **{k: v for k, v in vars(self).items() if "stderr" in k})
        ours, theirs = self.log_likelihood_nats_per_token, self.reference_log_likelihood_nats_per_token
        if theirs is not None:
            slack = SUMS + sum(map(rounding, (ours, theirs, self.difference_nats_per_token)))
            follows = ours - theirs
            within(follows - slack, follows + slack, difference_nats_per_token=self.difference_nats_per_token)
        within(-inf, 0.0, log_likelihood_nats_per_token=ours, reference_log_likelihood_nats_per_token=theirs)
        agree("answers", self.answers, contender.compared, "the contender's")
        agree(
            "tokens",
            self.tokens,
            contender.tokens + contender.compared,
            "the contender's, and the first of each answer",
        )
        if contender.compared:
            share = 1 - contender.identical / contender.compared
            slack = SUMS + rounding(self.changed_answers_share)
            within(share - slack, share + slack, changed_answers_share=self.changed_answers_share)


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """A tree drafted anew at every step: its levels, the nodes expanded on each, and the rows to choose from, where several."""

    levels: int
    topk: int
    rows: list[int] = field(default_factory=list)

    def check(self, size: int) -> None:
        """Raise InvalidInput where there is no such tree whose most rows are ``size``."""
        DynamicTree(self.levels, self.topk, size)
        if self.rows:
            check_rows(self.rows, size)


def check_rows(rows: Sequence[int], size: int) -> None:
    """Raise InvalidInput unless rows to choose from rise from 2 or more to ``size``."""
    if not rows or list(rows) != sorted(set(rows)) or rows[0] < 2 or rows[-1] != size:
        raise InvalidInput(f"rows must rise from 2 or more to the size, {size}, but are {rows[:8]}.")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One tree, or plain decoding (size 1), on all prompts."""

    name: str
    batch_size: int
    size: int
    medusa_choices: list[list[int]]
    steps: int
    passes: int
    tokens: int
    tokens_per_step: float
    tokens_per_s: float | None
    identical: int
    compared: int
    decode_s: list[float] = field(default_factory=list)  # per round
    prefill_s: float | None = None
    predicted: Predicted = field(default_factory=Predicted)
    predicted_tokens_per_step: float | None = None  # the replayed one
    replayed_steps: int | None = None
    replayed_tokens_per_step: float | None = None
    accepted: list[int] = field(default_factory=list)  # steps that emitted 0, 1, ... guesses
    replayed_accepted: list[int] = field(default_factory=list)  # the same by replay
    predicted_accepted: list[float] = field(default_factory=list)  # share of steps, before this run
    sequences: list[Answer] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    stopped_after: int | None = None  # blocks, of one that lost by far: its figures are of these alone
    dynamic: Drafted | None = None  # how its trees are drafted at each step; without choices, and ``size`` is the most

    @property
    def depth(self) -> int:
        """Of the deepest guess."""
        return self.dynamic.levels if self.dynamic else Tree.from_choices(self.medusa_choices).depth

    @property
    def stderr(self) -> float | None:
        """Standard error of tokens_per_step over conversations; None for fewer than two."""
        return self.stderr_of(None)

    def stderr_of(self, group: str | None) -> float | None:
        """The same on the answers of a group alone."""
        answers = [answer for answer in self.sequences if group in (None, answer.group)]
        names = {name: i for i, name in enumerate(dict.fromkeys(answer.id for answer in answers))}
        if len(names) < 2:
            return None
        which = [names[answer.id] for answer in answers]
        tokens = np.bincount(which, [answer.emitted for answer in answers])
        steps = np.bincount(which, [answer.steps for answer in answers])
        return stderr(drawn_rates(tokens, steps, conversation_draws(len(names))), len(names))

    def check(self, source: str | Path, where: str, max_new_tokens: int | None) -> None:
        """Raise InvalidInput, with the place in the file, where the numbers contradict one another."""
        with at_place(source, where):
            if self.dynamic is None:
                agree("size", self.size, len(Tree.from_choices(self.medusa_choices)), "the tree's")
            else:
                self.dynamic.check(self.size)
                if self.medusa_choices:
                    raise InvalidInput("medusa_choices must be empty where trees are drafted anew, but are not.")
            depth = self.depth
            within(1, batch_size=self.batch_size)
            within(0, compared=self.compared, prefill_s=self.prefill_s, replayed_steps=self.replayed_steps)
            within(0, self.compared, identical=self.identical)
            within(self.steps, self.steps * (1 + depth), tokens=self.tokens)
            within(self.steps / self.batch_size, self.steps + self.compared, passes=self.passes)
            rate = self.tokens / self.steps if self.steps else 1.0
            agree("tokens_per_step", self.tokens_per_step, rate, "tokens / steps")
            within(0, tokens_per_s=self.tokens_per_s)
            within(0, replayed_stderr=self.predicted.replayed_stderr)
            for name in ("product", "joint", "replayed"):
                within(1, self.size, **{f"predicted.{name}": getattr(self.predicted, name)})
            if (replayed := self.predicted.replayed) is not None:
                agree(
                    "predicted_tokens_per_step",
                    self.predicted_tokens_per_step,
                    replayed,
                    "predicted.replayed",
                    replayed,
                )
            self._check_accepted()
        for i, answer in enumerate(self.sequences):
            with at_place(source, f"{where}.sequences.{i}"):
                answer.check(depth, max_new_tokens)
        for i, block in enumerate(self.blocks):
            with at_place(source, f"{where}.blocks.{i}"):
                block.check(depth)
        with at_place(source, where):
            self._check_sums()

    def _check_accepted(self) -> None:
        """The counts of steps by their guesses; a step that ends an answer may emit a guess and no token behind it."""
        shares("predicted_accepted", self.predicted_accepted)
        for name, counts, steps in (
            ("accepted", self.accepted, self.steps),
            ("replayed_accepted", self.replayed_accepted, self.replayed_steps),
        ):
            within(0, **{name: min(counts, default=0)})
            if counts and steps is not None:
                agree(f"the sum of {name}", sum(counts), steps, "the steps")
        most = sum((1 + n) * count for n, count in enumerate(self.accepted))
        if self.accepted:
            within(most - self.compared, most, tokens=self.tokens)
        if self.replayed_accepted and self.replayed_tokens_per_step is not None:
            steps = sum(self.replayed_accepted)
            most = sum((1 + n) * count for n, count in enumerate(self.replayed_accepted))
            slack = rounding(self.replayed_tokens_per_step)
            rates = ((most - self.compared) / steps - slack, most / steps + slack) if steps else (1.0, 1.0)
            within(*rates, replayed_tokens_per_step=self.replayed_tokens_per_step)

    def _check_sums(self) -> None:
        """What the answers and the timed blocks add up to."""
        if answers := self.sequences:
            agree("compared", self.compared, len(answers), "the sequences")
            agree("identical", self.identical, sum(a.identical for a in answers), "those of the sequences")
            agree("steps", self.steps, sum(a.steps for a in answers), "those of the sequences")
            agree("tokens", self.tokens, sum(a.emitted for a in answers), "those of the sequences but the prefilled")
            replayed = [a.replayed_steps for a in answers if a.replayed_steps is not None]
            if len(replayed) == len(answers):
                agree("replayed_steps", self.replayed_steps, sum(replayed), "those of the sequences")
        agree("stopped_after", self.stopped_after, len(self.blocks), "the blocks")
        if not self.blocks:
            return
        seconds: dict[int, float] = {}
        for block in self.blocks:
            seconds[block.round] = seconds.get(block.round, 0.0) + block.decode_s
        if self.decode_s:
            agree("the rounds of decode_s", len(self.decode_s), len(seconds), "those of the blocks")
            for number, (said, follows) in enumerate(zip(self.decode_s, seconds.values(), strict=True)):
                agree(f"decode_s of round {number}", said, follows, "the blocks'", follows)
        if total := sum(seconds.values()):
            tokens = sum(block.tokens for block in self.blocks)
            agree("tokens_per_s", self.tokens_per_s, tokens / total, "tokens / decode_s of the blocks", total)
        if not answers:
            return
        decoded = sorted({i for block in self.blocks for i in block.prompts})
        agree("the prompts of the blocks", len(decoded), len(answers), "the sequences")
        answer_to = dict(zip(decoded, answers, strict=True))
        for block in self.blocks:
            here = [answer_to[i] for i in block.prompts]
            if block.round == 0:  # other rounds may differ by rounding
                steps, tokens = sum(a.steps for a in here), sum(a.emitted for a in here)
                within(steps if self.batch_size == 1 else 0, steps, **{"steps of a block": block.steps})
                within(tokens if self.batch_size == 1 else 0, tokens, **{"tokens of a block": block.tokens})
