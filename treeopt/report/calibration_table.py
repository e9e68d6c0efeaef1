"""What was calibrated, for the terminal: how often guesses are right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treeopt.records.calibration import ENGINE_LOG
from treeopt.records.rules import guesser
from treeopt.report.terminal import grid, together
from treeopt.report.wording import pm

if TYPE_CHECKING:
    from rich.console import RenderableType

    from treeopt.records.calibration import Calibration
    from treeopt.report.grid import Grid


def calibration_table(calibration: Calibration, ranks: int = 5) -> RenderableType:
    """Accuracy of each head, or at each depth, at the first ranks, with its standard error."""
    info = calibration.meta
    if info.get("source") == ENGINE_LOG and info.get("survival"):
        return _survival_table(calibration)
    counted = [
        f"{info[key]:,} {what}" for key, what in (("positions", "states"), ("sequences", "answers")) if info.get(key)
    ]
    who = guesser(info.get("drafter") or {"kind": "medusa"})
    is_rejection = (info.get("acceptance") or {}).get("rule") == "rejection"
    what = "Head accuracy" if who == "head" else "Accuracy by depth"
    if is_rejection:
        what = "Share accepted by depth"
    title = what + (f" over {' of '.join(counted)}" if counted else "")
    ranks = min(ranks, calibration.top_k)
    names = [f"rank {rank}" for rank in range(ranks)]
    table = grid(title, [who, *names, "trials"], left=1, caption=_caption(info), spare=names[:1:-1])
    for k in range(calibration.num_heads):
        cells = [pm(calibration.accept[k, r], calibration.stderr[k, r], 3) for r in range(ranks)]
        table.add_row(str(k + 1), *cells, str(calibration.trials[k]))
    groups = info.get("groups")
    if is_rejection:
        table.caption = f"{table.caption or ''} {_chains(calibration)}".strip()
    return together(table, _group_table(groups, calibration.num_heads)) if groups else table


def _chains(calibration: Calibration) -> str:
    """What chains reach by the formula of the papers, which takes one acceptance rate for all tokens."""
    from treeopt.planning.chain_theory import chain_tokens_per_step

    accept = float(calibration.hits.sum() / calibration.trials.sum())
    rates = [f"{chain_tokens_per_step(accept, n):.2f}" for n in range(1, calibration.num_heads + 1)]
    return (
        f"A drafted token is accepted with probability {accept:.2f}: chains of 1, 2, ... would give {', '.join(rates)} "
        "tokens per step if that were the same everywhere."
    )


def _survival_table(calibration: Calibration) -> Grid:
    """Survival of a chain depth by depth, as an engine counted it."""
    info, accept = calibration.meta, calibration.accept[:, 0]
    title = "Survival of a chain, as an engine counted it"
    if info.get("drafts"):
        of = f" of {info['requests']:,} requests" if info.get("requests") else ""
        title += f": {info['drafts']:,} drafts{of}"
    table = grid(title, ("depth", "all right so far", "of those right before", "trials"), left=1)
    errors = info.get("survival_stderr") or [None] * calibration.num_heads
    for k, (survival, error) in enumerate(zip(info["survival"], errors, strict=False)):
        table.add_row(str(k + 1), pm(survival, error, 3), pm(accept[k], None, 3), str(calibration.trials[k]))
    return table


def _group_table(groups: dict[str, Any], num_heads: int) -> Grid:
    """Top-1 accuracy of each head, and tokens per step, group by group."""
    heads = [f"head {k + 1}" for k in range(num_heads)]
    title = "By group: accuracy at rank 0, held-out tokens per step with 64 rows"
    table = grid(title, ["group", "answers", *heads, "tokens/step"], left=1, spare=heads[:0:-1])
    for name, group in groups.items():
        tops = [f"{h[0] / t:.3f}" if t else "–" for h, t in zip(group["hits"], group["trials"], strict=True)]
        rate = pm(group.get("tokens_per_step"), group.get("tokens_per_step_stderr"))
        table.add_row(name, str(group["sequences"]), *tops, rate)
    return table


def _caption(info: dict[str, Any]) -> str | None:
    """What else there is to know of the answers."""
    said = []
    if info.get("loop_share"):
        said.append(f"{info['loop_share']:.0%} of the answers ended in a loop and were cut there.")
    answers = info.get("answers") or {}
    if answers.get("given"):
        agreement = (
            f"the target's own first choice is the given token in {info.get('target_agreement', 0):.1%} of the states."
        )
        kind = (
            "An estimate for greedy decoding, from given answers"
            if answers.get("is_estimate")
            else f"From answers sampled by the target itself at temperature {answers['temperature']:g}"
        )
        said.append(f"{kind}: {agreement}")
    if info.get("skipped"):
        said.append(f"{len(info['skipped'])} prompts or turns left out (listed in calibration.json).")
    return " ".join(said) or None
