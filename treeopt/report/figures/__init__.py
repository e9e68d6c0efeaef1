"""Pictures of what was measured, chosen and proved.

A figure's module computes a `Chart` from the types of the core, which can be used and tested without a drawing; one
function draws any chart. The tree alone has a layout of its own.

chart.py      panels, series, and how they are drawn
accuracy.py   the guesses: by rank, by group of prompts, along the answer
planning.py   tokens per step and throughput over tree size
batches.py    kinds of drafts, drafters and what batching trades, over batch sizes
latency.py    what a step costs and what it is made of
bench.py      what real decoding measured
training.py   how heads learned
tree.py       the tree and how often its nodes are accepted
style.py      one look for all, PNG and SVG
registry.py   all of them by name, made of a run directory
"""

from treeopt.report.figures.registry import FIGURES, Picture, draw, pictures
from treeopt.report.figures.style import svg_element

__all__ = ["FIGURES", "Picture", "draw", "pictures", "svg_element"]
