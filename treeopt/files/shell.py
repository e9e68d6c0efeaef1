"""Words for a shell: every value in a script, a launch line or a command that is printed to be copied.

shell_word     one word, which a shell reads back as the value, whatever it holds
printable  a text for the terminal, in which nothing moves the cursor or hides what stands there
"""

import re
import shlex
from collections.abc import Collection

from treeopt.errors import InvalidInput

PLAIN = set(range(ord(" "), ord("~") + 1)) - set(b"'\\")  # bytes that stand for themselves in $'...'
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def shell_word(value: object) -> str:
    r"""One word of a shell's line.

    Bytes of what cannot be printed are written as \x in $'...': without a quote or a line break of its own it is one word
    for shells that do not know that form, too.

    >>> print(shell_word("HEADS"), shell_word(4), shell_word("my heads"), shell_word("$(x)"), shell_word("it's"), shell_word("a\nb"))
    HEADS 4 'my heads' '$(x)' 'it'"'"'s' $'a\x0ab'
    """
    text = str(value)
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(chr(byte) if byte in PLAIN else f"\\x{byte:02x}" for byte in _bytes(text)) + "'"


def command_line(*words: object) -> str:
    """Words as the line that a shell reads as these words.

    >>> command_line("treeopt", "run", "--drafter", "my heads; rm -r x")
    "treeopt run --drafter 'my heads; rm -r x'"
    """
    return " ".join(map(shell_word, words))


def split_template(name: str, text: str, places: Collection[str]) -> tuple[str, ...]:
    """The words of a command with places to fill, split as a shell does, without running one.

    name : of the parameter

    Raises InvalidInput for places that are not known.

    >>> split_template("launch", "run --size {size} '{size} rows'", ["size"])
    ('run', '--size', '{size}', '{size} rows')
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise InvalidInput(f"`{name}` must be a command as in a shell, but {text!r}: {error}.") from None
    if unknown := sorted({place for word in words for place in re.findall(r"\{(\w+)\}", word)} - set(places)):
        known = ", ".join(f"{{{place}}}" for place in places)
        raise InvalidInput(f"`{name}` has the places {known}, but got {{{unknown[0]}}}.")
    return words


def printable(text: str) -> str:
    r"""The text with a sign in place of every character that a terminal would obey; lines stay lines.

    >>> printable("red \x1b[31m")
    'red \\x1b[31m'
    """
    return OBEYED.sub(lambda match: "".join(f"\\x{byte:02x}" for byte in _bytes(match[0])), text)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
