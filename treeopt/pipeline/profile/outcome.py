"""The end of a measurement: what is said of it, and the run's profile, with what it had before of the same thing."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from treeopt.errors import TreeoptError
from treeopt.files.notes import note
from treeopt.files.shell import shell_word
from treeopt.files.writing import discard
from treeopt.latency.roofline import MEASURES as ANALYTICAL
from treeopt.records.origins import OURS, Origin, Provenance, check_same_origin, same_origin
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import RunDirectory
from treeopt.report.verdict import timing_caveats

LONGER = "a longer `time_limit_s` helps"


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
    name, here = earlier.runtime.get("name"), runtime.get("name")
    same = f" Or pass `runtime={shell_word(name)}`, if it is the same." if name and here not in (name, OURS) else ""
    what = f"{run.profile} (there) and what is timed now (here)"
    check_same_origin(
        origin_of(earlier.info, earlier.runtime),
        origin_of({"provenance": provenance}, runtime),
        what,
        run.remedy + same,
    )


def origin_of(info: Mapping[str, Any], runtime: Mapping[str, Any]) -> Origin:
    """The origin of latencies that may be joined: of one runtime, with the same settings."""
    settings = {
        "runtime": runtime.get("name"),
        **{key: runtime[key] for key in runtime if key not in ("name", "version")},
    }
    return replace(Origin.of_latencies(info, runtime), runtime=None, weights=None, settings=settings)


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
    if earlier is None:
        return result
    there, here = (origin_of(profile.info, profile.runtime) for profile in (earlier, result))
    if same_origin(there, here):
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
