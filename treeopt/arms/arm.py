"""An arm: a setting of speculation that was run, or could be, and what it gave. A run's arms are its `arms.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from treeopt.files.fields import Amount, Count, NotNegative, Positive, Share
from treeopt.files.storage import document, read_json, typed, write_json

OFF = "none"  # drafter of an arm without speculation
Unit = Literal["all", "request", "ratio"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A setting that was run with its figures, or one that could be run, without.

    model           : target, with what else its arms have in common
    dataset         : prompts that were answered
    drafter         : "none" without speculation; where the engine chooses the length, the drafter and its policy
    k               : guesses per step, 0 without speculation; None where the engine chooses, or it is not known
    concurrency     : requests at once
    about           : what else is known of how it was run ("temperature": "0"); arms that differ here are not compared
    tokens_per_s    : in the unit of the source
    unit            : of tokens_per_s: of all requests together, of one request, or a ratio to decoding without speculation
    tpot_ms         : mean milliseconds per token of one request
    tpot_p99_ms     : their 99th percentile
    tokens_per_step : with the bonus token
    positions       : share of the drafts whose guess 1, 2, ... was accepted with all before it (survival)
    repeats         : runs whose mean the figures are
    stderr          : standard error of the logarithm of tokens_per_s between launches; None where not known
    prompts         : answered in one run
    seconds         : that one run took
    source          : file, and line or table, for messages
    """

    model: str = ""
    dataset: str = ""
    drafter: str = OFF
    k: Count | None = 0
    concurrency: Positive = 1
    about: Mapping[str, str] = field(default_factory=dict)
    tokens_per_s: Amount | None = None
    unit: Unit = "all"
    tpot_ms: Amount | None = None
    tpot_p99_ms: Amount | None = None
    tokens_per_step: Amount | None = None
    positions: tuple[Share, ...] = ()
    repeats: Positive = 1
    stderr: NotNegative | None = None
    prompts: Positive | None = None
    seconds: Amount | None = None
    source: str = ""

    @property
    def setting(self) -> tuple[str, int | None]:
        """Drafter and length: what is chosen."""
        return self.drafter, self.k

    @property
    def cell(self) -> tuple[str, str, int]:
        """Model, data set and concurrency: what it is chosen for."""
        return self.model, self.dataset, self.concurrency

    @property
    def emitted(self) -> float | None:
        """Tokens of a step with the bonus token, by its rates by position where they are not given themselves."""
        if self.k == 0:
            return 1.0
        return self.tokens_per_step or (1 + sum(self.positions) if self.positions else None)

    @property
    def name(self) -> str:
        """
        >>> Arm().name, Arm(drafter="MTP", k=3).name, Arm(drafter="MTP adaptive", k=None).name
        ('off', 'MTP 3', 'MTP adaptive')
        """
        if self.k == 0:
            return "off"
        return self.drafter if self.k is None else f"{self.drafter} {self.k}"


@dataclass(frozen=True, kw_only=True)
class Arms:
    """All arms of a run: arms.json.

    arms     : a list of settings
    meanings : what each column was taken as, by its name in the source: a sentence
    notes    : what a reader of the figures should know
    """

    arms: tuple[Arm, ...]
    meanings: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def save(self, path: str | Path) -> None:
        write_json(path, "arms", document(self))

    @classmethod
    def load(cls, path: str | Path) -> Arms:
        return typed(cls, read_json(path, "arms"), path)
