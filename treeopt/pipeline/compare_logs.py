"""Compare for plans of copied text: what a plan loses on another log, against the setting that a search would take there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from treeopt.engines.copied import KIND
from treeopt.errors import InvalidInput, OutOfRange
from treeopt.growth.drift import measure_for
from treeopt.pipeline.copied import IN_SAMPLE, JUDGED_TOKENS, first_answers, halves, known_state, planned, tried_on
from treeopt.planning.candidates import Candidates
from treeopt.planning.compared import Compared
from treeopt.planning.copied import RowCosts, Tried, costs_of, table_of
from treeopt.planning.entries import figure_of
from treeopt.planning.regret import Loss, PlanLoss, Taken
from treeopt.planning.request import PlanRequest
from treeopt.records.plan import PlanEntry
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import RunDirectory
from treeopt.text.settings import SAM_BUDGET, Settings
from treeopt.trees.draft import CopiedText, Draft
from treeopt.trees.shapes import Limits


def plans_copied_text(run: RunDirectory) -> bool:
    """Whether a run has a log, and a plan of a drafter that copies text."""
    return run.requests.exists() and run.plan.exists() and (run.read_plan().drafter or {}).get("kind") == KIND


def compare_logs(
    a: RunDirectory, b: RunDirectory, latencies: LatencyProfile | None, batch_size: int | None, tolerance: float
) -> Compared:
    """What A's plan loses on B's log, of whose conversations one half is to seek settings on, and the other to judge them."""
    if not b.requests.exists():
        raise InvalidInput(f"{a.path} is planned for a log, so B must be a run with one, but {b.path} has none.")
    plan, latencies = a.read_plan(), latencies or next((r.read_profile() for r in (a, b) if r.profile.exists()), None)
    entries = plan.entries if batch_size is None else (plan.entry(batch_size),)
    drafts: list[Draft] = [entry.draft for entry in entries]
    if any(SAM_BUDGET in one.options for one in drafts if isinstance(one, CopiedText)):
        raise InvalidInput(
            f"{a.path} is planned with a corpus, whose texts are not in a log: search again for {b.path}."
        )
    whole = b.read_requests()
    log, name = first_answers(whole, JUDGED_TOKENS), str((plan.drafter or {})["id"])
    context = entries[0].context_tokens or log.usual_context
    sizes, engine = [entry.batch_size for entry in entries], plan.constraint.engine if plan.constraint else None
    request = PlanRequest(plan.limits(Limits()), sizes, context=context, engine=engine)
    anew, of = planned(b.requests, whole, latencies, request, [name]), halves(log)
    drafts += [entry.draft for entry in anew.entries]
    tried = {
        one.settings: tried_on(log, (name, one.settings, known_state(log), None), [of > 0])[0]
        for one in drafts
        if isinstance(one, CopiedText)
    }
    costs = costs_of(latencies, request, max((one.draft.rows for one in tried.values()), default=1))
    losses = [_loss(entry, anew.entry(b), tried, costs.get(b)) for b, entry in zip(sizes, entries, strict=True)]
    said = {
        "There are no latencies, so tokens per step are compared.": latencies is None,
        f"Settings of {name} alone are compared: search again to compare drafters.": True,
        IN_SAMPLE: bool((of == 2).any()),
    }
    said |= {f"Batch size {b}: neither plan speculates.": not one for b, one in zip(sizes, losses, strict=True)}
    notes = tuple(text for text, is_so in said.items() if is_so)
    return Compared(
        names=(str(a.path), str(b.path)),
        measure=measure_for(),
        shifts=(),
        losses=tuple(losses),
        tolerance=tolerance,
        notes=notes,
    )


def _loss(entry: PlanEntry, anew: PlanEntry, tried: Mapping[Settings, Tried], costs: RowCosts | None) -> PlanLoss:
    """What the entry's draft loses; nothing where neither copies text."""
    own = {one.draft.settings: tried[one.draft.settings] for one in (entry, anew) if isinstance(one.draft, CopiedText)}
    if not own:
        root, nothing = anew.chosen, Loss(share=0.0, stderr=0.0, interval95=(0.0, 0.0))
        return PlanLoss(planned=1.0, reached=root, best=root, loss=nothing, over_plain=nothing if costs else None)
    c = table_of([*own.values()], costs, entry.batch_size)
    places = [_place(one.draft, tried, c) for one in (entry, anew)]
    ours, best, plain = (
        Taken(rates.steps, rates.tokens, np.zeros(len(rates.steps), np.int64), np.append(c.ms[i], c.ms_draws[i])[None])
        for i in (*places, 0)
        if (rates := c.all[i].rates).steps is not None and rates.tokens is not None
    )
    return PlanLoss(
        planned=entry.chosen.tokens_per_step,
        reached=figure_of(c, places[0]),
        best=figure_of(c, places[1]),
        loss=ours.loss(best),
        over_plain=ours.loss(plain) if c.context is not None else None,
    )


def _place(draft: Draft, tried: Mapping[Settings, Tried], c: Candidates) -> int:
    """Where a table has a draft; OutOfRange where its steps were not timed."""
    if not isinstance(draft, CopiedText):
        return 0
    found = [i for i, one in enumerate(c.all) if one.draft == tried[draft.settings].draft]
    if not found:
        rows = tried[draft.settings].draft.rows
        raise OutOfRange(
            f"The profile must have steps of {rows} rows, as {draft.name} verifies there: time larger sizes."
        )
    return found[0]
