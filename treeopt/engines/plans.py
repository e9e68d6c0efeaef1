"""A plan on its way to an engine: read once, here, into a `Request`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treeopt.engines.base import Method, Request, Written
from treeopt.engines.registry import ENGINES, method_of, tree_method_of
from treeopt.engines.write import check_shape_of, export_request
from treeopt.errors import InvalidInput
from treeopt.records.origins import DrafterRecord
from treeopt.records.plan import Plan, each_its_own
from treeopt.records.rules import rule_of


def export_plan(
    plan: Plan,
    engine: str,
    *,
    batch_size: int | None = None,
    method: str | None = None,
    version: str | None = None,
    max_draft_len: int | None = None,
) -> Written:
    """An engine's files for a plan: its schedule where the engine takes chains, else the entry of a batch size.

    Without a ``batch_size`` all must have one tree, or the engine decodes one of the plan's alone
    (`batch_sizes_to_export`).

    Raises InvalidInput for a plan of trees and an engine of chains: the best chain is no path of the best tree.
    """
    drafter = plan.drafter or DrafterRecord()
    num_heads = drafter.get("num_heads")
    if num_heads is None:
        raise InvalidInput("The export needs the number of heads, but the plan has no drafter.num_heads.")
    way = method_for_plan(plan, engine, method)
    request = Request(
        num_heads=num_heads,
        num_layers=drafter.get("num_layers") or 1,
        drafter=drafter.get("kind"),
        drafter_id=drafter.get("id"),
        version=version,
        max_draft_len=max_draft_len,
        batch_size=plan.entries[-1].batch_size,
        acceptance=plan.acceptance,
    )
    sizes = batch_sizes_to_export(plan, way) if batch_size is None else [batch_size]
    return export_request(_asking(request, plan, way, engine, sizes), engine, method=way.name)


def _asking(request: Request, plan: Plan, way: Method, engine: str, sizes: Sequence[int | None]) -> Request:
    """The request for a plan's drafts: for one of them, or for that of every range of batch sizes."""
    whole, entry = sizes == [None], plan.entries[0]
    if not whole and (way.dynamic or len(sizes) == 1 or way.shape != "chain"):
        entry = plan.entry(sizes[0] if len(sizes) == 1 else None)
        request = replace(request, batch_size=entry.batch_size)
        return replace(request, dynamic=entry.setting) if way.dynamic else replace(request, tree=entry.tree)
    if way.dynamic and not (way.by_batch_size and not plan.mix):
        return replace(request, dynamic=entry.setting)
    if way.dynamic:
        ranges = each_its_own([entry.batch_size for entry in plan.entries])
        return replace(request, settings=tuple((r.first, r.last, plan.entries[r.entry].setting) for r in ranges))
    if way.shape != "chain":
        return replace(request, tree=plan.entries[plan.schedule[0].entry].tree)
    for entry in plan.entries:
        check_shape_of(entry.tree, way, engine)
    lengths = ((part.first, part.last, plan.entries[part.entry].chosen.depth) for part in plan.schedule)
    return replace(request, lengths=tuple(lengths))


def method_for_plan(plan: Plan, engine: str, method: str | None = None) -> Method:
    """The method that a plan goes to an engine by: the one named, planned for, of its dynamic trees, or usual."""
    planned, kind = plan.constraint.engine if plan.constraint else None, (plan.drafter or {}).get("kind")
    if method is None and planned is not None and planned.name == engine:
        method = planned.method
    usual = method_of(engine, kind, method)
    chains = plan.constraint is not None and plan.constraint.shape == "chain" and planned_trees(plan) is None
    if method is not None or chains or not all(entry.best("dynamic") for entry in plan.entries):
        return usual
    return tree_method_of(engine, kind, rule_of(plan.acceptance), (e.batch_size for e in plan.entries)) or usual


def planned_trees(plan: Plan) -> Method | None:
    """The method of dynamic trees that the plan was made for; None where it was made for none."""
    planned = plan.constraint.engine if plan.constraint else None
    methods = ENGINES[planned.name].methods if planned and planned.name in ENGINES else ()
    return next((one for one in methods if planned and one.dynamic and one.name == planned.method), None)


def batch_sizes_to_export(plan: Plan, way: Method) -> list[int | None]:
    """The batch sizes that a plan is written for, one by one; None alone where a schedule or one tree serves all.

    An engine that decodes fewer sequences at once gets those that it can decode, if the plan has any and is for no mix.
    """
    sizes: list[int | None] = [entry.batch_size for entry in plan.entries]
    fit = [size for size in sizes if way.decodes(size)]
    if len(fit) < len(sizes) and fit and not plan.mix:
        return fit
    if way.dynamic:
        alike = len({entry.setting for entry in plan.entries}) == 1
    elif way.shape == "chain":
        alike = len({plan.entries[part.entry].chosen.depth for part in plan.schedule}) == 1
    else:
        alike = False
    trees = {tuple(map(tuple, entry.tree.choices)) for entry in plan.entries}
    return [None] if alike or way.by_batch_size or (not way.dynamic and len(trees) == 1) else sizes
