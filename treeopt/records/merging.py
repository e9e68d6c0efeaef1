"""Merge traces: the shards of one calibration, or calibrations of different prompts by their share of the traffic.

Nothing is measured again. The parts of which a trace was made stay known in its meta, so that merging is associative and
in any order: the parts are taken out, put in order, and joined. Parts of a shard are blocks, in the order of their
places; those of calibrations are the calibrations, in the order of their prompts' digests.

A share of the traffic is one of its conversations. Every conversation counts a whole number of times, as if it were repeated
(`RankTrace.repeated`): 1 for those of the calibration that counts least, 2 for some and 3 for others where a ratio is between.

Shards are one calibration divided among processes that know nothing of each other: the prompts are cut into blocks, which
are decoded by themselves as in a single process, and shard i of n measures the blocks i, i + n, i + 2n, ...
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
from numpy.typing import NDArray

from treeopt.errors import InvalidInput, quoted
from treeopt.records.origins import Part, ShardRecord
from treeopt.records.rules import same_drafter
from treeopt.records.trace import RankTrace

MOST_REPEATED = 100  # times that a conversation may count
ROUNDING = 1e-9  # of how often conversations count
# What traces must have in common, and where their meta says it.
MUST_AGREE = {
    "numbers of heads": ("num_heads",),
    "models": ("provenance", "model"),
    "revisions of the model": ("provenance", "revision"),
    "number formats": ("provenance", "dtype"),
    "acceptance rules": ("acceptance",),
    "kinds of answers": ("answers",),
    "numbers of ranks": ("top_k",),
    "longest answers": ("max_new_tokens",),
    "tokens that end an answer": ("eos_ids",),
    "dynamic trees": ("pools",),
    "trees over marginals": ("marginals",),
    "narrower blocks": ("narrower",),
    "prompts that are divided among shards": ("shard", "prompts"),
    "blocks of shards": ("shard", "block_prompts"),
    "numbers of blocks": ("shard", "num_blocks"),
}
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
    """One digest of the prompts with these hashes, in this order."""
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


@dataclass(frozen=True)
class _Piece:
    """A part with its own trace, and the name of the trace that it was taken out of."""

    part: Part
    trace: RankTrace
    name: str


def merge(traces: Sequence[Named], shares: Sequence[float] | None = None) -> RankTrace:
    """The trace of all of them, by the names that sentences call them.

    shares : how much of the traffic each stands for, in any unit; without them every conversation counts once

    Raises InvalidInput for traces that do not belong together, for what is there twice, and for shares of shards.
    """
    if len(traces) < 2:
        raise InvalidInput(f"Merging takes two runs at least, but got {len(traces)}.")
    if shares is not None and len(shares) != len(traces):
        raise InvalidInput(f"`weight` must be given once for every run, {len(traces)} times, but came {len(shares)}.")
    for name, trace in traces:
        if trace.tokens is None or trace.group is None or trace.meta.get("prompt_sha256") is None:
            raise InvalidInput(f"Merging takes what treeopt calibrate measured, but {name} does not say which prompts.")
        _check_alike(traces[0], (name, trace))
    is_shard = traces[0][1].meta.get("shard") is not None
    if is_shard and shares is not None:
        raise InvalidInput("`weight` is for calibrations of different prompts, but these are shards of one.")
    each = [_pieces(*named) for named in traces]
    if not is_shard:
        each = _shared(each, shares)
    pieces = sorted((piece for own in each for piece in own), key=lambda piece: piece.part["key"])
    _check_distinct(pieces)
    meta = reduce(_agreed, [{k: v for k, v in p.trace.meta.items() if k not in OF_FILES} for p in pieces])
    parts, skipped = [piece.part for piece in pieces], [row for _, t in traces for row in t.meta.get("skipped") or []]
    if is_shard:
        meta["shard"] |= {"blocks": parts}
        if len(pieces) == meta["shard"]["num_blocks"]:
            del meta["shard"]
        return join([piece.trace for piece in pieces], meta | {"skipped": skipped})
    found = join([_grouped(piece) for piece in pieces], meta | {"skipped": []})
    about = {"skipped": sorted(skipped, key=_place), "merged": parts}
    return replace(found, meta=found.meta | about, weight=None if shares is None else _weights(pieces))


def _check_alike(one: Named, other: Named) -> None:
    """Raise InvalidInput, with both names, unless two traces were measured by the same rule on the same model."""
    metas = [{**t.meta, "top_k": t.top_k, "num_heads": t.num_heads} for _, t in (one, other)]
    found = {what: [_at(meta, place) for meta in metas] for what, place in MUST_AGREE.items()}
    drafters = [meta.get("drafter") or {} for meta in metas]
    if not same_drafter(*drafters):
        found["drafters"] = drafters
    for what, (ours, theirs) in found.items():
        if ours != theirs:
            raise InvalidInput(
                f"Traces with different {what} cannot be merged: {one[0]} has {quoted(ours, 200)}, {other[0]} "
                f"{quoted(theirs, 200)}."
            )


def _at(meta: Mapping[str, Any], place: Sequence[str]) -> Any:
    found: Any = meta
    for key in place:
        found = (found or {}).get(key)
    return found


def _pieces(name: str, trace: RankTrace) -> list[_Piece]:
    """The parts that a trace consists of, each as a trace of its own; a calibration that was never merged is one."""
    meta, n = trace.meta, trace.num_sequences
    whole: Part = {"key": digest(meta["prompt_sha256"]), "sequences": n, "name": _at(meta, ("provenance", "dataset"))}
    parts: list[Part] = meta["shard"]["blocks"] if meta.get("shard") else meta.get("merged") or [whole]
    ends = np.cumsum([0, *(part["sequences"] for part in parts)]).tolist()
    if ends[-1] != n or len({part.get("share") is None for part in parts}) > 1:
        raise InvalidInput(f"{name} contradicts itself: the parts that it says it was made of are not what it holds.")
    alone = replace(trace, weight=None, meta=meta | {"skipped": []})
    return [_Piece(part, alone.select(np.arange(*at)), name) for part, at in zip(parts, pairwise(ends), strict=True)]


def _shared(each: Sequence[list[_Piece]], shares: Sequence[float] | None) -> list[list[_Piece]]:
    """The pieces of each trace with their shares of the traffic, which sum to 1; without shares none may have one."""
    if shares is None:
        for piece in (piece for own in each for piece in own if piece.part.get("share")):
            raise InvalidInput(
                f"{piece.name} was merged by shares of the traffic: say with `weight` what every run stands for."
            )
        return list(each)
    found = []
    for share, own in zip(shares, each, strict=True):
        known = [piece.part.get("share") or piece.trace.num_conversations for piece in own]
        exact = [share / sum(shares) * n / sum(known) for n in known]
        found.append([replace(p, part={**p.part, "share": n}) for p, n in zip(own, exact, strict=True)])
    return found


def _check_distinct(pieces: Sequence[_Piece]) -> None:
    """Raise InvalidInput where two pieces answered the same prompt."""
    holders: dict[str, str] = {}
    for piece in pieces:
        here = dict.fromkeys(piece.trace.meta["prompt_sha256"], piece.name)
        if both := [sha for sha in here if sha in holders]:
            raise InvalidInput(
                f"A prompt counts once, but {len(both):,} prompts are in {holders[both[0]]} and in {piece.name}, the first "
                f"of them {both[0]}. Calibrate one of the two on prompts that are not in the other."
            )
        holders |= here


def _grouped(piece: _Piece) -> RankTrace:
    """The trace of a piece; one without groups becomes a group of its own, named as its data."""
    if piece.trace.group_names:
        return piece.trace
    return replace(piece.trace, meta={**piece.trace.meta, "group_names": [piece.part.get("name") or "(unknown)"]})


def _weights(pieces: Sequence[_Piece]) -> NDArray[np.float32] | None:
    """(S,) how often each sequence counts, the same for the turns of a conversation; None where all count once.

    Of a calibration whose conversations count r times each on average, the i-th counts floor((i + 1) r) - floor(i r) times.
    """
    ratios = [(piece.part["share"] or 0.0) / piece.trace.num_conversations for piece in pieces]
    least = min(ratios)
    if max(ratios) > MOST_REPEATED * least:
        raise InvalidInput(
            f"By these shares one calibration's conversations would count {max(ratios) / least:,.0f} times as much "
            f"as another's, but at most {MOST_REPEATED} times is allowed: calibrate on more prompts of the one that counts more."
        )
    found = []
    for ratio, piece in zip(ratios, pieces, strict=True):
        ends = np.floor(np.arange(piece.trace.num_conversations + 1) * ratio / least + ROUNDING)
        found.append(np.diff(ends)[piece.trace.clusters])
    weights = np.concatenate(found).astype(np.float32)
    return None if (weights == 1).all() else weights


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
    same = ("top_k", "eos_ids", "max_new_tokens", "pools", "marginals", "narrower")
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
