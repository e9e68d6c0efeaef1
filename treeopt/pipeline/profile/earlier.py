"""A profile and what the run had measured before, as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treeopt.errors import TreeoptError
from treeopt.latency.rounds import precision_reached
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import note

# Of profiles that can be one.
SAME = ("model", "revision", "drafter", "acceptance", "device", "dtype", "machine")


def with_earlier(run: RunDirectory, result: LatencyProfile) -> LatencyProfile:
    """The result with the settings of the run's profile that it does not have, if they are of the same thing."""
    if not run.profile.exists():
        return result
    try:
        earlier = run.read_profile()
    except TreeoptError as error:
        note(f"The run's profile could not be read and is replaced: {error}")
        return result
    ours, theirs = (p.info.get("provenance") or {} for p in (result, earlier))
    other = [key for key in SAME if ours.get(key) != theirs.get(key)]
    other += ["runtime"] if result.runtime != earlier.runtime else []
    if other:
        note(f"The run's profile differs in {', '.join(other)} and is replaced.")
        return result
    return joined(earlier, result)


def joined(earlier: LatencyProfile, later: LatencyProfile) -> LatencyProfile:
    """Both profiles as one; of a setting that both measured, the later.

    Rows of real prompts are of about the same length each time, so at a batch size they are one setting.
    """
    places = earlier.info.get("drift") or []
    nominal = {(p["batch_size"], p["context_tokens"]) for p in places if p.get("nominal")}
    again = {p["batch_size"] for p in later.info["drift"] if not p["nominal"]}
    kept = {s for s in earlier.settings if s not in later.settings and (s in nominal or s[0] not in again)}

    def keep(records: Sequence[Any]) -> list[Any]:
        return [r for r in records if _setting(r) in kept]

    info = {**later.info}
    for key in ("drift", "bandwidth_floor"):
        if key in earlier.info or key in later.info:
            info[key] = sorted([*keep(earlier.info.get(key) or []), *(later.info.get(key) or [])], key=_setting)
    points = sorted([*keep(earlier.points), *later.points], key=lambda p: (_setting(p), p.size, p.depth))
    plain = sorted([*keep(earlier.autoregressive), *later.autoregressive], key=_setting)
    whole = LatencyProfile(tuple(points), tuple(plain), later.runtime, info)
    info["precision"] = precision_reached(whole.points, whole.autoregressive, later.info["precision"]["wanted"])
    return whole


def _setting(record: Any) -> tuple[int, int]:
    """Batch size and context of a timing or of a record of the file."""
    if isinstance(record, StepTiming):
        return record.setting
    return record["batch_size"], record["context_tokens"]
