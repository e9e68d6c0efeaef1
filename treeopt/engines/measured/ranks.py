"""Ranks that an engine logged while it decoded: JSON lines, one emitted sequence each.

{"ranks": [[0, 2, null], [1, null, null], ...], "tokens": [...], "id": "...", "group": "...", "end": "eos"}

ranks   one row for each of the N emitted tokens: at state t, the rank of token t + 1 + k at head k,
        counted from 0; null or -1 beyond what was logged; -2 where a head did not guess at all
tokens  the N emitted tokens
id      of the conversation: sequences with the same id are its turns, and stay together in folds
group   to report by
end     why the sequence ended: limit, eos, context or loop (or 0...3); limit where it is left out

Past the end of a sequence there is nothing to log: those cells must be null. They are no trials, but
misses behind an EOS, where a guess is wrong.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PlainValidator

from treeopt.engines.measured.files import Found
from treeopt.errors import InvalidInput
from treeopt.files.storage import typed
from treeopt.records.trace import MISS, NO_TRIAL, End, RankTrace
from treeopt.trees.tree import MOST_DEPTH, MOST_RANK

MOST_GROUPS = 1000  # each is reported by itself
ENDS = {end.name.lower(): end for end in End}


def _end(value: object) -> End | None:
    found = ENDS.get(value.lower(), value) if isinstance(value, str) else value
    if found is None or (isinstance(found, int) and found in list(End)):
        return found if found is None else End(found)
    raise ValueError(f"a sequence must end by {', '.join(ENDS)}, but got {value!r}")


@dataclass(frozen=True)
class Logged:
    """A line of the file."""

    ranks: list[list[Annotated[int, Field(ge=NO_TRIAL, le=MOST_RANK)] | None]]
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = None
    id: str | int | None = None
    group: str | None = None
    end: Annotated[End | None, PlainValidator(_end)] = None


def matches(content: Any) -> bool:
    first = content[0] if isinstance(content, list) and content else content
    return isinstance(first, dict) and "ranks" in first


def read(content: Any, path: Path) -> Found:
    """The trace of logged ranks."""
    lines = typed(list[Logged], content if isinstance(content, list) else [content], path)
    heads = len(lines[0].ranks[0]) if lines[0].ranks else 0
    names = list(dict.fromkeys(line.group or "" for line in lines))
    if heads > MOST_DEPTH or len(names) > MOST_GROUPS:
        raise InvalidInput(f"{path} may have {MOST_DEPTH} heads and {MOST_GROUPS} groups, but has more.")
    blocks = [sequence_ranks(line, heads, f"{path}, sequence {s + 1},") for s, line in enumerate(lines)]
    place = {name: i for i, name in enumerate(names)}
    ids = [(s, None) if line.id is None else (type(line.id), line.id) for s, line in enumerate(lines)]
    cluster = {one: i for i, one in enumerate(dict.fromkeys(ids))}
    tokens = [token for line in lines for token in line.tokens or []]  # of all lines, or `RankTrace` refuses them
    trace = RankTrace(
        ranks=np.concatenate(blocks),
        starts=np.cumsum([0, *map(len, blocks)]),
        tokens=None if all(line.tokens is None for line in lines) else np.array(tokens, np.int32),
        end=None if all(line.end is None for line in lines) else np.array([line.end or End.LIMIT for line in lines]),
        group=np.array([place[line.group or ""] for line in lines]) if any(names) else None,
        cluster=np.array([cluster[one] for one in ids]),
        meta={"group_names": names if any(names) else []},
    )
    tried = (trace.ranks[trace.has_step] != NO_TRIAL).sum(0)
    if tried.min() < 1:
        raise InvalidInput(
            f"{path} must have something to guess for every head, but head {tried.argmin() + 1} has not."
        )
    return Found(trace=trace)


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
