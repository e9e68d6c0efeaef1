"""Grown trees beside others of their size: what each objective reaches held-out, dense trees, chains, the published tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from treeopt.growth.coverage import COVERAGE, tokens_of_trees
from treeopt.growth.heldout import HeldOut, crossfit, crossfit_probe
from treeopt.growth.objectives import OBJECTIVES
from treeopt.growth.replay import replay, tokens_per_step
from treeopt.records.probe import Probe
from treeopt.records.trace import RankTrace
from treeopt.trees.published import published_tree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

MOST_DENSE = 200  # dense trees that are replayed

Widths = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Tokens per step of grown trees and of fixed ones.

    held_out : objective -> the trees that it grows, cross-fitted
    dense    : (widths, size, tokens per step) of trees with all combinations of the best candidates
    n_dense  : how many of them there are within the budget
    fixed    : (name, size, tokens per step) of chains and the published tree
    """

    held_out: Mapping[str, HeldOut]
    dense: tuple[tuple[Widths, int, float], ...]
    n_dense: int
    fixed: tuple[tuple[str, int, float], ...]


def compare(source: RankTrace | Probe, limits: Limits, *, most_dense: int = MOST_DENSE) -> Comparison:
    """Grow by every objective and replay the others; of a probe, only trees whose nodes were probed are replayed."""
    depth = limits.depth(source.num_heads)
    limits = replace(limits, max_depth=depth)
    if isinstance(source, Probe):
        held_out = {COVERAGE: crossfit_probe(source, **asdict(limits))}
        ranks = 1 + source.tree.max_rank
    else:
        held_out = {name: crossfit(source, objective=name, **asdict(limits)) for name in OBJECTIVES}
        ranks = source.top_k
    every = dense_widths(limits.budget, depth, min(limits.max_rank + 1, ranks))
    if isinstance(source, Probe):  # the last corner of a tree tells most of those that were not
        known = set(source.tree.paths)
        corners = [widths for widths in every if tuple(width - 1 for width in widths) in known]
        every = [widths for widths in corners if known.issuperset(Tree.dense(widths).paths)]
    dense = {widths: Tree.dense(widths) for widths in _sample(every, most_dense)}
    fixed = {f"chain of {d}": Tree.chain(d) for d in range(1, depth + 1) if d < limits.budget}
    published = published_tree().cut(max_depth=depth)
    if published.max_rank < ranks and len(published) <= limits.budget:
        fixed["mc_sim_7b_63"] = published
    if isinstance(source, Probe):
        fixed = {name: tree for name, tree in fixed.items() if known.issuperset(tree.paths)}
    rates = _rates([*dense.values(), *fixed.values()], source)
    return Comparison(
        held_out,
        tuple((widths, len(tree), rate) for (widths, tree), rate in zip(dense.items(), rates, strict=False)),
        len(every),
        tuple((name, len(tree), rate) for (name, tree), rate in zip(fixed.items(), rates[len(dense) :], strict=True)),
    )


def _sample(every: list[Widths], most: int) -> list[Widths]:
    """At most so many dense trees, about as many of every size, though most dense trees are large."""
    if len(every) <= most:
        return every
    sizes = np.array([1 + np.cumprod(widths).sum() for widths in every])
    share = 1 / np.bincount(sizes)[sizes]
    picked = np.random.default_rng(0).choice(len(every), most, replace=False, p=share / share.sum())
    return [every[i] for i in np.sort(picked)]


def _rates(trees: Sequence[Tree], source: RankTrace | Probe) -> list[float]:
    """Tokens per step of each tree."""
    if not isinstance(source, Probe):
        return [replay(source, tree).tokens_per_step for tree in trees]
    paths = source.tree.paths
    members = np.array([[path in nodes for path in paths] for nodes in (set(tree.paths) for tree in trees)])
    tokens = tokens_of_trees(source, paths, members.reshape(-1, len(paths))).sum(1)
    return [tokens_per_step(float(n), len(source.accepted)) for n in tokens]


def dense_widths(budget: int, max_depth: int, max_width: int) -> list[tuple[int, ...]]:
    """The widths [s1 ... sd] of every dense tree of 2 to ``budget`` rows.

    >>> dense_widths(4, 2, 3)
    [(1,), (1, 1), (1, 2), (2,), (3,)]
    """
    found: list[tuple[int, ...]] = []

    def extend(widths: tuple[int, ...], size: int, leaves: int) -> None:
        for width in range(1, max_width + 1):
            if size + leaves * width > budget:
                return
            found.append((*widths, width))
            if len(widths) + 1 < max_depth:
                extend((*widths, width), size + leaves * width, leaves * width)

    extend((), 1, 1)
    return found
