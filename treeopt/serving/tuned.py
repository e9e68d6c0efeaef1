"""How a server is watched, and what came of it: what its drafts counted, its pace, and what could not be known."""

from collections.abc import Sequence
from dataclasses import dataclass

from treeopt.files.parameters import Count, Positive
from treeopt.files.storage import document, schema
from treeopt.records.calibration import Calibration
from treeopt.records.estimate import Estimate
from treeopt.serving.watch import Pace


@dataclass(frozen=True, kw_only=True)
class Watching:
    """How a server is watched.

    minutes   : how long to watch, with each number of ``clients``
    plain     : a server without a drafter to be watched beside it, or scrapes.jsonl of one that was watched before
    drafter   : what makes the drafts, which counters do not say: eagle3, draft-model, ngram, mtp
    drive     : file of prompts to send, in closed loops; by default nothing is sent but GETs
    clients   : how many prompts are sent at once, one number after another
    overwrite : replace the run's trace, calibration and recordings
    """

    minutes: Positive = 5
    plain: str | None = None
    drafter: str | None = None
    drive: str | None = None
    clients: Sequence[Count] = (1,)
    overwrite: bool = False

    @property
    def plain_url(self) -> str | None:
        """The server without a drafter, where it is up."""
        return self.plain if self.plain and "://" in self.plain else None


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
