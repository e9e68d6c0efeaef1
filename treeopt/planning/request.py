"""What a plan is asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treeopt.errors import InvalidInput
from treeopt.records.plan import PlannedEngine
from treeopt.trees.draft import DynamicLimits
from treeopt.trees.shapes import Limits

LIMITS, DYNAMIC = Limits(), DynamicLimits(marginals=True)


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned, checked once; the names are those of the options.

    limits        what the trees may be
    batch_sizes   one tree for each; a mapping to shares of the time asks for a single tree, that with the most
                  tokens in all
    context       tokens that a sequence has, of the profile's range (None: as in the trace)
    measured_only consider only sizes that were timed at that batch size
    engine        what the limits stand for, for the record
    takes         shape of the trees that the engine takes, one of `SHAPES`: grown trees of another are left out
    lengths       take chains of these lengths alone, for a drafter whose guesses depend on the width of its block; empty for all
    dynamic       what dynamic trees may be beside those limits; None for an engine that takes none
    """

    limits: Limits = LIMITS
    batch_sizes: Sequence[int] | Mapping[int, float] = (1,)
    context: int | None = None
    measured_only: bool = False
    engine: PlannedEngine | None = None
    takes: str = "sibling-closed"
    lengths: tuple[int, ...] = ()
    dynamic: DynamicLimits | None = DYNAMIC

    def __post_init__(self) -> None:
        for size, share in (self.mix or {}).items():
            if not 0 < share < float("inf"):
                raise InvalidInput(
                    f"A mix needs a positive share of the time for every batch size, but {size} has {share}."
                )
        if not self.sizes or self.sizes[0] < 1:
            raise InvalidInput(f"Batch sizes must be at least 1, but got {self.sizes}.")

    @property
    def sizes(self) -> list[int]:
        return sorted(set(self.batch_sizes))

    @property
    def mix(self) -> dict[int, float] | None:
        """Batch size -> share of the time, where one tree is asked for."""
        return dict(self.batch_sizes) if isinstance(self.batch_sizes, Mapping) else None


REQUEST = PlanRequest()
