"""FasterDecoding/Medusa: a Python list, for ``medusa_generate(medusa_choices=...)`` and ``--medusa-choices``."""

from __future__ import annotations

from collections.abc import Mapping

from treeopt.export.buffers import decoded, medusa_buffers
from treeopt.export.engine import Request, Written
from treeopt.export.lists import listed, same, the_list
from treeopt.tree import Tree


def write(request: Request) -> Written:
    """``medusa_choices.py`` for medusa/model/medusa_choices.py, and the bare list as JSON."""
    tree = request.tree_of("medusa")
    choices = listed(tree)
    files = {
        "medusa_choices.py": f"treeopt_{len(tree) - 1} = {choices}\n",
        "medusa_choices.json": f"{choices}\n",
    }
    command = (
        "python llm_judge/gen_model_answer_medusa.py --model-path HEADS --model-id treeopt "
        f'--medusa-choices "{choices}"'
    )
    note = "In your own code: model.medusa_generate(input_ids, medusa_choices=treeopt_...), one sequence at a time."
    return Written(files=files, command=command, notes=(note,))


def parse(files: Mapping[str, str]) -> Tree:
    """The tree that Medusa's buffers of every file's list are of."""
    return same(decoded(medusa_buffers(the_list(text))) for text in files.values())
