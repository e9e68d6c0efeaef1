"""The verdict and the tables of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatch
from typing import TYPE_CHECKING

import numpy as np

from treeopt.growth.drift import SURVIVAL
from treeopt.planning.compared import Compared, DraftersCompared, GroupsCompared, Winner
from treeopt.report.table import Column, Table
from treeopt.report.terminal import together
from treeopt.report.wording import count, draft_words, pm, told

if TYPE_CHECKING:
    from rich.console import RenderableType

    from treeopt.planning.regret import Loss

Result = Compared | GroupsCompared | DraftersCompared


@singledispatch
def verdict(result: Result) -> str:
    """A comparison's verdict in a sentence or two."""
    raise TypeError(type(result).__name__)


def compared_table(result: Result) -> RenderableType:
    """The verdict, then the tables."""
    return together(*_tables(result), headline=[verdict(result)])


@singledispatch
def _tables(result: Result) -> list[Table]:
    raise TypeError(type(result).__name__)


def per_cent(loss: Loss) -> str:
    """A loss with its standard error.

    >>> from treeopt.planning.regret import Loss
    >>> per_cent(Loss(share=0.0041, stderr=0.0018, interval95=(0.0, 0.008)))
    '0.4 ±0.2'
    """
    return pm(100 * loss.share, 100 * loss.stderr, 1).replace("-0.0 ", "0.0 ")


def _ends(interval: Iterable[float], digits: str) -> str:
    return "[{:{digits}}, {:{digits}}]".format(*interval, digits=digits)


@verdict.register(Compared)
def _(result: Compared) -> str:
    one, tolerance = result.worst, f"{100 * result.tolerance:g} %"
    best = f"the best for {result.names[1]}" + (f" at batch size {one.batch_size}" if len(result.losses) > 1 else "")
    plan = f"The plan ({count(one.reached.size, 'row')})"
    loses = f"{plan} loses {per_cent(one.loss)} % against {best}"
    if not result.keep:
        return f"{loses}, more than {tolerance}: plan anew."
    low, high = (100 * end for end in one.loss.interval95)
    if high > 100 * result.tolerance:
        return (
            f"{loses}, 95 % interval {low:.1f} to {high:.1f}: not shown to be more than {tolerance}, so keep it. More "
            "conversations would tell."
        )
    within = pm(max(100 * one.loss.share, 0.0), 100 * one.loss.stderr, 1)
    return f"{plan} is still within {within} % of {best}: keep it."


@verdict.register(GroupsCompared)
def _(result: GroupsCompared) -> str:
    if gainers := result.gainers:
        said = ", ".join(f"{one.group} {per_cent(one.shared)} % at batch size {one.batch_size}" for one in gainers)
        return (
            f"Of what its own plan reaches, sharing one costs {said}: treeopt search --for-groups own makes a plan for "
            "each."
        )
    most = max(result.groups, key=lambda group: group.shared.interval95[0])
    return (
        f"One plan is enough: no group is shown to gain more than {100 * result.tolerance:g} % by a plan of its own. The "
        f"most is {per_cent(most.shared)} % ({most.group}, batch size {most.batch_size})."
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


@_tables.register(Compared)
def _(result: Compared) -> list[Table]:
    what = "share of steps whose chain survives to a depth" if result.measure == SURVIVAL else "top-1 accuracy"
    moved = [str(shift.depth) for shift in result.moved]
    said = f"Depths that moved beyond noise: {', '.join(moved)}." if moved else "No depth moved beyond noise."
    depths = [
        Column("depth", lambda one: str(one.depth)),
        Column("A", lambda one: f"{one.before:.3f}"),
        Column("B", lambda one: f"{one.after:.3f}"),
        Column("change [95 % interval]", lambda one: f"{one.after - one.before:+.3f} {_ends(one.change95, '+.3f')}"),
        Column("", lambda one: "moved" if one.moved else "noise"),
    ]
    caption = f"{said} A is {result.names[0]}, B is {result.names[1]}. All depths were tested together (Holm)."
    shifts = Table(f"Guesses at each depth: {what}", depths, result.shifts, caption=caption)
    plans = [
        Column("batch", lambda one: str(one.batch_size)),
        Column("rows", lambda one: str(one.reached.size)),
        Column("depth", lambda one: str(one.reached.depth)),
        Column("tokens/step\nplanned", lambda one: pm(one.planned, None)),
        Column("tokens/step\non B", lambda one: told(one.reached, "tokens_per_step")),
        Column("best on B:\nrows", lambda one: str(one.best.size), spare=1),
        Column("\ndepth", lambda one: str(one.best.depth), spare=2),
        Column("best on B:\ntokens/step", lambda one: pm(one.best.tokens_per_step, None), spare=3),
        Column(
            "loses %\n[95 % interval]",
            lambda one: f"{per_cent(one.loss)} {_ends(100 * np.array(one.loss.interval95), '.1f')}",
        ),
    ]
    table = Table("A's plan on B, beside the best that a search on B would find", plans, result.losses)
    return [*([shifts] if result.shifts else []), table]


@_tables.register(GroupsCompared)
def _(result: GroupsCompared) -> list[Table]:
    columns = [
        Column("group", lambda one: one.group or "(no group)", names=True),
        Column("batch", lambda one: str(one.batch_size)),
        Column("conver-\nsations", lambda one: f"{one.conversations:,}"),
        Column("own tree", lambda one: draft_words(one.own.draft), wraps=True),
        Column("tokens/step\nof it", lambda one: pm(one.own.tokens_per_step, None), spare=1),
        Column("loses %\nwith shared", lambda one: per_cent(one.shared)),
    ]
    caption = "Losses are against the group's own plan, all held out; ± is a standard error over conversations."
    return [Table("One plan for all groups", columns, result.groups, caption=caption)]


@_tables.register(DraftersCompared)
def _(result: DraftersCompared) -> list[Table]:
    won = {(one.batch_size, one.drafter) for one in result.winners if one.pays is not False}
    columns = [
        Column("batch", lambda one: str(one.batch_size)),
        Column("drafter", lambda one: one.drafter, wraps=True),
        Column("tree or setting", lambda one: one.setting or draft_words(one.figure.draft), wraps=True),
        Column("tokens/step", lambda one: told(one.figure, "tokens_per_step")),
        Column("step ms", lambda one: pm(one.figure.step_ms, None)),
        Column("speedup\n[95 % interval]", lambda one: f"{one.speedup}{'' if one.is_measured else ' predicted'}"),
    ]
    title, best = f"Drafters for {result.about}", lambda one: (one.batch_size, one.drafter) in won
    return [Table(title, columns, result.settings, bold=best, section=lambda one: one.batch_size)]
