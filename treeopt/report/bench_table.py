"""What a benchmark says: its tables for the terminal and the report, and sentences on them."""

from __future__ import annotations

from collections.abc import Mapping
from math import hypot
from typing import TYPE_CHECKING, Any

from treeopt.records.benchmark import Benchmark
from treeopt.records.contender import Contender
from treeopt.records.figure import Figure
from treeopt.records.plan import PlanEntry
from treeopt.records.rules import RULES, SAME_TEXT, TEXTS, option_of, rule_of
from treeopt.report.table import Column, Table
from treeopt.report.terminal import headline, together
from treeopt.report.verdict import label, measured, subject
from treeopt.report.wording import count, percentages, pm

if TYPE_CHECKING:
    from rich.console import RenderableType


def bench_table(bench: Benchmark) -> RenderableType:
    """The verdict of a benchmark, then its tables."""
    groups = group_table(None, bench)
    return together(*headline(measured(bench)), *bench_tables(bench), *([groups] if groups else []))


def bench_tables(bench: Benchmark) -> list[Table]:
    """Predicted, replayed and measured, contender by contender; then what the target thinks of their texts."""
    columns = [
        Column("contender", lambda c: label(bench, c.name), names=True),
        Column("rows", lambda c: f"≤{c.size}" if bench.engine and c.name == "defaults" else str(c.size)),
        Column("predicted: product\n/ joint / replay", _predicted, spare=2),
        Column("\nreplayed", lambda c: pm(c.replayed_tokens_per_step, None), spare=1),
        Column("tokens/step\nmeasured", lambda c: pm(c.tokens_per_step, c.stderr)),
        Column("\ntokens/s", lambda c: pm(c.tokens_per_s, None, 0)),
        Column("speedup\n[95 % interval]", lambda c: str(bench.speedup(c.name) or "–")),
    ]
    if has_one_text(bench.acceptance):
        columns.append(Column("same\ntext", lambda c: f"{c.identical}/{c.compared}"))
    found = [
        Table(
            bench_title(bench),
            columns,
            bench.contenders,
            caption=" ".join(filter(None, (stopped_note(bench), differences_note(bench)))),
            bold=lambda c: c.name == bench.judged,
        )
    ]
    if bench.quality:
        found.append(_quality_table(bench))
    return found


def _predicted(contender: Contender) -> str:
    """Tokens per step, predicted in three ways; a dash where none is known."""
    of = contender.predicted
    known = " / ".join(pm(value, None) for value in (of.product, of.joint, of.replayed))
    return known.replace("– / – / –", "–")


def _quality_table(bench: Benchmark) -> Table:
    """A row for each contender: how likely its texts are by the target, and how many changed."""
    columns = [
        Column("contender", lambda row: label(bench, row[0]), names=True),
        Column(
            "log-likelihood\n[nats per token]",
            lambda row: pm(row[1].log_likelihood_nats_per_token, row[1].log_likelihood_nats_per_token_stderr, 3),
        ),
        Column(
            "over plain answers\n[nats per token]",
            lambda row: pm(row[1].difference_nats_per_token, row[1].difference_nats_per_token_stderr, 3),
        ),
        Column("answers\nchanged", lambda row: f"{row[1].changed_answers_share:.0%}"),
        Column("tokens\nchanged", lambda row: f"{row[1].changed_tokens_share:.0%}"),
    ]
    meaning = {
        "reject": " The rule keeps the distribution of the texts, not the texts: a changed answer is another sample, "
        "as good as the plain one.",
        "typical": " The rule does not keep the texts: a log-likelihood below that of plain answers is its price.",
    }.get(rule_of(bench.acceptance), "")
    caption = (
        "Plain answers were decoded beforehand in a batch of 16. Rounding differs with the batch size, "
        f"so plain decoding itself may change some texts, and in bfloat16 many.{meaning}"
    )
    title = "The texts, judged by the target itself at temperature 1"
    return Table(title, columns, (bench.quality or {}).items(), caption=caption)


def group_table(entry: PlanEntry | None, bench: Benchmark | None) -> Table | None:
    """The chosen tree on each group of prompts, as a plan predicts it and a benchmark measured it; None without groups."""
    predicted = entry.groups if entry else {}
    measured = bench if bench and bench.judged in {c.name for c in bench.contenders} else None
    names = list(dict.fromkeys([*predicted, *(measured.groups if measured else [])]))
    if not names:
        return None
    columns = [Column("group", lambda name: name or "(no group)", names=True)]
    if entry:
        of = predicted
        columns += [
            Column(
                "tokens/step,\npredicted",
                lambda name: pm(of[name].tokens_per_step, of[name].stderr.tokens_per_step) if name in of else "–",
            ),
            Column(
                "speedup,\npredicted",
                lambda name: pm(of[name].speedup, _speedup_stderr(of[name], entry)) if name in of else "–",
            ),
        ]
    if measured:
        found = {group: measured.tokens_per_step(measured.judged, group) for group in measured.groups}
        shares = dict(zip(found, percentages([answers for _, answers in found.values()]), strict=True))
        error = measured.contender(measured.judged).stderr_of
        columns += [
            Column("answers\nmeasured", lambda name: str(found[name][1]) if name in found else "–"),
            Column("share of\nanswers", lambda name: shares.get(name, "–")),
            Column(
                "tokens/step,\nmeasured",
                lambda name: pm(found[name][0], error(name), 3) if name in found and found[name][1] else "–",
            ),
            Column(
                "speedup\n[95 % interval]",
                lambda name: str((name in found and measured.speedup(measured.judged, group=name)) or "–"),
            ),
        ]
    return Table(f"{subject(bench) if bench else 'The chosen tree'} by group of prompts", columns, names)


def _speedup_stderr(of: Figure, entry: PlanEntry) -> float | None:
    """Error of a group's predicted speedup: tokens per step vary with its prompts, the step with the rounds of timing."""
    if not of.speedup or of.stderr.tokens_per_step is None:
        return None
    of_step = (entry.chosen.stderr.step_ms or 0.0) / (entry.chosen.step_ms or 1.0)
    return of.speedup * hypot(of.stderr.tokens_per_step / of.tokens_per_step, of_step)


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


def bench_title(bench: Benchmark) -> str:
    """The title of the table of contenders; a rule that is not the default is named."""
    first, rule = bench.contenders[0], bench.acceptance
    which = "held-out" if bench.prompts == "held out" else "calibration"
    by = f", by {bench.engine}" if bench.engine else ""
    rounds = f", {bench.rounds} rounds" if bench.rounds > 1 else ""
    answers = f"{first.compared} answers to {which} prompts"
    title = f"Real decoding of {answers}, batch size {first.batch_size}, {bench.dtype}{by}{rounds}"
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


def closing(entry: PlanEntry, bench: Benchmark) -> str:
    """What was measured beside what the plan predicted; empty where there is nothing to compare."""
    if bench.judged != "chosen":  # the plan's figures are of its tree
        return ""
    speedup, overhead = bench.speedup("chosen"), bench.overhead("chosen")
    if entry.chosen.size == 1 or speedup is None or overhead is None or entry.chosen.speedup is None:
        return ""
    predicted = pm(entry.chosen.tokens_per_step / entry.chosen.speedup, None)
    return (
        f"The speedup is {speedup.value:.2f}; {pm(entry.chosen.speedup, entry.chosen.stderr.speedup)} was predicted. "
        f"A step takes {overhead.value:.2f} times as long as a plain one; {predicted} was predicted."
    )
