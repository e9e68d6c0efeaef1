"""What a benchmark says: its tables for the terminal and the report, and sentences on them."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from math import hypot
from typing import Any

from rich.console import RenderableType

from treeopt.records.benchmark import Benchmark
from treeopt.records.estimate import Estimate
from treeopt.records.figure import Figure
from treeopt.records.plan import PlanEntry
from treeopt.records.rules import RULES, SAME_TEXT, TEXTS, option_of, rule_of
from treeopt.report.table import Column, Table
from treeopt.report.terminal import together
from treeopt.report.verdict import decoding_caveats, label, measured, subject
from treeopt.report.wording import count, pm, timed


def bench_table(bench: Benchmark) -> RenderableType:
    said = measured(bench)
    return together(*bench_tables(bench), group_table(None, bench), headline=[said] if said else [])


def bench_tables(bench: Benchmark) -> list[Table]:
    """Predicted and measured, contender by contender; then what the target thinks of their texts."""
    columns = [
        Column("contender", lambda c: label(bench, c.name), names=True),
        Column("rows", lambda c: str(c.size)),
        Column("tokens/step\npredicted", lambda c: pm(c.predicted_tokens_per_step), spare=1),
        Column("tokens/step\nmeasured", lambda c: pm(c.rate_of())),
        Column("\ntokens/s", lambda c: pm(c.tokens_per_s, 0)),
        Column("speedup\n[95 % interval]", lambda c: str(bench.speedup(c.name) or "–")),
    ]
    if bench.is_launched:
        columns.append(Column("ms/token\np50, p95", lambda c: ", ".join(f"{ms:.3g}" for ms in c.token_ms or ()) or "–"))
    if has_one_text(bench.acceptance):
        columns.append(Column("same\ntext", lambda c: f"{c.identical}/{c.compared}"))
    caption = " ".join(filter(None, [*decoding_caveats(bench), _about_differences(bench)]))
    table = Table(_title(bench), columns, bench.contenders, caption=caption, bold=lambda c: c.name == bench.judged)
    return [table, *([_quality_table(bench)] if bench.quality else [])]


def _quality_table(bench: Benchmark) -> Table:
    """A row for each contender: how likely its texts are by the target, and how many changed."""
    columns = [
        Column("contender", lambda row: label(bench, row[0]), names=True),
        Column("log-likelihood\n[nats per token]", lambda row: pm(row[1].log_likelihood_nats_per_token, 3)),
        Column("over plain answers\n[nats per token]", lambda row: pm(row[1].difference_nats_per_token, 3)),
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
    groups = measured.groups if measured else []
    if not (names := list(dict.fromkeys([*predicted, *groups]))):
        return None

    def column(header: str, known: Collection[str], cell: Callable[[str], str]) -> Column:
        return Column(header, lambda name: cell(name) if name in known else "–")

    columns = [Column("group", lambda name: name or "(no group)", names=True)]
    if entry:
        columns += [
            column("tokens/step,\npredicted", predicted, lambda name: pm(predicted[name].tokens_per_step)),
            column("speedup,\npredicted", predicted, lambda name: _speedup(predicted[name], entry.chosen.step_ms)),
        ]
    if measured:
        judged, speedup = measured.contender(measured.judged), partial(measured.speedup, measured.judged)
        answers = [answer.group for answer in judged.sequences]
        columns += [
            column("answers\nmeasured", groups, lambda name: str(answers.count(name))),
            column("tokens/step,\nmeasured", answers, lambda name: pm(judged.rate_of(name), 3)),
            column("speedup\n[95 % interval]", groups, lambda name: str(speedup(group=name) or "–")),
        ]
    return Table(f"{subject(bench) if bench else 'The chosen tree'} by group of prompts", columns, names)


def _speedup(group: Figure, step_ms: Estimate | None) -> str:
    """A group's predicted speedup: tokens per step vary with its prompts, the step with the rounds of timing."""
    rate, speedup = group.tokens_per_step, group.speedup
    if speedup is None or step_ms is None or rate.stderr is None:
        return pm(speedup)
    return pm(Estimate(speedup, speedup * hypot(rate.stderr / rate, (step_ms.stderr or 0.0) / step_ms)))


def _about_differences(bench: Benchmark) -> str:
    """How near a choice it was where texts differ from plain decoding's; empty where none does, or no gap is known."""
    gaps = [a.logit_gap for c in bench.contenders for a in c.sequences if a.logit_gap is not None]
    if not gaps or not has_one_text(bench.acceptance):
        return ""
    return (
        "Where a text differs from plain decoding's, the target's logits for the two first tokens that differ are at most "
        f"{max(gaps):.2g} apart."
    )


def _title(bench: Benchmark) -> str:
    """What was decoded; a rule that is not the default is named."""
    first, rule = bench.contenders[0], bench.acceptance
    which = "held-out" if bench.prompts == "held out" else "calibration"
    title = f"Real decoding of {count(first.compared, 'answer')} to {which} prompts, batch size {first.batch_size}"
    if not (bench.about_engine or bench.is_launched):  # which may have a precision of their own
        title += f", {bench.dtype}"
    title += f", by {bench.engine}" if bench.engine else ""
    title += f", {bench.rounds} {'launches each' if bench.is_launched else 'rounds'}" if bench.rounds > 1 else ""
    return title if rule_of(rule) == "greedy" else f"{title}, {option_of(rule)}"


def has_one_text(acceptance: Mapping[str, Any] | None) -> bool:
    """Whether a prompt has the same answer with every tree, rounding aside."""
    return RULES[rule_of(acceptance)] in SAME_TEXT


def about_rule(acceptance: Mapping[str, Any] | None) -> str:
    """The rule of a plan, and what it makes of the texts; empty where it is not known.

    >>> about_rule({"rule": "greedy"})
    "Guesses are accepted by --rule greedy: the texts are the target's own, whatever the tree."
    """
    texts = TEXTS[rule_of(acceptance)]
    return f"Guesses are accepted by {option_of(acceptance)}: the texts are {texts}." if acceptance else ""


def text_price(acceptance: Mapping[str, Any] | None, bench: Benchmark | None) -> str:
    """What a rule that does not keep the target's distribution costs the chosen tree's texts; empty for the others."""
    if rule_of(acceptance) != "typical":
        return ""
    quality = (bench.quality or {}).get(bench.judged) if bench else None
    if quality is None:
        return "What the rule costs in text is not measured yet."
    difference = quality.difference_nats_per_token
    apart, is_less = replace(difference, value=abs(difference)), difference <= 0
    return (
        f"By the target's own probabilities, texts of the chosen tree are {pm(apart, 3)} nats per token "
        f"{'less' if is_less else 'more'} likely than plain answers; {quality.changed_answers_share:.0%} of the answers "
        f"and {quality.changed_tokens_share:.0%} of the tokens changed."
    )


def closing(entry: PlanEntry, bench: Benchmark) -> str:
    """What was measured beside what the plan predicted; empty where there is nothing to compare."""
    if bench.judged != "chosen" or entry.chosen.size == 1 or entry.chosen.speedup is None:  # of the plan's tree
        return ""
    speedup = bench.speedup("chosen", "plain")  # as was predicted
    if speedup is None:
        return ""
    overhead = bench.contender("chosen").tokens_per_step / speedup
    exact = " over the exact engine's plain decoding" * (bench.baseline != "plain")
    return (
        f"The speedup{exact} is {speedup:.2f}; {timed(entry.chosen.speedup)} was predicted. "
        f"A step takes {overhead:.2f} times as long as a plain one; {pm(entry.chosen.overhead)} was predicted."
    )
