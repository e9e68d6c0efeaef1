"""The steps of the line, each reading the run directory and writing one file to it; named as their commands.

logs.py      requests -> requests.npz, of a log
session.py   what loads a model: options given, on top of those of the run
profile/     -> profile.json: timed.py, here; untimed.py, read or computed; placement.py, which drafts are timed
proof.py     bench: which of the next two is asked for
bench.py     -> bench.json; entrants.py, who is decoded; contest.py, how; plain.py, beside what; logged.py, requests of a log
launched.py  bench by servers that a command of the user's starts; lengths.py, their arms with each length -> arms.json
trees.py     score: a given tree beside the best · read_tree: the tree in a file
train.py     -> heads, and how they were made
"""

from treeopt.pipeline.bench import bench
from treeopt.pipeline.calibrate import calibrate, calibrate_run
from treeopt.pipeline.compare import compare
from treeopt.pipeline.contest import contest
from treeopt.pipeline.export import convert, export, export_all
from treeopt.pipeline.importing import import_accuracies, import_files
from treeopt.pipeline.logs import read_requests
from treeopt.pipeline.profile.timed import profile
from treeopt.pipeline.profile.untimed import profile_analytical, profile_from_file
from treeopt.pipeline.proof import bench_run
from treeopt.pipeline.run import drafters_of, run_drafters, run_line
from treeopt.pipeline.search import search, search_in_memory
from treeopt.pipeline.session import open_random, session_of, session_of_run, source_of
from treeopt.pipeline.train import train
from treeopt.pipeline.trees import named_tree, read_tree, score
from treeopt.pipeline.tune import tune, tune_sources
