"""What comparing comes to, as tables and sentences."""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING

from treeopt.growth.drift import SURVIVAL
from treeopt.planning.compared import Compared, DraftersCompared, GroupsCompared, Setting, Winner
from treeopt.report.terminal import grid, headline, together
from treeopt.report.wording import count, pm
from treeopt.trees.tree import Tree

if TYPE_CHECKING:
    from rich.console import RenderableType

    from treeopt.planning.regret import Loss

Result = Compared | GroupsCompared | DraftersCompared


@singledispatch
def verdict(result: Result) -> str:
    """What it comes to, in a sentence or two."""
    raise TypeError(type(result).__name__)


@singledispatch
def compared_table(result: Result) -> RenderableType:
    """The verdict, then the tables."""
    raise TypeError(type(result).__name__)


def per_cent(loss: Loss) -> str:
    """A loss with its standard error.

    >>> from treeopt.planning.regret import Loss
    >>> per_cent(Loss(share=0.0041, stderr=0.0018, interval95=(0.0, 0.008)))
    '0.4 ±0.2'
    """
    return pm(100 * loss.share, 100 * loss.stderr, 1).replace("-0.0 ", "0.0 ")


@verdict.register(Compared)
def _(result: Compared) -> str:
    one = result.worst
    where = f" at batch size {one.batch_size}" if len(result.losses) > 1 else ""
    rows = count(one.size, "row")
    if not result.keep:
        return (
            f"The plan ({rows}) loses {per_cent(one.loss)} % against the best for {result.names[1]}{where}, more than "
            f"{100 * result.tolerance:g} %: plan anew."
        )
    low, high = (100 * end for end in one.loss.interval95)
    if high > 100 * result.tolerance:
        return (
            f"The plan ({rows}) loses {per_cent(one.loss)} % against the best for {result.names[1]}{where}, 95 % interval "
            f"{low:.1f} to {high:.1f}: not shown to be more than {100 * result.tolerance:g} %, so keep it. More "
            "conversations would tell."
        )
    within = pm(max(100 * one.loss.share, 0.0), 100 * one.loss.stderr, 1)
    return f"The plan ({rows}) is still within {within} % of the best for {result.names[1]}{where}: keep it."


@verdict.register(GroupsCompared)
def _(result: GroupsCompared) -> str:
    most = max(result.groups, key=lambda group: group.shared.interval95[0])
    if not result.gainers:
        return (
            f"One plan is enough: no group is shown to gain more than {100 * result.tolerance:g} % by a plan of its own. The most is "
            f"{per_cent(most.shared)} % ({most.group}, batch size {most.batch_size})."
        )
    said = ", ".join(
        f"{group.group} {per_cent(group.shared)} % at batch size {group.batch_size}" for group in result.gainers
    )
    sizes = {group.batch_size for group in result.groups}
    worst = max(result.groups, key=lambda group: group.minimax.share)
    where = f" at batch size {worst.batch_size}" if len(sizes) > 1 else ""
    return (
        f"Of what its own plan reaches, sharing one costs {said}. With the plan that is least bad for the worst group "
        f"(treeopt search --for-groups minimax) no group loses more than {per_cent(worst.minimax)} %{where}."
    )


@verdict.register(DraftersCompared)
def _(result: DraftersCompared) -> str:
    return " ".join(map(_won, result.winners))


def _won(one: Winner) -> str:
    """Who is fastest at a batch size."""
    if one.pays is False:
        return f"Batch size {one.batch_size}: none is shown to beat plain decoding; {one.drafter} comes nearest."
    tied = f", tied with {', '.join(one.tied)}" if one.tied else ""
    return f"Batch size {one.batch_size}: {one.drafter} is fastest{tied}."


@compared_table.register(Compared)
def _(result: Compared) -> RenderableType:
    what = "share of steps whose chain survives to a depth" if result.measure == SURVIVAL else "top-1 accuracy"
    moved = [str(shift.depth) for shift in result.moved]
    said = f"Depths that moved beyond noise: {', '.join(moved)}." if moved else "No depth moved beyond noise."
    rows = [
        (
            str(shift.depth),
            f"{shift.before:.3f}",
            f"{shift.after:.3f}",
            f"{shift.after - shift.before:+.3f} [{shift.change95[0]:+.3f}, {shift.change95[1]:+.3f}]",
            "moved" if shift.moved else "noise",
        )
        for shift in result.shifts
    ]
    columns = ("depth", "A", "B", "change [95 % interval]", "")
    caption = f"{said} A is {result.names[0]}, B is {result.names[1]}. All depths were tested together (Holm)."
    shifts = [grid(f"Guesses at each depth: {what}", columns, rows, caption=caption)] if rows else []
    plans = [
        (
            str(one.batch_size),
            str(one.size),
            str(one.depth),
            pm(one.planned, None),
            pm(one.tokens_per_step, one.tokens_per_step_stderr),
            str(one.best_size),
            str(one.best_depth),
            pm(one.best_tokens_per_step, None),
            f"{per_cent(one.loss)} [{100 * one.loss.interval95[0]:.1f}, {100 * one.loss.interval95[1]:.1f}]",
        )
        for one in result.losses
    ]
    best = ("best on B:\nrows", "\ndepth", "best on B:\ntokens/step")
    names = ("batch", "rows", "depth", "tokens/step\nplanned", "tokens/step\non B", *best, "loses %\n[95 % interval]")
    table = grid("A's plan on B, beside the best that a search on B would find", names, plans, spare=best[::-1])
    return together(*headline(verdict(result)), *shifts, table)


@compared_table.register(GroupsCompared)
def _(result: GroupsCompared) -> RenderableType:
    rows = [
        (
            group.group or "(no group)",
            str(group.batch_size),
            f"{group.conversations:,}",
            f"{group.size} rows, {group.depth} deep",
            pm(group.tokens_per_step, None),
            per_cent(group.shared),
            per_cent(group.minimax),
        )
        for group in result.groups
    ]
    columns = (
        "group",
        "batch",
        "conver-\nsations",
        "own tree",
        "tokens/step\nof it",
        "loses %\nwith shared",
        "loses %\nwith minimax",
    )
    caption = "Losses are against the group's own plan, all held out; ± is a standard error over conversations."
    table = grid(
        "One plan for all groups", columns, rows, left=1, wraps=("own tree",), spare=columns[4:5], caption=caption
    )
    return together(*headline(verdict(result)), table)


@compared_table.register(DraftersCompared)
def _(result: DraftersCompared) -> RenderableType:
    winners = {one.batch_size: one for one in result.winners}
    columns = ("batch", "drafter", "tree or setting", "tokens/step", "step ms", "speedup\n[95 % interval]")
    table = grid(f"Drafters for {result.about}", columns, wraps=columns[1:3])
    for i, one in enumerate(result.settings):
        if i and result.settings[i - 1].batch_size != one.batch_size:
            table.add_section()
        winner = winners[one.batch_size]
        table.add_row(
            str(one.batch_size),
            one.drafter,
            setting_words(one),
            pm(one.tokens_per_step, one.tokens_per_step_stderr),
            pm(one.step_ms, None),
            f"{one.speedup}{'' if one.is_measured else ' predicted'}",
            style="bold green" if one.drafter == winner.drafter and winner.pays is not False else None,
        )
    return together(*headline(verdict(result)), table)


def setting_words(one: Setting) -> str:
    """The tree of a setting in a few words."""
    if one.setting:
        return one.setting
    if one.size == 1:
        return "do not speculate"
    if one.medusa_choices == Tree.chain(one.depth).choices:
        return f"chain of {one.depth}"
    return f"{one.size} rows, {one.depth} deep"
