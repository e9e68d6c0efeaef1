"""A figure that a notebook shows as a picture."""

from matplotlib.figure import Figure

from treeopt.report.figures.style import DPI, SIZE_INCHES, to_bytes


class ShownFigure(Figure):
    """matplotlib's figure; by itself Jupyter shows its size alone, unless pyplot was imported."""

    def _repr_png_(self) -> bytes:
        return to_bytes(self, "png")


def blank(width: float = SIZE_INCHES[0], height: float = SIZE_INCHES[1]) -> Figure:
    """An empty figure of this size in inches, whose parts make room for each other."""
    return ShownFigure(figsize=(width, height), dpi=DPI, layout="constrained")
