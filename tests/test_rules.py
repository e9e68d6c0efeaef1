"""Acceptance rules, and the options that ask for them."""

import pytest

from treeopt.records.rules import OPTIONS, RULES, option_of
from treeopt.runtime.session import open_rule


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
