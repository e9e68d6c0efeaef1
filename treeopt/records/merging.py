"""Merge traces: the shards of one calibration, or calibrations of different prompts by their share of the traffic.

Nothing is measured again. The parts of which a trace was made stay known in its meta, so that merging is associative and
in any order: the parts are taken out, put in order, and joined. Parts of a shard are blocks, in the order of their
places; those of calibrations are the calibrations, in the order of their prompts' digests.

A share of the traffic is one of its conversations. Every conversation counts a whole number of times, 1 for those of the
calibration that counts least, so that r times as much is 2 for some and 3 for others where r is between; what that means
is what repeating the conversation would (`RankTrace.repeated`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput, quoted
from treeopt.files import storage
from treeopt.files.storage import document
from treeopt.records.rules import same_drafter
from treeopt.records.shards import Part, ShardRecord, digest
from treeopt.records.trace import RankTrace

MOST_REPEATED = 100  # times that a conversation may count
# What traces must have in common, and where their meta says it.
MUST_AGREE = {
    "models": ("provenance", "model"),
    "revisions of the model": ("provenance", "revision"),
    "number formats": ("provenance", "dtype"),
    "acceptance rules": ("acceptance",),
    "kinds of answers": ("answers",),
    "numbers of ranks": ("top_k",),
    "longest answers": ("max_new_tokens",),
    "tokens that end an answer": ("eos_ids",),
    "dynamic trees": ("pools",),
}
OF_FILES = ("schema", "num_heads")  # keys that saving adds
Named = tuple[str, RankTrace]  # under which name a trace was given


@dataclass(frozen=True, kw_only=True)
class _Origin:
    """Where the sequences of a trace come from, by its meta: a shard's blocks, or merged calibrations."""

    shard: ShardRecord | None = None
    merged: tuple[Part, ...] | None = None

    def parts(self, trace: RankTrace) -> tuple[Part, ...]:
        """The parts that the trace consists of; a calibration that was never merged is one."""
        if self.shard:
            return self.shard.blocks
        meta = trace.meta
        whole = Part(
            key=digest(meta["prompt_sha256"]),
            name=_at(meta, ("provenance", "dataset")),
            sequences=trace.num_sequences,
            blocks=len(meta.get("batch_sizes") or []),
            skipped=len(meta.get("skipped") or []),
        )
        return self.merged or (whole,)


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
        if trace.tokens is None or trace.meta.get("prompt_sha256") is None:
            raise InvalidInput(f"Merging takes what treeopt calibrate measured, but {name} does not say which prompts.")
        _check_alike(traces[0], (name, trace))
    origins = [storage.typed(_Origin, _said(trace), name) for name, trace in traces]
    shard = _common_shard([name for name, _ in traces], origins)
    if shard and shares is not None:
        raise InvalidInput("`weight` is for calibrations of different prompts, but these are shards of one.")
    each = [
        [_Piece(part, piece, name) for part, piece in zip(parts, _pieces(name, trace, parts), strict=True)]
        for (name, trace), parts in ((one, origin.parts(one[1])) for one, origin in zip(traces, origins, strict=True))
    ]
    if not shard:
        each = _shared(each, shares)
    pieces = sorted((piece for own in each for piece in own), key=lambda piece: piece.part.key)
    _check_distinct(pieces)
    meta = _common([piece.trace.meta for piece in pieces])
    if shard:
        del meta["shard"]
        meta["skipped"] = _rows_without_prompt(traces[0][1], origins[0].parts(traces[0][1]))
        if len(pieces) < shard.num_blocks:
            meta["shard"] = document(replace(shard, blocks=tuple(piece.part for piece in pieces)))
        return join([piece.trace for piece in pieces], meta)
    meta |= {"skipped": [], "merged": [document(piece.part) for piece in pieces]}
    found = join([_grouped(piece) for piece in pieces], meta)
    return found if shares is None else replace(found, weight=_weights(pieces))


