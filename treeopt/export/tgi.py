"""text-generation-inference: the length of a chain, one top-1 guess per head; it takes no tree.

The launcher's --model-id names the folder of the heads, whose config.json names the base model.
"""

from __future__ import annotations

from collections.abc import Mapping

from treeopt.errors import InvalidInput
from treeopt.export import chains
from treeopt.export.engine import Lengths, Request, Written

MOST_ROWS = 128  # above batch x (1 + N) rows TGI silently stops speculating
MODELS = {"medusa": "HEADS", "ngram": "BASE"}  # what --model-id names


def write_chain(request: Request) -> Written:
    """The launch command with ``--speculate``, or of the base model where no chain pays."""
    drafter = chains.drafter_of(request, ("medusa", "ngram"), "TGI")
    length = chains.only_length(request, "TGI")
    if length == 0:
        return chains.plain("text-generation-launcher --model-id BASE")
    notes = []
    if drafter == "medusa":
        chains.within_heads(length, request, "TGI")
        notes.append(
            "HEADS holds medusa_lm_head.safetensors and a config.json that names the base model and has no "
            '"architectures": treeopt convert DRAFTER --to medusa --output HEADS'
        )
    rows = request.batch_size * (1 + length)
    if rows > MOST_ROWS:
        notes.append(
            f"TGI silently stops speculating above {MOST_ROWS} rows, but {request.batch_size} sequences "
            f"x {1 + length} rows are {rows}."
        )
    command = f"text-generation-launcher --model-id {MODELS[drafter]} --speculate {length}"
    return chains.launch(command, notes)


def parse(files: Mapping[str, str]) -> Lengths:
    """The chain length as TGI reads it; InvalidInput for heads without one, of which it would use all."""
    given = chains.flags(files)
    length = given.get("--speculate")
    if length is not None:
        return ((1, None, chains.whole(length, "--speculate")),)
    if given.get("--model-id") == MODELS["medusa"]:
        raise InvalidInput("Without --speculate TGI uses as many guesses as there are heads: name the length.")
    return chains.NO_SPECULATION
