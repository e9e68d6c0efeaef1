"""How torch's threads wait: asleep. This module imports nothing heavy, since it is to come before torch.

A thread of OpenMP that waits for another one keeps its core busy for a while, in the hope of going on at once. Where
another program has that core, the threads wait for each other in turn: with two threads on two cores of which one was
busy, a step of 4 ms took up to 600 ms. OpenMP reads how to wait from the environment, once, when torch loads it.
"""

import os
import sys
from importlib.util import find_spec

from treeopt.errors import Unsupported

RUNS_MODELS = ("torch", "transformers", "datasets", "safetensors")  # what only commands that run a model import
POLICY = "OMP_WAIT_POLICY"
SAID_BY = (POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # variables by which a user says how threads wait


def import_torch() -> None:
    """Import torch with threads that sleep while they wait, unless it is there already or the user says how they wait.

    The environment is as before in the end: commands that are started have threads of their own. Raises Unsupported where
    what runs models is not installed.
    """
    if absent := [name for name in RUNS_MODELS if find_spec(name) is None]:
        raise Unsupported(
            f"This runs a model, which needs {absent[0]}, but it is not installed. Install it with: pip install 'treeopt[models]'"
        )
    if "torch" in sys.modules or any(name in os.environ for name in SAID_BY):
        return
    os.environ[POLICY] = "PASSIVE"
    try:
        import torch

        torch.get_num_threads()  # OpenMP has read the variable now at the latest
    finally:
        del os.environ[POLICY]
