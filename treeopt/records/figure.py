"""A figure: a draft with what its steps bring and what they cost, predicted, replayed or measured.

It keeps the factors and what is known of their noise; the rest follows, and is written for readers under "shown".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import Annotated

from pydantic import Field, PlainSerializer, PlainValidator

from treeopt.files.fields import Amount, NotNegative, Positive, rule
from treeopt.trees.draft import Draft, draft_of

AnyDraft = Annotated[Draft, PlainValidator(draft_of), PlainSerializer(lambda draft: draft.record)]
Rate = Annotated[float, Field(ge=1, allow_inf_nan=False), rule("a number of at least 1")]  # tokens per step


Interval = tuple[Amount, Amount]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio of two rates with its 95 % interval, None where too little is known for one.

    >>> print(Ratio(value=1.2, low=1.1, high=1.3))
    1.20 [1.10, 1.30]
    """

    value: Amount
    low: Amount | None = None
    high: Amount | None = None

    @classmethod
    def of(cls, value: float, ends: Sequence[float] | None) -> Ratio:
        low, high = ends or (None, None)
        return cls(value=value, low=low, high=high)

    @property
    def log_stderr(self) -> float | None:
        """Standard error of its logarithm; None where there is no interval."""
        if self.low is None or self.high is None:
            return None
        return log(self.high / self.low) / (2 * 1.959964)

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.value:.2f}{interval}"


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Standard errors of a figure; None for unknown ones."""

    tokens_per_step: NotNegative | None = None
    step_ms: NotNegative | None = None
    tokens_per_s: NotNegative | None = None
    speedup: NotNegative | None = None


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """95 % intervals of a figure; None for unknown ones.

    over_chosen : of its throughput over that of the draft which was chosen beside it
    """

    tokens_per_step: Interval | None = None
    tokens_per_s: Interval | None = None
    speedup: Interval | None = None
    over_chosen: Interval | None = None


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A draft with its tokens per step and the milliseconds of its step; None where no latency is known.

    plain_ms      : of a plain decoding step at the same batch size
    rows_per_step : rows verified on average, root included, of a draft that often has fewer than it may have; None where it
                    always has all
    replay_us     : processor time of a step of the replay, prompts included [µs], which is no cost of the engine's

    >>> from treeopt.trees.tree import Tree
    >>> figure = Figure(draft=Tree.chain(2), batch_size=4, tokens_per_step=1.8, step_ms=6.0, plain_ms=5.0)
    >>> figure.size, figure.tokens_per_s, figure.speedup
    (3, 1200.0, 1.5)
    """

    draft: AnyDraft
    batch_size: Positive
    tokens_per_step: Rate
    step_ms: Amount | None = None
    plain_ms: Amount | None = None
    rows_per_step: Rate | None = None
    replay_us: Amount | None = field(default=None, compare=False)
    stderr: Errors = Errors()
    interval95: Intervals = Intervals()

    @property
    def size(self) -> int:
        """Rows verified per sequence and step, root included."""
        return len(self.draft)

    @property
    def depth(self) -> int:
        """Guesses that a step accepts at most."""
        return self.draft.depth

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of the whole batch; None where no latency is known."""
        return None if self.step_ms is None else 1e3 * self.batch_size * self.tokens_per_step / self.step_ms

    @property
    def overhead(self) -> float | None:
        """Latency of a step over that of a plain one (Medusa, appendix B)."""
        return None if self.step_ms is None or self.plain_ms is None else self.step_ms / self.plain_ms

    @property
    def speedup(self) -> float | None:
        """Tokens per second over those of plain decoding; None where a latency is not known."""
        return None if self.overhead is None else self.tokens_per_step / self.overhead

    @property
    def break_even(self) -> float | None:
        """What a row more may cost before the draft is slower than plain decoding, as a share of a plain step; None without rows."""
        more = (self.rows_per_step or self.size) - 1
        return (self.tokens_per_step - 1) / more if more > 0 else None

    @property
    def rate(self) -> float:
        """What drafts are compared by: tokens per second, or per step where no latency is known."""
        return self.tokens_per_s or self.tokens_per_step

    @property
    def speedup_ratio(self) -> Ratio | None:
        """The speedup with its 95 % interval; None where a latency is not known."""
        return None if self.speedup is None else Ratio.of(self.speedup, self.interval95.speedup)

    def over(self, chosen: Figure) -> Ratio:
        """Its throughput over that of the draft that was chosen, with the interval that is known of it."""
        return Ratio.of(self.rate / chosen.rate, self.interval95.over_chosen)

    @property
    def shown(self) -> dict[str, object]:
        known = {name: getattr(self, name) for name in ("size", "depth", "tokens_per_s", "speedup")}
        return {name: value for name, value in known.items() if value is not None}


def fastest(figures: Sequence[Figure]) -> Figure | None:
    """The figure with the most tokens per second (per step where no latency is known) by estimate; None of none."""
    return max(figures, key=lambda figure: figure.rate, default=None)
