"""The table of a profile: what steps take, and how latencies lie between those that were timed."""

from collections.abc import Iterator, Sequence
from math import nan
from statistics import median

from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.report.table import Table, texts
from treeopt.report.wording import percentages, pm

MOST_SIZES = 24  # of a setting in a table; beyond them those below are shown, and the largest
SHOWN_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PARTS = ("draft", "target", "verify", "commit")  # of a step, in their order


def profile_table(profile: LatencyProfile) -> Table:
    """Median step latency by size, at the deepest measured depth, and its ratio to a plain step."""
    rows, is_whole, has_gaps = list[tuple[str, ...]](), True, False
    for setting in profile.settings:
        deepest = {p.size: p for p in sorted(profile.fixed, key=lambda p: p.depth) if p.setting == setting}
        shown = [size for size in sorted(deepest) if size in SHOWN_SIZES or size == max(deepest)]
        shown = sorted(deepest) if len(deepest) <= MOST_SIZES else shown
        is_whole &= len(shown) == len(deepest)
        has_gaps |= len(deepest) > 1 and len(deepest) <= max(deepest) - min(deepest)
        rows += _timed_steps(profile, setting, [deepest[size] for size in shown])
    header = ("batch", "context", "rows", "depth", "ms", "over\nplain", "samples", *PARTS)
    columns = texts(*header, spare=("samples", *reversed(PARTS)))
    said = [] if is_whole else ["Not every size is shown; profile.json has them all."]
    caption = " ".join(said + _between(profile) * has_gaps)
    title = f"Latency of {f'the {profile.part} of ' if profile.part else ''}one decoding step (median)"
    return Table(title, columns, rows, caption=caption, section=lambda row: row[:2])


def _between(profile: LatencyProfile) -> list[str]:
    """How latencies lie between timed sizes, if some could be left out."""
    from treeopt.latency.estimate import between_of

    way = between_of(profile)
    ways = [("a staircase", way.errors[0]), ("straight lines", way.errors[1])]
    (followed, error), (other, worse) = ways if way.is_stairs else ways[::-1]
    said = f"Between timed sizes latencies follow {followed}: timed sizes left out are missed by {100 * error:.1f} %, with "
    return [f"{said}{other} by {100 * worse:.1f} %."] * bool(way.left_out)


def _timed_steps(
    profile: LatencyProfile, setting: tuple[int, int], points: Sequence[StepTiming]
) -> Iterator[tuple[str, ...]]:
    """Rows of one batch size and context: the plain step, that of an engine with nothing forced, then the points."""
    from treeopt.latency.estimate import StepCosts

    costs = StepCosts(profile, *setting, as_measured=True)
    plain = [p for p in profile.autoregressive if p.setting == setting]
    timed = [("plain", costs.plain, plain)]
    own = [p for p in profile.as_it_comes if p.setting == setting]
    twins = {"plain, default": costs.as_it_comes, "no guesses": costs.idle}
    timed += [(said, latency, own) for said, c in twins.items() if own and c and (latency := c.step(2, 1))]
    timed += [(str(p.depth), latency, [p]) for p in points if (latency := costs.step(p.size, p.depth))]
    for depth, latency, steps in timed:
        where = (str(setting[0]), str(setting[1] or "–"), str(steps[0].size), depth)
        samples = str(sum(len(p.step_ms) for p in steps))
        _, _, (is_sure,) = costs.judged([steps[0].size], [steps[0].depth])
        ms, over = pm(latency.ms, latency.stderr_ms if is_sure else nan), pm(latency.ms / costs.plain.ms, None)
        yield *where, ms, over, samples, *_part_shares(steps[0])


def _part_shares(timing: StepTiming) -> list[str]:
    """Median share of each part in the sum of all; they are timed in steps of their own."""
    ms = {part: median(samples) for part, samples in timing.whole_parts().items()}
    shares = dict(zip(ms, percentages(list(ms.values())), strict=True))
    return [shares.get(part, "–") for part in PARTS]
