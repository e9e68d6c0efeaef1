"""Words for a shell, and texts for a terminal, whatever characters they have."""

import re
import shlex
from collections.abc import Collection

from treeopt.errors import InvalidInput

PLAIN = set(range(ord(" "), ord("~") + 1)) - set(b"'\\")  # bytes that $'...' takes as they are
OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def shell_word(value: object) -> str:
    r"""A value as one word, which a shell reads back as the value.

    Bytes that cannot be printed are written as \x in $'...'. The word has no line break, and no quote inside, so it is one word
    for shells that do not know that form, too.

    >>> print(shell_word("HEADS"), shell_word(4), shell_word("my heads"), shell_word("$(x)"), shell_word("it's"), shell_word("a\nb"))
    HEADS 4 'my heads' '$(x)' 'it'"'"'s' $'a\x0ab'
    """
    text = str(value)
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(chr(byte) if byte in PLAIN else f"\\x{byte:02x}" for byte in _bytes(text)) + "'"


def command_line(*words: object) -> str:
    """The line that a shell reads as these words.

    >>> command_line("treeopt", "run", "--drafter", "my heads; rm -r x")
    "treeopt run --drafter 'my heads; rm -r x'"
    """
    return " ".join(map(shell_word, words))


def split_template(name: str, text: str, places: Collection[str]) -> tuple[str, ...]:
    """The words of a command with {places} to fill, split as a shell splits them.

    name : of the parameter, for messages

    Raises InvalidInput for an unknown place.

    >>> split_template("launch", "run --size {size} '{size} rows'", ["size"])
    ('run', '--size', '{size}', '{size} rows')
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise InvalidInput(f"`{name}` must be a command as in a shell, but {text!r}: {error}.") from None
    for place in re.findall(r"\{(\w+)\}", " ".join(words)):
        if place not in places:
            allowed = ", ".join(f"{{{place}}}" for place in places)
            raise InvalidInput(f"`{name}` has the places {allowed}, but got {{{place}}}.")
    return words


def printable(text: str) -> str:
    r"""The text with an escape in place of every character that a terminal would obey; lines stay lines.

    >>> printable("red \x1b[31m")
    'red \\x1b[31m'
    """
    return OBEYED.sub(lambda match: "".join(f"\\x{byte:02x}" for byte in _bytes(match[0])), text)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
