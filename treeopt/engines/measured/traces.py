"""Ranks of every state, in the tensors of Medusa's script and in JSON lines of an engine. Trees can be replayed on them.

`NAME_heads_accuracy.pt`, which Medusa's medusa/eval/heads_accuracy.py writes (commit e2a5d20).

The script decodes every prompt greedily for the same number of steps and saves one tensor a head. It says
whether each of the head's 20 candidates was the token that came. A prompt of N = steps + 1 tokens has the
states 0...steps. At state t head k guesses token t + 1 + k, so that it has steps - k + 1 rows a prompt, in
order of t. Heads 1 and 2 tell how many prompts there were (rows1 - rows2), and row j of a block is state j.
So the file is a whole trace, although Medusa's reader sums it up and divides by the literal 16100, the rows
of head 1 for 805 prompts of 20 steps.

Each prompt is one sequence of consecutive states of greedy decoding, so trees can be replayed on it
exactly. One thing cannot be mended: the script does not stop at EOS, and tokens behind it count.

hits : (rows, R) bool  of one head; at most one candidate a row is the true token

Ranks that an engine logged while it decoded are JSON lines, one emitted sequence each.

{"ranks": [[0, 2, null], [1, null, null], ...], "tokens": [...], "id": "...", "group": "...", "end": "eos"}

ranks   one row for each of the N emitted tokens: at state t, the rank of token t + 1 + k at head k,
        counted from 0; null or -1 beyond what was logged; -2 where a head did not guess at all
tokens  the N emitted tokens
id      of the conversation: sequences with the same id are its turns, and stay together in folds
group   to report by
end     why the sequence ended: limit, eos, context or loop (or 0...3); limit where it is left out

Past the end of a sequence there is nothing to log, and cells must be null. They are no trials, except that they
are misses behind an EOS, where every guess is wrong.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PlainValidator

from treeopt.engines.measured.files import Measurement, head_order
from treeopt.engines.measured.rates import counted
from treeopt.errors import InvalidInput
from treeopt.files.storage import typed
from treeopt.records.trace import MISS, NO_TRIAL, End, RankTrace
from treeopt.trees.tree import MOST_DEPTH, MOST_RANK, BoolArray

NO_EOS = "Medusa's script does not stop at EOS, so what the model wrote after the end of an answer counts too."
NO_BLOCKS = (
    "The prompts do not have the same number of steps each, so it is unknown which rows belong "
    "together. Only the accuracy of each head was taken, over its own rows."
)
MOST_GROUPS = 1000  # each is reported by itself
ENDS = {end.name.lower(): end for end in End}


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
        turned = all((table.sum(0) <= 1).all() for table in hits)
        raise InvalidInput(
            f"{path} must hold tables of rows x candidates with one hit a row at most, but {shapes[0]} "
            + ("looks transposed: turn the tables round." if turned else "has several: its hits look cumulative.")
        )
    candidates = {shape[1] for shape in shapes}
    if any(0 in shape for shape in shapes) or len(candidates) > 1 or max(candidates) > MOST_RANK:
        raise InvalidInput(f"{path} must have rows and as many candidates for every head, but its shapes are {shapes}.")
    return hits


def _end(value: object) -> End | None:
    end = ENDS.get(value.lower(), value) if isinstance(value, str) else value
    if end is None:
        return None
    if isinstance(end, int) and end in list(End):
        return End(end)
    raise ValueError(f"a sequence must end by {', '.join(ENDS)}, but got {value!r}")


@dataclass(frozen=True)
class Logged:
    """A line of the file."""

    ranks: list[list[Annotated[int, Field(ge=NO_TRIAL, le=MOST_RANK)] | None]]
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = None
    id: str | int | None = None
    group: str | None = None
    end: Annotated[End | None, PlainValidator(_end)] = None


def is_ranks(content: Any) -> bool:
    first = content[0] if isinstance(content, list) and content else content
    return isinstance(first, dict) and "ranks" in first


def read_ranks(content: Any, path: Path) -> Measurement:
    lines = typed(list[Logged], content if isinstance(content, list) else [content], path)
    heads = len(lines[0].ranks[0]) if lines[0].ranks else 0
    names = list(dict.fromkeys(line.group or "" for line in lines))
    if heads > MOST_DEPTH or len(names) > MOST_GROUPS:
        raise InvalidInput(f"{path} may have {MOST_DEPTH} heads and {MOST_GROUPS} groups, but has more.")
    blocks = [sequence_ranks(line, heads, f"{path}, sequence {s + 1},") for s, line in enumerate(lines)]
    group_of = {name: i for i, name in enumerate(names)}
    ids = [(s, None) if line.id is None else (type(line.id), line.id) for s, line in enumerate(lines)]
    cluster_of = {conversation: i for i, conversation in enumerate(dict.fromkeys(ids))}
    tokens = [token for line in lines for token in line.tokens or []]  # of all lines, or `RankTrace` refuses them
    trace = RankTrace(
        ranks=np.concatenate(blocks),
        starts=np.cumsum([0, *map(len, blocks)]),
        tokens=None if all(line.tokens is None for line in lines) else np.array(tokens, np.int32),
        end=None if all(line.end is None for line in lines) else np.array([line.end or End.LIMIT for line in lines]),
        group=np.array([group_of[line.group or ""] for line in lines]) if any(names) else None,
        cluster=np.array([cluster_of[conversation] for conversation in ids]),
        meta={"group_names": names if any(names) else []},
    )
    trials = (trace.ranks[trace.has_step] != NO_TRIAL).sum(0)
    if trials.min() < 1:
        raise InvalidInput(
            f"{path} must have something to guess for every head, but head {trials.argmin() + 1} has not."
        )
    return Measurement(trace=trace)


def sequence_ranks(line: Logged, heads: int, where: str) -> NDArray[np.int64]:
    """(N, K) ranks of one sequence, with misses and states without a trial.

    >>> sequence_ranks(Logged([[0, 2], [None, None], [None, None]]), 2, "x").tolist()
    [[0, 2], [-1, -2], [-2, -2]]
    """
    if heads < 1 or not line.ranks or any(len(row) != heads for row in line.ranks):
        raise InvalidInput(f"{where} must have one rank per head in every row, {heads} as in the file's first row.")
    if line.tokens is not None and len(line.tokens) != len(line.ranks):
        raise InvalidInput(f"{where} must have a token for every row of ranks.")
    ranks = np.array([[MISS if rank is None else rank for rank in row] for row in line.ranks])
    state, head = np.indices(ranks.shape)
    past = state + head + 2 > len(ranks)
    if (ranks[past] >= 0).any():
        t, k = np.argwhere(past & (ranks >= 0))[0]
        raise InvalidInput(
            f"{where} emitted {len(ranks)} tokens, but at state {t} head {k + 1} has a rank for token {t + k + 2}: "
            "it must be null."
        )
    ranks[past] = MISS if line.end is End.EOS else NO_TRIAL
    ranks[-1] = NO_TRIAL
    return ranks
