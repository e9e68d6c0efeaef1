"""Chat: messages become the tokens that stand before an answer, and a given answer the target's own tokens.

With a chat template every prompt is written anew from all its messages, and the template alone writes
special tokens. Without one a conversation is plain text, and each prompt goes on where the answer ended:

    system text · blank line · turn 1 · answer 1 without its end · blank line · turn 2 · ...
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from treeopt.errors import InvalidInput, first_line

if TYPE_CHECKING:
    from treeopt.runtime.target import Target

Tokens = tuple[int, ...]
Message = tuple[str, str]  # role (system, user or assistant), text
BLANK_LINE = "\n\n"
# Templates that write today's date are given this day's, or a prompt would not be the same tomorrow.
SOME_DAY = datetime(2025, 1, 1)
MOST_ADDED = 2**17  # characters that a template may write beside four times what it is given
NO_OPTIONS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class ChatTemplate:
    """A model's chat templates, which write messages as text; they are read by jinja2 alone, as transformers reads them.

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
        compiled(self.named["default"])

    def write(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] = NO_OPTIONS, *, finished: bool = False
    ) -> str:
        """Messages as the template writes them. Raises ValueError where it refuses them.

        options  : what a request gives the template besides, tools for example
        finished : whether the last message is an answer; else the template begins one
        """
        template = compiled(self.named.get("tool_use" if options.get("tools") else "default", self.named["default"]))
        values = {"tools": None, "documents": None, **self.special, **options}
        most = 4 * len(str((messages, options))) + MOST_ADDED
        text = ""
        try:
            for part in template.generate(values | {"messages": messages, "add_generation_prompt": not finished}):
                text += part
                if len(text) > most:
                    raise TemplateError(f"it writes more than {most:,} characters")
        except Exception as error:  # a template is a program, and may raise anything
            raise ValueError(f"the chat template refuses it: {first_line(error)}") from None
        return text


class _Generation(Extension):
    """The blocks by which templates mark answers, for training: what stands in them is written."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


@cache
def compiled(text: str) -> Any:
    """A chat template of jinja2. Raises InvalidInput where it cannot be read."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    extensions: list[Any] = [_Generation, "jinja2.ext.loopcontrols"]
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    jinja.filters["tojson"] = tojson
    jinja.globals |= {"raise_exception": refuse, "strftime_now": SOME_DAY.strftime}
    try:
        return jinja.from_string(text)
    except Exception as error:
        raise InvalidInput(
            f"The model's chat template cannot be read: {first_line(error)}. Leave it out with `chat_template=False`."
        ) from None


@dataclass(frozen=True)
class ChatFormat:
    """How messages are written for one target."""

    tokenizer: Any
    eos_ids: frozenset[int]
    vocab_size: int
    template: ChatTemplate | None  # None for plain text

    @classmethod
    def of(cls, target: Target, *, chat_template: bool = True) -> ChatFormat:
        """The tokenizer's template where it has one and ``chat_template`` allows it, else plain text."""
        tokenizer = target.tokenizer
        named = getattr(tokenizer, "chat_template", None) if chat_template else None
        template = None
        if named:
            special = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
            template = ChatTemplate(named if isinstance(named, dict) else {"default": named}, special)
        return cls(tokenizer, target.eos_ids, target.vocab_size, template)

    def first_prompt(self, messages: Sequence[Message]) -> Tokens:
        """Tokens up to the first answer. Raises InvalidInput where the template refuses the messages."""
        asked = dialogue(messages, ())
        if self.template is not None:
            return self._written(asked)
        return self._encode(BLANK_LINE.join(text for _, text in asked), bos=True)

    def next_prompt(self, messages: Sequence[Message], first: Tokens, answers: Sequence[Tokens]) -> Tokens:
        """Tokens up to the next answer, after the given answers to the turns before.

        Raises InvalidInput where the template refuses the messages.
        """
        if not answers:
            return first
        bodies = [answer[:-1] if answer and answer[-1] in self.eos_ids else answer for answer in answers]
        if self.template is not None:
            texts = self.tokenizer.batch_decode(bodies, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            return self._written(dialogue(messages, texts))
        tokens = first
        later = [text for role, text in messages if role == "user"][1:]
        for body, turn in zip(bodies, later, strict=False):
            tokens += body + self._encode(BLANK_LINE + turn)
        return tokens

    def given_answer(self, messages: Sequence[Message], answers: Sequence[str], turn: int) -> Tokens:
        """Tokens of answer ``turn`` (0 for the first) as the target would emit them, cut after its EOS.

        With a template they are what the finished message has more than the prompt for it.
        """
        tokens: Tokens = ()
        if self.template is not None:
            asked = dialogue(messages, answers[:turn])
            before = self._written(asked)
            after = self._written([*asked, ("assistant", answers[turn])], finished=True)
            if after[: len(before)] == before:
                tokens = after[len(before) :]
        tokens = tokens or self._encode(answers[turn])
        end = next((i for i, token in enumerate(tokens) if token in self.eos_ids), None)
        if end is not None or not self.eos_ids:
            return tokens if end is None else tokens[: end + 1]
        own = self.tokenizer.eos_token_id
        return (*tokens, own if own in self.eos_ids else min(self.eos_ids))

    def _written(self, messages: Sequence[Message], *, finished: bool = False) -> Tokens:
        """Tokens of one conversation; a system text that the template refuses moves into the first turn."""
        assert self.template is not None
        try:
            text = self.template.write([{"role": role, "content": text} for role, text in messages], finished=finished)
        except ValueError as error:
            if messages[0][0] == "system":
                (_, system), (_, turn), *rest = messages
                return self._written([("user", system + BLANK_LINE + turn), *rest], finished=finished)
            raise InvalidInput(str(error)) from None
        return self._encode(text)

    def _encode(self, text: str, *, bos: bool = False) -> Tokens:
        """Tokens of a text. A tokenizer's own BOS is not put before a template's."""
        ids = tuple(self.tokenizer(text, add_special_tokens=bos)["input_ids"])
        if max(ids, default=0) >= self.vocab_size:
            raise InvalidInput(f"its token {max(ids)} is beyond the model's vocabulary of {self.vocab_size}")
        return ids


def dialogue(messages: Sequence[Message], answers: Sequence[str]) -> list[Message]:
    """System text and turns with the answers between them, up to the first turn that has none.

    >>> dialogue([("user", "1 + 1?"), ("user", "And 2 + 2?"), ("user", "Really?")], ["2"])
    [('user', '1 + 1?'), ('assistant', '2'), ('user', 'And 2 + 2?')]
    """
    said = [message for message in messages if message[0] != "user"]
    turns = [message for message in messages if message[0] == "user"]
    for turn, answer in zip(turns, answers, strict=False):
        said += [turn, ("assistant", answer)]
    return said + turns[len(answers) : len(answers) + 1]
