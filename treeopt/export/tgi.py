"""text-generation-inference: the length of a chain, one top-1 guess per head; it takes no tree.

The launcher's --model-id names the folder of the heads, whose config.json names the base model.
"""

from __future__ import annotations

from collections.abc import Mapping

from treeopt.errors import InvalidInput
from treeopt.export.chains import (
    COMMANDS,
    NO_SPECULATION,
    drafter_of,
    flags,
    only_length,
    plain,
    unnamed,
    whole,
    within_heads,
)
from treeopt.export.engine import Lengths, Request, Written

MOST_ROWS = 128  # above batch x (1 + N) rows TGI silently stops speculating
MODELS = {"medusa": "HEADS", "ngram": "BASE"}  # what --model-id names


def write_chain(request: Request) -> Written:
    """The launch command with ``--speculate``, or of the base model where no chain pays."""
    drafter = drafter_of(request, ("medusa", "ngram"), "TGI")
    length = only_length(request, "TGI")
    if length == 0:
        return plain("text-generation-launcher --model-id BASE")
    notes = list(unnamed(request, drafter))
    if drafter == "medusa":
        within_heads(length, request, "TGI")
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
    return Written(files={COMMANDS: f"{command}\n"}, command=command, notes=tuple(notes))


def parse(files: Mapping[str, str]) -> Lengths:
    """The chain length as TGI reads it; InvalidInput for heads without one, of which it would use all."""
    given = flags(files)
    length = given.get("--speculate")
    if length is not None:
        return ((1, None, whole(length, "--speculate")),)
    if given.get("--model-id") == MODELS["medusa"]:
        raise InvalidInput("Without --speculate TGI uses as many guesses as there are heads: name the length.")
    return NO_SPECULATION


def length_at(length: int, batch_size: int) -> int:
    """How many guesses TGI really makes: none above `MOST_ROWS` rows.

    >>> length_at(3, 32), length_at(3, 33)
    (3, 0)
    """
    return length if batch_size * (1 + length) <= MOST_ROWS else 0
