"""What a benchmark says, as tables and sentences for the terminal and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treeopt.records.benchmark import Benchmark, Ratio
from treeopt.records.plan import PlanEntry
from treeopt.records.rules import RULES, SAME_TEXT, TEXTS, option_of, rule_of
from treeopt.report.terminal import grid, together
from treeopt.report.wording import count, pm

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

PUBLISHED = "mc_sim_7b_63"
CONTENDERS = {
    "plain": "plain decoding",
    "chosen": "chosen by treeopt",
    "mc_sim_7b_63": "published mc_sim_7b_63",
    "chain": "best top-1 chain",
    "budget": "best of full budget",
}
CONTENDER_COLUMNS = (
    "contender",
    "rows",
    *(f"tokens/step\npredicted,\n{how}" for how in ("product", "joint", "replay")),
    "tokens/step\nreplayed\non these",
    "tokens/step\nmeasured",
    "tokens/s",
    "speedup\n[95 % interval]",
    "same text\nas plain",
)
QUALITY_TITLE = "The texts, judged by the target itself at temperature 1"
QUALITY_COLUMNS = (
    "contender",
    "log-likelihood\n[nats per token]",
    "over plain answers\n[nats per token]",
    "answers\nchanged",
    "tokens\nchanged",
)


def bench_table(bench: Benchmark) -> RenderableType:
    """Predicted, replayed and measured, contender by contender."""
    columns = ("contender", "rows", "predicted: product\n/ joint / replay", "\nreplayed", "tokens/step\nmeasured")
    last = ("same\ntext",) if has_one_text(bench.acceptance) else ()
    table = grid(bench_title(bench), (*columns, "\ntokens/s", "speedup\n[95 % interval]", *last), left=1)
    table.columns[0].no_wrap = True
    for c, (name, rows, product, joint, _, *others) in zip(bench.contenders, contender_rows(bench), strict=True):
        predicted = " / ".join((product, joint, pm(c.predicted.replayed, None))).replace("– / – / –", "–")
        table.add_row(name, rows, predicted, *others, style="bold green" if c.name == "chosen" else None)
    more = [_bench_group_table(bench)] if bench.groups else []
    if bench.quality:
        more.append(grid(QUALITY_TITLE, QUALITY_COLUMNS, quality_rows(bench), left=1, caption=quality_note(bench)))
    return together(table, *more) if more else table


def contender_rows(bench: Benchmark) -> list[tuple[str, ...]]:
    """Rows of `CONTENDER_COLUMNS`, without the last where the text depends on the tree."""
    return [
        (
            CONTENDERS.get(c.name, c.name),
            str(c.size),
            pm(c.predicted.product, None),
            pm(c.predicted.joint, None),
            pm(c.predicted_tokens_per_step, c.predicted.replayed_stderr),
            pm(c.replayed_tokens_per_step, None),
            pm(c.tokens_per_step, c.stderr),
            pm(c.tokens_per_s, None, 0),
            str(bench.speedup(c.name) or "–"),
            *[f"{c.identical}/{c.compared}"] * has_one_text(bench.acceptance),
        )
        for c in bench.contenders
    ]


def bench_title(bench: Benchmark) -> str:
    """Of the table of contenders; a rule that is not the default is named."""
    first, rule = bench.contenders[0], bench.acceptance
    which = "held-out" if bench.prompts == "held out" else "calibration"
    title = (
        f"Real decoding of {first.compared} answers to {which} prompts, batch size {first.batch_size}, {bench.dtype}"
    )
    return title if rule_of(rule) == "greedy" else f"{title}, {option_of(rule)}"


def has_one_text(acceptance: Mapping[str, Any] | None) -> bool:
    """Whether a prompt has the same answer with every tree, rounding aside."""
    return RULES[rule_of(acceptance)] in SAME_TEXT


def about_rule(acceptance: Mapping[str, Any] | None) -> str:
    """The rule of a plan, and what it makes of the texts; empty where it is not known.

    >>> about_rule({"rule": "greedy"})
    "Guesses are accepted by --acceptance greedy: the texts are the target's own, whatever the tree."
    """
    if not acceptance:
        return ""
    texts = TEXTS[rule_of(acceptance)]
    return f"Guesses are accepted by {option_of(acceptance)}: the texts are {texts}."


def quality_rows(bench: Benchmark) -> list[tuple[str, ...]]:
    """A row of `QUALITY_COLUMNS` for each contender; none where texts were not judged."""
    return [
        (
            CONTENDERS.get(name, name),
            pm(of.log_likelihood_nats_per_token, of.log_likelihood_nats_per_token_stderr, 3),
            pm(of.difference_nats_per_token, of.difference_nats_per_token_stderr, 3),
            f"{of.changed_answers_share:.0%}",
            f"{of.changed_tokens_share:.0%}",
        )
        for name, of in (bench.quality or {}).items()
    ]


def quality_note(bench: Benchmark) -> str:
    """What the table of the texts compares with, and what a change means under the rule."""
    rule = rule_of(bench.acceptance)
    meaning = {
        "reject": " The rule keeps the distribution of the texts, not the texts: a changed answer is another sample, "
        "as good as the plain one.",
        "typical": " The rule does not keep the texts: a log-likelihood below that of plain answers is its price.",
    }.get(rule, "")
    return (
        "Plain answers were decoded beforehand in a batch of 16; rounding differs with the batch size, so plain decoding "
        f"itself may change texts, in bfloat16 many.{meaning}"
    )


def text_price(acceptance: Mapping[str, Any] | None, bench: Benchmark | None) -> str:
    """What a rule that does not keep the target's distribution costs the chosen tree's texts; empty for the others."""
    if rule_of(acceptance) != "typical":
        return ""
    of = (bench.quality or {}).get("chosen") if bench else None
    if of is None:
        return "What the rule costs in text is not measured yet."
    by, error = of.difference_nats_per_token, of.difference_nats_per_token_stderr
    return (
        f"To the target the chosen tree's texts are {abs(by):.3f} ±{error:.3f} nats per token {'less' if by <= 0 else 'more'} "
        f"likely than plain answers; {of.changed_answers_share:.0%} of the answers and {of.changed_tokens_share:.0%} of "
        "the tokens changed."
    )


def _bench_group_table(bench: Benchmark) -> Table:
    """The chosen tree, group by group."""
    rows = []
    for group in bench.groups:
        rate, answers = bench.tokens_per_step("chosen", group)
        rows.append((group, str(answers), f"{rate:.3f}", str(bench.speedup("chosen", group=group) or "–")))
    return grid(
        "The chosen tree by group", ("group", "answers", "tokens/step", "speedup [95 % interval]"), rows, left=1
    )


def doubt(speedup: Ratio) -> str:
    """What to say first where a speedup over plain decoding is not shown to be above 1; empty where it is.

    >>> doubt(Ratio(value=1.2, low=1.1, high=1.3)), doubt(Ratio(value=0.8, low=0.7, high=0.9))
    ('', 'Speculation loses here: serve the model without it.')
    """
    if speedup.low is None or speedup.high is None:
        return "Whether speculation gains here is not shown: so few prompts give no interval."
    if speedup.high < 1:
        return "Speculation loses here: serve the model without it."
    if speedup.low <= 1:
        return (
            f"Speculation is not shown to gain here: its speedup may be anything from {speedup.low:.2f} to "
            f"{speedup.high:.2f}, which more prompts would narrow."
        )
    return ""


def closing(entry: PlanEntry, bench: Benchmark) -> str:
    """What it all comes to, in sentences."""
    if entry.size == 1:
        return "No tree pays on this machine at this batch size: serve the model without speculation."
    speedup, names = bench.speedup("chosen"), [contender.name for contender in bench.contenders]
    over = bench.speedup("chosen", PUBLISHED) if PUBLISHED in names else None
    if speedup is None:
        return "Too few prompts for a full batch: nothing was timed. Pass more to bench."
    predicted = pm(entry.speedup, entry.speedup_stderr)
    overhead = bench.overhead("chosen")
    expected = entry.tokens_per_step / entry.speedup if entry.speedup else None
    published = (
        ""
        if over is None
        else f", and {over.value:.2f} times as fast as with the published tree of {bench.contender(PUBLISHED).size} rows"
    )
    first = doubt(speedup)
    return (
        f"{first} " * bool(first) + f"With the chosen tree ({count(entry.size, 'row')} a step) decoding is "
        f"{speedup.value:.2f} times as fast as without ({predicted} predicted){published}. "
        f"A step takes {'–' if overhead is None else f'{overhead.value:.2f}'} times a plain one ({pm(expected, None)} predicted)."
    )
