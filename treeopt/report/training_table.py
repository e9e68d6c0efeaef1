"""The table of trained heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treeopt.report.terminal import grid, together
from treeopt.report.wording import pm

if TYPE_CHECKING:
    from rich.console import RenderableType


def training_table(record: Mapping[str, Any], command: str) -> RenderableType:
    """Accuracy of each head on the held-out texts, before and after; then the line that uses them."""
    from rich.text import Text

    before, after = (record["held_out"][when] for when in ("before", "after"))
    texts = record["texts"]["held_out"]
    columns = ("head", "before", "after", "loss before [nats]", "after", "states")
    table = grid(f"First choices that are right, on {texts} held-out texts", columns)
    for k, trials in enumerate(after["trials"]):
        cells = [pm(counts[key][k], None, 3) for key in ("accuracy", "head_loss_nats") for counts in (before, after)]
        table.add_row(str(k + 1), *cells, f"{trials:,}")
    said = [f"{record['steps']:,} steps in {record['seconds']:,.0f} s."]
    if after["base_nats_per_token"] is not None:
        said.append(
            f"The base's own loss on these texts went from {before['base_nats_per_token']:.4f} to "
            f"{after['base_nats_per_token']:.4f} nats per token. The KL divergence from the original base is "
            f"{after['base_kl_nats_per_token']:.4f}."
        )
    said.append("Calibrate on prompts that the heads did not learn from:")
    return together(table, *said, Text(command, no_wrap=True, overflow="ignore"))
