"""Drafters: what guesses a target's next tokens. Their table is `treeopt.records.drafters`."""

from importlib import import_module
from typing import Any

from treeopt.records.drafters import DRAFTERS


def part_of(kind: str, part: str) -> Any:
    """The function that a row of the table names, with its module imported; ``part`` is the field of the row."""
    module, _, name = getattr(DRAFTERS[kind], part).partition(":")
    return getattr(import_module(f"treeopt.runtime.{module}"), name)
