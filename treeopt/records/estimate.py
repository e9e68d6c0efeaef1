"""An estimate: a number with what is known of its error."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from treeopt.files.fields import Amount, NotNegative
from treeopt.records.bootstrap import interval95, stderr

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

Z95 = 1.959964  # half of a 95 % interval in standard errors
NEGLIGIBLE = 0.005  # share of a speed that does not matter


@dataclass(frozen=True, eq=False)
class Estimate(float):
    """A number with its standard error and the ends of its 95 % interval, each None where it is not known.

    It counts as the number: it is compared, formatted and computed with as a float.

    >>> speedup = Estimate(1.2, low=1.1, high=1.3)
    >>> print(speedup, Estimate(2.09, 0.03), 10 * speedup, speedup > 1, sep="; ")
    1.20 [1.10, 1.30]; 2.09 ±0.03; 12.0; True
    """

    value: float
    stderr: float | None = None
    low: float | None = None
    high: float | None = None

    def __new__(cls, value: float, *errors: float | None, **named_errors: float | None) -> Self:
        return super().__new__(cls, value)

    @classmethod
    def of_draws(cls, value: float, draws: NDArray[np.float64], n: int) -> Self:
        """An estimate by its bootstrap draws over ``n`` things."""
        return cls(float(value), stderr(draws, n), *interval95(draws, n))

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of its 95 % interval, else those by its standard error; both are the value where neither is known."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        half = Z95 * (self.stderr or 0.0)
        return self.value - half, self.value + half

    @property
    def log_stderr(self) -> float | None:
        """Standard error of its logarithm, by its interval; None where there is none."""
        if self.low is None or self.high is None:
            return None
        return log(self.high / self.low) / (2 * Z95)

    @property
    def is_settled(self) -> bool:
        """Whether its interval leaves out 1, or everything beyond `NEGLIGIBLE` of 1.

        >>> Estimate(1.2, low=1.1, high=1.3).is_settled, Estimate(1.2, low=0.9, high=1.5).is_settled, Estimate(1.2).is_settled
        (True, False, False)
        """
        if self.low is None or self.high is None:
            return False
        return not self.low <= 1 <= self.high or 1 - NEGLIGIBLE < self.low <= self.high < 1 + NEGLIGIBLE

    @property
    def record(self) -> dict[str, float]:
        """The object that files have for it, without what is not known."""
        return {name: float(number) for name, number in vars(self).items() if number is not None}

    def __str__(self) -> str:
        if self.low is not None:
            return f"{self:.2f} [{self.low:.2f}, {self.high:.2f}]"
        return f"{self:.2f}" + ("" if self.stderr is None else f" ±{self.stderr:.2f}")


@dataclass(frozen=True)
class Estimated:
    """Annotates an estimate of a file: the object ``{"value", "stderr", "low", "high"}``, or the value alone.

    number : type of the value · ends : type of the ends of the interval
    """

    number: Any
    ends: Any = Amount

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        types = {"value": self.number, "stderr": NotNegative, "low": self.ends, "high": self.ends}
        fields = {
            name: core_schema.typed_dict_field(handler.generate_schema(kind), required=name == "value")
            for name, kind in types.items()
        }
        parts = core_schema.no_info_before_validator_function(_parts, core_schema.typed_dict_schema(fields))
        return core_schema.no_info_after_validator_function(lambda known: Estimate(**known), parts)


def _parts(record: Any) -> Any:
    """The parts of an estimate that are known."""
    if not isinstance(record, dict):
        return {"value": record}
    return {name: part for name, part in record.items() if part is not None}
