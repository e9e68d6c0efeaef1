"""What compare says: a verdict in a sentence or two, and its tables."""

from collections.abc import Callable
from typing import Any

from rich.console import RenderableType

from treeopt.arms.gate import INCONCLUSIVE, Gate
from treeopt.growth.drift import SURVIVAL
from treeopt.planning.compared import Compared, Comparison, DraftersCompared, GroupsCompared, Winner
from treeopt.planning.regret import Regret
from treeopt.records.estimate import Estimate
from treeopt.report.table import Column, Table
from treeopt.report.terminal import together
from treeopt.report.verdict import times
from treeopt.report.wording import count, pm


def verdict(result: Comparison) -> str:
    return COMPARED[type(result)][0](result)


def compared_table(result: Comparison) -> RenderableType:
    return together(*COMPARED[type(result)][1](result), headline=[verdict(result)])


def per_cent(loss: Estimate) -> Estimate:
    """A share with its errors in per cent."""
    return Estimate(100 * loss, 100 * (loss.stderr or 0.0), *(100 * end for end in loss.ends))


def _loss(regret: Regret) -> str:
    return pm(per_cent(regret.loss), 1).replace("-0.0 ", "0.0 ")


def _plan_verdict(result: Compared) -> str:
    timed = [regret for regret in result.losses if regret.served.speedup]
    speculation = [_speculation(regret) for regret in sorted(timed, key=lambda regret: -regret.loss)]
    worst, tolerance = result.worst, f"{100 * result.tolerance:g} %"
    best = f"the best for {result.names[1]}" + (f" at batch size {worst.batch_size}" if len(result.losses) > 1 else "")
    plan, loss = f"The plan ({count(worst.served.size, 'row')})", per_cent(worst.loss)
    low, high = loss.ends
    if not result.keep:
        said = f"{plan} loses {_loss(worst)} % against {best}, more than {tolerance}: plan anew."
    elif high > 100 * result.tolerance:
        said = (
            f"{plan} loses {_loss(worst)} % against {best}, 95 % interval {low:.1f} to {high:.1f}: not shown to be more "
            f"than {tolerance}, so keep it. More conversations would tell."
        )
    else:
        within = pm(Estimate(max(loss, 0.0), loss.stderr), 1)
        said = f"{plan} is still within {within} % of {best}: keep it."
    return " ".join([*speculation, said])


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


def _groups_verdict(result: GroupsCompared) -> str:
    if result.are_contexts:
        return _contexts_verdict(result)
    if gainers := result.gainers:
        said = [
            f"{regret.group} at batch size {regret.batch_size} ({regret.best.draft.words}), "
            f"{times(regret.gain)} as fast as shared"
            for regret in gainers
        ]
        return f"A setting of their own pays for {'; '.join(said)}. To plan for it, calibrate its prompts in a run of their own."
    most = max(result.groups, key=lambda regret: regret.loss.ends[0])
    return (
        f"One plan is enough: no group is shown to gain more than {100 * result.tolerance:g} % by a plan of its own. The "
        f"most is {_loss(most)} % ({most.group}, batch size {most.batch_size})."
    )


def _contexts_verdict(result: GroupsCompared) -> str:
    """At each batch size what is best in the shortest context and in the longest, and where speculation stops paying."""
    said = []
    for size in dict.fromkeys(context.batch_size for context in result.groups):
        contexts = [context for context in result.groups if context.batch_size == size]
        first, last = contexts[0], contexts[-1]
        drafts = f"{first.best.draft.words} for {first.group}, {last.best.draft.words} for {last.group}"
        accepted = (
            f"First guesses are right in {first.accepted:.0%} and {last.accepted:.0%}."
            if first.accepted and last.accepted
            else ""
        )
        stops = next(
            (context.group for i, context in enumerate(contexts) if all(c.best.size == 1 for c in contexts[i:])), None
        )
        timed = any(context.best.speedup for context in contexts)
        stop = (
            f" Speculation stops paying at {stops} of context."
            if stops
            else " It pays in every context."
            if timed
            else ""
        )
        said.append(f"Batch size {size}: best is {drafts}. {accepted}{stop}")
    return " ".join(said)


def _won(one: Winner) -> str:
    if one.pays is False:
        return f"Batch size {one.batch_size}: none is shown to beat plain decoding; {one.drafter} comes nearest."
    tied = f", tied with {', '.join(one.tied)}" if one.tied else ""
    return f"Batch size {one.batch_size}: {one.drafter} is fastest{tied}."


def _gate_verdict(result: Gate) -> str:
    worst, tolerance = result.worst, f"{100 * result.tolerance:g} %"
    loss = "a loss of {:.1f} % [{:.1f}, {:.1f}]".format(*(100 * value for value in (worst.loss, *worst.loss.ends)))
    said = f"{result.verdict}: "
    if result.gone:
        said += f"the fastest before has no figure after: {', '.join(result.gone)}. "
    said += f"{worst.name} went from {worst.before:.2f} to {worst.after:.2f}, {loss}, with {tolerance} allowed."
    if result.verdict == INCONCLUSIVE and worst.loss.ends[0] > result.tolerance:
        least = f"{100 * worst.least_loss(len(result.changes)):.1f} %"
        said += f" Of {len(result.changes)} settings one may lose so much by chance: in an interval that allows for it, at least {least} is lost."
    noisiest = result.noisiest
    said += f" With {count(noisiest.runs, result.noun)} on each side, a loss below {100 * noisiest.held:.1f} % cannot be told from noise"
    if noisiest.held > result.tolerance:
        needed = noisiest.runs_for(result.tolerance)
        said += f"; {tolerance} would take {count(needed, result.noun)}" if needed else "; no number of them tells 0 %"
    return f"{said}. {result.assumed}".strip()


