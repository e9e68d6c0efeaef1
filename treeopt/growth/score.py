"""How good a given tree is, beside the best trees.

best      the tree of the same size that growth finds; on a trace its tokens per step are held out (cross-fitted)
distance  share of the best tree's tokens per step that the given tree lacks, 0.1 for 10 %

A given tree is replayed on the whole trace. If it was grown there, a note says so, or the held-out figure takes its place.
"""

from dataclasses import dataclass

import numpy as np

from treeopt.files.storage import document
from treeopt.growth.rates import Rates, drawn
from treeopt.growth.source import source_of
from treeopt.records.bootstrap import stderr
from treeopt.records.display import Displayed
from treeopt.records.estimate import Estimate
from treeopt.records.figure import Figure
from treeopt.records.inputs import Accuracies
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import MAX_RANK, Tree

ROUNDING = 1e-9  # rates that differ by less are the same sum in another order


@dataclass(frozen=True, kw_only=True, repr=False)
class Score(Displayed):
    """A tree beside the best tree of its size and the smallest tree that is as good.

    given         : replayed on the trace, with an error over conversations; from a calibration the product, without one
    best          : the best tree of that size; held out where there is a trace
    smallest      : the smallest grown tree that reaches as much; None where none of up to as many rows does
    distance      : share of the best tree's tokens per step that it lacks; its error is paired by conversation
    unknown_nodes : guesses of ranks or depths that the record does not know; they count as never accepted
    notes         : what a reader of the figures should know
    """

    given: Figure
    best: Figure
    smallest: Figure | None
    distance: Estimate
    unknown_nodes: int
    notes: tuple[str, ...]

    def document(self) -> dict[str, object]:
        keys = ("distance", "unknown_nodes", "best", "smallest", "notes")
        return {**document(self.given), **{key: document(getattr(self, key)) for key in keys}}


def score_tree(record: Accuracies, tree: Tree, *, grown_here: bool = False) -> Score:
    """The score of ``tree`` by a trace (replayed) or a calibration (product of marginals), beside the best trees.

    The best trees have as many rows, siblings without gaps, and ranks up to the tree's own or the usual ten.

    grown_here : whether the tree was grown on this record

    >>> from treeopt.records.calibration import Calibration
    >>> calibration = Calibration(np.array([[60, 20], [40, 10]]), np.array([100, 100]))
    >>> score = score_tree(calibration, Tree.from_choices([[0], [1]]))
    >>> score.given.tokens_per_step.value, score.best.draft.choices, round(score.distance, 3)
    (1.8, [[0], [0, 0]], 0.022)
    """
    source, size = source_of(record), len(tree)
    limits = Limits(size, source.num_heads, max(MAX_RANK, tree.max_rank))
    curve = source.crossfit(limits)
    best_tree, best, rates = curve.grown.tree(len(curve.grown)), curve.every[-1], source.rates(tree)
    error, notes = None, []
    if unknown := size - len(tree.cut(max_depth=source.num_heads, max_rank=source.num_ranks - 1)):
        heads = source.drafter_heads or source.num_heads
        deep = size - len(tree.cut(max_depth=heads)) if source.drafter_heads else 0
        if deep:
            notes.append(
                f"{deep} of the {size - 1} guesses cannot be made: the drafter makes {heads} in a row, and the tree is {tree.depth} "
                "deep."
            )
        if unknown > deep:
            notes.append(
                f"This {source.kind} ends at rank {source.num_ranks - 1} and depth {source.num_heads}. {unknown - deep} of the "
                f"{size - 1} guesses lie beyond that and count as never accepted, so the figures are lower bounds."
            )
    if not rates.is_counted:
        notes.append("Predicted from marginal accuracies alone: independent heads, nothing held out.")
    elif tree == best_tree:
        rates, error = best, 0.0
        notes.append("The search finds the same tree on this trace, so the figures shown are the held-out ones.")
    else:  # both from the same resampled conversations: what is hard for one tree is for the other too
        given_draws, best_draws = drawn([rates, best])
        error = stderr(1 - given_draws / best_draws, len(best.steps))
        if grown_here:
            notes.append("The tree was grown on this trace, so its figures are in-sample, and too good.")
    enough = np.flatnonzero(curve.tokens_per_step >= rates.tokens_per_step * (1 - ROUNDING)) + 1
    smallest = int(enough[0]) if len(enough) else None
    return Score(
        given=_figure(tree, rates),
        best=_figure(best_tree, best),
        smallest=_figure(curve.grown.tree(smallest), curve.rates(smallest)) if smallest else None,
        distance=Estimate(1 - rates.tokens_per_step / best.tokens_per_step, error),
        unknown_nodes=unknown,
        notes=tuple(notes),
    )


def _figure(tree: Tree, rates: Rates) -> Figure:
    return Figure(draft=tree, batch_size=1, tokens_per_step=rates.estimate)
