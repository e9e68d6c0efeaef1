"""The command line: every command reads files, calls one function, and writes one file.

Results go to stdout, talk and progress to stderr. Exit 0 done, 1 could not, 2 misused, 130 Ctrl-C. What is heavy is imported
inside a command, so that --help is quick.
"""

import errno
import logging
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from itertools import pairwise
from typing import Any, NoReturn

import click

from treeopt import __version__
from treeopt.cli.command import say
from treeopt.cli.exchange import convert, export, import_, tune
from treeopt.cli.interrupts import interruptible
from treeopt.cli.show import list_, plot, report, show, status
from treeopt.cli.steps import bench, calibrate, compare, profile, requests, run, score, search, train
from treeopt.errors import TreeoptError, first_line, said_as
from treeopt.files.notes import LOGGER
from treeopt.files.shell import printable, shell_word

INTERRUPTED = "\ntreeopt: interrupted. Every file is whole. The same treeopt {} command goes on from what was finished."
RENAMED = {
    "import-tree": "treeopt show FILE, or treeopt import FILE",
    "merge": "treeopt import RUN...",
    "--acceptance": "--rule greedy, --rule sample:temperature=0.7 or --rule typical",
    "--temperature": "--rule sample:temperature=T",
    "--top-p": "--rule sample:top_p=P",
    "--epsilon": "--rule typical:epsilon=E",
    "--delta": "--rule typical:delta=D",
    "--from-logs": "treeopt requests LOG",
}  # fmt: skip
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Notes(logging.Handler):
    """Prints what the library notes on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        from treeopt.report.terminal import note

        note(record.getMessage())


def print_notes() -> None:
    if not any(isinstance(handler, Notes) for handler in LOGGER.handlers):
        LOGGER.addHandler(Notes())
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False


class Commands(click.Group):
    """Prints a TreeoptError as one sentence and exits 1, and so what the system refuses, a full disk for example.

    Ctrl-C and SIGTERM end a command with a sentence on what is left, and with exit 128 and the number of the signal, 130 for Ctrl-C.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of the words; click.UsageError for an empty one, which would be the current folder, and for no UTF-8."""
        for before, word in pairwise(["", *args]):
            if not word or (word.startswith("--") and word.endswith("=")):
                name = word[:-1] or (before if before.startswith("-") else "An argument")
                raise click.UsageError(f"{name} must not be empty.", ctx)
            if any("\ud800" <= character <= "\udfff" for character in word):
                raise click.UsageError(f"Names must be UTF-8, but got {os.fsencode(word)!r}.", ctx)
            if (new := RENAMED.get(word.partition("=")[0])) and (word.startswith("-") or not before):
                raise click.UsageError(f"{word.partition('=')[0]} is now: {new}", ctx)
        return super().resolve_command(ctx, args)

    def as_option(self, ctx: click.Context, name: str, value: str | None) -> str:
        """A parameter as an option of the command that runs, or of the first that has it."""
        own = [c for word, c in self.commands.items() if word == ctx.invoked_subcommand]
        parameters = (p for command in (*own, *self.commands.values()) for p in command.params if p.name == name)
        first = next(parameters, None)
        if isinstance(first, click.Argument):
            return name.upper()
        flag = max(first.opts, key=len) if first else f"--{name.replace('_', '-')}"
        return flag if value in (None, "True", "False") else f"{flag} {shell_word(value)}"

    def invoke(self, ctx: click.Context) -> Any:
        print_notes()
        with said_as(partial(self.as_option, ctx)):
            came: list[int] = []
            try:
                with interruptible() as came:
                    return super().invoke(ctx)
            except BaseException as error:
                # Whatever a library made of the interrupt while it wrote an archive, it was one.
                if came or isinstance(error, KeyboardInterrupt):
                    _end(INTERRUPTED.format(ctx.invoked_subcommand), 128 + (came[0] if came else signal.SIGINT))
                if isinstance(error, TreeoptError):
                    _end(f"treeopt: {error}", 1)
                if isinstance(error, OSError) and error.errno not in (None, errno.EPIPE):
                    _end(f"treeopt: {_refused(error)}", 1)
                if isinstance(error, EOFError):
                    _end(f"treeopt: What was read ended early: {first_line(error)}.", 1)
                if isinstance(error, click.ClickException):
                    vars(error)["message"] = printable(error.message)
                raise


def _end(said: str, code: int) -> NoReturn:
    with suppress(OSError):  # stderr may be full as well
        say(said, err=True)
    sys.exit(code)


def _refused(error: OSError) -> str:
    if error.filename is not None:
        return f"{error.filename} cannot be read or written: {error.strerror}."
    # What is written to files names them.
    return f"{'The output cannot be written' if error.errno in FULL else 'The system refused'}: {error.strerror}."


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="treeopt")
def cli() -> None:
    """Find the best speculation tree for Medusa-style decoding, and prove it by real decoding.

    \b
    treeopt run             the whole line on the built-in demo model, or on your own
    treeopt COMMAND -h      what a command does, with an example
    """


COMMANDS = (
    run, tune, calibrate, requests, import_, profile, search, bench, export, compare, score, convert, plot, show, report,
    status, train, list_,
)  # fmt: skip
for _command in COMMANDS:
    cli.add_command(_command)


def main() -> None:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr's, where the terminal's encoding lacks a sign
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # looked for in every package that is installed
    cli()
