"""What compare says: a verdict in a sentence or two, and its tables."""

from collections.abc import Callable
from typing import Any

from rich.console import RenderableType

from treeopt.arms.gate import INCONCLUSIVE, Gate
from treeopt.planning.compared import Compared, Comparison, DraftersCompared, GroupsCompared, Winner
from treeopt.planning.regret import Regret
from treeopt.records.estimate import Estimate
from treeopt.report.table import Column, Table
from treeopt.report.terminal import together
from treeopt.report.verdict import times
from treeopt.report.wording import count, interval, per_cent, pm


def verdict(result: Comparison) -> str:
    """What the comparison comes to, in a sentence or two."""
    return COMPARED[type(result)][0](result)


def compared_table(result: Comparison) -> RenderableType:
    """The verdict, and the tables below it."""
    return together(*COMPARED[type(result)][1](result), headline=[verdict(result)])


def _loss(regret: Regret) -> str:
    return pm(per_cent(regret.loss), 1).replace("-0.0 ", "0.0 ")


# A plan on other answers


def _plan_verdict(result: Compared) -> str:
    worst, tolerance = result.worst, f"{100 * result.tolerance:g} %"
    plan, best = f"The plan ({count(worst.served.size, 'row')})", f"the best for {result.names[1]}"
    if len(result.losses) > 1:
        best += f" at batch size {worst.batch_size}"
    loss = per_cent(worst.loss)
    low, high = loss.ends
    if not result.keep:
        keep = f"{plan} loses {_loss(worst)} % against {best}, more than {tolerance}: plan anew."
    elif high > 100 * result.tolerance:
        keep = (
            f"{plan} loses {_loss(worst)} % against {best}, 95 % interval {low:.1f} to {high:.1f}: not shown to be more "
            f"than {tolerance}, so keep it. More conversations would tell."
        )
    else:
        within = pm(Estimate(max(loss, 0.0), loss.stderr), 1)
        keep = f"{plan} is still within {within} % of {best}: keep it."
    timed = sorted((r for r in result.losses if r.served.speedup), key=lambda regret: -regret.loss)
    return " ".join([*map(_speculation, timed), keep])


def _speculation(regret: Regret) -> str:
    """What a plan's draft now costs or gains against plain decoding at a batch size, and whether to turn it off or on."""
    at, speedup = f"At batch size {regret.batch_size}", regret.served.speedup
    assert speedup is not None
    low, high = speedup.ends
    if regret.served.size == 1:
        pays = regret.best.size > 1 and regret.exceeds(0)
        return f"{at} the plan is not to speculate{', but speculation now gains: turn it on' if pays else ''}."
    change = 100 * (speedup - 1)
    if high < 1:
        return f"{at} speculation now costs {-change:.0f} %{': turn it off' if regret.best.size == 1 else ''}."
    if low > 1:
        return f"{at} speculation gains {change:.0f} %."
    return f"{at} speculation is not shown to gain or to cost ({change:+.0f} %)."


def _plan_tables(result: Compared) -> list[Table]:
    plans = [
        Column("batch", lambda regret: str(regret.batch_size)),
        Column("rows", lambda regret: str(regret.served.size)),
        Column("depth", lambda regret: str(regret.served.depth)),
        Column("tokens/step\nplanned", lambda regret: pm(regret.planned)),
        Column("tokens/step\non B", lambda regret: pm(regret.served.tokens_per_step)),
        Column("best on B:\nrows", lambda regret: str(regret.best.size), spare=1),
        Column("\ndepth", lambda regret: str(regret.best.depth), spare=2),
        Column("best on B:\ntokens/step", lambda regret: f"{regret.best.tokens_per_step:.2f}", spare=3),
        Column("loses %\n[95 % interval]", lambda regret: interval(per_cent(regret.loss), 1)),
    ]
    caption = f"A is {result.names[0]}, B is {result.names[1]}."
    return [
        Table("A's plan on B, beside the best that a search on B would find", plans, result.losses, caption=caption)
    ]


# Groups of prompts


def _groups_verdict(result: GroupsCompared) -> str:
    if result.gainers:
        gains = [
            f"{regret.group} at batch size {regret.batch_size} ({regret.best.draft.words}), {times(regret.gain)} as fast as shared"
            for regret in result.gainers
        ]
        return f"A setting of their own pays for {'; '.join(gains)}. To plan for it, calibrate its prompts in a run of their own."
    most = max(result.groups, key=lambda regret: regret.loss.ends[0])
    return (
        f"One plan is enough: no group is shown to gain more than {100 * result.tolerance:g} % by a plan of its own. The "
        f"most is {_loss(most)} % ({most.group}, batch size {most.batch_size})."
    )


