"""Chat templates: a model's own way to write messages as text, read by jinja2 alone, as transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from treeopt.errors import InvalidInput
from treeopt.files.storage import read_text
from treeopt.runtime.prompts.confined import Confined
from treeopt.runtime.prompts.messages import Message

# Templates that write today's date are given this day's, or a prompt would not be the same tomorrow.
SOME_DAY = datetime(2025, 1, 1)
MOST_ADDED = 2**17  # characters that a template may write beside four times what it is given
NO_OPTIONS: Mapping[str, Any] = {}
TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class ChatTemplate:
    """The chat templates of a model.

    named   : templates by name; "default" writes what no other is for, "tool_use" what comes with tools
    special : texts of special tokens by name, bos_token for one

    Raises InvalidInput where there is no default, or it cannot be read.
    """

    named: Mapping[str, str]
    special: Mapping[str, str]

    def __post_init__(self) -> None:
        if "default" not in self.named:
            raise InvalidInput(
                f"The tokenizer must have a default chat template, but it has {', '.join(self.named)}. Or leave it out with "
                "`chat_template=False`."
            )
        try:
            _written(self.named["default"])
        except ValueError as error:
            raise InvalidInput(
                f"The model's chat template cannot be read: {error}. Leave it out with `chat_template=False`."
            ) from None

    def write(
        self, messages: Sequence[Message], options: Mapping[str, Any] = NO_OPTIONS, *, finished: bool = False
    ) -> str:
        """Messages as the template writes them. Raises InvalidInput where it refuses them, or exceeds a limit.

        options  : what a request gives the template besides, tools for example
        finished : whether the last message is an answer; else the template begins one
        """
        template = self.named.get("tool_use" if options.get("tools") else "default", self.named["default"])
        values = {"tools": None, "documents": None, **self.special, **options, "messages": messages}
        most = 4 * len(str((messages, options))) + MOST_ADDED
        try:
            return _written(template, values | {"add_generation_prompt": not finished}, most)
        except ValueError as error:
            raise InvalidInput(f"the chat template refuses it: {error}") from None


def templates_of(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a model's folder by name: those of its tokenizer's config, and those in files of their own."""
    stated = config.get("chat_template")
    named = stated if isinstance(stated, list) else [{"name": "default", "template": stated}]
    templates = {str(part.get("name")): part.get("template") for part in named if isinstance(part, dict)}
    templates |= {file.stem: read_text(file) for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / TEMPLATE).is_file():
        templates["default"] = read_text(folder / TEMPLATE)
    return {name: text for name, text in templates.items() if isinstance(text, str)}


class _Generation(Extension):
    """The blocks by which templates mark answers, for training: what stands in them is written."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


@cache
def _compiled(text: str) -> Any:
    """A chat template of jinja2."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    extensions: list[Any] = [_Generation, "jinja2.ext.loopcontrols"]
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    jinja.filters["tojson"] = tojson
    jinja.globals |= {"raise_exception": refuse, "strftime_now": SOME_DAY.strftime}
    return jinja.from_string(text)


def _write(template: str, values: Mapping[str, Any] | None = None, most: int = 0) -> str:
    """What a template writes with some values, at most so many characters; it is read alone where there are none."""
    compiled, parts, length = _compiled(template), [], 0
    for part in compiled.generate(values) if values is not None else ():
        parts.append(part)
        length += len(part)
        if length > most:
            raise TemplateError(f"it writes more than {most:,} characters")
    return "".join(parts)


_written = Confined(_write)
