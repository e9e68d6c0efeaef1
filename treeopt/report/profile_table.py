"""What was profiled, for the terminal: the latency of a step over tree size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treeopt.report.terminal import grid
from treeopt.report.wording import percentages, pm

if TYPE_CHECKING:
    from rich.console import RenderableType

    from treeopt.records.profile import LatencyProfile, StepTiming

MOST_SIZES = 24  # of a setting in a table; beyond them those below are shown, and the largest
SHOWN_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PARTS = ("draft", "target", "verify", "commit")  # of a step, in their order


def profile_table(profile: LatencyProfile) -> RenderableType:
    """Median step latency by size, at the deepest measured depth, and its ratio to a plain step."""
    from treeopt.latency.estimate import StepCosts

    columns = ("batch", "context", "rows", "depth", "ms", "over\nplain", "samples", *PARTS)
    table = grid("Latency of one decoding step (median)", columns, spare=("samples", *reversed(PARTS)))
    for batch, context in profile.settings:
        costs = StepCosts(profile, batch, context, as_measured=True)
        plain = costs.plain
        here = (batch, context)
        timed = [p for p in profile.autoregressive if p.setting == here]
        deepest = {p.size: p for p in sorted(profile.fixed, key=lambda p: p.depth) if p.setting == here}
        if len(deepest) > MOST_SIZES:
            table.caption = "Not every size is shown; profile.json has them all."
            deepest = {size: p for size, p in deepest.items() if size in SHOWN_SIZES or size == max(deepest)}
        steps = [("1", "plain", plain, sum(len(p.step_ms) for p in timed), timed[0])]
        for size, point in sorted(deepest.items()):
            if (latency := costs.step(size, point.depth)) is not None:
                steps.append((str(size), str(point.depth), latency, len(point.step_ms), point))
        for rows, depth, latency, samples, timing in steps:
            ms, over = pm(latency.ms, latency.stderr_ms), f"{latency.ms / plain.ms:.2f}"
            table.add_row(str(batch), str(context or "–"), rows, depth, ms, over, str(samples), *_parts(timing))
        table.add_section()
    return table


def _parts(timing: StepTiming) -> list[str]:
    """Median share of each part in the sum of all; they are timed in steps of their own."""
    from statistics import median

    ms = {part: median(samples) for part, samples in timing.whole_parts().items()}
    shares = dict(zip(ms, percentages(list(ms.values())), strict=True))
    return [shares.get(part, "–") for part in PARTS]
