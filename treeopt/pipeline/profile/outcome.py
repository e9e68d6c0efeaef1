"""The end of a measurement: what is said of it, and the run's profile with it."""

from __future__ import annotations

from treeopt.files.journal import discard
from treeopt.latency.rounds import precision_reached
from treeopt.pipeline.profile.earlier import with_earlier
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import note

TOLD_DRIFT = 0.05


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
    for place in result.info["drift"]:
        if abs(place["drift"]) > TOLD_DRIFT:
            note(
                f"Plain steps at batch size {place['batch_size']} became {abs(place['drift']):.0%} "
                f"{'slower' if place['drift'] > 0 else 'faster'} while they were timed. Trees are compared with "
                "plain steps of their own round, so that this is corrected."
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
