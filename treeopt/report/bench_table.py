"""What a benchmark says, as tables and sentences for the terminal and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treeopt.records.benchmark import Benchmark
from treeopt.records.plan import PlanEntry
from treeopt.records.rules import RULES, SAME_TEXT, TEXTS, option_of, rule_of
from treeopt.report.terminal import grid, headline, together
from treeopt.report.verdict import label, measured, subject
from treeopt.report.wording import count, percentages, pm

if TYPE_CHECKING:
    from rich.console import RenderableType

    from treeopt.report.grid import Grid

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
    """What the benchmark comes to, then predicted, replayed and measured, contender by contender."""
    columns = ("contender", "rows", "predicted: product\n/ joint / replay", "\nreplayed", "tokens/step\nmeasured")
    last = ("same\ntext",) if has_one_text(bench.acceptance) else ()
    columns = (*columns, "\ntokens/s", "speedup\n[95 % interval]", *last)
    table = grid(bench_title(bench), columns, left=1, spare=columns[2:4], caption=notes(bench) or None)
    for c, (name, rows, product, joint, _, *others) in zip(bench.contenders, contender_rows(bench), strict=True):
        predicted = " / ".join((product, joint, pm(c.predicted.replayed, None))).replace("– / – / –", "–")
        table.add_row(name, rows, predicted, *others, style="bold green" if c.name == bench.judged else None)
    more = [_bench_group_table(bench)] if bench.groups else []
    if bench.quality:
        more.append(grid(QUALITY_TITLE, QUALITY_COLUMNS, quality_rows(bench), left=1, caption=quality_note(bench)))
    return together(*headline(measured(bench)), table, *more)


def notes(bench: Benchmark) -> str:
    """What is said under the table of contenders."""
    return " ".join(filter(None, (stopped_note(bench), differences_note(bench))))


def differences_note(bench: Benchmark) -> str:
    """How near a choice it was where texts differ from plain decoding's; empty where none does, or no gap is known."""
    gaps = [a.logit_gap for c in bench.contenders for a in c.sequences if a.logit_gap is not None]
    if not gaps or not has_one_text(bench.acceptance):
        return ""
    return (
        "Where a text differs from plain decoding's, the target's logits for the two first tokens that differ are at most "
        f"{max(gaps):.2g} apart."
    )


def stopped_note(bench: Benchmark) -> str:
    """Which contenders lost by far and stopped, and what their figures are of; empty where none did."""
    if not bench.stopped:
        return ""
    named = ", ".join(f"{label(bench, c.name)} after {count(c.compared, 'answer')}" for c in bench.stopped)
    return f"Stopped early, since shown to be slower than the chosen tree: {named}. Their intervals are of 99.9 %."


def contender_rows(bench: Benchmark) -> list[tuple[str, ...]]:
    """Rows of `CONTENDER_COLUMNS`, without the last where the text depends on the tree."""
    return [
        (
            label(bench, c.name),
            f"≤{c.size}" if bench.engine and c.name == "defaults" else str(c.size),
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
    ) + (f", by {bench.engine}" if bench.engine else "")
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
            label(bench, name),
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
        "Plain answers were decoded beforehand in a batch of 16. Rounding differs with the batch size, "
        f"so plain decoding itself may change some texts, and in bfloat16 many.{meaning}"
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
        f"By the target's own probabilities, texts of the chosen tree are {abs(by):.3f} ±{error:.3f} nats "
        f"per token {('less' if by <= 0 else 'more')} likely than plain answers; "
        f"{of.changed_answers_share:.0%} of the answers and {of.changed_tokens_share:.0%} of the tokens "
        "changed."
    )


def _bench_group_table(bench: Benchmark) -> Grid:
    """The chosen tree, group by group."""
    columns = ("group", "answers", "share", "tokens/step", "speedup [95 % interval]")
    return grid(f"{subject(bench)} by group", columns, group_rows(bench), left=1)


def group_rows(bench: Benchmark) -> list[tuple[str, ...]]:
    """Group, answers, their share, tokens per step and speedup of the chosen tree."""
    found = [(group, *bench.tokens_per_step(bench.judged, group)) for group in bench.groups]
    shares = percentages([answers for *_, answers in found])
    error = bench.contender(bench.judged).stderr_of
    return [
        (
            group or "(no group)",
            str(answers),
            share,
            pm(rate if answers else None, error(group), 3),
            str(bench.speedup(bench.judged, group=group) or "–"),
        )
        for (group, rate, answers), share in zip(found, shares, strict=True)
    ]


def closing(entry: PlanEntry, bench: Benchmark) -> str:
    """What was measured beside what the plan predicted; empty where there is nothing to compare."""
    if bench.judged != "chosen":  # the plan's figures are of its tree
        return ""
    speedup, overhead = bench.speedup("chosen"), bench.overhead("chosen")
    if entry.size == 1 or speedup is None or overhead is None or entry.speedup is None:
        return ""
    predicted = pm(entry.tokens_per_step / entry.speedup, None)
    return (
        f"The speedup is {speedup.value:.2f}; {pm(entry.speedup, entry.speedup_stderr)} was predicted. "
        f"A step takes {overhead.value:.2f} times as long as a plain one; {predicted} was predicted."
    )
