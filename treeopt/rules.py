"""Names of the acceptance rules, and whether what was measured under one holds for another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treeopt.errors import InvalidInput

# As --acceptance has them, and as records do.
RULES = {"greedy": "greedy", "sample": "sample-then-match", "reject": "rejection", "typical": "typical"}
OPTIONS = {
    "greedy": (),
    "sample": ("top_p", "top_k", "seed"),
    "reject": ("top_p", "top_k", "seed"),
    "typical": ("epsilon", "delta"),
}
SAME_TEXT = ("greedy", "sample-then-match")  # the text does not depend on the tree


def option_of(record: Mapping[str, Any]) -> str:
    """The options that ask for the rule of a record.

    >>> option_of({"rule": "sample-then-match", "temperature": 0.7, "top_p": None, "seed": 0})
    '--acceptance sample --temperature 0.7'
    """
    names = {rule: name for name, rule in RULES.items()}
    name = names.get(record.get("rule", "greedy"), "greedy")
    keys = ("temperature", *OPTIONS[name]) if name != "greedy" else ()
    parts = [f"--{key.replace('_', '-')} {record[key]}" for key in keys if record.get(key)]
    return " ".join([f"--acceptance {name}", *parts])


def check_rule(measured: Mapping[str, Any] | None, wanted: Mapping[str, Any], what: str) -> None:
    """Raise InvalidInput unless what was measured under one rule holds for another; an unknown rule may.

    what : the beginning of the sentence, "trace.npz holds"
    """
    keys = ["rule"] if wanted["rule"] == "greedy" else [key for key in wanted if key != "seed"]
    if not measured or all(measured.get(key) == wanted[key] for key in keys):
        return
    raise InvalidInput(
        f"A tree is only as good as the acceptance rule that it was measured under: {what} for "
        f"{option_of(measured)}, not for {option_of(wanted)}. Measure with: treeopt calibrate {option_of(wanted)}"
    )
