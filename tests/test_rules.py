"""Acceptance rules, and the options that ask for them."""

import pytest

from treeopt.errors import InvalidInput
from treeopt.records.options import Source
from treeopt.records.rules import PARAMETERS, RULES, Rule, option_of
from treeopt.runtime.session import open_rule


@pytest.mark.parametrize("rule", ["greedy", "sample:temperature=0.1234567,top_p=0.9,top_k=8", "typical:epsilon=0.1"])
def test_the_options_of_a_record_ask_for_the_same_rule(rule):
    """To the last digit: at 0.316228, six digits of the root of 0.1, delta was another one."""
    record = open_rule(Source(rule=rule, seed=3)).record
    words = option_of(record).split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert open_rule(Source(rule=options["--rule"], seed=int(options.get("--seed", 0)))).record == record


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magic", "greedy, sample, reject, typical"),
        ("greedy:temperature=1", "no parameters"),
        ("sample:epsilon=1", "temperature, top_p, top_k, but got epsilon"),
        ("sample:0.7", "must be like sample:temperature=0.7"),
        ("sample:temperature=hot", "temperature is 'hot'"),
    ],
)
def test_a_rule_that_is_none_is_refused(text, message):
    with pytest.raises(InvalidInput, match=message):
        Rule.parse(text)


def test_every_rule_has_parameters():
    assert RULES.keys() == PARAMETERS.keys()
