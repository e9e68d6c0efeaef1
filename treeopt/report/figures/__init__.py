"""Pictures of what was measured, chosen and proved.

Every figure is made in two steps, so that its numbers can be used and tested without a drawing:
``*_data()`` computes a small record from the types of the core, ``draw_*()`` draws that record.

tree.py       the tree and how often its nodes are accepted
accuracy.py   the guesses: by rank, by group of prompts, along the answer
planning.py   tokens per step and throughput over tree size
latency.py    what a step costs and what it is made of
bench.py      what real decoding measured
style.py      one look for all, PNG and SVG
registry.py   all of them by name, drawn from a run directory
page.py       drawings of the report that answer to the pointer
"""

from treeopt.report.figures.accuracy import (
    accuracy_data,
    draw_accuracy,
    draw_groups,
    draw_positions,
    groups_data,
    positions_data,
)
from treeopt.report.figures.bench import accepted_data, contenders_data, draw_accepted, draw_contenders
from treeopt.report.figures.latency import draw_latency, draw_parts, latency_data, parts_data
from treeopt.report.figures.planning import draw_sizes, draw_throughput, sizes_data, throughput_data
from treeopt.report.figures.registry import FIGURES, Figure, Picture, draw, pictures
from treeopt.report.figures.style import to_bytes, to_svg
from treeopt.report.figures.tree import draw_tree, tree_data

__all__ = [
    "FIGURES",
    "Figure",
    "Picture",
    "accepted_data",
    "accuracy_data",
    "contenders_data",
    "draw",
    "draw_accepted",
    "draw_accuracy",
    "draw_contenders",
    "draw_groups",
    "draw_latency",
    "draw_parts",
    "draw_positions",
    "draw_sizes",
    "draw_throughput",
    "draw_tree",
    "groups_data",
    "latency_data",
    "parts_data",
    "pictures",
    "positions_data",
    "sizes_data",
    "throughput_data",
    "to_bytes",
    "to_svg",
    "tree_data",
]
