"""What came of watching a server: what its drafts counted, its pace, and what could not be known."""

from __future__ import annotations

from dataclasses import dataclass

from treeopt.files.storage import schema
from treeopt.records.calibration import Calibration
from treeopt.records.figure import Ratio
from treeopt.serving.watch import Pace


@dataclass(frozen=True, kw_only=True, eq=False)
class Tuned:
    """What a server did while it was watched.

    paces, plain : by running requests, of the server and of one without a drafter; empty where they are not known
    over_plain   : how many times plain's throughput it has, over the batch sizes of both
    command      : that starts it as planned; None where nothing can be planned
    unknown      : what could not be known, in sentences
    """

    engine: str
    model: str
    paces: dict[int, Pace]
    plain: dict[int, Pace]
    calibration: Calibration | None
    over_plain: Ratio | None
    command: str | None
    unknown: tuple[str, ...]

    @property
    def tokens_per_step(self) -> float | None:
        """Of all batch sizes together; by the counters of drafts alone where the engine does not count its tokens."""
        if self.paces:
            return sum(pace.sums[0] for pace in self.paces.values()) / sum(pace.sums[1] for pace in self.paces.values())
        return None if self.calibration is None else 1 + sum(self.survival)

    @property
    def survival(self) -> list[float]:
        return list(self.calibration.meta["survival"]) if self.calibration is not None else []

    def document(self) -> dict[str, object]:
        """What --json prints."""
        ratio = self.over_plain
        by_batch = [
            {"batch_size": size, "tokens_per_step": pace.tokens_per_step, "step_ms": pace.step_ms, "token_ms": pace.token_ms,
             "plain_step_ms": self.plain[size].step_ms if size in self.plain else None}
            for size, pace in self.paces.items()
        ]  # fmt: skip
        return {
            "schema": schema("tuned"), "engine": self.engine, "model": self.model, "tokens_per_step": self.tokens_per_step,
            "over_plain": ratio and {"value": ratio.value, "interval95": [ratio.low, ratio.high]}, "batch_sizes": by_batch,
            "survival": self.survival, "command": self.command, "unknown": list(self.unknown),
        }  # fmt: skip
