"""Join the shards of one calibration.

Shards are one calibration divided among processes that know nothing of each other: the prompts are cut into blocks, which
are decoded by themselves as in a single process, and shard i of n measures the blocks i, i + n, i + 2n, ...

Nothing is measured again. The blocks of which a trace was made stay known in its meta, so that shards join in any order,
however many at a time: the blocks are taken out, put in the order of their places, and joined.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.records.origins import Part, Provenance, ShardRecord, differing
from treeopt.records.trace import RankTrace

OF_FILES = ("schema", "num_heads")  # keys that saving adds
Named = tuple[str, RankTrace]  # under which name a trace was given


@dataclass(frozen=True)
class Shard:
    """Which of how many shards, counted from 1.

    >>> Shard.of("2/3").places(7)
    [1, 4]
    """

    index: int = 1
    count: int = 1

    @classmethod
    def of(cls, text: str) -> Shard:
        """The shard that "i/n" means. Raises InvalidInput for anything else."""
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise InvalidInput(f"`shard` must be i/n with i from 1 to n, for example 2/8, but got {text!r}.")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def places(self, blocks: int) -> list[int]:
        """The places, from 0, of its blocks among all."""
        return list(range(self.index - 1, blocks, self.count))


WHOLE = Shard()


def digest(hashes: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


@dataclass(frozen=True)
class _Block:
    """A block with its own trace, and the name of the trace that it was taken out of."""

    part: Part
    trace: RankTrace
    name: str


def merge(traces: Sequence[Named]) -> RankTrace:
    """The trace of all shards, by the names that sentences call them.

    Raises InvalidInput for traces that are no shards or do not belong together, and for blocks that are there twice.
    """
    if len(traces) < 2:
        raise InvalidInput(f"Merging takes two runs at least, but got {len(traces)}.")
    for name, trace in traces:
        if trace.tokens is None or trace.group is None or trace.meta.get("prompt_sha256") is None:
            raise InvalidInput(f"Merging takes what treeopt calibrate measured, but {name} does not say which prompts.")
        if trace.meta.get("shard") is None:
            raise InvalidInput(
                f"Merging joins the shards of one calibration (treeopt calibrate --shard), but {name} is a whole one. Of "
                "several files of prompts calibrate on all at once."
            )
        _check_alike(traces[0], (name, trace))
    blocks = sorted((block for named in traces for block in _blocks(*named)), key=lambda block: block.part["key"])
    for one, other in pairwise(blocks):
        if one.part["key"] == other.part["key"]:
            raise InvalidInput(
                f"A prompt counts once, but block {1 + one.part['key']} is in {one.name} and in {other.name}: leave one out."
            )
    meta = reduce(_agreed, [{k: v for k, v in b.trace.meta.items() if k not in OF_FILES} for b in blocks])
    meta["shard"] |= {"blocks": [block.part for block in blocks]}
    if len(blocks) == meta["shard"]["num_blocks"]:
        del meta["shard"]
    skipped = [row for _, trace in traces for row in trace.meta.get("skipped") or []]
    return join([block.trace for block in blocks], meta | {"skipped": skipped})


def _check_alike(one: Named, other: Named) -> None:
    """Raise InvalidInput, with both names, unless two traces are shards of one calibration."""
    if said := differing(_measured(one[1]), _measured(other[1])):
        raise InvalidInput(
            f"Shards of one calibration are merged, but {one[0]} (there) and {other[0]} (here) differ in {', '.join(said)}."
        )


def _measured(trace: RankTrace) -> dict[str, object]:
    """What all shards of a calibration have in common."""
    meta, made, drafter = trace.meta, Provenance.of(trace.meta), trace.meta.get("drafter") or {}
    rules = ("acceptance", "answers", "max_new_tokens", "eos_ids", "pools", "marginals")
    weights = "id" if drafter.get("sha256") is None else "sha256"
    return {
        "model": made.model,
        "revision": made.revision,
        "dtype": made.dtype,
        **{key: meta.get(key) for key in rules},
        "drafter": {key: drafter.get(key) for key in ("kind", "num_heads", "num_layers", weights)},
        "ranks": trace.top_k,
        "heads": trace.num_heads,
        "shard": {key: value for key, value in meta["shard"].items() if key != "blocks"},
    }


def _blocks(name: str, trace: RankTrace) -> list[_Block]:
    """The blocks that a shard consists of, each as a trace of its own."""
    parts: list[Part] = trace.meta["shard"]["blocks"]
    ends = np.cumsum([0, *(part["sequences"] for part in parts)]).tolist()
    if ends[-1] != trace.num_sequences:
        raise InvalidInput(f"{name} contradicts itself: the parts that it says it was made of are not what it holds.")
    alone = replace(trace, meta=trace.meta | {"skipped": []})
    return [_Block(part, alone.select(np.arange(*at)), name) for part, at in zip(parts, pairwise(ends), strict=True)]


def _agreed(one: Any, other: Any) -> Any:
    """What both say; None where they differ."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {key: _agreed(one.get(key), other.get(key)) for key in dict.fromkeys((*one, *other))}
    return one if one == other else None


def join(blocks: Sequence[RankTrace], meta: Mapping[str, Any]) -> RankTrace:
    """One trace of all blocks: their groups under common names, their skipped turns in one list."""
    named = [[block.meta["group_names"][group] for group in np.asarray(block.group).tolist()] for block in blocks]
    number = {name: place for place, name in enumerate(dict.fromkeys(name for names in named for name in names))}
    common = [
        replace(block, group=np.array([number[name] for name in names]))
        for block, names in zip(blocks, named, strict=True)
    ]
    first = blocks[0].meta
    same = ("top_k", "eos_ids", "max_new_tokens", "pools", "marginals")
    shared: dict[str, object] = {key: first[key] for key in same if key in first}
    skipped = [*meta["skipped"], *(turn for b in blocks for turn in b.meta["skipped"])]
    lists = {
        "group_names": list(number),
        "batch_sizes": sorted({size for b in blocks for size in b.meta.get("batch_sizes", [b.meta.get("batch_size")])}),
        "prompt_sha256": [sha for b in blocks for sha in b.meta["prompt_sha256"]],
        "skipped": sorted({_place(row): row for row in skipped}.values(), key=_place),
    }
    return RankTrace.concatenate(common, {**shared, **meta, **lists})


def _place(skipped: Mapping[str, Any]) -> tuple[int, str]:
    """Row and reason of a prompt or turn that was left out."""
    return skipped.get("row") or 0, skipped.get("reason") or ""


def shard_record(prompts: str, block_prompts: int, num_blocks: int, blocks: Mapping[int, RankTrace]) -> ShardRecord:
    """The meta "shard" of the trace of some blocks, by place."""
    parts: list[Part] = [{"key": place, "sequences": block.num_sequences} for place, block in sorted(blocks.items())]
    return {"prompts": prompts, "block_prompts": block_prompts, "num_blocks": num_blocks, "blocks": parts}
