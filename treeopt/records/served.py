"""What an engine of dynamic trees is told for a plan: the three numbers of a tree, or not to speculate."""

from __future__ import annotations

from treeopt.errors import InvalidInput
from treeopt.records.plan import Plan, PlanEntry
from treeopt.trees.dynamic import MOST_LEVELS, DynamicTree

NEAR = 0.005  # share of the throughput; a chain that is faster by less is as fast
RECORDED = "record some with treeopt calibrate --topk 2,4,8, then treeopt profile, then search again"


def setting_of(plan: Plan, entry: PlanEntry) -> DynamicTree | None:
    """The fastest of an entry's dynamic tree, its best chain and plain decoding, which is None.

    One dynamic tree for a mix is compared with plain decoding over the mix. Raises InvalidInput where the plan has none.
    """
    shares = plan.mix or {entry.batch_size: 1.0}
    ours = plain = 0.0
    for e in plan.entries if plan.mix else (entry,):
        if (found := e.dynamic) is None or not found.tokens_per_s or not found.speedup:
            raise InvalidInput(f"The plan has no dynamic tree for batch size {e.batch_size}: {RECORDED}.")
        ours += shares[e.batch_size] * found.tokens_per_s
        plain += shares[e.batch_size] * found.tokens_per_s / found.speedup
    tree = entry.dynamic.tree if entry.dynamic else None
    chain = None if plan.mix else entry.best_chain
    if chain and 1 <= chain.depth <= MOST_LEVELS and (chain.tokens_per_s or 0.0) > (1 + NEAR) * ours:
        tree, ours = DynamicTree(chain.depth, 1, chain.size), chain.tokens_per_s or 0.0
    return tree if ours > plain else None


def speculates(plan: Plan) -> bool:
    """Whether a plan has a tree at any batch size, fixed or dynamic."""
    return any(e.size > 1 or (e.dynamic is not None and setting_of(plan, e) is not None) for e in plan.entries)


def losses_of(plan: Plan, entry: PlanEntry) -> dict[int, float]:
    """Batch size -> share of the throughput that an entry's setting loses there against that one's own, where known."""
    setting, own = setting_of(plan, entry), entry.dynamic
    if setting is not None:
        return own.elsewhere if own and own.tree == setting else {}
    if plan.mix:  # the trees are not each batch size's own
        return {}
    return {e.batch_size: 1 - 1 / max(e.dynamic.speedup, 1) for e in plan.entries if e.dynamic and e.dynamic.speedup}
