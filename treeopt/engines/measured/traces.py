"""Ranks of every state, in `NAME_heads_accuracy.pt` of Medusa's medusa/eval/heads_accuracy.py (commit e2a5d20).

The script decodes every prompt greedily for the same number of steps and saves one tensor a head. It says
whether each of the head's 20 candidates was the token that came. A prompt of N = steps + 1 tokens has the
states 0...steps. At state t head k guesses token t + 1 + k, so that it has steps - k + 1 rows a prompt, in
order of t. Heads 1 and 2 tell how many prompts there were (rows1 - rows2), and row j of a block is state j.
So the file is a whole trace, although Medusa's reader sums it up and divides by the literal 16100, the rows
of head 1 for 805 prompts of 20 steps.

Each prompt is one sequence of consecutive states of greedy decoding, so trees can be replayed on it
exactly. One thing cannot be mended: the script does not stop at EOS, and tokens behind it count.

hits : (rows, R) bool  of one head; at most one candidate a row is the true token
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.engines.measured.files import Measurement, counted, head_order
from treeopt.errors import InvalidInput
from treeopt.records.trace import MISS, NO_TRIAL, End, RankTrace
from treeopt.trees.tree import MOST_DEPTH, MOST_RANK, BoolArray

NO_EOS = "Medusa's script does not stop at EOS, so what the model wrote after the end of an answer counts too."
NO_BLOCKS = (
    "The prompts do not have the same number of steps each, so it is unknown which rows belong "
    "together. Only the accuracy of each head was taken, over its own rows."
)


def is_hits(content: Any) -> bool:
    tensors = list(content.values()) if isinstance(content, dict) else content
    return (
        isinstance(tensors, list)
        and bool(tensors)
        and all(isinstance(tensor, np.ndarray) and tensor.ndim == 2 for tensor in tensors)
    )


def read_hits(content: Any, path: Path) -> Measurement:
    """The trace of hit tensors; a calibration of counts if the rows do not fit together."""
    names = head_order(content, path) if isinstance(content, dict) else range(len(content))
    heads = check_hits([content[name] for name in names], path)
    rows = [len(hits) for hits in heads]
    blocks = block_shape(rows)
    if blocks is None:
        hits = np.stack([head.sum(0) for head in heads])
        return Measurement(counted(hits, rows, path), (NO_BLOCKS, NO_EOS))
    prompts, steps = blocks
    ranks = np.full((prompts, steps + 1, len(heads)), NO_TRIAL)
    for k, hits in enumerate(heads):
        rank = np.where(hits.any(1), hits.argmax(1), MISS)
        ranks[:, : steps - k, k] = rank.reshape(prompts, steps - k)
    meta = {"top_k": heads[0].shape[1], "acceptance": {"rule": "greedy", "temperature": 0.0}}
    starts, end = np.arange(prompts + 1) * (steps + 1), np.full(prompts, End.LIMIT)
    trace = RankTrace(ranks.reshape(-1, len(heads)), starts, end=end, meta=meta)
    return Measurement(None, (NO_EOS,), trace)


def block_shape(rows: list[int]) -> tuple[int, int] | None:
    """(prompts, steps) that give every head its number of rows; None if no numbers do.

    >>> block_shape([16100, 15295, 14490]), block_shape([16100, 16100])
    ((805, 20), None)
    """
    prompts = rows[0] - rows[1] if len(rows) > 1 else 0
    if prompts < 1 or rows[0] % prompts:
        return None
    steps = rows[0] // prompts
    return (prompts, steps) if rows == [prompts * (steps - k) for k in range(len(rows))] else None


def check_hits(tables: list[NDArray[Any]], path: Path) -> list[BoolArray]:
    """The tables of hits, rows x candidates. Raises InvalidInput if they are none."""
    if len(tables) > MOST_DEPTH:
        raise InvalidInput(f"{path} may have {MOST_DEPTH} heads, but has {len(tables):,}.")
    if any(table.dtype.kind not in "biu" or not np.isin(table, (0, 1)).all() for table in tables):
        raise InvalidInput(f"{path} must hold hits, true or false, but it holds other numbers.")
    hits, shapes = [table.astype(bool) for table in tables], [table.shape for table in tables]
    if any((table.sum(1) > 1).any() for table in hits):
        raise InvalidInput(
            f"{path} must hold tables of rows x candidates with one hit a row at most, but a row of {shapes[0]} has several: "
            "they are transposed, or its hits are cumulative."
        )
    candidates = {shape[1] for shape in shapes}
    if any(0 in shape for shape in shapes) or len(candidates) > 1 or max(candidates) > MOST_RANK:
        raise InvalidInput(f"{path} must have rows and as many candidates for every head, but its shapes are {shapes}.")
    return hits
