"""The acceptance rules, and whether measurements with one rule or drafter hold for another."""

from collections.abc import Mapping
from typing import Any

from treeopt.errors import MARKED, InvalidInput

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


def same_drafter(first: Mapping[str, Any], other: Mapping[str, Any], *, weights: bool = True) -> bool:
    """Whether two records can be of one drafter, or (without ``weights``) of drafters that cost the same.

    A key that a record does not have is no difference. A drafter without weights is told by its id.

    >>> same_drafter({"kind": "mtp", "id": "mtp"}, {"kind": "mtp", "id": "mtp:1"})
    False
    """
    keys = ["kind", "num_heads", "num_layers"]
    if weights:
        keys.append("sha256")
    if first.get("sha256") is None and other.get("sha256") is None:
        keys.append("id")
    return all(first.get(key) == other.get(key) for key in keys if None not in (first.get(key), other.get(key)))


def check_drafter(measured: Mapping[str, Any] | None, wanted: Mapping[str, Any], what: str) -> None:
    """Raise InvalidInput where a run was calibrated with another drafter.

    what : beginning of the message: "Bench decodes"
    """
    if measured and not same_drafter(measured, wanted):
        raise InvalidInput(
            f"{what} with the drafter that the run was calibrated with, {measured.get('id')}, but got {wanted['id']}. "
            "Run treeopt calibrate --overwrite with it first, or use another --run."
        )


def check_rule(
    measured: Mapping[str, Any] | None,
    wanted: Mapping[str, Any],
    what: str,
    *,
    command: str = "treeopt calibrate --overwrite",
) -> None:
    """Raise InvalidInput where a measurement under one rule does not hold for another. An unknown rule holds for all.

    what    : the measurement, in the message: "trace.npz holds"
    command : measures again, without the options of the rule
    """
    keys = ["rule"] if wanted["rule"] == "greedy" else [key for key in wanted if key != "seed"]
    if not measured or all(measured.get(key) == wanted[key] for key in keys):
        return
    options = "" if command.startswith("treeopt search") else f" {option_of(wanted)}"
    raise InvalidInput(
        f"A tree must be used with the acceptance rule that it was measured under, but {what} for "
        f"{marked_rule(measured)}, not for {marked_rule(wanted)}. Run: {command}{options}"
    )
