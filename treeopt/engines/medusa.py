"""FasterDecoding/Medusa: a Python list, for ``medusa_generate(medusa_choices=...)`` and ``--medusa-choices``."""

from __future__ import annotations

from dataclasses import replace

from treeopt.engines.base import Choices, Method, Request, ServingEngine, Written
from treeopt.engines.lists import decoded, in_python, listed, medusa_buffers, once
from treeopt.trees.tree import MAX_RANK, Tree

TEMPERATURE = "The script takes the temperature from each question's category, whatever --temperature says; medusa_generate heeds it."


def write(request: Request) -> Written:
    """``medusa_choices.py`` for medusa/model/medusa_choices.py, and the bare list as JSON."""
    written = in_python(request, "medusa")
    files = {**written.files, "medusa_choices.json": f"{listed(request.tree_of('medusa'))}\n"}
    return replace(written, files=files, notes=(*written.notes, TEMPERATURE))


def read(choices: Choices, _: Tree) -> Tree:
    """The tree that Medusa's buffers are of."""
    return decoded(medusa_buffers(once(choices)))


ENGINE = ServingEngine(name="medusa", title="Medusa", readers={"Medusa": read}, counting=("Medusa",), methods=(
    Method(name="choices", checked="main e2a5d20 of 2024-04", drafters=("medusa",), shape="any", rules=("greedy", "typical"),
           max_rank=MAX_RANK, max_batch_size=1,
           carrier="medusa/model/medusa_choices.py, medusa_generate(medusa_choices=...), --medusa-choices",
           syntax="[[0], [1], [0, 0]]",
           source="FasterDecoding/Medusa medusa/model/utils.py, llm_judge/gen_model_answer_medusa.py", write=write),
))  # fmt: skip
