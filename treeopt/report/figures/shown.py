"""A figure that a notebook shows as a picture."""

from matplotlib.figure import Figure

from treeopt.report.figures.style import to_bytes


class ShownFigure(Figure):
    """matplotlib's figure; by itself Jupyter shows its size alone, unless pyplot was imported."""

    def _repr_png_(self) -> bytes:
        return to_bytes(self, "png")
