"""Profiles of what others timed, read from a file, and of what nobody did, computed.

row     one line of the file: a step's latency, or tokens per second and per step, at a batch size, context, size
plain   rows of size 1; every batch size and context needs some
sample  several rows of the same step are samples of it; those of one round are compared with each other
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treeopt.errors import InvalidInput, TreeoptError, Unsupported
from treeopt.files.provenance import Provenance
from treeopt.files.storage import read_text
from treeopt.latency.devices import device_of
from treeopt.latency.model_shape import ITEMSIZE, shape_of
from treeopt.latency.roofline import MEASURES, analytical_profile
from treeopt.latency.rounds import PRECISION, drifts
from treeopt.pipeline.profile.earlier import reached
from treeopt.pipeline.profile.timed import tell
from treeopt.records.inputs import find_accuracies, inputs_of
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import note

NAMES = {  # what a column means: how it may be called
    "batch_size": ("batch_size", "batch"),
    "context_tokens": ("context_tokens", "context"),
    "size": ("size",),
    "nodes": ("num_draft_tokens", "num_speculative_tokens", "nodes", "choices"),  # without the root
    "depth": ("depth",),
    "step_ms": ("step_ms", "ms"),
    "tokens_per_s": ("tokens_per_s",),
    "tokens_per_step": ("tokens_per_step",),
    "round": ("round",),
}
NUM_HEADS = 4  # deepest tree where nothing says how deep
UNKNOWN_CONTEXT = 0
CONTEXT = 512  # of computed steps
UNREAD = ("machine", "versions")  # keys of a provenance that a file does not tell


@dataclass(frozen=True)
class Row:
    """One sample, as the file has it; None for what it does not say."""

    batch_size: int
    size: int
    step_ms: float
    context_tokens: int | None = None
    depth: int | None = None
    round: int | None = None


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

    contexts   the one of rows that do not say theirs
    num_heads  depth of trees that do not say theirs, so far as their size allows; by default the calibrated one
    """
    check_unmeasured(run, overwrite)
    if len(contexts) > 1:
        raise InvalidInput("--from-csv takes one --context, that of rows which do not say theirs.")
    rows = read_rows(file)
    if contexts:
        rows = [replace(r, context_tokens=r.context_tokens or contexts[0]) for r in rows]
    elif any(row.context_tokens is None for row in rows):
        rows = [replace(r, context_tokens=r.context_tokens or UNKNOWN_CONTEXT) for r in rows]
        note(f"The contexts of some rows are not known and stand as {UNKNOWN_CONTEXT}; --context tells them.")
    if any(row.depth is None for row in rows):
        deepest = num_heads or calibrated_heads(run) or NUM_HEADS
        rows = [replace(r, depth=min(r.size - 1, deepest)) if r.depth is None else r for r in rows]
        if any(row.size > 2 for row in rows):
            note(
                f"The file says no depths: trees are taken to be {deepest} deep, or as deep as they can be; a column "
                "depth or --heads tells it."
            )
    result = profile_of(rows, str(file))
    provenance = Provenance().record() | dict.fromkeys(UNREAD)
    result.info.update(measures="step", provenance=provenance, inputs=inputs_of(file))
    result.runtime["name"] = runtime or file.stem
    few = sum(len(p.step_ms) < 2 for p in (*result.points, *result.autoregressive))
    if few:
        note(
            f"{few} of {len(result.points) + len(result.autoregressive)} latencies have one sample: how well they are "
            "known is not."
        )
    else:
        result.info["precision"] = reached(result, PRECISION)
        tell(result, "more rows of them help")
    result.save(run.profile)
    return result


def profile_of(rows: Sequence[Row], name: str) -> LatencyProfile:
    """Rows with all that they need as a profile; InvalidInput where a setting has no plain row."""
    groups: dict[tuple[int, int, int, int], list[Row]] = {}
    for row in rows:
        assert row.context_tokens is not None
        assert row.depth is not None
        groups.setdefault((row.batch_size, row.context_tokens, row.size, row.depth), []).append(row)
    plain = {key[:2] for key in groups if key[2] == 1}
    for batch_size, context, *_ in sorted(groups):
        if (batch_size, context) not in plain:
            raise InvalidInput(
                f"{name} must have a plain row, of size 1, for every batch size and context, but batch size "
                f"{batch_size}{f' at context {context}' if context else ''} has none: time plain decoding too (0 under "
                "num_draft_tokens, which leaves the root out)."
            )
    timed = [
        StepTiming(*key, step_ms=tuple(row.step_ms for row in group), round=_rounds(group))
        for key, group in sorted(groups.items())
    ]
    reference = tuple(timing for timing in timed if timing.size == 1)
    return LatencyProfile(tuple(t for t in timed if t.size > 1), reference, {}, {"drift": drifts(reference)})


