"""Grown trees beside others of their size: what each objective reaches held-out, dense trees, chains, the published tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from treeopt.growth.heldout import HeldOut
from treeopt.growth.source import Source
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


def compare(source: Source, limits: Limits, *, most_dense: int = MOST_DENSE) -> Comparison:
    """Grow by every objective, and score the others that the source tells apart."""
    depth = limits.depth(source.num_heads)
    limits = replace(limits, max_depth=depth)
    widths = dense_widths(limits.budget, depth, min(limits.num_ranks, source.num_ranks))
    every = [w for w in widths if _is_known(w, source)]
    dense = {w: Tree.dense(w) for w in _sample(every, most_dense)}
    fixed = {f"chain of {d}": Tree.chain(d) for d in range(1, depth + 1) if d < limits.budget}
    published = published_tree().cut(max_depth=depth)
    if len(published) <= limits.budget:
        fixed["mc_sim_7b_63"] = published
    known = {name: tree for name, tree in fixed.items() if source.knows(tree)}
    return Comparison(
        {name: source.crossfit(limits, name) for name in source.objectives},
        tuple((w, len(tree), source.rate(tree).tokens_per_step) for w, tree in dense.items()),
        len(every),
        tuple((name, len(tree), source.rate(tree).tokens_per_step) for name, tree in known.items()),
    )


def _is_known(widths: Widths, source: Source) -> bool:
    """Whether the source tells a dense tree's nodes apart: its last corner, and of a probe all the others too."""
    corner = [width - 1 for width in widths]
    last = Tree.from_choices([corner[:depth] for depth in range(1, len(corner) + 1)])
    return source.knows(last) and (source.is_exact or source.knows(Tree.dense(widths)))


def _sample(every: list[Widths], most: int) -> list[Widths]:
    """At most so many dense trees, about as many of every size, though most dense trees are large."""
    if len(every) <= most:
        return every
    sizes = np.array([1 + np.cumprod(widths).sum() for widths in every])
    share = 1 / np.bincount(sizes)[sizes]
    picked = np.random.default_rng(0).choice(len(every), most, replace=False, p=share / share.sum())
    return [every[i] for i in np.sort(picked)]


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
