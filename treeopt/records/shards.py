"""Shards: one calibration divided among processes that know nothing of each other.

The prompts are cut into blocks, which are decoded by themselves, and shard i of n measures the blocks i, i + n, i + 2n, ...
So no block is another one than in a single process, and the shards together are its trace (`treeopt.records.merging`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from treeopt.errors import InvalidInput
from treeopt.files.fields import Amount, Count, Positive


@dataclass(frozen=True)
class Shard:
    """Which of how many shards, counted from 1.

    >>> Shard.of("2/3").places(7)
    [1, 4]
    """

    index: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count:
            raise InvalidInput(f"`shard` must be i/n with i from 1 to n, but got {self}.")

    @classmethod
    def of(cls, text: str) -> Shard:
        """The shard that "i/n" means. Raises InvalidInput for anything else."""
        if not (found := re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)):
            raise InvalidInput(f"`shard` must be i/n, for example 2/8, but got {text!r}.")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def places(self, blocks: int) -> list[int]:
        """The places, from 0, of its blocks among all."""
        return list(range(self.index - 1, blocks, self.count))


WHOLE = Shard()


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a trace: a block of a shard, or one of the calibrations that were merged.

    key     : place of the block among all blocks; digest of the calibration's prompts, in order
    skipped : prompts and turns that were left out · blocks : that it was measured in
    name    : of the data that a calibration comes from
    share   : of the traffic; None where every conversation counts once
    """

    key: int | str
    sequences: Positive
    skipped: Count
    blocks: Count
    name: str | None = None
    share: Amount | None = None


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """What the trace of a shard, or of some shards, says of itself under meta "shard".

    prompts       : digest of all prompts that the calibration asks
    block_prompts : prompts of a block
    num_blocks    : of the whole calibration
    blocks        : those that are here, by place
    """

    prompts: str
    block_prompts: int
    num_blocks: int
    blocks: tuple[Part, ...]


def digest(hashes: Iterable[str]) -> str:
    """One digest of the prompts with these hashes, in this order."""
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()
