"""A figure: a draft with what its steps bring and what they cost, predicted, replayed or measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from math import nan
from typing import Annotated

from pydantic import Field, GetPydanticSchema, PlainValidator

from treeopt.files.fields import Amount, NotNegative, Positive, rule
from treeopt.records.estimate import Estimate
from treeopt.trees.draft import Draft, draft_of

AnyDraft = Annotated[Draft, PlainValidator(draft_of)]
Rate = Annotated[float, Field(ge=1, allow_inf_nan=False), rule("a number of at least 1")]  # tokens per step
# Files have the numbers alone, and their errors apart.
EstimatedRate = Annotated[Estimate, GetPydanticSchema(lambda source, handler: handler.generate_schema(Rate))]
EstimatedAmount = Annotated[Estimate, GetPydanticSchema(lambda source, handler: handler.generate_schema(Amount))]
FiledErrors = dict[str, NotNegative | None]
FiledEnds = dict[str, tuple[Amount, Amount] | None]
ESTIMATES = ("tokens_per_step", "step_ms", "tokens_per_s", "speedup", "over_chosen")
SHOWN = ("size", "depth", "tokens_per_s", "speedup")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A draft with its tokens per step and the milliseconds of its step; None where no latency is known.

    plain_ms      : milliseconds of a plain decoding step at the same batch size
    rows_per_step : rows verified on average, root included; None where every step verifies as many as it may
    tokens_per_s  : tokens per second of the whole batch
    speedup       : tokens per second over those of plain decoding
    over_chosen   : throughput over that of the draft that was chosen beside it; its value is that of `over`

    Of tokens_per_s, speedup and over_chosen the errors alone are given: their values follow from the other numbers. Files have
    all errors under ``stderr`` and ``interval95``, by the names of the numbers.

    >>> from treeopt.trees.tree import Tree
    >>> figure = Figure(draft=Tree.chain(2), batch_size=4, tokens_per_step=Estimate(1.8), step_ms=Estimate(6.0), plain_ms=5.0)
    >>> print(figure.size, figure.tokens_per_s, figure.speedup)
    3 1200.00 1.50
    """

    draft: AnyDraft
    batch_size: Positive
    tokens_per_step: EstimatedRate
    step_ms: EstimatedAmount | None = None
    plain_ms: Amount | None = None
    rows_per_step: Rate | None = None
    tokens_per_s: EstimatedAmount | None = None
    speedup: EstimatedAmount | None = None
    over_chosen: EstimatedAmount | None = field(default=None, compare=False)
    stderr: InitVar[FiledErrors | None] = None
    interval95: InitVar[FiledEnds | None] = None

    def __post_init__(self, stderr: FiledErrors | None, interval95: FiledEnds | None) -> None:
        values = {name: getattr(self, name) for name in ESTIMATES}
        values["tokens_per_s"] = self.step_ms and 1e3 * self.batch_size * self.tokens_per_step / self.step_ms
        values["speedup"] = self.overhead and self.tokens_per_step / self.overhead
        if interval95 and interval95.get("over_chosen"):
            values["over_chosen"] = nan
        for name, value in values.items():
            known = getattr(self, name)
            if not isinstance(known, Estimate):
                known = Estimate(nan, (stderr or {}).get(name), *((interval95 or {}).get(name) or ()))
            object.__setattr__(self, name, None if value is None else replace(known, value=float(value)))

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

    @property
    def record(self) -> dict[str, object]:
        """The figure as files have it; what follows from its numbers stands under "shown"."""
        known = {name: estimate for name in ESTIMATES if (estimate := getattr(self, name)) is not None}
        parts = {**vars(self), "draft": self.draft.record, "size": self.size, "depth": self.depth}
        parts |= {name: estimate.value for name, estimate in known.items()}
        parts["stderr"] = {name: estimate.stderr for name, estimate in known.items() if estimate.stderr is not None}
        parts["interval95"] = {name: [*estimate.ends] for name, estimate in known.items() if estimate.low is not None}
        parts["shown"] = {name: part for name in SHOWN if (part := parts.pop(name)) is not None}
        del parts["over_chosen"]
        return {name: part for name, part in parts.items() if part not in (None, {})}


def fastest(figures: Sequence[Figure]) -> Figure | None:
    """The figure with the most tokens per second (per step where no latency is known) by estimate; None of none."""
    return max(figures, key=lambda figure: figure.rate, default=None)
