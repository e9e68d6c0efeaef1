"""What real decoding with one draft measured: a contender of ``bench.json``, its answers and its timed blocks.

steps    decoding steps summed over rows; a step of a batch of b live rows counts b times
passes   forwards of the target, prefills included
block    prompts that were decoded together with one contender; contenders are interleaved by block
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np

from treeopt.files.fields import Count, Finite, NotNegative, Positive, Share
from treeopt.records.bootstrap import conversation_draws, drawn_rates, stderr
from treeopt.records.estimate import Estimate, Estimated
from treeopt.records.figure import AnyDraft, EstimatedRate


@dataclass(frozen=True)
class Prompt:
    """What contenders are asked, and the conversation that it is of.

    text    : tokens; a server is asked in text or messages, too
    cluster : number of the conversation
    limit   : most tokens of the answer, where it is the prompt's own
    """

    text: Any
    id: str = ""
    group: str = ""
    cluster: int = 0
    limit: int | None = None


@dataclass(kw_only=True)
class Answer:
    """What a contender decoded for one prompt, beside the plain answer and the replay.

    id               : hash of the conversation
    steps            : decoding steps
    tokens           : of the answer
    identical        : whether it is the plain answer
    replayed_steps   : by replay of the plain answer; left out where the text depends on the tree
    replayed_tokens  : that the replayed steps emit, where the answer is not the plain one
    group            : of the prompt
    first_difference : place of the first token that differs from the plain answer
    logit_gap        : between the two tokens there, at the target
    prefilled        : tokens that the pass over the prompt emitted, which is no step; engines may verify guesses
                       in it

    Until it is compared, which no file has but a journal:

    text     : its tokens; of a server its text
    accepted : guesses that each step accepted, where that is known
    """

    id: str  # of the conversation
    steps: Count
    tokens: Count
    identical: bool
    replayed_steps: Count | None = None
    replayed_tokens: Count | None = None
    group: str = ""
    first_difference: Count | None = None  # place of the first token that differs
    logit_gap: NotNegative | None = None  # between the two tokens there, at the target
    prefilled: Count = 1
    text: list[int] | str = field(default_factory=list)
    accepted: list[Count] = field(default_factory=list)

    @property
    def emitted(self) -> int:
        """Tokens that the steps emitted."""
        return self.tokens - self.prefilled


@dataclass(kw_only=True)
class Block:
    """Timed steps (all rows live) of one contender on one block of prompts in one round.

    round    : from 0
    prompts  : their places
    tokens   : that the steps emitted
    steps    : decoding steps
    decode_s : seconds of the steps
    group    : a block's prompts are all of one group

    Until it is part of a benchmark, which no file has but a journal:

    answers              : to the prompts
    counted              : steps that accepted 0, 1, ... guesses, where a server counts them for all answers together
    passes               : forwards of the target that emitted something
    prefill_s            : of passes that read prompts
    seconds, processor_s : of everything together, and of this process
    """

    round: Count
    prompts: list[int]
    tokens: Count
    steps: Count
    decode_s: NotNegative
    group: str = ""  # a block's prompts are all of one group
    answers: list[Answer] = field(default_factory=list)
    counted: list[Count] = field(default_factory=list)
    passes: Count | None = None
    prefill_s: NotNegative | None = None
    seconds: NotNegative | None = None
    processor_s: NotNegative | None = None

    @property
    def timed(self) -> "Block":
        """What a file has of it."""
        return replace(self, answers=[], counted=[], passes=None, prefill_s=None, seconds=None, processor_s=None)


Nats = Annotated[Estimate, Estimated(Finite, Finite)]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What the target thinks of a contender's texts, and how far they are from the reference: plain answers.

    log_likelihood_nats_per_token           : of the texts, by the target at temperature 1
    reference_log_likelihood_nats_per_token : of the reference
    difference_nats_per_token               : log-likelihood beyond that of the reference, paired by conversation;
                                              its value follows from the two
    changed_answers_share                   : answers that differ from the plain ones at all
    changed_tokens_share                    : tokens outside the blocks that both texts have in order, over the
                                              tokens of both
    answers                                 : that were judged
    tokens                                  : of the texts
    reference_tokens                        : of the reference
    """

    log_likelihood_nats_per_token: Nats
    reference_log_likelihood_nats_per_token: Nats
    difference_nats_per_token: Nats
    changed_answers_share: Share
    changed_tokens_share: Share
    answers: Count | None = None
    tokens: Count | None = None
    reference_tokens: Count | None = None

    def __post_init__(self) -> None:
        value = float(self.log_likelihood_nats_per_token - self.reference_log_likelihood_nats_per_token)
        object.__setattr__(self, "difference_nats_per_token", replace(self.difference_nats_per_token, value=value))


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One draft, or plain decoding (a lone root), on all prompts; what it answered and what was timed.

    name                      : who it is
    batch_size                : sequences decoded at once
    passes                    : forwards of the target in one round, prefills included
    prefill_s                 : seconds in prefills, all rounds
    predicted_tokens_per_step : before this run
    accepted                  : steps that emitted 0, 1, ... guesses
    replayed_accepted         : likewise, of the replay; left out where the text depends on the tree
    predicted_accepted        : share of the steps, before this run
    spread                    : whether a server's sum of steps is spread over the answers, whose steps are not
                                known; then tokens per step have no error
    sequences                 : every answer
    blocks                    : timed steps; speedups are paired by block
    """

    first_keys = (
        *("name", "batch_size", "draft", "tokens_per_step", "tokens_per_s", "steps", "tokens", "identical", "compared"),
        *("replayed_steps", "replayed_tokens_per_step"),
    )
    name: str
    batch_size: Positive
    draft: AnyDraft
    passes: Count | None = None
    prefill_s: NotNegative | None = None
    predicted_tokens_per_step: EstimatedRate | None = None
    accepted: list[Count] = field(default_factory=list)
    replayed_accepted: list[Count] = field(default_factory=list)
    predicted_accepted: list[Share] = field(default_factory=list)
    spread: bool = False
    sequences: list[Answer]
    blocks: list[Block]

    @property
    def size(self) -> int:
        """Rows verified per sequence and step, root included."""
        return len(self.draft)

    @cached_property
    def steps(self) -> int:
        """Decoding steps, summed over answers."""
        return sum(answer.steps for answer in self.sequences)

    @cached_property
    def tokens(self) -> int:
        """Tokens that the steps emitted."""
        return sum(answer.emitted for answer in self.sequences)

    @cached_property
    def tokens_per_step(self) -> Estimate:
        """Tokens per step over all answers; 1 where there was no step."""
        return self.rate_of()

    @property
    def tokens_per_s(self) -> Estimate | None:
        """Tokens per second of the timed blocks; None where nothing was timed."""
        seconds = sum(block.decode_s for block in self.blocks)
        return Estimate(sum(block.tokens for block in self.blocks) / seconds) if seconds else None

    @property
    def token_ms(self) -> tuple[float, float] | None:
        """Time per token of a sequence, the median over the timed answers and the 95th percentile; None where none was timed."""
        each = [1e3 * self.batch_size * b.decode_s / b.tokens for b in self.blocks if b.tokens]
        return (float(np.median(each)), float(np.quantile(each, 0.95))) if each else None

    @property
    def identical(self) -> int:
        """Answers that are the plain ones."""
        return sum(answer.identical for answer in self.sequences)

    @property
    def compared(self) -> int:
        """Answers that were compared with the plain ones."""
        return len(self.sequences)

    @property
    def replayed_steps(self) -> int | None:
        """Steps that replay takes for all answers; None where some cannot be replayed."""
        steps = [answer.replayed_steps for answer in self.sequences if answer.replayed_steps is not None]
        return sum(steps) if self.sequences and len(steps) == len(self.sequences) else None

    @property
    def replayed_tokens_per_step(self) -> float | None:
        """Tokens per step by replay of the plain answers; None where some cannot be replayed."""
        if self.replayed_steps is None:
            return None
        tokens = sum(a.emitted if a.replayed_tokens is None else a.replayed_tokens for a in self.sequences)
        return tokens / self.replayed_steps if self.replayed_steps else 1.0

    def rate_of(self, group: str | None = None) -> Estimate:
        """Tokens per step on the answers of a group, or on all; 1 where there was no step.

        The error is over conversations; None for fewer than two, and where steps are spread.
        """
        answers = [answer for answer in self.sequences if group in (None, answer.group)]
        emitted, taken = [answer.emitted for answer in answers], [answer.steps for answer in answers]
        rate = sum(emitted) / sum(taken) if sum(taken) else 1.0
        places = {name: place for place, name in enumerate(dict.fromkeys(answer.id for answer in answers))}
        if (n := len(places)) < 2 or self.spread:
            return Estimate(rate)
        which = [places[answer.id] for answer in answers]
        tokens, steps = np.bincount(which, emitted), np.bincount(which, taken)
        return Estimate(rate, stderr(drawn_rates(tokens, steps, conversation_draws(n)), n))