def _common_shard(names: Sequence[str], origins: Sequence[_Origin]) -> ShardRecord | None:
    """The calibration that all are shards of; None where none is a shard. Raises InvalidInput for any other case."""
    shards = {name: origin.shard for name, origin in zip(names, origins, strict=True) if origin.shard}
    whole = [name for name in names if name not in shards]
    if not shards:
        return None
    first_name, first = next(iter(shards.items()))
    if whole:
        raise InvalidInput(
            f"A shard goes with the others of its calibration only, but {first_name} is one and {whole[0]} is a whole "
            "calibration: merge all shards of the one first."
        )
    for name, shard in shards.items():
        for what in ("prompts", "block_prompts", "num_blocks"):
            if getattr(shard, what) != getattr(first, what):
                raise InvalidInput(
                    f"Shards of one calibration ask the same prompts in the same blocks, but {first_name} and {name} "
                    f"differ in {what}. Run every shard with the same options, `batch_size` too."
                )
    return first


def _shared(each: Sequence[Sequence[_Piece]], shares: Sequence[float] | None) -> list[list[_Piece]]:
    """The pieces of each trace with their shares of the traffic, which sum to 1; without shares none may have one."""
    if shares is None:
        for own in each:
            if any(piece.part.share is not None for piece in own):
                raise InvalidInput(
                    f"{own[0].name} was merged by shares of the traffic: say with `weight` what every run stands for."
                )
        return [list(own) for own in each]
    found, total = [], math.fsum(shares)
    for share, own in zip(shares, each, strict=True):
        sizes = [piece.trace.num_conversations for piece in own]
        known = [
            size / sum(sizes) if p.part.share is None else p.part.share for p, size in zip(own, sizes, strict=True)
        ]
        within = share / total / math.fsum(known)
        found.append([replace(p, part=replace(p.part, share=within * s)) for p, s in zip(own, known, strict=True)])
    return found


def join(blocks: Sequence[RankTrace], meta: dict[str, Any]) -> RankTrace:
    """One trace of all blocks: their groups under common names, their skipped turns in one list."""
    names = list(dict.fromkeys(name for block in blocks for name in block.meta["group_names"]))
    common = []
    for block in blocks:
        assert block.group is not None
        index = np.array([names.index(name) for name in block.meta["group_names"]])
        common.append(replace(block, group=index[block.group]))
    shared: dict[str, Any] = {
        key: blocks[0].meta[key] for key in ("top_k", "eos_ids", "max_new_tokens", "pools") if key in blocks[0].meta
    }
    return RankTrace.concatenate(
        common,
        {
            **shared,
            **meta,
            "group_names": names,
            "batch_sizes": [size for block in blocks for size in _batch_sizes(block)],
            "prompt_sha256": [sha for block in blocks for sha in block.meta["prompt_sha256"]],
            "skipped": [*meta["skipped"], *(turn for block in blocks for turn in block.meta["skipped"])],
        },
    )


def shard_record(prompts: str, block_prompts: int, num_blocks: int, blocks: Mapping[int, RankTrace]) -> dict[str, Any]:
    """The meta "shard" of the trace of some blocks, by place."""
    parts = [
        Part(key=place, sequences=block.num_sequences, skipped=len(block.meta["skipped"]), blocks=1)
        for place, block in sorted(blocks.items())
    ]
    shard = ShardRecord(prompts=prompts, block_prompts=block_prompts, num_blocks=num_blocks, blocks=tuple(parts))
    found: dict[str, Any] = document(shard)
    return found


def _batch_sizes(block: RankTrace) -> list[int]:
    """Batch sizes of the blocks of a part, or of a block as it is measured."""
    return list(block.meta["batch_sizes"]) if "batch_sizes" in block.meta else [block.meta["batch_size"]]


def _said(trace: RankTrace) -> dict[str, Any]:
    return {key: trace.meta.get(key) for key in ("shard", "merged")}


def _check_alike(one: Named, other: Named) -> None:
    """Raise InvalidInput, with both names, unless two traces were measured by the same rule on the same model."""
    (name, trace), (other_name, other_trace) = one, other
    found: list[tuple[str, Any, Any]] = [("numbers of heads", trace.num_heads, other_trace.num_heads)]
    for what, place in MUST_AGREE.items():
        ours, theirs = (_at({**t.meta, "top_k": t.top_k}, place) for t in (trace, other_trace))
        found.append((what, ours, theirs))
    drafters = [t.meta.get("drafter") or {} for t in (trace, other_trace)]
    if not same_drafter(*drafters):
        found.append(("drafters", drafters[0], drafters[1]))
    for what, ours, theirs in found:
        if ours != theirs:
            raise InvalidInput(
                f"Traces with different {what} cannot be merged: {name} has {quoted(ours, 200)}, {other_name} "
                f"{quoted(theirs, 200)}."
            )


