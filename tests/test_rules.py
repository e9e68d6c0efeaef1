"""What was measured under one acceptance rule is refused for another, with the command that measures the other."""

import pytest

from treeopt.errors import InvalidInput
from treeopt.records.rules import OPTIONS, RULES, check_rule, option_of
from treeopt.runtime.session import open_rule

SAMPLED = {"rule": "sample-then-match", "temperature": 0.7, "top_p": None, "top_k": None, "seed": 0}


def test_a_rule_holds_for_itself_whatever_the_seed():
    check_rule(SAMPLED, {**SAMPLED, "seed": 7}, "it holds")
    check_rule({"rule": "greedy"}, {"rule": "greedy", "temperature": 0.0}, "it holds")
    check_rule(None, SAMPLED, "it holds")  # not known
    check_rule(SAMPLED, {"rule": "sample-then-match"}, "it holds")  # at any temperature


@pytest.mark.parametrize("change", [{"rule": "greedy"}, {"temperature": 0.8}, {"top_p": 0.9}, {"top_k": 5}])
def test_another_rule_is_refused_with_the_command(change):
    with pytest.raises(InvalidInput, match=r"treeopt calibrate --overwrite --acceptance sample --temperature 0\.7"):
        check_rule({**SAMPLED, **change}, SAMPLED, "it holds")


def test_a_plan_of_another_rule_than_was_calibrated_since_is_made_anew():
    with pytest.raises(InvalidInput, match=r"not for acceptance='sample' .* Run: treeopt search$"):
        check_rule({"rule": "greedy"}, SAMPLED, "the plan holds", command="treeopt search")


@pytest.mark.parametrize("name", ["greedy", "sample", "typical"])
def test_the_options_of_a_record_ask_for_the_same_rule(name):
    options = {
        "greedy": {},
        "sample": {"temperature": 0.6, "top_p": 0.9, "top_k": 8, "seed": 3},
        "typical": {"temperature": 0.6, "epsilon": 0.16},
    }
    record = open_rule({"acceptance": name, **options[name]}).record
    words = option_of(record).split()
    asked = {words[i][2:].replace("-", "_"): words[i + 1] for i in range(0, len(words), 2)}
    assert asked.pop("acceptance") == name
    typed = {key: int(value) if key in ("top_k", "seed") else float(value) for key, value in asked.items()}
    assert open_rule({"acceptance": name, **typed}).record == record


def test_every_rule_has_options():
    assert RULES.keys() == OPTIONS.keys()