def _groups_tables(result: GroupsCompared) -> list[Table]:
    columns = [
        Column("group", lambda regret: regret.group or "(no group)", names=True),
        Column("batch", lambda regret: str(regret.batch_size)),
        Column("conver-\nsations", lambda regret: f"{regret.conversations:,}"),
        Column("own tree", lambda regret: regret.best.draft.words, wraps=True),
        Column("tokens/step\nof it", lambda regret: f"{regret.best.tokens_per_step:.2f}", spare=1),
        Column("own over shared\n[95 % interval]", lambda regret: str(regret.gain)),
    ]
    caption = "Own over shared is what its own tree brings a group: tokens per second over those with the shared one, held out."
    return [Table("One plan for all groups", columns, result.groups, caption=caption)]


# A change of what is served


def _gate_verdict(result: Gate) -> str:
    worst, noisiest, tolerance = result.worst, result.noisiest, f"{100 * result.tolerance:g} %"
    said = f"{result.verdict}: "
    if result.gone:
        said += f"the fastest before has no figure after: {', '.join(result.gone)}. "
    loss = interval(per_cent(worst.loss), 1)
    said += (
        f"{worst.name} went from {worst.before:.2f} to {worst.after:.2f}, a loss of {loss} %, with {tolerance} allowed."
    )
    if result.verdict == INCONCLUSIVE and worst.loss.ends[0] > result.tolerance:
        least = f"{100 * worst.least_loss(len(result.changes)):.1f} %"
        said += f" Of {len(result.changes)} settings one may lose so much by chance: in an interval that allows for it, at least {least} is lost."
    said += f" With {count(noisiest.runs, result.noun)} on each side, a loss below {100 * noisiest.held:.1f} % cannot be told from noise"
    if noisiest.held > result.tolerance:
        needed = noisiest.runs_for(result.tolerance)
        said += f"; {tolerance} would take {count(needed, result.noun)}" if needed else "; no number of them tells 0 %"
    return f"{said}. {result.assumed}".strip()


def _gate_tables(result: Gate) -> list[Table]:
    columns = [
        Column("what", lambda change: change.name, wraps=True),
        Column("before", lambda change: f"{change.before:.2f}"),
        Column("after", lambda change: f"{change.after:.2f}"),
        Column("loses %\n[95 % interval]", lambda change: interval(per_cent(change.loss), 1)),
    ]
    return [Table(f"{result.measure} of {result.names[0]} and {result.names[1]}", columns, result.changes)]


# Drafters


def _drafters_verdict(result: DraftersCompared) -> str:
    return " ".join(map(_won, result.winners))


def _won(winner: Winner) -> str:
    if winner.pays is False:
        return f"Batch size {winner.batch_size}: none is shown to beat plain decoding; {winner.drafter} comes nearest."
    tied = f", tied with {', '.join(winner.tied)}" if winner.tied else ""
    return f"Batch size {winner.batch_size}: {winner.drafter} is fastest{tied}."


def _drafters_tables(result: DraftersCompared) -> list[Table]:
    won = {(winner.batch_size, winner.drafter) for winner in result.winners if winner.pays is not False}
    columns = [
        Column("batch", lambda row: str(row.batch_size)),
        Column("drafter", lambda row: row.drafter, wraps=True),
        Column("tree or setting", lambda row: row.setting or row.figure.draft.words, wraps=True),
        Column("tokens/step", lambda row: pm(row.figure.tokens_per_step)),
        Column("step ms", lambda row: f"{row.figure.step_ms:.2f}"),
        Column("speedup\n[95 % interval]", lambda row: f"{row.speedup}{'' if row.is_measured else ' predicted'}"),
    ]
    title, best = f"Drafters for {result.about}", lambda row: (row.batch_size, row.drafter) in won
    return [Table(title, columns, result.settings, bold=best, section=lambda row: row.batch_size)]


# By the kind of comparison, its verdict and its tables.
COMPARED: dict[type[Comparison], tuple[Callable[[Any], str], Callable[[Any], list[Table]]]] = {
    Compared: (_plan_verdict, _plan_tables),
    GroupsCompared: (_groups_verdict, _groups_tables),
    Gate: (_gate_verdict, _gate_tables),
    DraftersCompared: (_drafters_verdict, _drafters_tables),
}
