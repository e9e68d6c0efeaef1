"""NVIDIA Model Optimizer: keyword arguments of SPECBENCH_MEDUSA in its examples/specdec_bench.

It has no search for trees; its benchmark builds the buffers of Medusa, and its own ``Tree`` checks parents.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from treeopt.engines.base import Choices, Method, Request, ServingEngine, Written
from treeopt.engines.lists import as_lists, decoded, listed, medusa_buffers
from treeopt.errors import InvalidInput
from treeopt.trees.tree import MAX_RANK, Tree

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


def read(choices: Choices, _: Tree) -> Tree:
    """The tree of the benchmark's buffers; ValueError where the library's own check raises it."""
    lists = as_lists(choices)
    try:
        total_nodes(lists)
    except InvalidInput as error:
        raise ValueError(str(error).rstrip(".")) from None
    return decoded(medusa_buffers(lists))


ENGINE = ServingEngine(
    name="modelopt", title="Model Optimizer, specdec_bench", package="nvidia-modelopt", readers={"Model Optimizer": read},
    counting=("Model Optimizer",), methods=(
    Method(name="specbench-medusa", checked="0.47.0, benchmark a2fbac7 of 2026-08", drafters=("medusa",), shape="any",
           max_rank=MAX_RANK, max_batch_size=1,
           carrier="engine_args in the YAML of --runtime_params", syntax="medusa_choices: [[0], [1], [0, 0]]",
           derived=("medusa_num_heads = heads",),
           source="NVIDIA/Model-Optimizer examples/specdec_bench/specdec_bench/models/specbench_medusa.py, "
                  "modelopt/torch/speculative/utils.py", write=write),
))  # fmt: skip
