"""What came of watching a server: what its drafts counted, its pace, and what could not be known."""

from dataclasses import dataclass

from treeopt.files.storage import document, schema
from treeopt.records.calibration import Calibration
from treeopt.records.estimate import Estimate
from treeopt.serving.watch import Pace


@dataclass(frozen=True, kw_only=True, eq=False)
class Tuned:
    """What a server did while it was watched.

    tokens_per_step : of all its steps; None where it does not count its tokens, nor drafts by position
    paces, plain    : by running requests, of the server and of one without a drafter
    over_plain      : how many times plain's throughput it has, over the batch sizes of both
    command         : that starts it as planned; None where nothing can be planned
    unknown         : what could not be known, in sentences
    """

    engine: str
    model: str
    tokens_per_step: float | None = None
    paces: dict[int, Pace]
    plain: dict[int, Pace]
    over_plain: Estimate | None = None
    calibration: Calibration | None = None
    command: str | None = None
    unknown: tuple[str, ...]

    @property
    def survival(self) -> list[float]:
        return [] if self.calibration is None else list(self.calibration.meta["survival"])

    def document(self) -> dict[str, object]:
        figures = ("tokens_per_step", "step_ms", "token_ms")
        sizes = [{"batch_size": n, **{name: getattr(one, name) for name in figures}} for n, one in self.paces.items()]
        plain = [{"batch_size": n, "step_ms": one.step_ms} for n, one in self.plain.items()]
        names = ("engine", "model", "tokens_per_step", "survival", "command", "unknown")
        known = {name: getattr(self, name) for name in names}
        known["over_plain"] = document(self.over_plain)
        return {"schema": schema("tuned"), **known, "paces": sizes, "plain": plain}
