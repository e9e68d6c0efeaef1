"""Acceptance of the run's drafter as other tools take it in place of the drafter: from a trace or from counts, without a model."""

from __future__ import annotations

from functools import singledispatch
from pathlib import Path
from typing import Any

import numpy as np

from treeopt.engines import acceptance
from treeopt.engines.base import Written
from treeopt.errors import InvalidInput, quoted
from treeopt.growth.replay import chain_survival
from treeopt.records.calibration import ENGINE_LOG
from treeopt.records.drafters import COUNTED
from treeopt.records.inputs import broken, read_accuracies
from treeopt.records.rules import marked_rule, option_of, rule_of
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.trees.tree import MOST_DEPTH

Told = tuple[dict[str, acceptance.Survivals], str]  # survival by group of prompts, of all of them first, and a note
ALL = "all"
SYNTHETIC = (
    "Where guesses are accepted by chance, the drafter still runs and texts mean nothing: ask for answers of a fixed length "
    "(ignore_eos), of a drafter that always drafts. Steps are drawn alike, though real requests are easy or hard."
)


def acceptance_files(run: RunDirectory) -> Written:
    """What every tool takes, by the run's trace, or else by its calibration; InvalidInput where that is not of chains."""
    path, record = read_accuracies(run)
    rule, kind = record.meta.get("acceptance") or {}, (record.meta.get("drafter") or {}).get("kind") or ""
    if rule_of(rule) == "typical":
        why = f"Tools take chains that a first miss ends, but {path} holds for {marked_rule(rule)}, which accepts otherwise."
        raise InvalidInput(f"{why} Calibrate with `acceptance=sample`.")
    groups, said = survivals(record, path)
    if fault := broken(record):
        raise InvalidInput(f"{fault} Nothing is written of {path}.")
    longest, about = len(groups[ALL]), f"Drafter: {quoted(kind or None)}. Guesses accepted by: {option_of(rule)}."
    notes = [said, *filter(None, [COUNTED[kind].note if kind in COUNTED else ""])]
    for form in (form for form in acceptance.FORMS if form.most and longest > form.most):
        notes.append(f"{form.title} takes no more than {form.most} guesses: its file ends there, not at {longest}.")
    return Written(files=acceptance.write(groups, about), command="", notes=(*notes, SYNTHETIC))


@singledispatch
def survivals(calibration: Any, path: Path) -> Told:
    """Survival of the longest chain, cut for those that are shorter; of groups it is not known."""
    survival, info = calibration.survival.tolist(), calibration.meta
    if info.get("source") == ENGINE_LOG:
        lengths = ", ".join(info.get("draft_lengths") or {}) or len(survival)
        note = f"Survival was counted by an engine with drafts of {lengths}: of other lengths it is an estimate."
    elif info.get("survival"):
        note = f"{path} has survival over all states, but decoding jumps over easy ones: with a trace it is lower, and right."
    else:
        note = f"{path} has no survival: it is worked out as if guesses were independent of one another."
    chains = range(1, min(len(survival), MOST_DEPTH) + 1)
    return {ALL: [calibration.of_length(k).survival[:k].tolist() for k in chains]}, note


@survivals.register
def _(trace: RankTrace, path: Path) -> Told:
    """Survival at the steps that decoding takes with each length, which visits other states the longer the chain is."""
    owns = {f"group {name}": np.flatnonzero(trace.group == g) for g, name in enumerate(trace.group_names)}
    parts = {ALL: trace, **{name: trace.select(own) for name, own in owns.items() if len(own)}}
    depth, groups = min(trace.num_heads, MOST_DEPTH), dict[str, acceptance.Survivals]()
    groups |= {name: chain_survival(part, depth) for name, part in parts.items() if part.has_step.any()}
    if not groups:
        raise InvalidInput(f"{path} has no step of decoding: its answers are of one token each.")
    return groups, "Survival of each length is that of the steps which decoding takes with it, replayed from the trace."