def _gate_tables(result: Gate) -> list[Table]:
    columns = [
        Column("what", lambda one: one.name, wraps=True),
        Column("before", lambda one: f"{one.before:.2f}"),
        Column("after", lambda one: f"{one.after:.2f}"),
        Column(
            "loses %\n[95 % interval]",
            lambda one: "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * v for v in (one.loss, *one.loss.ends))),
        ),
    ]
    return [Table(f"{result.measure} of {result.names[0]} and {result.names[1]}", columns, result.changes)]


def _plan_tables(result: Compared) -> list[Table]:
    what = "share of steps whose chain survives to a depth" if result.measure == SURVIVAL else "top-1 accuracy"
    moved = [str(shift.depth) for shift in result.moved]
    said = f"Depths that moved beyond noise: {', '.join(moved)}." if moved else "No depth moved beyond noise."
    depths = [
        Column("depth", lambda one: str(one.depth)),
        Column("A", lambda one: f"{one.before:.3f}"),
        Column("B", lambda one: f"{one.after:.3f}"),
        Column("change [95 % interval]", lambda one: "{:+.3f} [{:+.3f}, {:+.3f}]".format(one.change, *one.change.ends)),
        Column("", lambda one: "moved" if one.moved else "noise"),
    ]
    caption = f"{said} A is {result.names[0]}, B is {result.names[1]}. The intervals of all depths hold together."
    shifts = Table(f"Guesses at each depth: {what}", depths, result.shifts, caption=caption)
    plans = [
        Column("batch", lambda one: str(one.batch_size)),
        Column("rows", lambda one: str(one.served.size)),
        Column("depth", lambda one: str(one.served.depth)),
        Column("tokens/step\nplanned", lambda one: pm(one.planned)),
        Column("tokens/step\non B", lambda one: pm(one.served.tokens_per_step)),
        Column("best on B:\nrows", lambda one: str(one.best.size), spare=1),
        Column("\ndepth", lambda one: str(one.best.depth), spare=2),
        Column("best on B:\ntokens/step", lambda one: f"{one.best.tokens_per_step:.2f}", spare=3),
        Column(
            "loses %\n[95 % interval]", lambda one: "{} [{:.1f}, {:.1f}]".format(_loss(one), *per_cent(one.loss).ends)
        ),
    ]
    table = Table("A's plan on B, beside the best that a search on B would find", plans, result.losses)
    return [*([shifts] if result.shifts else []), table]


def _groups_tables(result: GroupsCompared) -> list[Table]:
    columns = [
        Column("group", lambda one: one.group or "(no group)", names=True),
        Column("batch", lambda one: str(one.batch_size)),
        Column("conver-\nsations", lambda one: f"{one.conversations:,}"),
        Column("own tree", lambda one: one.best.draft.words, wraps=True),
        Column("tokens/step\nof it", lambda one: f"{one.best.tokens_per_step:.2f}", spare=1),
        Column("own over shared\n[95 % interval]", lambda one: str(one.gain)),
    ]
    if result.are_contexts:
        columns[0] = Column("context", lambda one: one.group, names=True)
        columns.insert(3, Column("first guess\nright", lambda one: pm(one.accepted)))
        columns.append(Column("own over\nplain", lambda one: pm(one.best.speedup)))
    caption = "The last column is what its own tree brings a group: tokens per second over those with the shared one, held out."
    return [Table("One plan for all groups", columns, result.groups, caption=caption)]


def _drafters_tables(result: DraftersCompared) -> list[Table]:
    won = {(one.batch_size, one.drafter) for one in result.winners if one.pays is not False}
    columns = [
        Column("batch", lambda one: str(one.batch_size)),
        Column("drafter", lambda one: one.drafter, wraps=True),
        Column("tree or setting", lambda one: one.setting or one.figure.draft.words, wraps=True),
        Column("tokens/step", lambda one: pm(one.figure.tokens_per_step)),
        Column("step ms", lambda one: f"{one.figure.step_ms:.2f}"),
        Column("speedup\n[95 % interval]", lambda one: f"{one.speedup}{'' if one.is_measured else ' predicted'}"),
    ]
    title, best = f"Drafters for {result.about}", lambda one: (one.batch_size, one.drafter) in won
    return [Table(title, columns, result.settings, bold=best, section=lambda one: one.batch_size)]


# By the kind of comparison, what it comes to in a sentence or two, and its tables.
COMPARED: dict[type[Comparison], tuple[Callable[[Any], str], Callable[[Any], list[Table]]]] = {
    Compared: (_plan_verdict, _plan_tables),
    GroupsCompared: (_groups_verdict, _groups_tables),
    Gate: (_gate_verdict, _gate_tables),
    DraftersCompared: (lambda result: " ".join(map(_won, result.winners)), _drafters_tables),
}
