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
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import reduce
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput, quoted
from treeopt.files import storage
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
class Source:
    """One of the calibrations that a merged trace was made of, under meta "merged".

    prompts   : digest of those that were asked, in order
    name      : of the data that they come from
    blocks    : how many it was measured in
    skipped   : prompts and turns that were left out
    share     : of the traffic; None where every conversation counts once
    """

    prompts: str
    name: str | None
    sequences: int
    blocks: int
    skipped: int
    share: float | None = None

    def __post_init__(self) -> None:
        if self.share is not None and not self.share > 0:
            raise InvalidInput(f"a share of the traffic must be above 0, but is {self.share:g}.")


@dataclass(frozen=True, kw_only=True)
class _Merged:
    """The meta of a trace that merging made, or a shard's."""

    shard: ShardRecord | None = None
    merged: tuple[Source, ...] | None = None


def merge(traces: Sequence[Named], shares: Sequence[float] | None = None) -> RankTrace:
    """The trace of all of them, by the names that sentences call them.

    shares : how much of the traffic each stands for, in any unit; without them every conversation counts once

    Raises InvalidInput for traces that do not belong together, for what is there twice, and for shares of shards.
    """
    if len(traces) < 2:
        raise InvalidInput(f"Merging takes two runs at least, but got {len(traces)}.")
    if shares is not None and len(shares) != len(traces):
        raise InvalidInput(f"--weight must be given once for every run, {len(traces)} times, but came {len(shares)}.")
    for name, trace in traces:
        if trace.tokens is None or trace.meta.get("prompt_sha256") is None:
            raise InvalidInput(f"Merging takes what treeopt calibrate measured, but {name} does not say which prompts.")
        _check_alike(traces[0], (name, trace))
    records = [storage.typed(_Merged, _said(trace), name) for name, trace in traces]
    sharded = [name for (name, _), record in zip(traces, records, strict=True) if record.shard]
    whole = [name for name, _ in traces if name not in sharded]
    if sharded and whole:
        raise InvalidInput(
            f"A shard goes with the others of its calibration only, but {sharded[0]} is one and {whole[0]} is a whole "
            "calibration: merge all shards of the one first."
        )
    if sharded:
        if shares is not None:
            raise InvalidInput("--weight is for calibrations of different prompts, but these are shards of one.")
        return _merge_shards(traces, [record.shard for record in records if record.shard])
    return _merge_whole(traces, [record.merged for record in records], shares)


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
    """What the trace of some blocks, by place, says under meta "shard"."""
    parts = [
        Part(block=place, sequences=block.num_sequences, skipped=len(block.meta["skipped"]))
        for place, block in sorted(blocks.items())
    ]
    record = ShardRecord(prompts=prompts, block_prompts=block_prompts, num_blocks=num_blocks, blocks=tuple(parts))
    return {**asdict(record), "blocks": [asdict(part) for part in parts]}


def _batch_sizes(block: RankTrace) -> list[int]:
    """Those of a part of several blocks, or that of a block as it is measured."""
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


def _merge_shards(traces: Sequence[Named], records: Sequence[ShardRecord]) -> RankTrace:
    """The trace of the shards' blocks; that of a single process where all are there."""
    blocks: dict[int, RankTrace] = {}
    holders: dict[int, int] = {}  # of each block the place of its trace
    first = records[0]
    for number, ((name, trace), record) in enumerate(zip(traces, records, strict=True)):
        for what in ("prompts", "block_prompts", "num_blocks"):
            if getattr(record, what) != getattr(first, what):
                raise InvalidInput(
                    f"Shards of one calibration ask the same prompts in the same blocks, but {traces[0][0]} and {name} "
                    f"differ in {what}. Run every shard with the same options, --batch-size too."
                )
        counts = [(part.sequences, part.skipped, 1) for part in record.blocks]
        for part, piece in zip(record.blocks, _pieces(name, trace, counts), strict=True):
            if part.block in blocks:
                raise InvalidInput(
                    f"A block of prompts counts once, but block {part.block + 1} of {first.num_blocks} is in "
                    f"{traces[holders[part.block]][0]} and in {name}."
                )
            blocks[part.block], holders[part.block] = piece, number
    order = sorted(blocks)
    leading = holders[order[0]]
    meta = _common([traces[holders[place]][1].meta for place in order])
    rows = len(traces[leading][1].meta["skipped"]) - sum(part.skipped for part in records[leading].blocks)
    meta["skipped"] = traces[leading][1].meta["skipped"][:rows]  # rows of the source without a prompt
    del meta["shard"]
    if len(order) < first.num_blocks:
        ordered = {place: blocks[place] for place in order}
        meta["shard"] = shard_record(first.prompts, first.block_prompts, first.num_blocks, ordered)
    return join([blocks[place] for place in order], meta)