def _at(meta: Mapping[str, Any], place: Sequence[str]) -> Any:
    found: Any = meta
    for key in place:
        found = (found or {}).get(key)
    return found


def _rows_without_prompt(trace: RankTrace, parts: Sequence[Part]) -> list[Any]:
    """The skipped rows of the source that belong to no part: they had no prompt."""
    skipped = trace.meta.get("skipped") or []
    return list(skipped[: len(skipped) - sum(part.skipped for part in parts)])


def _pieces(name: str, trace: RankTrace, parts: Sequence[Part]) -> list[RankTrace]:
    """The parts of a trace, each with the meta of a trace of its own."""
    found, meta = [], trace.meta
    counts = [(part.sequences, part.skipped, part.blocks) for part in parts]
    rows = len(meta.get("skipped") or []) - sum(part.skipped for part in parts)
    ends = [[0, *accumulate(column)] for column in zip(*counts, strict=True)]
    sizes = [len(meta["prompt_sha256"]), len(meta.get("skipped") or []) - rows, len(meta.get("batch_sizes") or [])]
    if [end[-1] for end in ends] != sizes or rows < 0 or trace.group is None:
        raise InvalidInput(f"{name} contradicts itself: the parts that it says it was made of are not what it holds.")
    for i in range(len(counts)):
        begins, stops = ([end[i + after] for end in ends] for after in (0, 1))
        piece = trace.select(np.arange(begins[0], stops[0]))
        assert piece.group is not None
        groups = list(dict.fromkeys(piece.group.tolist()))
        known = {
            "group_names": [meta["group_names"][group] for group in groups],
            "prompt_sha256": meta["prompt_sha256"][begins[0] : stops[0]],
            "skipped": meta["skipped"][rows + begins[1] : rows + stops[1]],
            "batch_sizes": meta["batch_sizes"][begins[2] : stops[2]],
        }
        renumbered = np.array([groups.index(group) for group in piece.group.tolist()])
        found.append(replace(piece, group=renumbered, weight=None, meta={**meta, **known}))
    return found


def _check_distinct(pieces: Sequence[_Piece]) -> None:
    """Raise InvalidInput where two pieces answered the same prompt."""
    holders: dict[str, str] = {}
    for piece in pieces:
        here = dict.fromkeys(piece.trace.meta["prompt_sha256"])
        both = [sha for sha in here if sha in holders]
        if both:
            raise InvalidInput(
                f"A prompt counts once, but {len(both):,} prompts are in {holders[both[0]]} and in {piece.name}, the first "
                f"of them {both[0]}. Calibrate one of the two on prompts that are not in the other."
            )
        holders |= dict.fromkeys(here, piece.name)


def _grouped(piece: _Piece) -> RankTrace:
    """The trace of a piece; one without groups becomes a group of its own, named as its data."""
    if piece.trace.group_names:
        return piece.trace
    return replace(piece.trace, meta={**piece.trace.meta, "group_names": [piece.part.name or "(unknown)"]})


def _weights(pieces: Sequence[_Piece]) -> NDArray[np.float32] | None:
    """(S,) how often each sequence counts, the same for the turns of a conversation; None where all count once.

    Of a calibration whose conversations count r times each on average, the i-th counts floor((i + 1) r) - floor(i r) times.
    """
    ratios = [Fraction(piece.part.share or 0.0) / piece.trace.num_conversations for piece in pieces]
    least = min(ratios)
    if max(ratios) > MOST_REPEATED * least:
        raise InvalidInput(
            f"By these shares one calibration's conversations would count {float(max(ratios) / least):,.0f} times as much "
            f"as another's, but at most {MOST_REPEATED} times is allowed: calibrate on more prompts of the one that counts more."
        )
    found = []
    for ratio, piece in zip(ratios, pieces, strict=True):
        ends = [math.floor(i * ratio / least) for i in range(piece.trace.num_conversations + 1)]
        found.append(np.diff(ends)[piece.trace.clusters])
    weights = np.concatenate(found).astype(np.float32)
    return None if (weights == 1).all() else weights


def _common(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all say the same; None where they differ."""
    own = [{key: value for key, value in meta.items() if key not in OF_FILES} for meta in metas]
    return dict(reduce(_agreed, own))


def _agreed(one: Any, other: Any) -> Any:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {key: _agreed(one.get(key), other.get(key)) for key in dict.fromkeys((*one, *other))}
    return one if one == other else None
