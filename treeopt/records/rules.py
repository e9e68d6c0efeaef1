"""The acceptance rules."""

from collections.abc import Mapping
from typing import Any

from treeopt.errors import MARKED

# The name on the command line, and the name in records.
RULES = {"greedy": "greedy", "sample": "sample-then-match", "reject": "rejection", "typical": "typical"}
OPTIONS = {
    "greedy": (),
    "sample": ("top_p", "top_k", "seed"),
    "reject": ("top_p", "top_k", "seed"),
    "typical": ("epsilon", "delta"),
}
MEANINGS = {
    "greedy": "the target's likeliest token; the default",
    "sample": "what the target samples at the given temperature; lossless, with every drafter and tree",
    "reject": "the same distribution by p/q rejection, with chains of a draft model",
    "typical": "Medusa's: whatever is likely enough passes; faster, with another text",
}
TEXTS = {  # the texts that decoding with a tree gives
    "greedy": "the target's own, whatever the tree",
    "sample": "samples of the target's own, the same with every tree",
    "reject": "samples of the target's own distribution, and differ from tree to tree",
    "typical": "not the target's own, and differ from tree to tree",
}
SAME_TEXT = ("greedy", "sample-then-match")  # rules whose text does not depend on the tree


def rule_of(record: Mapping[str, Any] | None) -> str:
    """The name of a record's rule on the command line; greedy for a record without one.

    >>> rule_of({"rule": "rejection", "temperature": 0.7})
    'reject'
    """
    return next((name for name, rule in RULES.items() if rule == (record or {}).get("rule")), "greedy")


def marked_rule(record: Mapping[str, Any]) -> str:
    """The parameters that ask for a record's rule, marked as in messages (`treeopt.errors`).

    >>> marked_rule({"rule": "rejection", "temperature": 0.7})
    '`acceptance=reject` `temperature=0.7`'
    """
    name = rule_of(record)
    keys = ("temperature", *OPTIONS[name]) if name != "greedy" else ()
    return " ".join([f"`acceptance={name}`", *(f"`{key}={record[key]}`" for key in keys if record.get(key))])


def option_of(record: Mapping[str, Any]) -> str:
    """The options that ask for a record's rule.

    >>> option_of({"rule": "sample-then-match", "temperature": 0.7, "top_p": None, "seed": 0})
    '--acceptance sample --temperature 0.7'
    """
    return MARKED.sub(lambda match: f"--{match[1].replace('_', '-')} {match[2]}", marked_rule(record))
