"""The errors that users see: each message states the rule, what came, and what to do.

TreeoptError            anything treeopt refuses; the command line prints it and exits 1
├── InvalidInput        a file, tree, table or option that breaks a rule
├── OutOfRange          a question that the measurements do not cover
└── Unsupported         a model, drafter or engine that cannot do what is asked
"""


class TreeoptError(Exception):
    """Base of every error that treeopt raises on purpose."""


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


def first_line(error: BaseException, most: int = 200) -> str:
    """What another library's error says, as part of a sentence: its first line, printable, without a full stop.

    >>> first_line(ImportError("Install s3fs to access S3.\\nDetails"))
    'Install s3fs to access S3'
    """
    said = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    line = str(said).splitlines()[0].rstrip(".")
    return "".join(c if c.isprintable() else "?" for c in line[:most])
