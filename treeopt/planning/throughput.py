"""The trees with the most tokens per second where drafting takes time for every node that expands.

tokens  T(t) of a tree t, where they add up (`growth.Worth`)
ms      rest_ms[N] + sum over levels l of node_ms[l] e_l(t), for a tree of N rows of which e_l expand on level l
ratio   tokens / ms

The best ratio of two sums is found by Dinkelbach's iteration (On nonlinear fractional programming, Management
Science 13, 1967): with theta the best ratio so far, find the tree with the most T(t) - theta ms(t), and take its
ratio for theta, until nothing is left to gain. A tree with the most of that difference is one of `Worth.best`, where
an expanding node of level l has the price theta node_ms[l]; so a round finds it for all sizes at once, and the last
one has the best of all trees up to a depth exactly. A tree of another size is the size's best at the last theta,
unless a smaller one has more tokens less prices (`knapsack`). Then its ratio r is at most (theta - r)
(1 - its own ms / ms of the size's tree with the best ratio) short of the best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.growth.objectives import Worth
from treeopt.latency.drafting import NEARLY_FREE, DraftCosts, expanding_nodes
from treeopt.records.profile import LatencyProfile

ROUNDING = 1e-9  # ratios that differ by less are the same


@dataclass(frozen=True)
class LevelPrices:
    """What an expanding node must bring in, for the trees up to one depth.

    per_node : (D,) tokens per step, of every level
    bound    : tokens per ms that no tree exceeds: the best tree's own, unless larger trees were timed as faster
    """

    per_node: tuple[float, ...]
    bound: float


def best_prices(
    worth: Worth, rest_ms: NDArray[np.float64], node_ms: NDArray[np.float64], *, budget: int, shape: str
) -> LevelPrices | None:
    """The prices under which `Worth.best` has the tree with the best ratio; None where no size is known.

    rest_ms : (budget+1,) of trees of 0, 1, ... rows; NaN where it is not known · node_ms : (D,) of every level

    >>> from treeopt.growth.objectives import products
    >>> worth = products(np.array([[0.6, 0.3], [0.5, 0.1]]), shape="sibling-closed")
    >>> rest_ms, node_ms = np.array([np.nan, 1.0, 1.0, 1.0]), np.array([0.0, 0.4])
    >>> prices = best_prices(worth, rest_ms, node_ms, budget=3, shape="sibling-closed")
    >>> round(prices.bound, 6), worth.best(3, "sibling-closed", prices.per_node).tree(3).choices
    (1.9, [[0], [1]])
    """
    shape = "sibling-closed" if shape == "any" else shape
    known = np.flatnonzero(np.isfinite(rest_ms))
    if not len(known):
        return None
    theta = 0.0
    while True:
        family = worth.best(budget, shape, tuple((theta * node_ms).tolist()))
        sizes = family.sizes
        tokens = np.array([family.tokens_per_step(size) for size in sizes.tolist()])
        drafting = np.array([_node_ms(expanding_nodes(family.nodes(size)), node_ms) for size in sizes.tolist()])
        ratios = tokens / (rest_ms[sizes] + drafting)
        if not np.isfinite(ratios).any():
            return None
        best = float(np.nanmax(ratios))
        if best <= theta * (1 + ROUNDING):
            break
        theta = best
    # No tree of so many rows leaves more than the most that one of them or fewer leaves, which the knapsack knows.
    most = np.maximum.accumulate(tokens - theta * drafting)[np.searchsorted(sizes, known, side="right") - 1]
    slack = float((most - theta * rest_ms[known]).max())
    over = slack / float(rest_ms[known].min()) if slack > ROUNDING * float(most.max()) else 0.0
    return LevelPrices(tuple((theta * node_ms).tolist()), theta + over)


def _node_ms(expanding: tuple[int, ...], node_ms: NDArray[np.float64]) -> float:
    return float(node_ms[: len(expanding)] @ np.array(expanding, dtype=float))


def rest_of_step(
    profile: LatencyProfile, batch_size: int, context: int, *, depth: int, budget: int, measured_only: bool
) -> NDArray[np.float64]:
    """(budget+1,) ms of a step with a tree of 0, 1, ... rows and ``depth``, but for its expanding nodes.

    NaN where there is no such tree, or nothing that was measured encloses it.
    """
    rest_ms = np.full(budget + 1, np.nan)
    costs = profile.draft_costs(batch_size, context)
    if costs is None or depth > len(costs.fixed_ms):
        return rest_ms
    for size in range(depth + 1, budget + 1):
        weights = profile.weights(batch_size, context, size, depth, measured_only=measured_only)
        rest = None if weights is None else profile.drafting.rest_ms(weights)
        if rest is not None:
            rest_ms[size] = rest + costs.fixed_ms[:depth].sum()
    return rest_ms


def is_costly(profile: LatencyProfile, batch_size: int, costs: DraftCosts) -> bool:
    """Whether the expanding nodes of any tree that was timed took more than `NEARLY_FREE` of its step."""
    return any(
        _node_ms(point.expanding, costs.node_ms[: point.depth]) > NEARLY_FREE * float(np.median(point.step_ms))
        for point in profile.points
        if point.batch_size == batch_size and point.expanding and point.depth <= len(costs.node_ms)
    )