def _rounds(group: Sequence[Row]) -> tuple[int, ...] | None:
    return tuple(row.round for row in group if row.round is not None) or None


def read_rows(file: Path) -> list[Row]:
    """The rows of a table (comma, semicolon or tab) or of JSON lines; InvalidInput names the line."""
    text = read_text(file).removeprefix("\ufeff")
    found, unused = [], set[str]()
    for line, record in _records(file, text):
        try:
            found.append(_sglang(record) if is_sglang(record) else _row(record))
        except TreeoptError as error:
            raise InvalidInput(f"{file} line {line}: {error}") from None
        known = {name for names in NAMES.values() for name in names}
        unused |= set() if is_sglang(record) else record.keys() - known
    if not found:
        raise InvalidInput(f"{file} must have rows of timings, but it has none.")
    if len({row.round is None for row in found}) > 1:
        raise InvalidInput(f"{file} must say the round of every row, or of none.")
    if unused:
        note(f"Columns of {file.name} that are not used: {', '.join(sorted(unused))}.")
    return found


def _records(file: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and what stands there under which name; empty cells are left out."""
    if text.lstrip().startswith("{"):
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield number, _json(file, number, line)
        return
    first = text.lstrip().partition("\n")[0]
    reader = csv.reader(text.splitlines(), delimiter=max(",;\t", key=first.count), strict=True)
    header: list[str] = []
    try:
        for cells in reader:
            values = [cell.strip() for cell in cells]
            if not any(values):
                continue
            if not header:
                header = [name.lower() for name in values]
                _check_header(file, header)
                continue
            if len(values) != len(header):
                raise InvalidInput(
                    f"{file} line {reader.line_num} must have {len(header)} cells, but it has {len(values)}."
                )
            yield reader.line_num, {k: v for k, v in zip(header, values, strict=True) if v}
    except csv.Error as error:
        raise InvalidInput(f"{file} line {reader.line_num} is not a row of a table: {error}.") from None


def _json(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise InvalidInput(f"{file} line {number} must be one JSON object; was it cut off?")
    return {key: value for key, value in record.items() if value is not None}


def _check_header(file: Path, header: Sequence[str]) -> None:
    """Every needed column is there, and nothing twice."""
    columns = {meaning: [name for name in header if name in names] for meaning, names in NAMES.items()}
    twice = next((names for names in columns.values() if len(names) > 1), None)
    if twice:
        raise InvalidInput(f"{file} must say a thing once, but it has the columns {' and '.join(twice)}.")
    if not columns["batch_size"]:
        raise InvalidInput(f"{file} must have a column batch_size; its header is {', '.join(header)}.")
    if bool(columns["size"]) == bool(columns["nodes"]):
        raise InvalidInput(
            f"{file} must have a column size (with the root) or {', '.join(NAMES['nodes'])} (without), one of them; "
            f"its header is {', '.join(header)}."
        )
    if not columns["step_ms"] and not (columns["tokens_per_s"] and columns["tokens_per_step"]):
        raise InvalidInput(
            f"{file} must have a column step_ms, or tokens_per_s and tokens_per_step; its header is "
            f"{', '.join(header)}."
        )


def _row(record: Mapping[str, Any]) -> Row:
    """A line of a table, or of JSON with the same names."""

    def cell(meaning: str) -> Any:
        return next((record[name] for name in NAMES[meaning] if name in record), None)

    if (cell("size") is None) == (cell("nodes") is None):
        raise InvalidInput("a row must have a size or a number of nodes, one of them.")
    batch_size = whole(cell("batch_size"), "batch_size", least=1)
    size = whole(cell("nodes"), "nodes", least=0) + 1 if cell("size") is None else whole(cell("size"), "size", least=1)
    ms = cell("step_ms")
    if ms is None:
        speed, per_step = (positive(cell(name), name) for name in ("tokens_per_s", "tokens_per_step"))
        ms = ms_of_speed(batch_size, speed, per_step)
    depth = cell("depth") if size > 1 else 0
    if depth is None and "num_speculative_tokens" in record:
        depth = size - 1  # a chain
    depth = None if depth is None else whole(depth, "depth", least=min(size - 1, 1))
    if depth is not None and size > 1 and depth >= size:
        raise InvalidInput(f"depth must be less than size, which counts the root, but they are {depth} and {size}.")
    context, number = cell("context_tokens"), cell("round")
    return Row(
        batch_size,
        size,
        positive(ms, "step_ms"),
        None if context is None else whole(context, "context_tokens", least=1),
        depth,
        None if number is None else whole(number, "round", least=0),
    )


def is_sglang(record: Mapping[str, Any]) -> bool:
    """Whether it is a line of SGLang's bench_speculative.py."""
    return {"step_time", "num_draft_tokens", "steps"} <= record.keys()


def _sglang(record: Mapping[str, Any]) -> Row:
    """A line of bench_speculative.py: seconds a step; its num_draft_tokens counts the root, 0 is plain decoding."""
    size = max(1, whole(record.get("num_draft_tokens"), "num_draft_tokens", least=0))
    depth = whole(record.get("steps"), "steps", least=min(size - 1, 1))
    return Row(
        whole(record.get("batch_size"), "batch_size", least=1),
        size,
        1e3 * positive(record["step_time"], "step_time"),
        depth=min(depth, size - 1),
    )


def ms_of_speed(batch_size: int, tokens_per_s: float, tokens_per_step: float) -> float:
    """Latency of a step [ms] of a batch that emits so much together.

    >>> ms_of_speed(8, 1600.0, 2.5)
    12.5
    """
    return 1e3 * batch_size * tokens_per_step / tokens_per_s


def whole(value: Any, name: str, *, least: int) -> int:
    """A whole number, from JSON or from a cell."""
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,12}(\.0+)?", text) or int(float(text)) < least:
        raise InvalidInput(f"{name} must be a whole number of at least {least}, but got {_shown(value)}.")
    return int(float(text))


