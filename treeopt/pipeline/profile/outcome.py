"""The end of a measurement: what is said of it, and the run's profile, with what it had before of the same thing."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from treeopt.errors import TreeoptError, quoted
from treeopt.files.shell import shell_word
from treeopt.files.storage import to_json
from treeopt.files.writing import discard
from treeopt.latency.roofline import MEASURES as ANALYTICAL
from treeopt.records.origins import OURS, Provenance, differing, keep_other
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import note
from treeopt.report.verdict import timing_caveats

LONGER = "a longer `time_limit_s` helps"
SAME = ("model", "revision", "drafter", "acceptance", "device", "dtype", "machine")  # of joined profiles


def check_can_join(run: RunDirectory, runtime: Mapping[str, Any], provenance: Provenance, *, overwrite: bool) -> None:
    """Raise InvalidInput, before anything is timed, where the run's profile is of something else and is to be kept.

    Computed latencies are replaced by measured ones unasked.
    """
    if overwrite or not run.profile.exists():
        return
    earlier = run.read_profile()
    if earlier.info.get("measures") == ANALYTICAL:
        note("The run's profile was computed, not measured; it is replaced.")
        return
    name, ours = earlier.runtime.get("name"), runtime.get("name")
    same = f", or `runtime={shell_word(name)}`, if it is the same" if name and ours not in (name, OURS) else ""
    keep_other(run.profile, differences(earlier, runtime, provenance), same)


def differences(earlier: LatencyProfile, runtime: Mapping[str, Any], provenance: Provenance) -> list[str]:
    """In what a profile differs from one of this runtime and provenance, so that the two are not one."""
    theirs, ours = Provenance.of(earlier.info).record, json.loads(to_json(provenance.record))
    threads = ("threads",) if None not in (theirs["threads"], ours["threads"]) else ()
    found = [said for key in (*SAME, *threads) for said in differing(theirs[key], ours[key], key)]
    names = earlier.runtime.get("name"), runtime.get("name")
    if names[0] != names[1]:
        return [f"runtime ({quoted(names[0])} there, {quoted(names[1])} here)", *found]
    return [*differing(earlier.runtime, json.loads(to_json(runtime))), *found]


def finish(
    run: RunDirectory, result: LatencyProfile, precision: float | None, *, remedy: str = LONGER, alone: bool = False
) -> LatencyProfile:
    """The result, with what the run had measured before of the same thing, as the run's profile; ``alone`` without it."""
    if precision is not None:
        result.info["precision"] = precision
        note(*timing_caveats(result, remedy))
    whole = result if alone else with_earlier(run, result)
    whole.save(run.profile)
    discard(run.partial("profile"))
    return whole


def with_earlier(run: RunDirectory, result: LatencyProfile) -> LatencyProfile:
    """The result with the settings of the run's profile that it does not have, if they are of the same thing."""
    try:
        earlier = run.read_profile() if run.profile.exists() else None
    except TreeoptError:  # damaged; that it may be replaced was asked before (`check_can_join`)
        earlier = None
    if earlier is None or differences(earlier, result.runtime, Provenance.of(result.info)):
        return result
    return joined(earlier, result)


def joined(earlier: LatencyProfile, later: LatencyProfile) -> LatencyProfile:
    """Both profiles as one; of a setting that both measured, the later.

    Rows of real prompts are of about the same length each time, so at a batch size they are one setting.
    """
    nominal = {of.setting for of in earlier.info.get("settings") or () if of.nominal}
    again = {of.batch_size for of in later.info.get("settings") or () if not of.nominal}
    kept = {s for s in earlier.settings if s not in later.settings and (s in nominal or s[0] not in again)}

    def both(before: Sequence[Any] | None, now: Sequence[Any] | None) -> list[Any]:
        found = [*(one for one in before or () if one.setting in kept), *(now or ())]
        return sorted(found, key=lambda one: one.setting)

    then, now = earlier.info, later.info
    info = {**now, "inputs": {**(then.get("inputs") or {}), **(now.get("inputs") or {})}}
    if "settings" in {**then, **now}:
        info["settings"] = both(then.get("settings"), now.get("settings"))
    if "precision" not in then:  # some latencies have one sample
        info.pop("precision", None)
    shares = [one.get("processor_share") for one in ((now, then) if kept else (now,))]
    if known := [share for share in shares if share is not None]:
        info["processor_share"] = min(known)

    points = sorted(both(earlier.points, later.points), key=lambda p: (p.setting, p.size, p.depth, p.cost))
    plain = both(earlier.autoregressive, later.autoregressive)
    return LatencyProfile(tuple(points), tuple(plain), later.runtime, info)
