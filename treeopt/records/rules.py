"""The acceptance rules."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treeopt.errors import MARKED, InvalidInput, quoted

# The name on the command line, and the name in records.
RULES = {"greedy": "greedy", "sample": "sample-then-match", "reject": "rejection", "typical": "typical"}
PARAMETERS = {
    "greedy": (),
    "sample": ("temperature", "top_p", "top_k"),
    "reject": ("temperature", "top_p", "top_k"),
    "typical": ("temperature", "epsilon", "delta"),
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


@dataclass(frozen=True)
class Rule:
    """An acceptance rule and its parameters; None is the rule's own default.

    name        : one of `RULES`
    temperature : of sampling; by default 1.0; typical 0.7
    top_p       : sample from the likeliest tokens of this total probability
    top_k       : sample from this many of the likeliest tokens
    epsilon     : threshold of typical acceptance; by default 0.09
    delta       : entropy factor of typical acceptance; by default the square root of epsilon

    Raises InvalidInput for another name, and for a parameter of another rule.

    >>> str(Rule("sample", temperature=0.7, top_p=0.9))
    'sample:temperature=0.7,top_p=0.9'
    """

    name: str = "greedy"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    epsilon: float | None = None
    delta: float | None = None

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise InvalidInput(f"`rule` must be one of {', '.join(RULES)}, but got {quoted(self.name)}.")
        if wrong := [name for name in self.parameters if name not in PARAMETERS[self.name]]:
            known = ", ".join(PARAMETERS[self.name]) or "no parameters"
            raise InvalidInput(f"`rule={self.name}` has {known}, but got {wrong[0]}.")

    @property
    def parameters(self) -> dict[str, float]:
        """The parameters that are given."""
        return {name: value for name, value in vars(self).items() if name != "name" and value is not None}

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """The rule that a text names.

        >>> Rule.parse("typical:epsilon=0.1").epsilon
        0.1
        """
        name, _, rest = text.partition(":")
        parameters: dict[str, Any] = {}
        for part in filter(None, rest.split(",")):
            parameter, _, value = (each.strip() for each in part.partition("="))
            if parameter not in {each for known in PARAMETERS.values() for each in known}:
                raise InvalidInput(f"`rule` must be like sample:temperature=0.7, but got {quoted(text)}.")
            try:
                parameters[parameter] = int(value) if parameter == "top_k" else float(value)
            except ValueError:
                raise InvalidInput(f"`rule` must have numbers, but {parameter} is {quoted(value)}.") from None
        return cls(name.strip(), **parameters)

    def __str__(self) -> str:
        values = ",".join(f"{name}={str(value).removesuffix('.0')}" for name, value in self.parameters.items())
        return f"{self.name}:{values}" if values else self.name


def rule_of(record: Mapping[str, Any] | None) -> str:
    """The name of a record's rule on the command line; greedy for a record without one.

    >>> rule_of({"rule": "rejection", "temperature": 0.7})
    'reject'
    """
    return next((name for name, rule in RULES.items() if rule == (record or {}).get("rule")), "greedy")


def marked_rule(record: Mapping[str, Any]) -> str:
    """The parameters that ask for a record's rule, marked as in messages (`treeopt.errors`).

    >>> marked_rule({"rule": "rejection", "temperature": 0.7})
    '`rule=reject:temperature=0.7`'
    """
    name = rule_of(record)
    rule = Rule(name, **{key: record[key] for key in PARAMETERS[name] if record.get(key)})
    return f"`rule={rule}`" + (f" `seed={record['seed']}`" if record.get("seed") else "")


def option_of(record: Mapping[str, Any]) -> str:
    """The options that ask for a record's rule.

    >>> option_of({"rule": "sample-then-match", "temperature": 0.7, "top_p": None, "seed": 0})
    '--rule sample:temperature=0.7'
    """
    return MARKED.sub(lambda match: f"--{match[1]} {match[2]}", marked_rule(record))
