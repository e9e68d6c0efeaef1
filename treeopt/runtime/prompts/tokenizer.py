"""A model's tokenizer and chat template without the model: its folder's files, read by tokenizers and jinja2 alone.

An engine puts the tokenizer's own BOS before a text, and none before what a template wrote. So does this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray

from treeopt.errors import InvalidInput, Unsupported, first_line
from treeopt.files.storage import read_text
from treeopt.runtime.folder import loadable, read_object
from treeopt.runtime.prompts.chat import BLANK_LINE, DATE_MACRO, try_template

VOCABULARY, CONFIG, TEMPLATE, GENERATION = FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
NOTHING: Mapping[str, Any] = {}


class Tokenizer:
    """The tokens of texts and messages, for one model. InvalidInput where its folder has none that can be used.

    eos_ids : tokens that end an answer, the tokenizer's own first
    chats   : compiled chat templates by name; none where there are none, or they are not wanted
    """

    def __init__(self, folder: Path, *, chat_template: bool = True) -> None:
        try:
            from tokenizers import Tokenizer as Model
        except ImportError:
            raise Unsupported(
                "Texts become tokens by the package tokenizers, which is not installed. Install it with: "
                "pip install 'treeopt[text]'. A log of token ids needs no `tokenizer`."
            ) from None
        if not (file := folder / VOCABULARY).is_file():
            raise InvalidInput(f"`tokenizer` must be a folder with {VOCABULARY}, but {folder} has none.")
        with loadable("`tokenizer` must have a file of the package tokenizers", str(file)):
            self._model = Model.from_str(read_text(file))
            self._model.no_truncation()
            self._model.no_padding()
        config, generation = (read_object(folder / n) if (folder / n).is_file() else {} for n in (CONFIG, GENERATION))
        texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
        self._texts = {name: text for name, text in texts.items() if isinstance(text, str)}
        own, ids = self._model.token_to_id(self._texts.get("eos_token", "")), generation.get("eos_token_id")
        ends = (own, *(ids if isinstance(ids, list) else [ids]))
        self.eos_ids = tuple(dict.fromkeys(one for one in ends if type(one) is int and one >= 0))
        added = {i: one.content for i, one in self._model.get_added_tokens_decoder().items() if one.special}
        self.special_ids = frozenset(added)
        self.is_rendered = re.compile("|".join(map(re.escape, added.values())) or r"(?!)").search
        chats = _templates(folder, config) if chat_template else {}
        self.chats = {name: _compiled(text) for name, text in chats.items()}
        if chats:
            try_template(partial(self.write, [{"role": "user", "content": "a"}]))

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Characters of every token as the vocabulary has it: of most tokenizers, its bytes."""
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        found = np.zeros(max(vocabulary.values()) + 1, np.int64)
        found[list(vocabulary.values())] = list(map(len, vocabulary))
        return found

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """The tokens of a text. Raises ValueError for text that has no UTF-8."""
        try:
            ids: list[int] = self._model.encode(text, add_special_tokens=bos).ids
        except TypeError:
            raise ValueError("its text has half a character in it (a lone surrogate)") from None
        return ids

    def write(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] = NOTHING, *, finished: bool = False
    ) -> str:
        """Messages as the chat template writes them, as plain text without one. ValueError where the template refuses them.

        options  : what a request gives the template besides, tools for example
        finished : whether the last one is an answer; else the template begins one
        """
        if not self.chats:
            return BLANK_LINE.join([*(str(one["content"]) for one in messages), *([] if finished else [""])])
        chat = self.chats.get("tool_use" if options.get("tools") else "default", self.chats["default"])
        told = {"tools": None, "documents": None, **self._texts, **options}
        try:
            return str(chat.render(told | {"messages": messages, "add_generation_prompt": not finished}))
        except (TimeoutError, MemoryError):
            raise
        except Exception as error:  # a template is a program, and may raise anything
            raise ValueError(f"the chat template refuses it: {first_line(error)}") from None

    def until_end(self, ids: list[int], *, limit: int = 0, was_cut: bool = False) -> list[int]:
        """The tokens of an answer and the one that ends it, but not where a limit did."""
        end = next((i for i, token in enumerate(ids) if token in self.eos_ids), len(ids))
        if was_cut or 0 < limit <= end or not self.eos_ids:
            return ids[:end]
        return [*ids[:end], *(ids[end : end + 1] or self.eos_ids[:1])]


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a folder by name: those of its config, and those in files of their own."""
    said = config.get("chat_template")
    named = said if isinstance(said, list) else [{"name": "default", "template": said}]
    found = {
        one["name"]: one["template"] for one in named if isinstance(one, dict) and {"name", "template"} <= one.keys()
    }
    found |= {file.stem: read_text(file) for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / TEMPLATE).is_file():
        found["default"] = read_text(folder / TEMPLATE)
    texts = {str(name): text for name, text in found.items() if isinstance(text, str)}
    if texts and "default" not in texts:
        raise InvalidInput(
            f"The tokenizer must have a default chat template, but {folder} has {', '.join(texts)}. Or leave it out with "
            "`chat_template=False`."
        )
    return texts


class _Generation(Extension):
    """The blocks by which templates mark answers, for training: what stands in them is written."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _compiled(text: str) -> Any:

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    extensions: list[Any] = [_Generation, "jinja2.ext.loopcontrols"]
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    jinja.filters["tojson"] = tojson
    jinja.globals["raise_exception"] = refuse
    try:
        return jinja.from_string(DATE_MACRO + text if "strftime_now" in text else text)
    except Exception as error:
        raise InvalidInput(
            f"The model's chat template cannot be read: {first_line(error)}. Leave it out with `chat_template=False`."
        ) from None
