"""Join the shards of one calibration.

Shards are one calibration divided among processes that know nothing of each other. The prompts are cut into blocks, which
are decoded by themselves as in a single process, and shard i of n measures the blocks i, i + n, i + 2n, ... Nothing is
measured again: the blocks are taken out of the shards' traces, put in their order, and joined.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, pairwise, zip_longest
from typing import Any

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.records.origins import Origin, ShardRecord, check_same_origin
from treeopt.records.trace import RankTrace

Named = tuple[str, RankTrace]  # a trace and what sentences call it


@dataclass(frozen=True)
class Shard:
    """One of several shards, counted from 1.

    >>> Shard.of("2/3").places(7)
    [1, 4]
    """

    index: int = 1
    count: int = 1

    @classmethod
    def of(cls, text: str) -> Shard:
        """The shard that "i/n" means. Raises InvalidInput for anything else."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise InvalidInput(f"`shard` must be i/n with i from 1 to n, for example 2/8, but got {text!r}.")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def places(self, blocks: int) -> list[int]:
        """The places, from 0, of its blocks among all."""
        return list(range(self.index - 1, blocks, self.count))

    def record(self, prompts: str, block_prompts: int, blocks: Sequence[RankTrace]) -> ShardRecord:
        """The meta "shard" of a trace that joins its blocks."""
        sequences = [block.num_sequences for block in blocks]
        return ShardRecord(
            prompts=prompts, block_prompts=block_prompts, index=self.index, count=self.count, sequences=sequences
        )


WHOLE = Shard()


def digest(hashes: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def merge(traces: Sequence[Named]) -> RankTrace:
    """The trace of a calibration, by its shards in any order.

    Raises InvalidInput for traces that are no shards, that do not belong together, or are not all of them.
    """
    for name, trace in traces:
        if trace.meta.get("shard") is None or trace.group is None or trace.meta.get("prompt_sha256") is None:
            raise InvalidInput(f"Shards of one calibration are joined (treeopt calibrate --shard), but {name} is none.")
        what = f"Shards of one calibration are merged, but {traces[0][0]} (there) and {name} (here)"
        check_same_origin(_origin(traces[0][1]), _origin(trace), what)
    shards = sorted(traces, key=lambda named: named[1].meta["shard"]["index"])
    indices = [trace.meta["shard"]["index"] for _, trace in shards]
    count = shards[0][1].meta["shard"]["count"]
    if indices != list(range(1, count + 1)):
        raise InvalidInput(
            f"Merging takes each of the {count} shards of a calibration once, but got {', '.join(map(str, indices))}."
        )
    columns = [_blocks(name, trace) for name, trace in shards]
    blocks = [block for row in zip_longest(*columns) for block in row if block is not None]
    meta = reduce(_agreed, [trace.meta for _, trace in shards])
    skipped = chain(*(trace.meta.get("skipped") or [] for _, trace in shards))
    return join(blocks, {key: meta[key] for key in meta if key not in ("shard", "num_heads")} | {"skipped": [*skipped]})


def settings_of(meta: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """What two calibrations must have alike to be one, besides model, drafter and rule; ``more`` of it."""
    keys = ("answers", "max_new_tokens", "top_k", "pools", "marginals")
    rule = meta.get("acceptance") or {}
    return {**{key: meta.get(key) for key in keys}, "acceptance seed": rule.get("seed"), **more}


def _origin(trace: RankTrace) -> Origin:
    """What all shards of a calibration have in common; they may be measured on several devices."""
    shard = {key: trace.meta["shard"][key] for key in ("prompts", "block_prompts", "count")}
    more = {"top_k": trace.top_k, "heads": trace.num_heads, "eos_ids": trace.meta.get("eos_ids"), "shard": shard}
    return replace(Origin.of(trace.meta), device=None, settings=settings_of(trace.meta, **more))


def _blocks(name: str, trace: RankTrace) -> list[RankTrace]:
    """The blocks of a shard, each as a trace of its own."""
    ends = np.cumsum([0, *trace.meta["shard"]["sequences"]]).tolist()
    if ends[-1] != trace.num_sequences:
        raise InvalidInput(f"{name} contradicts itself: its blocks have {ends[-1]} sequences, but it holds others.")
    alone = replace(trace, meta=trace.meta | {"skipped": []})
    return [alone.select(np.arange(*ends_of_block)) for ends_of_block in pairwise(ends)]


def _agreed(first: Any, other: Any) -> Any:
    """What both say; None where they differ."""
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        return {key: _agreed(first.get(key), other.get(key)) for key in dict.fromkeys((*first, *other))}
    return first if first == other else None


def join(blocks: Sequence[RankTrace], meta: Mapping[str, Any]) -> RankTrace:
    """One trace of all blocks. Groups have common names, and each prompt that was skipped is listed once."""
    numbers: dict[str, int] = {}
    common, hashes, batch_sizes = [], [], set()
    skipped = {_place(row): row for row in meta["skipped"]}
    for block in blocks:
        names = [block.meta["group_names"][group] for group in np.asarray(block.group).tolist()]
        groups = [numbers.setdefault(name, len(numbers)) for name in names]
        common.append(replace(block, group=np.array(groups)))
        hashes += block.meta["prompt_sha256"]
        batch_sizes |= set(block.meta.get("batch_sizes", [block.meta.get("batch_size")]))
        skipped |= {_place(row): row for row in block.meta["skipped"]}
    first = blocks[0].meta
    same = ("top_k", "eos_ids", "max_new_tokens", "pools", "marginals")
    shared: dict[str, object] = {key: first[key] for key in same if key in first}
    lists = {
        "group_names": list(numbers),
        "batch_sizes": sorted(batch_sizes),
        "prompt_sha256": hashes,
        "skipped": [skipped[place] for place in sorted(skipped)],
    }
    return RankTrace.concatenate(common, {**shared, **meta, **lists})


def _place(skipped: Mapping[str, Any]) -> tuple[int, str]:
    """Row and reason of a prompt or turn that was left out."""
    return skipped.get("row") or 0, skipped.get("reason") or ""
