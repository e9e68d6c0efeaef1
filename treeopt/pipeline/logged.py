"""Requests of a log as prompts, which an engine decodes to prove a plan of drafters that copy text: which, and what replay says.

Their settings were sought on other conversations. An answer has the request's own limit, and goes on through loops, as a
server's does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from treeopt.errors import InvalidInput, Unsupported
from treeopt.pipeline.copied import halves, tried_on
from treeopt.pipeline.entrants import Entrant, plain_and_chosen
from treeopt.planning.entries import USUAL
from treeopt.planning.table import Candidate
from treeopt.records.benchmark import AS_IT_COMES
from treeopt.records.contender import Prompt
from treeopt.records.plan import ROOT, Plan, PlanEntry
from treeopt.records.requestlog import RequestLog
from treeopt.text.engines import KINDS, text_drafter
from treeopt.text.replay import State, replay
from treeopt.text.settings import Settings, drafters_of, usual
from treeopt.trees.draft import CopiedText, Draft
from treeopt.trees.tree import IntArray

if TYPE_CHECKING:
    from treeopt.runtime.stepper import Stepper

COPIED_ROWS = (2, 3, 5, 7, 9, 13, 17)  # of lookups that are timed in an engine


def some_requests(
    log: RequestLog, wanted: int, max_new_tokens: int | None, context: int, *, half: int = 1, in_a_row: int = 1
) -> RequestLog:
    """So many requests of conversations that settings were not sought on, or were (``half`` 0), of every group its share, in order.

    max_new_tokens : longest answer; else its limit is the request's own, or as long as the answer was, where the context has room
    in_a_row       : at most so many of a conversation follow each other, as what a server keeps of one helps the next
    """
    is_asked = (log.prompt_tokens + 1 < context) & (log.answer_tokens > 1)
    places = np.flatnonzero(np.isin(halves(log)[log.clusters], (half, 2)) & is_asked)
    if not len(places):
        raise InvalidInput(
            f"The run's log must have requests that fit into the model's context of {context} tokens, but has none."
        )
    keys = (places, log.clusters[places]) if log.group is None else (places, log.clusters[places], log.group[places])
    ordered, rng = places[np.lexsort(keys)], np.random.default_rng(0)
    chosen = log.select(np.sort(_drawn(ordered, log.clusters[ordered], min(wanted, len(places)), in_a_row, rng)))
    limits = {  # of prompts that are alike one
        tuple(one.prompt): min(one.limit or len(one.answer), max_new_tokens or context, context - len(one.prompt))
        for one in chosen.requests()
    }
    cut = [(one, limits[tuple(one.prompt)]) for one in chosen.requests()]
    cut_log = RequestLog.of(one._replace(answer=one.answer[:limit], limit=limit) for one, limit in cut)
    return replace(cut_log, group=chosen.group, cluster=chosen.cluster, meta=chosen.meta)


def _drawn(places: IntArray, clusters: IntArray, wanted: int, in_a_row: int, rng: np.random.Generator) -> IntArray:
    """So many of the places, in rows from random starts in even parts; an even spacing may meet first turns alone."""
    found, parts = set[int](), np.array_split(np.arange(len(places)), -(-wanted // in_a_row))
    while len(found) < wanted:
        for part in parts:
            if free := [i for i in part.tolist() if i not in found]:
                start = int(rng.choice(free))
                row = np.flatnonzero(clusters[start : start + in_a_row] == clusters[start]) + start
                found |= {*[i for i in row.tolist() if i not in found][: wanted - len(found)]}
    return places[sorted(found)]


def tried_drafts(plan: Plan, entry: PlanEntry, log: RequestLog, state: State = "cold") -> dict[str, Candidate]:
    """What replay says of the planned setting and of the engine's usual one on these requests.

    state : what a drafter keeps from request to request
    """
    name = str((plan.drafter or {}).get("id"))
    settings: dict[str, Settings] = {}
    if entry.speculates:
        settings["chosen"] = tuple(sorted(entry.draft.options.items()))
    if usual(name) not in settings.values():
        settings[USUAL] = usual(name)
    every = [np.ones(log.num_conversations, bool)]
    return {who: tried_on(log, (name, options, state, None), every)[0] for who, options in settings.items()}


def copied_entrants(entry: PlanEntry, tried: Mapping[str, Candidate], engine: Stepper) -> dict[str, Entrant]:
    """Plain decoding, and the settings that were tried; what a drafter keeps of other requests is not replayed."""
    entrants = plain_and_chosen(entry)
    for name, setting in tried.items():
        draft = entry.draft if name == "chosen" else setting.draft
        assert setting.accepted is not None
        shares = (setting.accepted / max(setting.accepted.sum(), 1)).tolist()
        entrants[name] = Entrant(draft, setting.rates.estimate, shares, not KINDS[draft.drafter].memory)
    return entrants | ({AS_IT_COMES: Entrant(ROOT, stepper=engine.twin)} if engine.as_it_comes else {})


def groups_of(log: RequestLog) -> list[str]:
    """The group of each request; empty where they are not grouped."""
    return [""] * log.num_sequences if log.group is None else [(log.group_names or [""])[i] for i in log.group]


def prompts_of(log: RequestLog) -> list[Prompt]:
    """The requests as prompts, in the order of the log."""
    return [
        Prompt(tuple(one.prompt), f"conversation {cluster}", group, cluster, one.limit)
        for one, group, cluster in zip(log.requests(), groups_of(log), log.clusters.tolist(), strict=True)
    ]


def copied_steps(log: RequestLog, draft: Draft, is_replayable: bool) -> tuple[list[int | None], list[int], list[int]]:
    """Steps of each answer by replay, None where there is none, and the tokens that they emit; all steps by accepted guesses."""
    plain = (log.answer_tokens - 1).tolist()
    if not draft.drafter:
        return plain, plain, [sum(plain)]
    if not is_replayable:
        return [None] * len(plain), plain, []
    found = replay(log.requests(), lambda: text_drafter(draft.drafter, draft.options), state="cold")
    emitted = [int(found.emitted[begin:end].sum()) for begin, end in pairwise(found.starts)]
    return np.diff(found.starts).tolist(), emitted, np.bincount(found.emitted - 1).tolist()


def lookups(engine: str, budget: int) -> list[Draft]:
    """Lookups that verify all of their rows whatever they find, which an engine that pads can be timed with; else Unsupported."""
    name = drafters_of(engine.partition("-")[0])[0]
    if "fill" not in KINDS[name].fixed:
        raise Unsupported(
            f"`engine={engine}` verifies what its drafter finds, so steps of so many rows cannot be timed at will: pass a table "
            "of its latencies as `from_csv`."
        )
    length = next(key for key, option in KINDS[name].options.items() if option.parameter == "length")
    return [CopiedText.of(name, {**dict(usual(name)), length: n - 1}, n, 1) for n in COPIED_ROWS if n <= budget]
