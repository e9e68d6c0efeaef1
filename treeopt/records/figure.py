"""A figure: a draft with what its steps bring and what they cost, predicted, replayed or measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator

from treeopt.files.fields import Amount, Positive, rule
from treeopt.records.estimate import Estimate, Estimated
from treeopt.trees.draft import Draft, draft_of


def with_draft(record: Any) -> Any:
    """An object of a file, which has the keys of its draft among its own, with the draft beside them."""
    return {**record, "draft": draft_of(record)} if isinstance(record, dict) else record


FLAT = BeforeValidator(with_draft)  # annotates whatever has a draft
AnyDraft = Annotated[Draft, PlainValidator(draft_of)]
Rate = Annotated[float, Field(ge=1, allow_inf_nan=False), rule("a number of at least 1")]  # tokens per step
EstimatedRate = Annotated[Estimate, Estimated(Rate)]
EstimatedAmount = Annotated[Estimate, Estimated(Amount)]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A draft with its tokens per step and the milliseconds of its step.

    batch_size      : sequences decoded at once
    tokens_per_step : at least 1, at most one more than the draft is deep
    step_ms         : milliseconds of its step; left out where no latency is known
    plain_ms        : milliseconds of a plain decoding step at the same batch size
    tokens_per_s    : of the whole batch: 1000 × batch_size × tokens_per_step ÷ step_ms
    speedup         : over plain decoding: tokens_per_step × plain_ms ÷ step_ms
    over_chosen     : throughput over that of the draft that was chosen beside it
    rows_per_step   : rows verified on average; left out where every step verifies as many as it may

    Of tokens_per_s and speedup the errors alone are read: their values follow from the other numbers.

    >>> from treeopt.trees.tree import Tree
    >>> figure = Figure(draft=Tree.chain(2), batch_size=4, tokens_per_step=Estimate(1.8), step_ms=Estimate(6.0), plain_ms=5.0)
    >>> print(figure.size, figure.tokens_per_s, figure.speedup)
    3 1200.00 1.50
    """

    batch_size: Positive
    draft: AnyDraft
    tokens_per_step: EstimatedRate
    step_ms: EstimatedAmount | None = None
    plain_ms: Amount | None = None
    tokens_per_s: EstimatedAmount | None = None
    speedup: EstimatedAmount | None = None
    over_chosen: EstimatedAmount | None = field(default=None, compare=False)
    rows_per_step: Rate | None = None

    def __post_init__(self) -> None:
        values = {
            "tokens_per_step": self.tokens_per_step,
            "step_ms": self.step_ms,
            "tokens_per_s": self.step_ms and 1e3 * self.batch_size * self.tokens_per_step / self.step_ms,
            "speedup": self.overhead and self.tokens_per_step / self.overhead,
        }
        for name, value in values.items():
            known = getattr(self, name)
            if value is not None:
                value = replace(known, value=float(value)) if isinstance(known, Estimate) else Estimate(float(value))
            object.__setattr__(self, name, value)

    @property
    def size(self) -> int:
        """Rows verified per sequence and step, root included."""
        return len(self.draft)

    @property
    def depth(self) -> int:
        """Guesses that a step accepts at most."""
        return self.draft.depth

    @property
    def overhead(self) -> float | None:
        """Latency of a step over that of a plain one (Medusa, appendix B)."""
        return None if self.step_ms is None or self.plain_ms is None else self.step_ms / self.plain_ms

    @property
    def break_even(self) -> float | None:
        """What a row more may cost before the draft is slower than plain decoding, as a share of a plain step; None without rows."""
        more = (self.rows_per_step or self.size) - 1
        return (self.tokens_per_step - 1) / more if more > 0 else None

    @property
    def rate(self) -> Estimate:
        """What drafts are compared by: tokens per second, or per step where no latency is known."""
        return self.tokens_per_s or self.tokens_per_step

    def over(self, chosen: Figure) -> Estimate:
        """Its throughput over that of the draft that was chosen beside it."""
        ratio = self.rate / chosen.rate
        return Estimate(ratio) if self.over_chosen is None else replace(self.over_chosen, value=ratio)


FigureOfFile = Annotated[Figure, FLAT]


def fastest(figures: Sequence[Figure]) -> Figure | None:
    """The figure with the most tokens per second (per step where no latency is known) by estimate; None of none."""
    return max(figures, key=lambda figure: figure.rate, default=None)
