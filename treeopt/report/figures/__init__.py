"""Pictures of what was measured, chosen and proved.

Every figure is made in two steps, so that its numbers can be used and tested without a drawing:
``*_data()`` computes a small record from the types of the core, ``draw_*()`` draws that record.

tree.py       the tree and how often its nodes are accepted
accuracy.py   the guesses: by rank, by group of prompts, along the answer
planning.py   tokens per step and throughput over tree size
latency.py    what a step costs and what it is made of
kinds.py      fixed, dynamic and adaptive trees
bench.py      what real decoding measured
training.py   how heads learned
style.py      one look for all, PNG and SVG
registry.py   all of them by name, drawn from a run directory
"""

from treeopt.report.figures.registry import FIGURES, Picture, draw, pictures
from treeopt.report.figures.style import svg_element

__all__ = ["FIGURES", "Picture", "draw", "pictures", "svg_element"]
