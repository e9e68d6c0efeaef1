"""How good a given tree is: what it reaches, and what the best trees do.

rate      tokens per step
best      the tree that growth finds at that size; from a trace its rate is held out (cross-fitted)
distance  share of the best tree's rate that the given one forgoes, 0.1 for 10 %

A given tree is replayed on the whole trace: it was not grown there, so that is not in-sample. Where it
was, that is said, or the held-out rate is taken instead.

S sequences · C conversations, of which they are the turns · N sizes (1...the tree's own)
"""

from dataclasses import dataclass

import numpy as np

from treeopt.growth.heldout import HeldOut
from treeopt.growth.replay import TreeRates
from treeopt.growth.source import source_of
from treeopt.records.bootstrap import conversation_draws, stderr
from treeopt.records.display import Displayed
from treeopt.records.inputs import Accuracies
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import MAX_RANK, Tree

ROUNDING = 1e-9  # rates that differ by less are the same sum in another order


@dataclass(frozen=True)
class Rated:
    """A tree with what it reaches.

    >>> Rated(Tree.chain(1), TreeRates(1.5)).document()["tokens_per_step"]
    1.5
    """

    tree: Tree
    rates: TreeRates

    def document(self) -> dict[str, object]:
        rates = self.rates
        return {
            "size": len(self.tree),
            "depth": self.tree.depth,
            "tokens_per_step": rates.tokens_per_step,
            "tokens_per_step_stderr": rates.stderr,
            "predicted": {name: getattr(rates, name) for name in ("product", "joint", "replayed")},
            "medusa_choices": self.tree.choices,
        }


@dataclass(frozen=True, kw_only=True, repr=False)
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

    def document(self) -> dict[str, object]:
        return {
            **self.given.document(),
            "unknown_nodes": self.unknown_nodes,
            "best": self.best.document(),
            "distance": self.distance,
            "distance_stderr": self.distance_stderr,
            "smallest": self.smallest.document() if self.smallest else None,
            "notes": list(self.notes),
        }


def score_tree(record: Accuracies, tree: Tree, *, grown_here: bool = False) -> Score:
    """The score of ``tree`` by a trace (replayed) or a calibration (product of marginals), beside the best trees.

    The best ones have as many rows, siblings without gaps, and ranks up to its own or the usual ten.
    ``grown_here``: whether it was grown on this record.

    >>> from treeopt.records.calibration import Calibration
    >>> calibration = Calibration(np.array([[60, 20], [40, 10]]), np.array([100, 100]))
    >>> score = score_tree(calibration, Tree.from_choices([[0], [1]]))
    >>> score.given.rates.tokens_per_step, score.best.tree.choices, round(score.distance, 3)
    (1.8, [[0], [0, 0]], 0.022)
    """
    source, size = source_of(record), len(tree)
    limits = Limits(size, source.num_heads, max(MAX_RANK, tree.max_rank))
    curve = source.crossfit(limits)
    known = tree.cut(max_depth=source.num_heads, max_rank=source.num_ranks - 1)
    best, given, notes = _rated(curve, len(curve.grown)), Rated(tree, source.rate(known)), []
    if unknown := size - len(known):
        notes.append(
            f"This {source.kind} ends at rank {source.num_ranks - 1} and depth {source.num_heads}. {unknown} of the "
            f"{size - 1} guesses lie beyond that and count as never accepted, so the figures are lower bounds."
        )
    steps, error = given.rates.steps, None
    if steps is None or best.rates.steps is None:
        notes.append("Predicted from marginal accuracies alone: independent heads, nothing held out.")
    elif tree == best.tree:
        given, error = best, 0.0
        notes.append("The search finds the same tree on this trace, so the figures shown are the held-out ones.")
    else:  # both from the same resampled conversations: what is hard for one tree is for the other too
        draws = conversation_draws(len(steps))
        ours, theirs = (np.maximum(draws @ taken, 1) for taken in (steps, best.rates.steps))
        error = stderr(1 - theirs / ours, len(steps))
        if grown_here:
            notes.append("The tree was grown on this trace, so its figures are in-sample, and too good.")
    reached = np.flatnonzero(curve.tokens_per_step >= given.rates.tokens_per_step * (1 - ROUNDING))
    return Score(
        given=given,
        best=best,
        smallest=_rated(curve, int(reached[0]) + 1) if len(reached) else None,
        distance=1 - given.rates.tokens_per_step / best.rates.tokens_per_step,
        distance_stderr=error,
        unknown_nodes=unknown,
        notes=tuple(notes),
    )


def _rated(curve: HeldOut, size: int) -> Rated:
    return Rated(curve.grown.tree(size), curve.rates(size))
