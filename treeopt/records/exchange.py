"""Options of what comes from other tools and goes to them: servers, tables of settings, files that are imported, exports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from treeopt.files.options import Options, option
from treeopt.records.options import NOISE

Beyond = Literal["off", "last"]  # what a schedule does above the largest batch size that was searched
DRAFTER = "what makes the drafts, where counters or files do not say it: eagle3, draft-model, ngram, mtp"


@dataclass(frozen=True, kw_only=True)
class Watching(Options):
    """How a server is watched."""

    heading: ClassVar[str] = "A server that is up"
    minutes: float = option("how long to watch, with each number of ``clients``", 5.0, above=0, common=True)
    plain: str | None = option(
        "a server without a drafter to be watched beside it, or watched.json of one that was watched before",
        common=True,
    )
    drafter: str | None = option(DRAFTER, common=True)
    drive: str | None = option(
        "file of prompts to send, in closed loops; by default nothing is sent but GETs", metavar="FILE", common=True
    )
    clients: Sequence[int] = option(
        "how many prompts are sent at once, one number after another", (1,), least=1, most=4096, common=True
    )
    beyond: Beyond = option(
        "what a schedule does above the largest load that was watched: off decodes plainly, last goes on", "off"
    )
    overwrite: bool = option(
        "forget what the run holds, its trace and calibration too; by default what is watched is added to what was",
        False,
    )

    @property
    def plain_url(self) -> str | None:
        """The server without a drafter, where it is up."""
        return self.plain if self.plain and "://" in self.plain else None


@dataclass(frozen=True)
class TableOptions(Options):
    """How settings that were run are decided among."""

    heading: ClassVar[str] = "A table of settings"
    columns: Sequence[str] = option("what a column of a table means, as NAME=MEANING", (), flag="--column", common=True)
    lengths: Sequence[int] = option(
        "guesses per step that could be run too, beside those in the files", (), least=0, common=True
    )
    noise: float | None = option(NOISE, above=0, most=1000)
    tpot_limit: float | None = option("most milliseconds per token of a request", above=0, common=True)
    engine: str | None = option(
        "the engine to start; by default the one that the files name", flag="--for", common=True
    )
    drafter: str | None = option(DRAFTER, common=True)


@dataclass(frozen=True)
class ImportOptions(Options):
    """What files of other tools mean, where they do not say it."""

    kind: str | None = option(
        "what FILE holds: a name from above; by default found from the file", flag="--from", common=True
    )
    rates: Literal["survival", "conditional", "marginal"] | None = option(
        "what rates by position without counts are. Of survival a guess was accepted with all before it, as engines print them; of "
        "conditional where all before it were; of marginal whatever those were; by default survival where one rate a head never "
        "rises, else marginal",
        common=True,
    )
    trials: int | None = option(
        "trials of every head, or number of drafts, if the file has shares only", least=1, common=True
    )
    tokens: int | None = option(
        "tokens that were generated meanwhile, if the file does not say it. The first of each answer is left out; they tell how many "
        "steps had no draft",
        least=1,
        common=True,
    )
    drafter: str | None = option(
        "what made the drafts, where the file does not say it: eagle3, ngram, mtp ... Others are medusa, hydra, eagle, draft-model, "
        "suffix, dflash, dspark and redrafter",
        common=True,
    )
    columns: Sequence[str] = option(
        "what a column of a table of settings means, as NAME=MEANING", (), flag="--column", common=True
    )
    overwrite: bool = option("replace what the run has measured or imported", False, common=True)


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """Which part of a plan is exported, and how."""

    batch_size: int | None = option(
        "only of this batch size; by default all of the plan's, where the engine takes a schedule", least=1, common=True
    )
    method: str | None = option("one of the engine's ways to speculate; by default the plan's", common=True)
    beyond: Beyond = option(
        "what a schedule does above the largest batch size that was planned: off, it does not speculate; last, it goes on as there",
        "off",
        common=True,
    )
