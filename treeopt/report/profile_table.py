"""What was profiled, for the terminal: the latency of a step over tree size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from treeopt.records.profile import LatencyProfile, StepTiming

MOST_SIZES = 24  # of a setting in a table; beyond them those below are shown, and the largest
SHOWN_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PARTS = ("draft", "target", "verify", "commit")  # of a step, in their order


def profile_table(profile: LatencyProfile) -> RenderableType:
    """Median step latency by size, at the deepest measured depth, and its ratio to a plain step."""
    from rich.table import Table

    from treeopt.latency.estimate import StepCosts

    table = Table(title="Latency of one decoding step (median)", title_justify="left")
    for name in ("batch", "context", "rows", "depth", "ms", "over plain", "samples", *PARTS):
        table.add_column(name, justify="right")
    for batch, context in profile.settings:
        costs = StepCosts(profile, batch, context)
        plain = costs.plain
        timed = [p for p in profile.autoregressive if p.setting == (batch, context)]
        table.add_row(
            str(batch),
            str(context or "–"),
            "1",
            "plain",
            f"{plain.ms:.2f} ±{plain.stderr_ms:.2f}",
            "1.00",
            str(sum(len(p.step_ms) for p in timed)),
            *_parts(timed[0]),
        )
        deepest: dict[int, Any] = {}
        for point in profile.points:
            here = point.setting == (batch, context)
            if here and (point.size not in deepest or point.depth > deepest[point.size].depth):
                deepest[point.size] = point
        if len(deepest) > MOST_SIZES:
            table.caption = "Not every size is shown; profile.json has them all."
        for size, point in sorted(deepest.items()):
            if len(deepest) > MOST_SIZES and size not in SHOWN_SIZES and size != max(deepest):
                continue
            latency = costs.step(size, point.depth)
            if latency is not None:
                table.add_row(
                    str(batch),
                    str(context or "–"),
                    str(size),
                    str(point.depth),
                    f"{latency.ms:.2f} ±{latency.stderr_ms:.2f}",
                    f"{latency.ms / plain.ms:.2f}",
                    str(len(point.step_ms)),
                    *_parts(point),
                )
        table.add_section()
    return table


def _parts(timing: StepTiming) -> list[str]:
    """Median share of each part in the sum of all; they are timed in steps of their own."""
    from statistics import median

    ms = {part: median(samples) for part, samples in timing.whole_parts().items()}
    return [f"{ms[part] / sum(ms.values()):.0%}" if part in ms else "–" for part in PARTS]
