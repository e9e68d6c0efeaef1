"""Search for the pair of copied text and the calibrated drafter: settings are replayed on the trace's own texts.

A trace has the answers, and at which rank the drafter had each token; the prompts are asked of the run's session again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, log
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from treeopt.engines.registry import method_of
from treeopt.errors import InvalidInput
from treeopt.growth.replay import TreeRates, accepted_lengths, by_conversation
from treeopt.growth.source import source_of
from treeopt.latency.estimate import StepCosts
from treeopt.pipeline.bench import trace_conversations
from treeopt.pipeline.session import open_session, resolve
from treeopt.planning.candidates import Candidate, shares_of
from treeopt.planning.request import PlanRequest
from treeopt.records.inputs import Accuracies
from treeopt.records.profile import LatencyProfile
from treeopt.records.requestlog import Request
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.terminal import progress
from treeopt.text.pairs import AUTOMATON, THRESHOLD, drafter_of
from treeopt.text.replay import replay
from treeopt.text.settings import Settings, sought
from treeopt.trees.draft import CopiedOr, CopiedText
from treeopt.trees.tree import Tree

if TYPE_CHECKING:
    from treeopt.runtime.session import Session

THRESHOLDS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
TRIED = 12  # settings of each drafter of text
FINALISTS = 2  # of each batch size, which are tried before chains of all lengths


def with_pairs(
    run: RunDirectory,
    record: Accuracies,
    latencies: LatencyProfile | None,
    request: PlanRequest,
    session: Session | None,
) -> PlanRequest:
    """The request with what copied text reaches on a trace, alone and before the drafter's chain, where its method has that."""
    if request.engine is None:
        return request
    way = method_of(request.engine.name, method=request.engine.method)
    if not way.copies:
        return request
    trace, source = cast(RankTrace, record), source_of(record)
    if not source.is_exact or trace.tokens is None or trace.weight is not None:
        raise InvalidInput(
            f"`method={way.name}` needs the run's own trace, with its texts and without `weight`: treeopt calibrate."
        )
    requests = texts_of(session or open_session(resolve(run, {})), trace)
    costs = [StepCosts(latencies, b, request.context or source.usual_context) for b in request.sizes if latencies]
    known: dict[CopiedText, TreeRates] = {}
    with progress("Replaying", len(way.copies)) as advance:
        for name in way.copies:
            known |= _reached(name, requests, trace, costs)
            advance(1)
    return replace(request, copying=known)


def texts_of(session: Session, trace: RankTrace) -> list[Request]:
    """The requests of a trace with what the drafter's chain reaches at each token; InvalidInput where prompts are missing."""
    from treeopt.runtime.measure.ranks import turn_prompts

    trace_conversations(session, trace)
    reached = np.split(accepted_lengths(trace, Tree.chain(trace.num_heads)), trace.starts[1:-1])
    limit = trace.meta.get("max_new_tokens")
    return [
        Request(list(prompt.tokens), answer, limit, neural=own.tolist())
        for prompt, answer, own in zip(turn_prompts(session.prompts, trace), trace.texts, reached, strict=True)
    ]


def rates_of(draft: CopiedText, requests: Sequence[Request], trace: RankTrace) -> tuple[CopiedText, TreeRates]:
    """What a draft reaches on the requests of a trace, one after the other, and the draft with the rows that it had at most."""
    found = replay(requests, lambda: drafter_of(draft))
    steps, length = max(len(found.rows), 1), getattr(draft, "length", 0)
    rows, accepted = (np.bincount(some, minlength=2) for some in (found.rows, found.accepted))
    most = max(int(found.rows.max(initial=1)), 1 + length)
    seen = replace(draft, rows=most, depth=min(max(int(found.drafted.max(initial=0)), length), most - 1))
    return seen, TreeRates(
        steps=by_conversation(trace, np.diff(found.starts)),
        tokens=by_conversation(trace, trace.lengths - 1),
        rows=rows / steps if len(found.rows) else np.array([0.0, 1.0]),
        accepted=accepted / steps,
        drafting=1.0 if length and draft.drafter == AUTOMATON else float((found.neural > 0).sum() / steps),
    )


def _reached(
    name: str, requests: Sequence[Request], trace: RankTrace, costs: Sequence[StepCosts]
) -> Mapping[CopiedText, TreeRates]:
    """All settings of a drafter of text that are tried alone and before the longest chain, the best also before shorter ones.

    The planner is told of all, so that it knows among how many the best was chosen.
    """
    known: dict[CopiedText, TreeRates] = {}

    def values(settings: Sequence[Settings], length: int = 0) -> list[list[float]]:
        found = [rates_of(_draft(name, one, length), requests, trace) for one in settings]
        known.update(found)
        return [worth(draft, rates, costs) for draft, rates in found]

    longest = trace.num_heads
    alone = sought(name, lambda settings: np.array(values(settings)), most=TRIED)
    beside: Sequence[Settings] = [((THRESHOLD, n),) for n in THRESHOLDS] if name == AUTOMATON else [*alone]
    paired = dict(zip(beside, values(beside, longest), strict=True))
    for length in range(1, longest):
        values(_best(paired), length)
    return known


def _draft(name: str, settings: Settings, length: int) -> CopiedText:
    made, chain = (CopiedOr, [length]) if length else (CopiedText, [])
    return made.of(name, dict(settings), 1 + length, length, *chain)


def _best(found: Mapping[Settings, Any]) -> list[Settings]:
    """The settings that are worth the most at each batch size."""
    ranked = (sorted(found, key=lambda one: -found[one][b])[:FINALISTS] for b in range(len(next(iter(found.values())))))
    return list(dict.fromkeys(one for some in ranked for one in some))


def worth(draft: CopiedText, rates: TreeRates, costs: Sequence[StepCosts]) -> list[float]:
    """Log tokens per second at each batch size, or per step where no latency is known; of what was not timed, nothing."""
    one, rate = Candidate(draft.kind, draft.rows, draft.depth, None, rates, draft), log(rates.tokens_per_step)
    found = list[float]()
    for cost in costs:
        shares = shares_of(one, cost.batch_size)
        ms = float(np.array([*shares.values()]) @ cost.ms(*np.array([*shares]).T))
        found.append(-inf if np.isnan(ms) else rate - log(ms))
    return found or [rate]
