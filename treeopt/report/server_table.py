"""What a server did while it was watched, for the terminal."""

from rich.console import RenderableType

from treeopt.records.estimate import Estimate
from treeopt.report.table import Table, texts
from treeopt.report.terminal import together
from treeopt.report.verdict import VERDICTS, outcome, times
from treeopt.serving.watch import Tuned, over_plain

LAUNCHES = "Two launches of one engine differ by up to 10 %, which the interval does not have."


def first_line_of(found: Tuned) -> str:
    """What speculation brings or costs now, as far as it is known."""
    tokens, ratio = found.tokens_per_step, found.over_plain
    if tokens is None:
        return "What speculation brings now is not known: the server does not count its tokens, or not as a server decodes."
    if found.calibration is None and tokens <= 1:
        return "The server decodes without speculation now."
    if ratio is None:
        return f"Speculation gives {tokens:.2f} tokens per step now: it pays while its step takes less than {tokens:.2f} plain steps."
    shown = outcome(ratio)
    why = ", for too little traffic was watched for an interval" if shown == "few" else ""
    brought = f"{times(ratio)} plain's throughput, with {tokens:.2f} tokens per step"
    return f"Speculation {VERDICTS[shown]} now{why}: {brought}. {LAUNCHES}"


def server_table(found: Tuned) -> RenderableType:
    """Its first line, its pace at each number of running requests, and its drafts length by length."""
    rows = []
    for size, pace in found.paces.items():
        other = found.plain.get(size)
        plain = (f"{other.step_ms:.2f}", _ratio(over_plain([pace], [other]))) if other else ("?", "?")
        rows.append([str(size), *(f"{one:.2f}" for one in (pace.tokens_per_step, pace.step_ms, pace.token_ms)), *plain])
    headers = ("running requests", "tokens/step", "step ms", "ms per token", "plain ms", "times plain [95 %]")
    paces = Table(f"{found.model} in {found.engine}, as it serves", texts(*headers, names=1), rows)
    return together(paces if rows else None, _lengths(found), headline=[first_line_of(found)])


def _ratio(over: Estimate) -> str:
    return f"{over:.2f} (too little traffic)" if over.low is None else str(over)


def _lengths(found: Tuned) -> Table | None:
    """Tokens per step of every length up to the one served, and what its step may take to be faster than that."""
    survival = found.survival
    if not survival:
        return None
    tokens = [1 + sum(survival[:k]) for k in range(len(survival) + 1)]
    rows = [
        [str(k), f"{survival[k - 1]:.3f}" if k else "", f"{one:.2f}", f"{100 * one / tokens[-1]:.0f} %"]
        for k, one in enumerate(tokens)
    ]
    caption = (
        f"A guess more than {len(survival)} adds at most {survival[-1]:.2f} tokens per step. Lengths differ in where steps "
        "start, so that others than the one served are estimates."
    )
    headers = ("guesses", "all right", "tokens/step", "faster if its step takes less of today's than")
    return Table("Draft lengths", texts(*headers, names=1), rows, caption=caption)
