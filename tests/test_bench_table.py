"""What a benchmark says in words: whether it gains, by which rule, and what the texts are worth."""

from dataclasses import replace

import pytest

from tests.helpers.runs import REJECT, TYPICAL, ruled, shown, some_bench, some_plan
from treeopt.records.estimate import Estimate
from treeopt.report.bench_table import about_rule, bench_table, bench_tables, group_table, text_price
from treeopt.report.plan_table import trees_table
from treeopt.report.wording import pm


def test_texts_are_judged_in_nats_per_token_at_temperature_1():
    said = shown(bench_table(ruled(some_bench(), TYPICAL)))
    assert said.count("[nats per token]") == 2  # the terminal takes brackets for its own
    assert all(part in said for part in ("temperature 1", "batch of 16", "-0.157 ±0.062"))


@pytest.mark.parametrize("rule", ["rejection", "typical", "greedy", "sample-then-match"])
def test_texts_that_depend_on_the_tree_are_judged_and_others_compared_one_by_one(rule):
    said = shown(
        bench_table(
            ruled(some_bench(), {"rejection": REJECT, "typical": TYPICAL}.get(rule, {"rule": rule, "temperature": 0.7}))
        )
    )
    compared = rule in ("greedy", "sample-then-match")
    assert (" same " in said) == ("5/6" in said) == ("judged" not in said) == compared
    assert ("keeps the distribution" in said) == (rule == "rejection")
    option = {"rejection": "reject", "sample-then-match": "sample"}.get(rule, rule)
    assert (f"--rule {option}" in said) == (rule != "greedy")


def test_only_a_rule_that_changes_the_distribution_has_a_price():
    assert "0.157 ±0.062 nats per token less" in text_price(TYPICAL, ruled(some_bench(), TYPICAL))
    assert "not measured yet" in text_price(TYPICAL, None)
    assert text_price(REJECT, ruled(some_bench(), REJECT)) == text_price({"rule": "greedy"}, None) == ""
    assert "the target's own distribution" in about_rule(REJECT)
    assert "not the target's own" in about_rule(TYPICAL)
    assert about_rule(None) == ""


def test_one_prediction_stands_in_the_tables():
    """Each cell is the number of the record that its header names."""
    plan, bench = some_plan((1, 4)), some_bench()
    known = Estimate(1.33)
    bench = replace(bench, contenders=tuple(replace(c, predicted_tokens_per_step=known) for c in bench.contenders))
    for entry, row in zip(plan.entries, trees_table(plan).rows, strict=True):
        assert row[5] == pm(entry.chosen.tokens_per_step)
    table = bench_tables(bench)[0]
    heads = [column.header.split("\n")[1] for column in table.columns if "tokens/step" in column.header]
    assert heads == ["predicted", "measured"]
    assert {row[2] for row in table.rows} == {"1.33"}


def test_groups_have_errors():
    table = group_table(None, some_bench(("code", "chat")))
    assert [(name, answers) for name, answers, _, _ in table.rows] == [("code", "6"), ("chat", "6")]
    assert all("±" in rate and "[" in ratio for _, _, rate, ratio in table.rows)
