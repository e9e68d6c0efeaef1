"""What a benchmark says, as tables and sentences for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treeopt.benchmark import Benchmark
from treeopt.console import pm, together
from treeopt.plan import PlanEntry

if TYPE_CHECKING:
    from rich.console import RenderableType

PUBLISHED = "mc_sim_7b_63"
CONTENDERS = {
    "plain": "plain decoding",
    "chosen": "chosen by treeopt",
    "mc_sim_7b_63": "published mc_sim_7b_63",
    "chain": "best top-1 chain",
    "budget": "best of full budget",
}


def bench_table(bench: Benchmark) -> RenderableType:
    """Predicted, replayed and measured, contender by contender."""
    from rich.table import Table

    first = bench.contenders[0]
    which = "held-out" if bench.info.get("prompts") == "held out" else "calibration"
    title = f"Real decoding of {first.compared} answers to {which} prompts, batch size {first.batch_size}, {bench.dtype}"
    table = Table(title=title, title_justify="left")
    table.add_column("contender")
    table.columns[0].no_wrap = True
    for name in ("rows", "predicted: product\n/ joint / replay", "\nreplayed", "tokens/step\nmeasured", "\ntokens/s",
                 "speedup\n[95 % interval]", "same\ntext"):  # fmt: skip
        table.add_column(name, justify="right")
    for c in bench.contenders:
        ratio = bench.speedup(c.name)
        predicted = [c.predicted.get(name) for name in ("product", "joint", "replayed")]
        table.add_row(
            CONTENDERS.get(c.name, c.name),
            str(c.size),
            " / ".join(pm(rate, None) for rate in predicted) if any(predicted) else "–",
            pm(c.replayed_tokens_per_step, None),
            pm(c.tokens_per_step, c.stderr),
            pm(c.tokens_per_s, None, 0),
            "–" if ratio is None else str(ratio),
            f"{c.identical}/{c.compared}",
            style="bold green" if c.name == "chosen" else None,
        )
    groups, quality = bench.groups, bench.info.get("quality")
    more = [_bench_group_table(bench, groups)] if groups else []
    more += [_quality_table(quality)] if quality else []
    return together(table, *more) if more else table


def _quality_table(quality: dict[str, dict[str, float]]) -> RenderableType:
    """What the rule of acceptance does to the text."""
    from rich.table import Table

    table = Table(title="The texts, judged by the model itself", title_justify="left")
    for name in (
        "contender",
        "log-likelihood\n[nats per token]",
        "against plain\n",
        "answers\nchanged",
        "tokens\nchanged",
    ):
        table.add_column(name, justify="left" if name == "contender" else "right")
    for name, of in quality.items():
        table.add_row(
            CONTENDERS.get(name, name),
            pm(of["log_likelihood_nats_per_token"], of["log_likelihood_nats_per_token_stderr"], 3),
            pm(of["difference_nats_per_token"], of["difference_nats_per_token_stderr"], 3),
            f"{of['changed_answers_share']:.0%}",
            f"{of['changed_tokens_share']:.0%}",
        )
    return table


def _bench_group_table(bench: Benchmark, groups: list[str]) -> RenderableType:
    """The chosen tree, group by group."""
    from rich.table import Table

    table = Table(title="The chosen tree by group", title_justify="left")
    for name in ("group", "answers", "tokens/step", "speedup [95 % interval]"):
        table.add_column(name, justify="left" if name == "group" else "right")
    for group in groups:
        rate, answers = bench.tokens_per_step("chosen", group)
        ratio = bench.speedup("chosen", group=group)
        table.add_row(group, str(answers), f"{rate:.3f}", "–" if ratio is None else str(ratio))
    return table


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
        "" if over is None else f", and {over.value:.2f} times as fast as with the published 64-node tree"
    )
    return (
        f"With the chosen tree ({entry.size} rows a step) decoding is {speedup.value:.2f} times as fast as "
        f"without ({predicted} predicted){published}. "
        f"A step takes {'–' if overhead is None else f'{overhead.value:.2f}'} times a plain one ({pm(expected, None)} predicted)."
    )
