"""The steps of the line, each reading the run directory and writing one file to it.

measure.py   calibrate -> trace.npz, calibration.json
probing.py   calibrate under typical acceptance -> probe.npz
profile.py   profile -> profile.json, with placement.py
timings.py   profile --from-csv, --analytical
external.py  profile --command
decide.py    search -> plan.json
prove.py     bench -> bench.json
deliver.py   export -> export/ · convert -> a checkpoint
exchange.py  score: a given tree beside the best · import-tree: what is wrong with its file
importing.py import -> trace.npz, calibration.json
train.py     train -> heads, and how they were made
"""

from treeopt.pipeline.bench import bench
from treeopt.pipeline.calibrate import calibrate
from treeopt.pipeline.export import convert, export, export_all, named_tree, read_tree
from treeopt.pipeline.importing import import_file
from treeopt.pipeline.probe import probe_again
from treeopt.pipeline.profile.analytical import profile_analytical
from treeopt.pipeline.profile.command import profile_command
from treeopt.pipeline.profile.table import profile_from_file
from treeopt.pipeline.profile.timed import profile
from treeopt.pipeline.search import search
from treeopt.pipeline.train import train
from treeopt.pipeline.trees import import_tree, score

__all__ = [
    "bench",
    "calibrate",
    "convert",
    "export",
    "export_all",
    "import_file",
    "import_tree",
    "named_tree",
    "probe_again",
    "profile",
    "profile_analytical",
    "profile_command",
    "profile_from_file",
    "read_tree",
    "score",
    "search",
    "train",
]
