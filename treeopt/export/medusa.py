"""FasterDecoding/Medusa: a Python list, for ``medusa_generate(medusa_choices=...)`` and ``--medusa-choices``."""

from __future__ import annotations

from collections.abc import Mapping

from treeopt.export.buffers import decoded, medusa_buffers
from treeopt.export.engine import Request, Written
from treeopt.export.lists import listed, same, the_list
from treeopt.trees.tree import Tree


def write(request: Request) -> Written:
    """``medusa_choices.py`` for medusa/model/medusa_choices.py, and the bare list as JSON."""
    tree = request.tree_of("medusa")
    choices = listed(tree)
    files = {"medusa_choices.py": f"treeopt_{len(tree) - 1} = {choices}\n", "medusa_choices.json": f"{choices}\n"}
    command = (
        "python llm_judge/gen_model_answer_medusa.py --model-path HEADS --model-id treeopt "
        f'--medusa-choices "{choices}"{posterior_flags(request)}'
    )
    arguments = "".join(f", {name}={value:g}" for name, value in posterior(request).items())
    notes = (
        f"In your own code: model.medusa_generate(input_ids, medusa_choices=treeopt_...{arguments}), one sequence at a "
        "time.",
        "The script takes the temperature from each question's category, whatever --temperature says; "
        "medusa_generate heeds it.",
    )
    return Written(files=files, command=command, notes=notes)


def posterior(request: Request) -> dict[str, float]:
    """Typical acceptance as Medusa's and Hydra's code calls its numbers; none for greedy decoding."""
    rule = request.acceptance or {}
    names = {"temperature": "temperature", "epsilon": "posterior_threshold", "delta": "posterior_alpha"}
    return {name: rule[key] for key, name in names.items() if rule.get(key) is not None}


def posterior_flags(request: Request) -> str:
    return "".join(f" --{name.replace('_', '-')} {value:g}" for name, value in posterior(request).items())


def parse(files: Mapping[str, str]) -> Tree:
    """The tree that Medusa's buffers of every file's list are of."""
    return same(decoded(medusa_buffers(the_list(text))) for text in files.values())
