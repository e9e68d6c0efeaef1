"""Pictures of what was measured, chosen and proved.

A figure's module computes a `Chart` from the types of the core, which can be used and tested without a drawing; one
function draws any chart. The tree alone has a layout of its own.
"""

from treeopt.report.figures.registry import FIGURES, Picture, draw, pictures
from treeopt.report.figures.style import svg_element

__all__ = ["FIGURES", "Picture", "draw", "pictures", "svg_element"]
