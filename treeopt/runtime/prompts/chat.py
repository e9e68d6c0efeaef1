"""Chat: messages become the tokens that stand before an answer, and a given answer the target's own tokens.

With a chat template every prompt is rendered anew from all its messages, and the template alone writes
special tokens. Without one a conversation is plain text, and each prompt goes on where the answer ended:

    system text · blank line · turn 1 · answer 1 without its end · blank line · turn 2 · ...
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from types import FrameType
from typing import TYPE_CHECKING, Any

from treeopt.errors import InvalidInput, first_line

if TYPE_CHECKING:
    from treeopt.runtime.target import Target

Tokens = tuple[int, ...]
Message = tuple[str, str]  # role (system, user or assistant), text
BLANK_LINE = "\n\n"
TEMPLATE_SECONDS, TEMPLATE_CHARS = 5, 2**17  # most that a template may take, and write, for a word
# Templates that write today's date are given this day's, or a prompt would not be the same tomorrow.
SOME_DAY = datetime(2025, 1, 1)
DATE_MACRO = "{% macro strftime_now(format) %}{{ format STEPS }}{% endmacro +%}".replace(
    "STEPS", " ".join(f"| replace('%{code}', '{SOME_DAY:%{code}}')" for code in "aAbBdeHIjmMpSyY")
)


@dataclass(frozen=True)
class ChatFormat:
    """How messages are written for one target."""

    tokenizer: Any
    eos_ids: frozenset[int]
    vocab_size: int
    template: str | None  # None for plain text

    @classmethod
    def of(cls, target: Target, *, chat_template: bool = True) -> ChatFormat:
        """The tokenizer's template where it has one and ``chat_template`` allows it, else plain text."""
        template = None
        if chat_template and getattr(target.tokenizer, "chat_template", None):
            try:
                template = str(target.tokenizer.get_chat_template())
            except ValueError as error:  # several by name, and none by default
                reason = f"The tokenizer must have a default chat template, but: {first_line(error)}."
                raise InvalidInput(f"{reason} Or leave it out with `chat_template=False`.") from None
            if "strftime_now" in template:
                template = DATE_MACRO + template
        chat = cls(target.tokenizer, target.eos_ids, target.vocab_size, template)
        if template is not None:
            try_template(lambda: str(chat._apply([[("user", "a")]], tokenize=False)[0]))
        return chat

    def first_prompts(self, conversations: Sequence[Sequence[Message]]) -> list[Tokens | InvalidInput]:
        """Tokens up to the first answer of each conversation; the error where it cannot be written."""
        firsts = [dialogue(messages, ()) for messages in conversations]

        def tried(write: Callable[[Any], Tokens], one: Any) -> Tokens | InvalidInput:
            try:
                return write(one)
            except InvalidInput as error:
                return error

        try:
            if self.template is not None:
                written = self._apply(firsts)
            else:
                written = self.tokenizer([BLANK_LINE.join(text for _, text in one) for one in firsts])["input_ids"]
        except Exception:  # one of them, or a system role, is refused by the template: find out which
            return [tried(self._render, messages) for messages in firsts]
        return [tried(self._checked, ids) for ids in written]

    def next_prompt(self, messages: Sequence[Message], first: Tokens, answers: Sequence[Tokens]) -> Tokens:
        """Tokens up to the next answer, after the given answers to the turns before.

        Raises InvalidInput where the template refuses the messages.
        """
        if not answers:
            return first
        bodies = [answer[:-1] if answer and answer[-1] in self.eos_ids else answer for answer in answers]
        if self.template is not None:
            texts = self.tokenizer.batch_decode(bodies, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            return self._render(dialogue(messages, texts))
        tokens = first
        later = [text for role, text in messages if role == "user"][1:]
        for body, turn in zip(bodies, later, strict=False):
            tokens += body + self._encode(BLANK_LINE + turn)
        return self._checked(tokens)

    def given_answer(self, messages: Sequence[Message], answers: Sequence[str], turn: int) -> Tokens:
        """Tokens of answer ``turn`` (0 for the first) as the target would emit them, cut after its EOS.

        With a template they are what the finished message has more than the prompt for it.
        """
        tokens: Tokens = ()
        if self.template is not None:
            asked = dialogue(messages, answers[:turn])
            before = self._render(asked)
            after = self._render([*asked, ("assistant", answers[turn])], finished=True)
            if after[: len(before)] == before:
                tokens = after[len(before) :]
        tokens = tokens or self._checked(self._encode(answers[turn]))
        end = next((i for i, token in enumerate(tokens) if token in self.eos_ids), None)
        if end is not None or not self.eos_ids:
            return tokens if end is None else tokens[: end + 1]
        own = self.tokenizer.eos_token_id
        return (*tokens, own if own in self.eos_ids else min(self.eos_ids))

    def _encode(self, text: str) -> Tokens:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _checked(self, ids: Sequence[int]) -> Tokens:
        if max(ids, default=0) >= self.vocab_size:
            raise InvalidInput(f"its token {max(ids)} is beyond the model's vocabulary of {self.vocab_size}")
        return tuple(ids)

    def _render(self, messages: list[Message], *, finished: bool = False) -> Tokens:
        """One conversation; a system text that the template refuses moves into the first turn."""
        try:
            ids = self._apply([messages], finished=finished)[0]
        except Exception as error:  # a template is a program, and may raise anything
            if messages[0][0] == "system":
                (_, system), (_, turn), *rest = messages
                return self._render([("user", system + BLANK_LINE + turn), *rest], finished=finished)
            raise InvalidInput(f"the model's chat template refuses it: {first_line(error)}") from None
        return self._checked(ids)

    def _apply(self, conversations: list[list[Message]], *, finished: bool = False, tokenize: bool = True) -> list[Any]:
        """Rendered and tokenised in one go: a tokenizer's own BOS is not put before the template's."""
        found = self.tokenizer.apply_chat_template(
            [[{"role": role, "content": text} for role, text in messages] for messages in conversations],
            chat_template=self.template,
            tokenize=tokenize,
            add_generation_prompt=not finished,
            return_dict=tokenize,
        )
        return found["input_ids"] if tokenize else found


def try_template(write_word: Callable[[], str]) -> None:
    """InvalidInput where a template, which is a program, takes for ever for a word, or makes a book of it."""
    try:
        with time_limit(TEMPLATE_SECONDS):
            written = write_word()
        if len(written) <= TEMPLATE_CHARS:
            return
        did = f"writes more than {TEMPLATE_CHARS:,} characters"
    except TimeoutError:
        did = f"takes more than {TEMPLATE_SECONDS} seconds"
    except Exception:  # it may want other messages: each conversation is tried
        return
    raise InvalidInput(f"The model's chat template {did} for one word: leave it out with `chat_template=False`.")


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer, in the main thread; elsewhere nothing can be interrupted."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


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
