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

from treeopt.pipeline.decide import search
from treeopt.pipeline.deliver import convert, export, export_all, named_tree, read_tree
from treeopt.pipeline.exchange import import_tree, score
from treeopt.pipeline.external import profile_command
from treeopt.pipeline.importing import import_file
from treeopt.pipeline.measure import calibrate
from treeopt.pipeline.probing import probe_again
from treeopt.pipeline.profile import profile
from treeopt.pipeline.prove import bench
from treeopt.pipeline.timings import profile_analytical, profile_from_file
from treeopt.pipeline.train import train

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
