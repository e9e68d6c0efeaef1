"""The decision among settings that were run, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import RenderableType

from treeopt.arms.arm import Arms, Unit
from treeopt.arms.choices import Decided, minutes_of, prompts_of, title_of
from treeopt.arms.decide import Choice
from treeopt.arms.steps import StepTime
from treeopt.records.inputs import BROKEN
from treeopt.report.table import Column, Table
from treeopt.report.terminal import together
from treeopt.report.wording import count, interval

SPEED: Mapping[Unit, str] = {"all": "tokens/s", "request": "tokens/s of a request", "ratio": "ratio"}


def arms_table(arms: Arms) -> Table:
    """All arms as they were read."""
    units = {arm.unit for arm in arms.arms}
    columns = [
        Column(
            "model, data set",
            lambda arm: title_of(arm.model, arm.dataset) if arm.model or arm.dataset else "",
            names=True,
        ),
        Column("requests", lambda arm: str(arm.concurrency)),
        Column("setting", lambda arm: arm.name, wraps=True),
        Column(
            SPEED[units.pop()] if len(units) == 1 else "tokens/s",
            lambda arm: "–" if arm.tokens_per_s is None else number(arm.tokens_per_s),
        ),
        Column("tokens/step", lambda arm: interval(arm.tokens_per_step)),
        Column("ms per token", lambda arm: "–" if arm.tpot_ms is None else number(arm.tpot_ms), spare=1),
    ]
    return Table(f"{count(len(arms.arms), 'setting')}", columns, arms.arms, section=lambda arm: arm.cell[:2])


def decision_table(decided: Decided) -> RenderableType:
    """What to serve and what it brings, what a step has to emit to pay, and the run that would decide most."""
    tables = list[Table | None]()
    for key, choices in decided.groups.items():
        steps = [step for step in decided.steps if step.served.cell[:2] == key]
        tables += [_choices(choices, title_of(*key)), _steps(steps)]
    return together(*tables, headline=headline(decided))


def headline(decided: Decided) -> Iterator[str]:
    """What to serve for each model and data set, what is broken, and the next run."""
    for drafter, why in decided.broken.items():
        yield BROKEN.format(f"{drafter}, {why}")
    for key, choices in decided.groups.items():
        if len({setting for choice in choices for setting in choice.run}) < 2:
            yield f"{title_of(*key)}: {choices[0].arm.name} alone was run, so there is nothing to choose among."
            continue
        verb = f"{title_of(*key)}: serve" if len(decided.groups) > 1 else "Serve"
        yield f"{verb} {', '.join(_ranges(choices))}."
        if decided.limit_ms is not None:
            yield _within_limit(choices, decided.limit_ms)
    yield next_run_sentence(decided)


def _ranges(choices: Sequence[Choice]) -> Iterator[str]:
    """The choices of ascending concurrency by ranges of it, such as "MTP 3 at 1 to 8 requests"."""
    for name, same in groupby(choices, key=lambda choice: choice.arm.name):
        loads = [choice.arm.concurrency for choice in same]
        span = f"{loads[0]} to {loads[-1]} requests" if len(loads) > 1 else count(loads[0], "request")
        yield f"{name} at {span}"


def _within_limit(choices: Sequence[Choice], limit: float) -> str:
    within = [choice for choice in choices if choice.within_limit]
    if not within:
        return f"No setting stays within {limit:g} ms per token."
    best = max(within, key=lambda choice: choice.posterior.mean[choice.chosen])  # of all requests together
    has_percentile = best.arm.tpot_p99_ms is not None
    caveat = "by the 99th percentile" if has_percentile else "by the mean, which is no percentile"
    return f"Within {limit:g} ms per token ({caveat}) most is served by {best.arm.name} at {count(best.arm.concurrency, 'request')} at once."


def next_run_sentence(decided: Decided) -> str:
    if decided.next_run is None:
        return "No further run is worth it."
    choice, run = decided.next_run
    arm = choice.posterior.arms[run.arm]
    prompts, minutes = prompts_of(choice), minutes_of(choice, run)
    size = "".join(
        [f" with {count(prompts, 'prompt')}" if prompts else "", f", about {minutes:.0f} min" if minutes else ""]
    )
    again = " again" if arm.tokens_per_s else ""
    return (
        f"Next, run {arm.name}{again} at {count(arm.concurrency, 'request')} at once{size}: it is expected to bring {100 * run.gain:.1f} % and "
        f"changes the choice with a chance of {100 * run.chance:.0f} %."
    )


def _choices(choices: Sequence[Choice], title: str) -> Table:
    over = Column("over the next best [95 %]", _over_next)
    if any(choice.over_off for choice in choices):
        over = Column("over off [95 %]", lambda choice: interval(choice.over_off))
    columns = [
        Column("requests", lambda choice: str(choice.arm.concurrency), names=True),
        Column("serve", lambda choice: choice.arm.name, names=True),
        Column(SPEED[choices[0].arm.unit], lambda choice: number(choice.throughput)),
        over,
        Column("as fast within noise", _tied, wraps=True),
        Column("not run, maybe faster", _maybe, wraps=True),
    ]
    return _filled(title, columns, choices)


def _filled(title: str, columns: Sequence[Column], records: Sequence[Any], caption: str = "") -> Table:
    """A table of the columns in which any row says something."""
    filled = [column for column in columns if any(column.cell(record) not in ("", "–") for record in records)]
    return Table(title, filled, records, caption=caption)


def _over_next(choice: Choice) -> str:
    """The throughput of the chosen arm over that of the fastest other one that was run."""
    others = [i for i in choice.run.values() if i != choice.chosen]
    if not others:
        return "–"
    following = max(others, key=lambda i: choice.posterior.mean[i])
    return f"{interval(choice.posterior.ratio(choice.chosen, following))} {choice.posterior.arms[following].name}"


def _tied(choice: Choice) -> str:
    return ", ".join(choice.posterior.arms[i].name for i in choice.tied)


def _maybe(choice: Choice) -> str:
    """The arm that was not run and is likely faster, with the chance of it."""
    if choice.predicted is None:
        return ""
    i, chance = choice.predicted
    return f"{choice.posterior.arms[i].name} ({100 * chance:.0f} %)"


def _steps(steps: Sequence[StepTime]) -> Table | None:
    """The step of each drafter's fastest length beside a plain one, and the tokens that it has to emit to pay."""
    if not steps:
        return None
    columns = [
        Column("requests", lambda step: str(step.served.concurrency), names=True),
        Column("setting", lambda step: step.served.name, names=True),
        Column("step ms", lambda step: interval(step.step_ms, 1)),
        Column("plain ms", lambda step: interval(step.plain_ms, 1), spare=1),
        Column("to break even", lambda step: interval(step.break_even_tokens)),
        Column("tokens/step", lambda step: interval(step.served.tokens_per_step)),
    ]
    lost = [f"{step.served.name} at {step.served.concurrency}" for step in steps if step.hopeless]
    caption = f"Would lose even if every guess were right: {', '.join(lost)}." if lost else ""
    if all(step.break_even_tokens is None for step in steps):
        caption = "A plain step and what it takes to break even need a run without speculation."
    return _filled("What a step takes [95 %]", columns, steps, caption)


def number(value: float) -> str:
    """A throughput with three or four digits.

    >>> number(28.51), number(1646.15)
    ('28.5', '1,646')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
