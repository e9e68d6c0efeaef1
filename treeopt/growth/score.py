"""How good a given tree is: what it reaches, and what the best trees do.

rate      tokens per step
best      the tree that growth finds at that size; from a trace its rate is held out (cross-fitted)
distance  share of the best tree's rate that the given one forgoes, 0.1 for 10 %

A given tree is replayed on the whole trace: it was not grown there, so that is not in-sample. Where it
was, that is said, or the held-out rate is taken instead.

S sequences · C conversations, of which they are the turns · N sizes (1...the tree's own)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from treeopt.growth.heldout import HeldOut, crossfit, from_calibration, rate_tree
from treeopt.growth.objectives import product_values
from treeopt.records.bootstrap import conversation_draws, stderr
from treeopt.records.calibration import Calibration
from treeopt.records.display import Displayed
from treeopt.records.trace import RankTrace
from treeopt.trees.shapes import sibling_closed
from treeopt.trees.tree import MAX_RANK, Tree

OBJECTIVE = "replay"
ROUNDING = 1e-9  # rates that differ by less are the same sum in another order


@dataclass(frozen=True, kw_only=True)
class Rated:
    """A tree with its tokens per step: by the product of marginals, over all states, and replayed.

    >>> Rated(tree=Tree.chain(1), product=1.5).tokens_per_step
    1.5
    """

    tree: Tree
    product: float
    joint: float | None = None
    replayed: float | None = None
    replayed_stderr: float | None = None

    @property
    def tokens_per_step(self) -> float:
        """The best figure at hand."""
        return self.product if self.replayed is None else self.replayed

    def document(self) -> dict[str, Any]:
        return {
            "size": len(self.tree),
            "depth": self.tree.depth,
            "tokens_per_step": self.tokens_per_step,
            "tokens_per_step_stderr": self.replayed_stderr,
            "predicted": {"product": self.product, "joint": self.joint, "replayed": self.replayed},
            "medusa_choices": self.tree.choices,
        }


@dataclass(frozen=True, kw_only=True)
class Score(Displayed):
    """A tree beside the best of its size and the smallest one that reaches as much.

    smallest is None where none up to the tree's size does; distance_stderr is paired by conversation,
    None without a trace. unknown_nodes have ranks or depths that the source knows nothing of.
    """

    given: Rated
    best: Rated
    smallest: Rated | None
    distance: float
    distance_stderr: float | None
    unknown_nodes: int
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """What ``treeopt score --json`` says."""
        return {
            **self.given.document(),
            "unknown_nodes": self.unknown_nodes,
            "best": self.best.document(),
            "distance": self.distance,
            "distance_stderr": self.distance_stderr,
            "smallest": self.smallest.document() if self.smallest else None,
            "notes": list(self.notes),
        }


def score_tree(source: RankTrace | Calibration, tree: Tree, *, grown_here: bool = False) -> Score:
    """What ``tree`` reaches by a trace (replayed) or a calibration (product of marginals), and the best trees.

    The best ones keep the rules that the tree itself keeps: as many rows, siblings without gaps if it
    has none, ranks up to its own or the usual ten. ``grown_here``: whether it was grown on this source.

    >>> calibration = Calibration(np.array([[60, 20], [40, 10]]), np.array([100, 100]))
    >>> score = score_tree(calibration, Tree.from_choices([[0], [1]]))
    >>> score.given.tokens_per_step, score.best.tree.choices, round(score.distance, 3)
    (1.8, [[0], [0, 0]], 0.022)
    """
    shape = "sibling-closed" if sibling_closed(tree) else "any"
    limits = {
        "budget": len(tree),
        "shape": shape,
        "max_depth": source.num_heads,
        "max_rank": max(MAX_RANK, tree.max_rank),
    }
    known = tree.cut(max_depth=source.num_heads, max_rank=source.top_k - 1)
    notes = []
    if len(known) < len(tree):
        notes.append(
            f"{len(tree) - len(known)} of its {len(tree) - 1} guesses are beyond rank {source.top_k - 1} or depth "
            f"{source.num_heads}, where this {_kind(source)} ends: they count as never accepted, so its "
            "figures are lower bounds."
        )
    if isinstance(source, Calibration):
        notes.append("Predicted from marginal accuracies alone: independent heads, nothing held out.")
        curve = from_calibration(source, **limits)
        product = float(product_values(source.accept, known.paths).sum())
        given, distance_stderr = Rated(tree=tree, product=product), None
    else:
        curve = crossfit(source, objective=OBJECTIVE, **limits)
        given, distance_stderr = _replayed(source, tree, known, curve)
        if tree == curve.family.tree(len(curve.family)):
            given, distance_stderr = _grown(curve, len(curve.family)), 0.0
            notes.append("The search grows this very tree on this trace; its figures are the held-out ones.")
        elif grown_here:
            notes.append("The tree was grown on this very trace: its figures are in-sample, and flatter it.")
    best = _grown(curve, len(curve.family))
    reached = np.flatnonzero(curve.tokens_per_step >= given.tokens_per_step * (1 - ROUNDING))
    return Score(
        given=given,
        best=best,
        smallest=_grown(curve, int(curve.family.sizes[reached[0]])) if len(reached) else None,
        distance=1 - given.tokens_per_step / best.tokens_per_step,
        distance_stderr=distance_stderr,
        unknown_nodes=len(tree) - len(known),
        notes=tuple(notes),
    )


def _replayed(trace: RankTrace, tree: Tree, known: Tree, curve: HeldOut) -> tuple[Rated, float]:
    """The tree on the whole trace, and the standard error of its distance from the best of its size.

    Both come from the same resampled conversations: what is hard for one tree is for the other too.
    """
    assert curve.steps is not None
    rates = rate_tree(trace, known)
    assert rates.steps is not None
    given = Rated(
        tree=tree, product=rates.product, joint=rates.joint, replayed=rates.replayed, replayed_stderr=rates.stderr
    )
    draws = conversation_draws(len(rates.steps))
    ours, theirs = (np.maximum(draws @ steps, 1) for steps in (rates.steps, curve.steps[-1]))
    return given, stderr(1 - theirs / ours, len(rates.steps))


def _grown(curve: HeldOut, size: int) -> Rated:
    """The grown tree of a size, with its held-out rates."""
    rates = curve.rates(size)
    return Rated(
        tree=curve.family.tree(size),
        product=rates.product,
        joint=rates.joint,
        replayed=rates.replayed,
        replayed_stderr=rates.stderr,
    )


def _kind(source: RankTrace | Calibration) -> str:
    return "calibration" if isinstance(source, Calibration) else "trace"
