"""Speculation in a server's own command: which words speculate, and how they are given another length."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """The options of an engine's server that speculate.

    program   : what a command that starts the server has in it, a regular expression
    flags     : names of the options, a regular expression; without them the server decodes plainly
    named_by  : the options, or keys of an option's JSON, that name the drafter, a regular expression
    key       : the key of an option's JSON that is the length
    lengths   : drafter's name, a regular expression, to options that set the length where none is JSON, and win over earlier
                ones: {length} is the length, {rows} one more, {drafter} the name
    parameter : of a request, that sets its length
    """

    program: str = ""
    flags: str = ""
    named_by: str = ""
    key: str = ""
    lengths: Mapping[str, str] = field(default_factory=dict)
    parameter: str = ""

    def split(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """The words of a command without its options of speculation, and these; values follow their option up to the next.

        >>> Speculation(flags="--spec-.*", named_by="--spec-type").split(["serve", "--spec-type", "mtp", "--port", "80"])
        (['serve', '--port', '80'], ['--spec-type', 'mtp'])
        """
        parts: tuple[list[str], list[str]] = ([], [])
        speculates = False
        for word in words:
            if word.startswith("-"):
                speculates = re.fullmatch(self.flags, word.partition("=")[0]) is not None
            parts[speculates].append(word)
        return parts

    def drafter(self, options: Sequence[str]) -> str:
        """The name of the drafter; "drafter" where the options do not say it."""
        for word, following in pairwise([*options, ""]):
            flag, _, value = word.partition("=")
            for name, setting in {**_configured(word), flag: value or following}.items():
                if re.fullmatch(self.named_by, name):
                    return str(setting)
        return "drafter"

    def at(self, options: Sequence[str], length: int) -> tuple[str, ...]:
        """The options for drafts of so many guesses; none for 0."""
        if length == 0:
            return ()
        configured = [_configured(word) for word in options]
        if any(configured):
            changed = [json.dumps({**settings, self.key: length}) for settings in configured]
            return tuple(
                new if settings else word for new, settings, word in zip(changed, configured, options, strict=True)
            )
        found = list(options)
        for drafter in self.drafter(options).split(","):
            template = next((text for name, text in self.lengths.items() if re.fullmatch(name, drafter)), "")
            found += template.format(length=length, rows=length + 1, drafter=drafter).split()
        return tuple(found)


def _configured(word: str) -> dict[str, object]:
    """The settings of a word that is a JSON object; none for another."""
    try:
        value = json.loads(word) if word.startswith("{") else {}
    except ValueError:
        return {}
    return {key.replace("-", "_"): setting for key, setting in value.items()} if isinstance(value, dict) else {}
