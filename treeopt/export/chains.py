"""Chain lengths by batch size, and what the exports of chains share.

lengths : ranges (from, to, K) of batch sizes, from 1 on without a gap, the last without end;
          K guesses a step, 0 for none
rule    : batch size to K, as an engine looks it up
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import TypeVar

from treeopt.errors import InvalidInput, Unsupported, quoted
from treeopt.export.engine import COMMANDS, Lengths, Request, Written

Value = TypeVar("Value")
Ranges = tuple[tuple[int, int | None, Value], ...]  # of batch sizes, with what they get: `Lengths`, `Settings`

LOOKED_UP = 3  # tokens of the longest n-gram that is looked up, as treeopt's own ``ngram`` does
LAST = 4096  # where a schedule ends that must end somewhere: no engine decodes more sequences at once
BLOCKS = ("dflash", "dspark")  # drafters that guess a block at once, as long as they were trained for at most
NO_SPECULATION: Lengths = ((1, None, 0),)


def merged(lengths: Ranges[Value]) -> Ranges[Value]:
    """The same lengths, or settings, in the fewest ranges.

    Raises InvalidInput where the ranges do not begin at 1, leave a gap or overlap.

    >>> merged(((1, 4, 3), (5, 8, 3), (9, None, 0)))
    ((1, 8, 3), (9, None, 0))
    """
    expected: int | None = 1
    for begin, end, length in lengths:
        if begin != expected or (end is not None and end < begin):
            raise InvalidInput(
                "A schedule must have ranges of batch sizes from 1 on, without gap or overlap, but has "
                f"{begin} to {'the end' if end is None else end} where it must go on from {expected}."
            )
        if isinstance(length, int) and length < 0:
            raise InvalidInput(f"A chain must have at least 0 guesses, but got {length}.")
        expected = None if end is None else end + 1
    if expected is not None:
        raise InvalidInput("The last range of a schedule must be open, so that it serves every batch size.")
    if lengths[-1][0] > LAST:
        raise InvalidInput(f"A schedule may distinguish batch sizes up to {LAST}, but has {lengths[-1][0]}.")
    found: list[tuple[int, int | None, Value]] = []
    for begin, end, length in lengths:
        first = found.pop()[0] if found and found[-1][2] == length else begin
        found.append((first, end, length))
    return tuple(found)


def ranges_of(rule: Callable[[int], Value]) -> Ranges[Value]:
    """What a look-up rule answers for batch sizes 1 to `LAST`; the last answer goes on.

    >>> ranges_of(lambda batch_size: 4 if batch_size <= 8 else 0)
    ((1, 8, 4), (9, None, 0))
    """
    lengths = [rule(batch_size) for batch_size in range(1, LAST + 1)]
    begins = [i + 1 for i, length in enumerate(lengths) if i == 0 or length != lengths[i - 1]]
    ends = [*(begin - 1 for begin in begins[1:]), None]
    return tuple((begin, end, lengths[begin - 1]) for begin, end in zip(begins, ends, strict=True))


def length_at(lengths: Mapping[int, int], batch_size: int) -> int:
    """A look-up by lower bounds: the length of the largest key up to the batch size, below all that of the smallest.

    >>> [length_at({2: 4, 8: 0}, batch_size) for batch_size in (1, 2, 7, 99)]
    [4, 4, 4, 0]
    """
    return lengths[max((key for key in lengths if key <= batch_size), default=min(lengths))]


def only_length(request: Request, engine: str) -> int:
    """The one length for all batch sizes; InvalidInput where the schedule has several."""
    lengths = merged(request.lengths)
    if len(lengths) > 1:
        raise InvalidInput(
            f"{engine} takes one chain length for all batch sizes, but the schedule has {said(lengths)}: "
            "export one of them with --batch-size."
        )
    return lengths[0][2]


def said(lengths: Lengths) -> str:
    """The ranges in words.

    >>> said(((1, 8, 4), (9, None, 0)))
    '1-8: 4, from 9 on: 0'
    """
    return ", ".join(f"{a}-{b}: {k}" if b is not None else f"from {a} on: {k}" for a, b, k in lengths)


def within_heads(length: int, request: Request, engine: str) -> int:
    """The length; InvalidInput where there are not as many heads, of which each makes one guess."""
    if length > request.num_heads:
        raise InvalidInput(
            f"{engine} takes a chain up to the number of heads, {request.num_heads}, but this one has "
            f"{length} guesses: search again with --max-depth {request.num_heads}."
        )
    return length


def drafter_of(request: Request, kinds: Iterable[str], engine: str) -> str:
    """The plan's drafter kind, the first of ``kinds`` where it names none; Unsupported for another."""
    kinds = tuple(kinds)
    drafter = request.drafter or kinds[0]
    if drafter not in kinds:
        raise Unsupported(f"{engine} runs {', '.join(kinds)} this way, but the drafter is {drafter}.")
    return drafter


def launch(command: str, notes: Iterable[str] = (), files: Mapping[str, str] | None = None) -> Written:
    """The files, and the launch command as one more."""
    return Written(files={**(files or {}), COMMANDS: f"{command}\n"}, command=command, notes=tuple(notes))


def plain(command: str, what: str = "chain") -> Written:
    """The base model alone, where no chain pays, or no tree."""
    return Written(
        files={COMMANDS: f"# No {what} pays: the base model without speculation.\n{command}\n"},
        command=command,
        notes=(f"No {what} pays here: the command serves the base model.",),
    )


def flags(files: Mapping[str, str]) -> dict[str, str]:
    """The launch command's ``--flag value`` or ``--flag=value`` pairs; "" for a flag without a value.

    Raises InvalidInput for a text that the shell could not read either.

    >>> flags({"commands.sh": "serve MODEL --eager --steps 3 # three"})
    {'--eager': '', '--steps': '3'}
    """
    try:
        words = shlex.split(files.get(COMMANDS, ""), comments=True)
    except ValueError as error:
        raise InvalidInput(f"A launch command must have its quotes closed: {error}.") from None
    found: dict[str, str] = {}
    for word, following in pairwise([*words, "--"]):
        if word.startswith("--") and "=" in word:
            name, _, found[name] = word.partition("=")
        elif word.startswith("--"):
            found[word] = "" if following.startswith("--") else following
    return found


def whole(text: str, name: str) -> int:
    """A flag's whole number, at least 0."""
    if not text.isdecimal() or len(text) > 9:
        raise InvalidInput(f"{name} must be a whole number, but got {quoted(text)}.")
    return int(text)
