"""NVIDIA Model Optimizer: keyword arguments of SPECBENCH_MEDUSA in its examples/specdec_bench.

It has no search for trees; its benchmark builds the buffers of Medusa, and its own ``Tree`` checks parents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import yaml

from treeopt.errors import InvalidInput
from treeopt.export.buffers import decoded, medusa_buffers
from treeopt.export.engine import Request, Written
from treeopt.export.lists import listed
from treeopt.trees.tree import Tree

FILE = "runtime_params.yml"


def write(request: Request) -> Written:
    """``--runtime_params`` with the list and the number of heads."""
    tree = request.tree_of("modelopt")
    text = f"engine_args:\n  medusa_num_heads: {request.num_heads}\n  medusa_choices: {listed(tree)}\n"
    command = (
        "python run.py --engine SPECBENCH_MEDUSA --tokenizer MODEL --model_dir MODEL --draft_model_dir HEADS "
        f"--tp_size 1 --concurrency 1 --mtbench QUESTIONS --runtime_params {FILE}"
    )
    return Written(files={FILE: text}, command=command, notes=("Run it in examples/specdec_bench.",))


def parse(files: Mapping[str, str]) -> Tree:
    """The tree of the file, by the benchmark's buffers and by the library's own check."""
    choices = yaml.safe_load(files[FILE])["engine_args"]["medusa_choices"]
    if total_nodes(choices) != len(choices) + 1:
        raise InvalidInput(f"{FILE} must list every choice once.")
    return decoded(medusa_buffers(choices))


def total_nodes(tree_paths: Sequence[Sequence[int]]) -> int:
    """Nodes that modelopt/torch/speculative/utils.py counts, root included; a choice that comes twice counts twice.

    Raises InvalidInput where a parent is missing, as the library raises a ValueError.

    >>> total_nodes([[0], [0], [0, 0]])
    4
    """
    known: set[str] = {"[]"}
    for path in sorted(map(list, tree_paths), key=len):
        if json.dumps(path[:-1]) not in known:
            raise InvalidInput(f"Model Optimizer finds an incomplete path: {path} lacks its parent.")
        known.add(json.dumps(path))
    return len(tree_paths) + 1
