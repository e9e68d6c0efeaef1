"""Latencies that are not timed here: read from a table that others timed, or computed of a device's roofline.

row     one line of the file: a step's latency, or tokens per second and per step, at a batch size, context, size
plain   rows of size 1; every batch size and context needs some
sample  several rows of the same step are samples of it; those of one round are compared with each other
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel

from treeopt.engines.registry import runtime_named
from treeopt.engines.sglang import SpeculationTimed
from treeopt.errors import InvalidInput, Unsupported
from treeopt.files.bounds import limit_rows, loads
from treeopt.files.fields import Amount, Count, Positive, checked
from treeopt.files.notes import note
from treeopt.files.storage import read_text
from treeopt.files.table import table_rows
from treeopt.latency.hardware import DTYPES, MEDUSA, device_of, drafting_of, shape_of
from treeopt.latency.roofline import MEASURES, analytical_profile
from treeopt.latency.rounds import PRECISION
from treeopt.pipeline.profile.outcome import check_can_join, finish
from treeopt.pipeline.profile.placement import NUM_HEADS
from treeopt.records.inputs import find_accuracies, inputs_of
from treeopt.records.options import ProfileOptions, Source
from treeopt.records.origins import Provenance
from treeopt.records.profile import LatencyProfile, ProfileSetting, StepTiming
from treeopt.records.rundir import RunDirectory

UNKNOWN_CONTEXT, COMPUTED_CONTEXT = 0, 512
SYNONYMS = {
    "batch": "batch_size", "context": "context_tokens", "choices": "nodes", "num_draft_tokens": "nodes", "rows": "size", "ms": "step_ms",
}  # fmt: skip


class LatencyRow(BaseModel):
    """One sample: a line of a table, or of JSON with the same names, once `SYNONYMS` are replaced."""

    batch_size: Positive
    size: Positive = 0  # with the root; 0 where it is not said
    step_ms: Amount = 0.0
    context_tokens: Positive | None = None
    depth: Count | None = None
    round: Count | None = None
    nodes: Count | None = None  # without the root
    num_speculative_tokens: Count | None = None  # nodes of a chain
    tokens_per_s: Amount | None = None
    tokens_per_step: Amount | None = None

    def whole(self) -> LatencyRow:
        """The row with size and latency; InvalidInput where it says too little, or contradicts itself."""
        sizes = [n + 1 for n in (self.nodes, self.num_speculative_tokens) if n is not None]
        sizes += [self.size] if self.size else []
        if len(sizes) != 1:
            raise InvalidInput("a row must have a size (with the root) or a number of nodes (without it), one of them.")
        size, ms, depth = sizes[0], self.step_ms, self.num_speculative_tokens if self.depth is None else self.depth
        if not ms and self.tokens_per_s and self.tokens_per_step:
            ms = 1e3 * self.batch_size * self.tokens_per_step / self.tokens_per_s
        elif not ms:
            raise InvalidInput("a row must have step_ms, or tokens_per_s and tokens_per_step.")
        if not 0 < ms < math.inf:
            raise InvalidInput(f"a step must take a finite time above 0, but got {ms:g} ms.")
        if size > 1 and depth is not None and not 1 <= depth < size:
            raise InvalidInput(f"depth must be at least 1 and less than size, but they are {depth} and {size}.")
        return self.model_copy(update={"size": size, "step_ms": ms, "depth": depth if size > 1 else 0})


def profile_from_file(
    run: RunDirectory,
    file: Path,
    *,
    runtime: str | None = None,
    contexts: Sequence[int] = (),
    num_heads: int | None = None,
    overwrite: bool = False,
) -> LatencyProfile:
    """The latencies of a table, or of the JSON lines of SGLang's bench_speculative.py, as the run's profile.

    Batch sizes and contexts are added to those that the run's profile has of the same runtime.

    contexts   the one of rows that do not say theirs
    num_heads  depth of trees that do not say theirs, so far as their size allows; by default that of the drafter that is planned
    """
    if len(contexts) > 1:
        raise InvalidInput("`from_csv` takes one `contexts`, that of rows which do not say theirs.")
    rows = read_rows(file)
    if not contexts and any(row.context_tokens is None for row in rows):
        note(f"Some rows do not say their context. It is written as {UNKNOWN_CONTEXT}; pass it with `contexts`.")
    if num_heads is None and any(row.depth is None and row.size > 2 for row in rows):
        note(
            "The file has no depths: its trees are taken to be as deep as the drafter guesses; `num_heads` says otherwise."
        )
    result = profile_of(rows, str(file), contexts[0] if contexts else UNKNOWN_CONTEXT, num_heads)
    calibrated = find_accuracies(run)
    result = result.as_deep_as(calibrated[1].num_heads if calibrated else NUM_HEADS)
    made = replace(Provenance.here(), machine=None, versions=None)  # which a file does not tell
    result.runtime["name"] = runtime_named(runtime or file.stem)
    check_can_join(run, result.runtime, made, overwrite=overwrite)
    result.info.update(measures="step", provenance=made.record, inputs=inputs_of(file))
    timings = (*result.points, *result.autoregressive)
    few = sum(len(timing.step_ms) < 2 for timing in timings)
    if few:
        note(f"{few} of {len(timings)} latencies have one sample each, so their error is unknown.")
    if not overwrite:
        check_nothing_lost(run, result)
    return finish(run, result, None if few else PRECISION, remedy="more rows of them help", alone=overwrite)


def profile_of(rows: Sequence[LatencyRow], name: str, context: int, deepest: int | None) -> LatencyProfile:
    """Rows as a profile, with the context and the depth of those that say none; InvalidInput without a plain row.

    Without ``deepest`` the depth of those is assumed to be all that their size allows.
    """
    groups: dict[tuple[int, int, int, int, bool], list[LatencyRow]] = {}
    for row in rows:
        depth = min(row.size - 1, deepest or row.size) if row.depth is None else row.depth
        assumed = row.depth is None and deepest is None and row.size > 1
        groups.setdefault((row.batch_size, row.context_tokens or context, row.size, depth, assumed), []).append(row)
    plain = {key[:2] for key in groups if key[2] == 1}
    for batch_size, at, *_ in sorted(groups):
        if (batch_size, at) not in plain:
            raise InvalidInput(
                f"{name} must have a plain row, of size 1, for every batch size and context, but batch size "
                f"{batch_size}{f' at context {at}' if at else ''} has none: time plain decoding too."
            )
    timed: dict[bool, list[StepTiming]] = {True: [], False: []}  # plain, and with trees
    for (batch_size, at, size, depth, assumed), group in sorted(groups.items()):
        samples, rounds = tuple(row.step_ms for row in group), tuple(r.round for r in group if r.round is not None)
        point = StepTiming(batch_size, at, size, depth, samples, round=rounds or None, depth_assumed=assumed or None)
        timed[size == 1].append(point)
    settings = [ProfileSetting(batch_size=t.batch_size, context_tokens=t.context_tokens) for t in timed[True]]
    return LatencyProfile(tuple(timed[False]), tuple(timed[True]), {}, {"settings": settings})


def read_rows(file: Path) -> list[LatencyRow]:
    """The rows of a table or of JSON lines; InvalidInput names the line."""
    text = read_text(file).removeprefix("\ufeff")
    is_json = text.lstrip().startswith("{")
    records: Iterator[tuple[int, Mapping[str, object]]] = _json_lines(file, text) if is_json else table_rows(text, file)
    found, unused = [], set[str]()
    for line, record in limit_rows(records, file):
        try:
            if {"step_time", "num_draft_tokens", "steps"} <= record.keys():
                timed = checked(SpeculationTimed, record)
                ms = 1e3 * timed.step_time
                row = LatencyRow.model_construct(
                    batch_size=timed.batch_size, size=timed.size, step_ms=ms, depth=timed.depth
                )
                found.append(row.whole())
                continue
            names: dict[str, str] = {}
            for name in record:
                word = name.replace(" ", "_")
                if (other := names.setdefault(SYNONYMS.get(word, word), name)) != name:
                    raise InvalidInput(f"a row must give each value once, but has {other} and {name}.")
            found.append(checked(LatencyRow, {meaning: record[name] for meaning, name in names.items()}).whole())
        except InvalidInput as error:
            raise InvalidInput(f"{file} line {line}: {error}") from None
        unused |= names.keys() - LatencyRow.model_fields.keys()
    if not found:
        raise InvalidInput(f"{file} must have rows of timings, but it has none.")
    if len({row.round is None for row in found}) > 1:
        raise InvalidInput(f"{file} must say the round of every row, or of none.")
    if unused:
        note(f"Columns of {file.name} that are not used: {', '.join(sorted(unused))}.")
    return found


def _json_lines(file: Path, text: str) -> Iterator[tuple[int, dict[str, object]]]:
    """The number of each line and its record, without nulls."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                record = loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise InvalidInput(f"{file} line {number} must be one JSON object; was it cut off?")
            yield number, {key: value for key, value in record.items() if value is not None}


