"""The table of a scored tree, and what it comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treeopt.report.terminal import grid, together
from treeopt.report.wording import pm

if TYPE_CHECKING:
    from rich.console import RenderableType

    from treeopt.growth.score import Score


def score_table(score: Score, name: str) -> RenderableType:
    """The tree, the best of its size and the smallest that reaches as much; what it comes to, in sentences."""
    held_out = " (held out)" if score.best.rates.replayed is not None else ""
    labels = (name, f"best of its size{held_out}", f"smallest that reaches it{held_out}")
    cells = [
        (
            label,
            str(len(rated.tree)),
            str(rated.tree.depth),
            pm(rated.rates.product, None, 3),
            pm(rated.rates.joint, None, 3),
            pm(rated.rates.replayed, rated.rates.stderr, 3),
        )
        for label, rated in zip(labels, (score.given, score.best, score.smallest), strict=True)
        if rated is not None
    ]
    columns = ("tree", "rows", "depth", "product", "joint", "replayed")
    return together(grid("Tokens per step", columns, cells, left=1), verdict(score, name))


def verdict(score: Score, name: str) -> str:
    """What the table comes to."""
    error = score.distance_stderr
    size, best = len(score.given.tree), len(score.best.tree)
    share = pm(100 * score.distance, None if error is None else 100 * error, 1)
    if score.unknown_nodes:
        return f"{name} is at most {share} % below the best tree of {best} rows."
    said = f"{name} is {share} % below the best tree of {best} rows."
    if round(score.distance, 4) <= 2 * (error or 0.0):
        noise = f", within the noise ({share} % below)" if error else ""
        said = f"{name} is as good as the best tree of {best} rows{noise}."
    if score.smallest and len(score.smallest.tree) < size:
        said += f" {len(score.smallest.tree)} rows reach what its {size} do."
    return said