def _merge_whole(
    traces: Sequence[Named], merged: Sequence[tuple[Source, ...] | None], shares: Sequence[float] | None
) -> RankTrace:
    """The trace of calibrations of different prompts."""
    parts: list[tuple[Source, RankTrace, str]] = []
    metas: dict[str, Mapping[str, Any]] = {}
    for number, ((name, trace), known) in enumerate(zip(traces, merged, strict=True)):
        sources = known or (_source_of(trace),)
        if shares is None and any(source.share is not None for source in sources):
            raise InvalidInput(
                f"{name} was merged by shares of the traffic: say with --weight what every run stands for."
            )
        pieces = _pieces(name, trace, [(source.sequences, source.skipped, source.blocks) for source in sources])
        own = _shares(sources, pieces)
        for source, piece, share in zip(sources, pieces, own, strict=True):
            given = None if shares is None else shares[number] * share
            parts.append((replace(source, share=given), piece, name))
            metas.setdefault(source.prompts, trace.meta)
    parts.sort(key=lambda part: part[0].prompts)
    _check_distinct(parts)
    if shares is not None:
        total = math.fsum(source.share or 0.0 for source, *_ in parts)
        parts = [(replace(source, share=(source.share or 0.0) / total), piece, name) for source, piece, name in parts]
    meta = _common([metas[source.prompts] for source, *_ in parts])
    meta |= {"skipped": [], "merged": [asdict(source) for source, *_ in parts]}
    found = join([_grouped(piece, source) for source, piece, _ in parts], meta)
    if shares is None:
        return found
    weights = _weights([source.share or 0.0 for source, *_ in parts], [piece for _, piece, _ in parts])
    return replace(found, weight=None if (weights == 1).all() else weights)


def _pieces(name: str, trace: RankTrace, counts: Sequence[tuple[int, int, int]]) -> list[RankTrace]:
    """The parts of a trace, each with the meta of a trace of its own.

    counts : of every part its sequences, skipped turns, and blocks
    """
    found, meta = [], trace.meta
    rows = len(meta.get("skipped") or []) - sum(skipped for _, skipped, _ in counts)
    ends = [[0, *accumulate(column)] for column in zip(*counts, strict=True)]
    sizes = [len(meta["prompt_sha256"]), len(meta.get("skipped") or []) - rows, len(meta.get("batch_sizes") or [])]
    if [end[-1] for end in ends] != sizes or min(map(min, counts)) < 0 or rows < 0 or trace.group is None:
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


def _source_of(trace: RankTrace) -> Source:
    """A calibration that was never merged, as a part."""
    return Source(
        prompts=digest(trace.meta["prompt_sha256"]),
        name=_at(trace.meta, ("provenance", "dataset")),
        sequences=trace.num_sequences,
        blocks=len(trace.meta.get("batch_sizes") or []),
        skipped=len(trace.meta.get("skipped") or []),
    )


def _shares(sources: Sequence[Source], pieces: Sequence[RankTrace]) -> list[float]:
    """What each source counts among those of one run: its share, or its conversations."""
    known = [source.share for source in sources]
    sizes = [piece.num_conversations for piece in pieces]
    return [size / sum(sizes) if share is None else share for share, size in zip(known, sizes, strict=True)]


def _check_distinct(parts: Sequence[tuple[Source, RankTrace, str]]) -> None:
    """Raise InvalidInput where two calibrations answered the same prompt."""
    holders: dict[str, str] = {}
    for _, piece, name in parts:
        here = dict.fromkeys(piece.meta["prompt_sha256"])
        both = [sha for sha in here if sha in holders]
        if both:
            raise InvalidInput(
                f"A prompt counts once, but {len(both):,} prompts are in {holders[both[0]]} and in {name}, the first of them "
                f"{both[0]}. Calibrate one of the two on prompts that are not in the other."
            )
        holders |= dict.fromkeys(here, name)


def _grouped(piece: RankTrace, source: Source) -> RankTrace:
    """A part without groups becomes a group of its own, named as its data."""
    if piece.group_names:
        return piece
    return replace(piece, meta={**piece.meta, "group_names": [source.name or "(unknown)"]})


def _weights(shares: Sequence[float], pieces: Sequence[RankTrace]) -> NDArray[np.float32]:
    """(S,) how often each sequence counts, the same for the turns of a conversation.

    Of a calibration whose conversations count r times each on average, the i-th counts floor((i + 1) r) - floor(i r) times.
    """
    ratios = [Fraction(share) / piece.num_conversations for share, piece in zip(shares, pieces, strict=True)]
    least = min(ratios)
    if max(ratios) > MOST_REPEATED * least:
        raise InvalidInput(
            f"By these shares one calibration's conversations would count {float(max(ratios) / least):,.0f} times as much "
            f"as another's, but at most {MOST_REPEATED} times is allowed: calibrate on more prompts of the one that counts more."
        )
    found = []
    for ratio, piece in zip(ratios, pieces, strict=True):
        ends = [math.floor(i * ratio / least) for i in range(piece.num_conversations + 1)]
        found.append(np.diff(ends)[piece.clusters])
    return np.concatenate(found).astype(np.float32)


def _common(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all say the same; None where they differ."""
    own = [{key: value for key, value in meta.items() if key not in OF_FILES} for meta in metas]
    return dict(reduce(_agreed, own))


def _agreed(one: Any, other: Any) -> Any:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {key: _agreed(one.get(key), other.get(key)) for key in dict.fromkeys((*one, *other))}
    return one if one == other else None
