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

from treeopt.engines.copied import KEPT
from treeopt.errors import InvalidInput
from treeopt.pipeline.copied import halves, tried_on
from treeopt.pipeline.entrants import PLAIN, Entrant, plain_and_chosen
from treeopt.planning.copied import USUAL, Tried, costs_of
from treeopt.planning.request import PlanRequest
from treeopt.records.benchmark import AS_IT_COMES
from treeopt.records.contender import Predicted
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.profile import LatencyProfile
from treeopt.records.requestlog import RequestLog
from treeopt.report.terminal import note
from treeopt.text.engines import text_drafter
from treeopt.text.replay import replay
from treeopt.text.settings import Settings, usual
from treeopt.trees.draft import CopiedText, Draft

if TYPE_CHECKING:
    from treeopt.runtime.measure.ranks import Prompt
    from treeopt.runtime.stepper import Stepper


def held_out_requests(log: RequestLog, wanted: int, max_new_tokens: int | None, context: int) -> RequestLog:
    """So many requests of conversations that settings were not sought on, of every group its share, in order.

    max_new_tokens : longest answer; else its limit is the request's own, or as long as the answer was, where the context has room
    """
    is_asked = (log.prompt_tokens + 1 < context) & (log.answer_tokens > 1)
    places = np.flatnonzero((halves(log)[log.clusters] > 0) & is_asked)
    if not len(places):
        raise InvalidInput(
            f"The run's log must hold out requests that fit into the model's context of {context} tokens, but has none."
        )
    if len(places) < wanted:
        note(f"Only {len(places)} held-out requests are left, fewer than the {wanted} asked for.")
    ordered = places if log.group is None else places[np.argsort(log.group[places], kind="stable")]
    n = min(wanted, len(places))
    chosen = log.select(np.sort(ordered[np.arange(n) * len(places) // n]))
    limits: dict[tuple[int, ...], int] = {}
    for one in chosen.requests():
        limit = min(one.limit or len(one.answer), max_new_tokens or context, context - len(one.prompt))
        limits[tuple(one.prompt)] = max(limit, limits.get(tuple(one.prompt), 0))
    cut = RequestLog.of(
        one._replace(answer=one.answer[: limits[tuple(one.prompt)]], limit=limits[tuple(one.prompt)])
        for one in chosen.requests()
    )
    return replace(cut, group=chosen.group, cluster=chosen.cluster, meta=chosen.meta)


def tried_drafts(plan: Plan, entry: PlanEntry, log: RequestLog) -> dict[str, Tried]:
    """What replay says of the planned setting and of the engine's usual one on these requests."""
    name = (plan.drafter or {})["id"]
    drafts: dict[str, Settings] = {"chosen": entry.draft.settings} if isinstance(entry.draft, CopiedText) else {}
    if usual(name) not in drafts.values():
        drafts[USUAL] = usual(name)
    every = [np.ones(log.num_conversations, bool)]
    return {who: tried_on(log, (name, settings, "cold", None), every)[0] for who, settings in drafts.items()}


def copied_entrants(entry: PlanEntry, tried: Mapping[str, Tried], engine: Stepper) -> dict[str, Entrant]:
    """Plain decoding, and the settings that were tried; what a drafter keeps of other requests is not replayed."""
    entrants = plain_and_chosen(entry)
    for name, one in tried.items():
        draft: Draft = entry.draft if name == "chosen" else one.draft
        shares = (one.accepted / max(one.accepted.sum(), 1)).tolist()
        is_replayable = not one.draft.drafter.startswith(tuple(KEPT))
        entrants[name] = Entrant(draft, Predicted(**one.candidate.rates.document()), shares, is_replayable)
    return entrants | ({AS_IT_COMES: Entrant(PLAIN, as_it_comes=True)} if engine.as_it_comes else {})


def prompts_of(log: RequestLog) -> list[Prompt]:
    """The requests as prompts, those of a conversation one behind the other."""
    from treeopt.runtime.measure.ranks import Prompt

    of = (
        [log.group_names[i] for i in log.group]
        if log.group is not None and log.group_names
        else [""] * log.num_sequences
    )
    found = [
        Prompt(tuple(one.prompt), f"conversation {cluster}", group, cluster)
        for one, group, cluster in zip(log.requests(), of, log.clusters.tolist(), strict=True)
    ]
    return sorted(found, key=lambda one: one.cluster)


def predicted_speedups(
    latencies: LatencyProfile | None, batch_size: int, tried: Mapping[str, Tried], log: RequestLog
) -> list[str]:
    """What the latencies that were planned with say of these requests, in a sentence; none without latencies."""
    if latencies is None:
        return []
    usual_tokens = int(np.mean(log.prompt_tokens + log.answer_tokens / 2))
    request = PlanRequest(batch_sizes=[batch_size], context=usual_tokens)
    costs = costs_of(latencies, request, max(one.draft.rows for one in tried.values()))[batch_size]
    found = {
        n: one.candidate.rates.tokens_per_step * costs.plain_ms / costs.step_ms(one.rows) for n, one in tried.items()
    }
    said = ", ".join(f"{name} {speedup:.2f}" for name, speedup in found.items() if speedup == speedup)
    return [f"Speedups of these requests by the latencies that were planned with: {said}."] if said else []


def copied_steps(log: RequestLog, draft: Draft, is_replayable: bool) -> tuple[list[int | None], list[int], list[int]]:
    """Of each answer the steps by replay, None where there is none, and the tokens that they emit; steps by accepted guesses."""
    plain = (log.answer_tokens - 1).tolist()
    if not isinstance(draft, CopiedText):
        return plain, plain, [sum(plain)]
    if not is_replayable:
        return [None] * len(plain), plain, []
    found = replay(log.requests(), lambda: text_drafter(draft.drafter, draft.options), state="cold")
    emitted = [int(found.emitted[begin:end].sum()) for begin, end in pairwise(found.starts)]
    return np.diff(found.starts).tolist(), emitted, np.bincount(found.emitted - 1).tolist()
