"""An outline of a session: all that a command needs to know of it, without its weights.

A worker opens the session and hands out its outline, so that the machine that gives the command needs neither the memory
nor the device that the model takes. The prompts travel whole, since they are read once, and the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import torch

from treeopt.files.provenance import Provenance
from treeopt.runtime.prompts.sets import PromptSet
from treeopt.runtime.session import Session, open_session
from treeopt.runtime.settings import SessionSettings

TARGET = ("name", "revision", "device", "dtype", "tokenizer", "eos_ids", "vocab_size", "context")
DRAFTER = ("num_heads", "draft_vocab_size", "has_probabilities")
RULE = ("record",)


@dataclass(frozen=True)
class Outline(Session):
    """A session that workers hold: of target, drafter and rule it has the plain attributes alone.

    known : where its figures come from, as the worker tells it
    """

    known: Provenance = field(default_factory=Provenance)

    def provenance(self, seed: int | None = None) -> Provenance:
        here = Provenance()
        return replace(self.known, seed=seed, command=here.command, time=here.time)


def open_outline(source: dict[str, Any], threads: int) -> Outline:
    """Open a session, and let go of it but for its outline."""
    session = open_in_worker(source, threads)
    known = {f.name: getattr(session, f.name) for f in fields(session)}
    plain = {"target": TARGET, "drafter": DRAFTER, "acceptance": RULE}
    known |= {part: SimpleNamespace(**{n: getattr(known[part], n) for n in names}) for part, names in plain.items()}
    return Outline(**known, known=session.provenance())


def open_in_worker(source: dict[str, Any], threads: int, prompts: PromptSet | None = None) -> Session:
    """The session of the options, for these prompts where they are known already."""
    torch.set_num_threads(threads)
    return replace(open_session(SessionSettings(**source), prompts), source=source)
