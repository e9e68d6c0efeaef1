"""The steps of the line, each reading the run directory and writing one file to it.

measure.py   calibrate -> trace.npz, calibration.json · profile -> profile.json
decide.py    search -> plan.json
prove.py     bench -> bench.json
deliver.py   export -> export/ · convert -> a checkpoint
"""

from treeopt.pipeline.decide import search
from treeopt.pipeline.deliver import convert, export, read_tree
from treeopt.pipeline.measure import SIZES, calibrate, profile
from treeopt.pipeline.prove import bench

__all__ = ["SIZES", "bench", "calibrate", "convert", "export", "profile", "read_tree", "search"]
