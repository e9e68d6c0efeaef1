"""The errors that users see: each message states the rule, what came, and what to do.

A message marks parameters by backticks, "`num_prompts` must be at least 1": a command says them as its options (`said_as`).

TreeoptError            anything treeopt refuses; the command line prints it and exits 1
├── InvalidInput        a file, tree, table or option that breaks a rule
├── OutOfRange          a question that the measurements do not cover
└── Unsupported         a model, drafter or engine that cannot do what is asked
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

Speech = Callable[[str, str | None], str]  # a parameter's name, and the value where the message says one
MARKED = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`\n]*))?`")


def as_parameter(name: str, value: str | None = None) -> str:
    """What a script writes: ``rule='sample'``."""
    if value is None:
        return name
    is_code = value in ("True", "False") or re.fullmatch(r"-?[0-9.]+", value)
    return f"{name}={value if is_code else repr(value)}"


_speech: list[Speech] = [as_parameter]


def spoken(message: str) -> str:
    """The message with its marked parameters as who asked writes them.

    >>> spoken("`num_prompts` must be at least 1, but got 0.")
    'num_prompts must be at least 1, but got 0.'
    """
    return MARKED.sub(lambda match: _speech[-1](match[1], match[2]), message)


@contextmanager
def said_as(speech: Speech) -> Iterator[None]:
    """Have parameters said in another way, as a command does with its options."""
    _speech.append(speech)
    try:
        yield
    finally:
        _speech.pop()


class TreeoptError(Exception):
    """Base of every error that treeopt raises on purpose."""

    def __str__(self) -> str:
        return spoken(super().__str__())


class InvalidInput(TreeoptError, ValueError):
    """A file, tree, table or option that breaks a stated rule."""


class OutOfRange(TreeoptError, ValueError):
    """A question that the measurements do not cover."""


class Unsupported(TreeoptError):
    """A model, drafter or engine that cannot do what is asked."""


def quoted(value: object, most: int = 80) -> str:
    """``value`` as it may appear in a message: printable and short.

    >>> quoted("head\\x1b"), quoted([0] * 100, most=11)
    ("'head\\\\x1b'", '[0, 0, 0...')
    """
    text = ascii(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def meant(name: object, known: Iterable[str]) -> str:
    """A sentence with the known name that was meant, and a space before it; empty where none is near.

    >>> meant("llama.cpp", ["vllm", "llama-cpp"]), meant("x", ["vllm"])
    (" Did you mean 'llama-cpp'?", '')
    """
    near = get_close_matches(str(name), list(known), 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def first_line(error: BaseException, most: int = 200) -> str:
    """What another library's error says, as part of a sentence: its first line, printable, without a full stop.

    >>> first_line(ImportError("Install s3fs to access S3.\\nDetails"))
    'Install s3fs to access S3'
    """
    said = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    line = str(said).splitlines()[0].rstrip(".")
    return "".join(c if c.isprintable() else "?" for c in line[:most])