def check_nothing_lost(run: RunDirectory, result: LatencyProfile) -> None:
    """Raise InvalidInput where the run's profile has other latencies of a setting of the table."""
    earlier = run.read_profile() if run.profile.exists() else None
    if earlier is None or earlier.info.get("measures") == MEASURES:
        return
    for setting in set(result.settings) & set(earlier.settings):
        old, new = (
            [timing for timing in (*one.points, *one.autoregressive) if timing.setting == setting]
            for one in (earlier, result)
        )
        if old != new:
            raise InvalidInput(
                f"{run.profile} has other latencies at batch size {setting[0]} and context {setting[1]} already, which are "
                "not replaced unasked. Leave those rows out, or pass another `run`, or `overwrite`."
            )


def profile_analytical(
    run: RunDirectory, device: str, source: Source, options: ProfileOptions, *, num_heads: int | None = None
) -> LatencyProfile:
    """Computed latencies of all sizes as the run's profile, and notes of what they rest on.

    device     its name, or its two roofs
    source     its model is a config.json, a folder with one, or a name that `shape_of` knows; its drafter a kind or a
               config.json, by default as calibrated, else Medusa heads
    num_heads  levels of drafting; by default as calibrated, else 4
    """
    if source.model is None:
        raise InvalidInput("`analytical` needs the model's shape: pass its config.json as `model`.")
    if run.profile.exists() and not options.overwrite and run.read_profile().info.get("measures") != MEASURES:
        raise InvalidInput(
            f"{run.profile} was measured and is not replaced unasked: pass `overwrite` or another `run`."
        )
    if source.dtype not in (None, *DTYPES):
        raise Unsupported(f"`analytical` knows devices' speeds in {' and '.join(DTYPES)}, not in {source.dtype}.")
    roofs, (shape, file, own) = device_of(device), shape_of(source.model)
    calibrated = find_accuracies(run)
    kind = (calibrated[1].meta.get("drafter") or {}).get("kind") if calibrated else None
    drafts = drafting_of(source.drafter or kind or MEDUSA.kind, shape)
    result = analytical_profile(
        shape,
        roofs,
        batch_sizes=options.batch_sizes,
        contexts=options.contexts or (COMPUTED_CONTEXT,),
        dtype=source.dtype or own or "bfloat16",
        sizes=options.sizes or range(2, options.budget + 1),
        num_heads=num_heads or (calibrated[1].num_heads if calibrated else NUM_HEADS),
        drafter=drafts,
    )
    used: str = result.info["roofline"]["dtype"]
    result.info["provenance"] = replace(Provenance.here(), device=roofs.name, dtype=used, machine=None).record
    result.info["inputs"] = inputs_of(file) if file else {}
    note(f"Nothing was timed: latencies are a roofline of {roofs.name} for {shape.name}, drafting with {drafts.kind}.")
    if roofs.units is None:
        note(f"Efficiencies are those of the A100-80GB-PCIe, since no {roofs.name} was measured.")
    result.save(run.profile)
    return result
