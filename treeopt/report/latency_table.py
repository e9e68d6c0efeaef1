"""The table of a profile: what steps take."""

from collections.abc import Iterator, Sequence
from math import nan

from treeopt.records.estimate import Estimate
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.report.table import Table, texts
from treeopt.report.wording import pm

MOST_SIZES = 24  # of a setting in a table; beyond them those below are shown, and the largest
SHOWN_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def profile_table(profile: LatencyProfile) -> Table:
    """Median step latency by size, at the deepest measured depth, and its ratio to a plain step."""
    rows, is_whole = list[tuple[str, ...]](), True
    for setting in profile.settings:
        deepest = {p.size: p for p in sorted(profile.fixed, key=lambda p: p.depth) if p.setting == setting}
        shown = [size for size in sorted(deepest) if size in SHOWN_SIZES or size == max(deepest)]
        shown = sorted(deepest) if len(deepest) <= MOST_SIZES else shown
        is_whole &= len(shown) == len(deepest)
        rows += _timed_steps(profile, setting, [deepest[size] for size in shown])
    header = ("batch", "context", "rows", "depth", "ms", "over\nplain", "samples")
    columns = texts(*header, spare=("samples",))
    caption = "" if is_whole else "Not every size is shown; profile.json has them all."
    title = f"Latency of {f'the {profile.part} of ' if profile.part else ''}one decoding step (median)"
    return Table(title, columns, rows, caption=caption, section=lambda row: row[:2])


def _timed_steps(
    profile: LatencyProfile, setting: tuple[int, int], points: Sequence[StepTiming]
) -> Iterator[tuple[str, ...]]:
    """Rows of one batch size and context: the plain step, that of an engine with nothing forced, then the points."""
    from treeopt.latency.measurements import Measurements, paired_latency, pooled

    measured = Measurements.at(profile, setting)
    plain = [p for p in profile.autoregressive if p.setting == setting]
    timed = [("plain", measured.plain, plain)]
    if own := [p for p in profile.as_it_comes if p.setting == setting]:
        name = "no guesses" if profile.runtime.get("launches") else "plain, default"
        timed.append((name, paired_latency(pooled(own), pooled(plain)), own))
    latencies = measured.latencies()
    timed += [(str(p.depth), latencies[p.cost], [p]) for p in points]
    for depth, latency, steps in timed:
        where = (str(setting[0]), str(setting[1] or "–"), str(steps[0].size), depth)
        samples = str(sum(len(p.step_ms) for p in steps))
        ms = pm(Estimate(latency.ms, latency.stderr_ms if measured.is_sure else nan))
        over = pm(latency.ms / measured.plain.ms)
        yield *where, ms, over, samples
