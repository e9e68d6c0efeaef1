"""Drafters that copy text, for several engines. The options of a `CopiedText` are the engine's own.

`treeopt.text.engines` checks the values of options. An engine's file names its drafters and writes them.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from treeopt.engines.base import About, Method
from treeopt.files.shell import shell_word
from treeopt.records.plan import Ranges
from treeopt.text.engines import KINDS, text_drafter
from treeopt.trees.draft import CopiedText, Draft
from treeopt.trees.limits import EngineLimits

KIND = "copied-text"


def method(*engines: str, **fields: Any) -> Method:
    """A method whose drafters' names begin with one of ``engines``, and whose options have the engine's ranges."""
    limits, refuses = EngineLimits(copies=True), partial(_fault, engines)
    return Method(name=KIND, drafters=(KIND,), limits=limits, rules=("greedy", "sample"), refuses=refuses, **fields)


def _fault(engines: tuple[str, ...], served: Ranges[CopiedText], about: About) -> str | None:
    """Why none of ``engines`` decodes the drafts; None if one does. Raises InvalidInput for options that it would refuse."""
    for draft in (draft for *_, draft in served if len(draft) > 1):
        engine = draft.drafter.partition(":")[0]
        if engine not in engines:
            return (
                f"has no {draft.drafter}, and its own drafters find other text, so the plan's figures do not hold there; "
                f"export --to {engine}, or plan anew"
            )
        text_drafter(draft.drafter, draft.options)
    return None


def flags(options: Mapping[str, Any], between: str = "-") -> str:
    """Options as words of a command line.

    >>> flags({"spec_ngram_simple_size_n": 4, "spec_ngram_simple_size_m": 8})
    ' --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 8'
    """
    return "".join(f" --{option.replace('_', between)} {shell_word(value)}" for option, value in options.items())


def notes_on(draft: Draft) -> list[str]:
    """A note if a drafter that copies text keeps something between requests; none for other drafts."""
    if draft.drafter not in KINDS or not KINDS[draft.drafter].memory:
        return []
    return [
        f"It keeps {KINDS[draft.drafter].memory}: the plan's figures hold for a server that is not restarted, and had requests such as "
        "those that were replayed before."
    ]
