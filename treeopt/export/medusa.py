"""FasterDecoding/Medusa: a Python list, for ``medusa_generate(medusa_choices=...)`` and ``--medusa-choices``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from treeopt.export.buffers import decoded, medusa_buffers
from treeopt.export.engine import Request, Written
from treeopt.export.lists import listed, lists_of, same
from treeopt.files.shell import shell_word
from treeopt.trees.tree import Tree


def write(request: Request) -> Written:
    """``medusa_choices.py`` for medusa/model/medusa_choices.py, and the bare list as JSON."""
    written = in_python(request, "medusa")
    files = {**written.files, "medusa_choices.json": f"{listed(request.tree_of('medusa'))}\n"}
    temperature = (
        "The script takes the temperature from each question's category, whatever --temperature says; "
        "medusa_generate heeds it."
    )
    return replace(written, files=files, notes=(*written.notes, temperature))


def in_python(request: Request, engine: str) -> Written:
    """The list as Python, and the benchmark with it, as Medusa's repository and its fork Hydra have them."""
    tree = request.tree_of(engine)
    choices = listed(tree)
    given = posterior(request)
    flags = "".join(f" --{name.replace('_', '-')} {value:g}" for name, value in given.items())
    arguments = "".join(f", {name}={value:g}" for name, value in given.items())
    call = f"model.{engine}_generate(input_ids, {engine}_choices=treeopt_...{arguments})"
    return Written(
        files={f"{engine}_choices.py": f"treeopt_{len(tree) - 1} = {choices}\n"},
        command=f"python llm_judge/gen_model_answer_{engine}.py --model-path HEADS --model-id treeopt "
        f"--{engine}-choices {shell_word(choices)}{flags}",
        notes=(f"In your own code: {call}, one sequence at a time.",),
    )


def posterior(request: Request) -> dict[str, float]:
    """Typical acceptance as Medusa's and Hydra's code calls its numbers; none for greedy decoding."""
    rule = request.acceptance or {}
    names = {"temperature": "temperature", "epsilon": "posterior_threshold", "delta": "posterior_alpha"}
    return {name: rule[key] for key, name in names.items() if rule.get(key) is not None}


def parse(files: Mapping[str, str]) -> Tree:
    """The tree that Medusa's buffers of every file's list are of."""
    return same(decoded(medusa_buffers(choices)) for choices in lists_of(files))
