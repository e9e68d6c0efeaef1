"""What real decoding measured, contender by contender: ``bench.json``.

steps    decoding steps summed over rows; a step of a batch of b live rows counts b times
passes   forwards of the target, prefills included
block    prompts that were decoded together with one contender; contenders are interleaved by block
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.files import storage
from treeopt.records.bootstrap import BOOTSTRAPS, SEED, conversation_draws, drawn_rates, interval95, stderr
from treeopt.records.display import Drawn
from treeopt.records.origins import Acceptance, check_origins

FEWEST_BLOCKS = 5  # below it no interval is given


@dataclass(frozen=True, kw_only=True)
class Block:
    """Timed steps (all rows live) of one contender on one block of prompts in one round."""

    round: int
    prompts: list[int]
    tokens: int
    steps: int
    decode_s: float
    group: str = ""  # a block's prompts are all of one group


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a contender decoded for one prompt, beside the plain answer and the replay."""

    id: str  # of the conversation
    steps: int
    tokens: int
    identical: bool
    replayed_steps: int | None = None
    group: str = ""
    first_difference: int | None = None  # place of the first token that differs
    logit_gap: float | None = None  # between the two tokens there, at the target


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
        tokens = np.bincount(which, [answer.tokens - 1 for answer in answers])
        steps = np.bincount(which, [answer.steps for answer in answers])
        return stderr(drawn_rates(tokens, steps, conversation_draws(len(names))), len(names))


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio of two contenders' tokens per second, with its 95 % interval (None for too few blocks)."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.value:.2f}{interval}"


@dataclass(frozen=True, kw_only=True)
class Benchmark(Drawn):
    """All contenders of one run; they decoded the same prompts, interleaved.

    prompts    : "held out", or "trace" for those of the calibration
    inputs     : file -> sha256 of what the contenders were predicted from
    quality    : contender -> its texts as judged by the target, where they depend on the tree
    loop_share : share of the plain answers that ended in a loop
    skipped    : prompts or turns that were left out, and why
    """

    contenders: tuple[Contender, ...]
    dtype: str = "unknown"
    rounds: int = 1
    prompts: str | None = None
    inputs: dict[str, str] | None = None
    quality: dict[str, Quality] | None = None
    max_new_tokens: int | None = None
    loop_share: float | None = None
    skipped: list[dict[str, Any]] | None = None
    provenance: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.contenders:
            raise InvalidInput("A benchmark must have contenders.")

    def contender(self, name: str) -> Contender:
        for contender in self.contenders:
            if contender.name == name:
                return contender
        names = ", ".join(c.name for c in self.contenders)
        raise InvalidInput(f"The benchmark has the contenders {names}, but {name!r} was asked.")

    @property
    def groups(self) -> list[str]:
        """Groups of the prompts, in order; empty where they are not grouped."""
        names = dict.fromkeys(block.group for block in self.contenders[0].blocks)
        return list(names) if any(names) else []

    def tokens_per_step(self, name: str, group: str) -> tuple[float, int]:
        """Tokens per step of a contender on the answers of a group, and how many they are."""
        answers = [answer for answer in self.contender(name).sequences if answer.group == group]
        steps = sum(answer.steps for answer in answers)
        return (sum(a.tokens - 1 for a in answers) / steps if steps else 1.0), len(answers)

    def speedup(self, name: str, baseline: str = "plain", *, group: str | None = None) -> Ratio | None:
        """Tokens per second over the baseline's, paired by block and round, bootstrapped over blocks.

        None where nothing was timed (every block had too few prompts for a full batch).
        """
        pairs = self._paired(name, baseline, group)
        if not len(pairs):
            return None
        return _with_interval(_ratio(pairs.sum(0)), _ratio(conversation_draws(len(pairs)) @ pairs), len(pairs))

    def overhead(self, name: str) -> Ratio | None:
        """Latency of a step over that of a plain one (Medusa, appendix B): the median over blocks.

        A block's plain steps were timed next to its others, so a disturbed block is one ratio of many.
        """
        pairs = self._paired(name, "plain", per="steps")
        if not len(pairs):
            return None
        ratios = 1 / _ratio(pairs)
        picks = np.random.default_rng(SEED).integers(0, len(ratios), (BOOTSTRAPS, len(ratios)))
        return _with_interval(np.median(ratios), np.median(ratios[picks], axis=1), len(ratios))

    def _paired(self, name: str, baseline: str, group: str | None = None, *, per: str = "tokens") -> Any:
        """(blocks, 4) tokens (or steps) and seconds of the contender and of the baseline, rounds added up."""
        sums: dict[tuple[int, ...], list[float]] = {}
        for place, which in enumerate((name, baseline)):
            for block in self.contender(which).blocks:
                if group not in (None, block.group):
                    continue
                row = sums.setdefault(tuple(block.prompts), [0.0] * 4)
                row[2 * place] += getattr(block, per)
                row[2 * place + 1] += block.decode_s
        return np.array([row for row in sums.values() if row[1] > 0 and row[3] > 0])

    @property
    def acceptance(self) -> Acceptance:
        """The rule that was decoded by; empty where the file does not say."""
        known: Acceptance = (self.provenance or {}).get("acceptance") or Acceptance()
        return known

    def document(self) -> dict[str, Any]:
        """What ``bench.json`` says; keys of the run that are not known are left out."""
        known = {key: value for key, value in asdict(self).items() if value is not None}
        for contender in known["contenders"]:
            contender["predicted"] = contender["predicted"] if any(contender["predicted"].values()) else {}
        return {"schema": storage.schema("bench"), **known}

    def save(self, path: str | Path) -> None:
        storage.write_json(path, "bench", self.document())

    @classmethod
    def load(cls, path: str | Path) -> Benchmark:
        document = storage.read_json(path, "bench", required=("contenders",))
        check_origins(document, path)
        return storage.typed(cls, document, path)


def _with_interval(value: Any, samples: Any, blocks: int) -> Ratio:
    """A ratio, and its 95 % interval by bootstrap samples over so many blocks."""
    low, high = interval95(samples, blocks) if blocks >= FEWEST_BLOCKS else (None, None)
    return Ratio(value=float(value), low=low, high=high)


def _ratio(sums: Any) -> Any:
    """(..., 4) tokens, seconds, baseline's tokens, baseline's seconds to the ratio of rates."""
    return sums[..., 0] / sums[..., 1] / (sums[..., 2] / sums[..., 3])
