"""The end of a measurement: what is said of it, and the run's profile, with what it had before of the same thing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from treeopt.errors import InvalidInput, TreeoptError, quoted
from treeopt.files.shell import shell_word
from treeopt.files.storage import to_json
from treeopt.files.writing import discard
from treeopt.latency.roofline import MEASURES as ANALYTICAL
from treeopt.latency.rounds import busy, precision_reached
from treeopt.records.origins import OURS, differing
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import note

TOLD_DRIFT = 0.05
SAME = ("model", "revision", "drafter", "acceptance", "device", "dtype", "machine")  # of profiles that can be one


def check_can_join(
    run: RunDirectory, runtime: Mapping[str, Any], provenance: Mapping[str, Any], *, overwrite: bool
) -> None:
    """Raise InvalidInput, before anything is timed, where the run's profile is of something else and is to be kept.

    Computed latencies are replaced by measured ones unasked.
    """
    if overwrite or not run.profile.exists():
        return
    earlier = run.read_profile()
    if earlier.info.get("measures") == ANALYTICAL:
        note("The run's profile was computed, not measured; it is replaced.")
        return
    if differs := differences(earlier, runtime, provenance):
        name = earlier.runtime.get("name")
        same = (
            f", or --runtime {shell_word(name)}, if it is the same"
            if runtime.get("name") not in (name, OURS) and name
            else ""
        )
        raise InvalidInput(
            f"{run.profile} is a profile of something else and is not replaced unasked; they differ in "
            f"{', '.join(differs)}. Pass another --run, or --overwrite{same}."
        )


def differences(earlier: LatencyProfile, runtime: Mapping[str, Any], provenance: Mapping[str, Any]) -> list[str]:
    """In what a profile differs from one of this runtime and provenance, so that the two are not one."""
    theirs = earlier.info.get("provenance") or {}
    ours = json.loads(to_json(provenance))
    threads = ("threads",) if None not in (theirs.get("threads"), ours.get("threads")) else ()
    found = [said for key in (*SAME, *threads) for said in differing(theirs.get(key), ours.get(key), key)]
    names = earlier.runtime.get("name"), runtime.get("name")
    if names[0] != names[1]:
        return [f"runtime ({quoted(names[0])} there, {quoted(names[1])} here)", *found]
    return [*differing(earlier.runtime, json.loads(to_json(runtime))), *found]


def finish(run: RunDirectory, result: LatencyProfile, precision: float) -> LatencyProfile:
    """The result, with what the run had measured before of the same thing, as the run's profile."""
    result.info["precision"] = precision_reached(result.points, result.autoregressive, precision)
    tell(result)
    whole = with_earlier(run, result)
    whole.save(run.profile)
    discard(run.partial("profile"))
    return whole


def tell(result: LatencyProfile, remedy: str = "a longer --time-limit helps") -> None:
    """Notes on what the reader of the table should know."""
    known = result.info["precision"]
    if not known["reached"]:
        note(
            f"{known['missed']} of {known['timings']} latencies are not known to {known['wanted']:.1%} yet, the worst "
            f"to {known['worst']:.1%}: {remedy}."
        )
    if caution := busy(result.info.get("processor_share")):
        note(caution)
    for place in result.info["drift"]:
        if abs(place["drift"]) > TOLD_DRIFT:
            note(
                f"Plain steps at batch size {place['batch_size']} became {abs(place['drift']):.0%} "
                f"{('slower' if place['drift'] > 0 else 'faster')} while they were timed. Trees are compared with "
                "plain steps of their own round, which corrects for this."
            )
    floors = result.info.get("bandwidth_floor") or []
    if floors or "weights" in result.runtime:
        weights = result.info["weight_bytes"]
        note(f"Weights: {weights['target'] / 1e9:.2f} GB, heads {weights['heads'] / 1e9:.2f} GB.")
    for floor in floors:
        note(
            f"Batch size {floor['batch_size']}: a plain step takes {floor['plain_over_floor']:.2f} times the "
            f"{floor['floor_ms']:.2f} ms that {floor['gb_per_s']:g} GB/s need for weights and cache."
        )


def with_earlier(run: RunDirectory, result: LatencyProfile) -> LatencyProfile:
    """The result with the settings of the run's profile that it does not have, if they are of the same thing.

    That it may replace another was asked before (`check_can_join`).
    """
    if not run.profile.exists():
        return result
    try:
        earlier = run.read_profile()
    except TreeoptError:
        return result
    return (
        result if differences(earlier, result.runtime, result.info.get("provenance") or {}) else joined(earlier, result)
    )


def joined(earlier: LatencyProfile, later: LatencyProfile) -> LatencyProfile:
    """Both profiles as one; of a setting that both measured, the later.

    Rows of real prompts are of about the same length each time, so at a batch size they are one setting.
    """
    places = earlier.info.get("drift") or []
    nominal = {(p["batch_size"], p["context_tokens"]) for p in places if p.get("nominal")}
    again = {p["batch_size"] for p in later.info.get("drift") or [] if not p["nominal"]}
    kept = {s for s in earlier.settings if s not in later.settings and (s in nominal or s[0] not in again)}

    def keep(records: Sequence[Any]) -> list[Any]:
        return [r for r in records if _setting(r) in kept]

    info = {**later.info}
    for key in ("drift", "bandwidth_floor"):
        if key in earlier.info or key in later.info:
            info[key] = sorted([*keep(earlier.info.get(key) or []), *(later.info.get(key) or [])], key=_setting)
    points = sorted(
        [*keep(earlier.points), *later.points],
        key=lambda p: (_setting(p), p.size, p.depth, p.topk or 0, bool(p.adaptive)),
    )
    plain = sorted([*keep(earlier.autoregressive), *later.autoregressive], key=_setting)
    whole = LatencyProfile(tuple(points), tuple(plain), later.runtime, info)
    info["inputs"] = {**(earlier.info.get("inputs") or {}), **(later.info.get("inputs") or {})}
    if "precision" in earlier.info and "precision" in later.info:
        info["precision"] = precision_reached(whole.points, whole.autoregressive, later.info["precision"]["wanted"])
    else:
        info.pop("precision", None)
    return whole


def _setting(record: Any) -> tuple[int, int]:
    """Batch size and context of a timing or of a record of the file."""
    if isinstance(record, StepTiming):
        return record.setting
    return record["batch_size"], record["context_tokens"]