def positive(value: Any, name: str) -> float:
    """A finite number above 0, from JSON or from a cell."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf:
        raise InvalidInput(f"{name} must be a number above 0, but got {_shown(value)}.")
    return number


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:40]


def check_unmeasured(run: RunDirectory, overwrite: bool) -> None:
    """Raise InvalidInput where the run has a profile that was measured, unless it is to be overwritten."""
    if run.profile.exists() and not overwrite and run.read_profile().info.get("measures") != MEASURES:
        raise InvalidInput(
            f"A measured profile is not replaced unasked, but {run.profile} is one: pass another --run, or --overwrite."
        )


def calibrated_heads(run: RunDirectory) -> int | None:
    """Heads that the run was calibrated with."""
    found = find_accuracies(run)
    return found[1].num_heads if found else None


def profile_analytical(
    run: RunDirectory,
    device: str,
    config: str,
    *,
    batch_sizes: Sequence[int],
    contexts: Sequence[int] = (),
    sizes: Sequence[int] | None = None,
    budget: int = 64,
    dtype: str | None = None,
    num_heads: int | None = None,
    overwrite: bool = False,
) -> LatencyProfile:
    """Computed latencies of all sizes up to ``budget``, or of ``sizes``, as the run's profile.

    num_heads  of Medusa; by default as calibrated, else 4
    """
    check_unmeasured(run, overwrite)
    if dtype not in (None, *ITEMSIZE):
        raise Unsupported(f"--analytical knows devices' speeds in {' and '.join(ITEMSIZE)}, not in {dtype}.")
    found = device_of(device)
    shape, file, own = shape_of(config)
    result = analytical_profile(
        shape,
        found,
        batch_sizes=batch_sizes,
        contexts=contexts or (CONTEXT,),
        dtype=dtype or own or "bfloat16",
        sizes=sizes or range(2, budget + 1),
        num_heads=num_heads or calibrated_heads(run) or NUM_HEADS,
    )
    provenance = Provenance(device=found.name, dtype=result.info["roofline"]["dtype"]).record()
    result.info["provenance"] = provenance | {"machine": None}
    result.info["inputs"] = inputs_of(file) if file else {}
    result.save(run.profile)
    note(f"Nothing was timed: latencies are a roofline of {found.name} for {shape.name}.")
    if not found.fitted:
        note(f"Efficiencies are those of the A100-80GB-PCIe, since no {found.name} was measured.")
    cache = max(batch_sizes) * max(contexts or (CONTEXT,)) * shape.cache_numbers
    gigabytes = (shape.weights + cache) * ITEMSIZE[result.info["roofline"]["dtype"]] / 1e9
    if found.memory_gb is not None and gigabytes > found.memory_gb:
        note(f"Weights and cache of {gigabytes:.0f} GB do not fit into the {found.memory_gb:g} GB of {found.name}.")
    return result
