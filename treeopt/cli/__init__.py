"""The command line: every command reads files, calls one function, and writes one file.

Results go to stdout, talk and progress to stderr. Exit 0 done, 1 could not, 2 misused.

Each command is in the file of its name; export.py has convert too, show.py plot and report, trees.py score and
import-tree. options.py holds what commands share. What is heavy is imported inside a command, so that --help is quick.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

import click

from treeopt import __version__
from treeopt.cli.bench import bench
from treeopt.cli.calibrate import calibrate
from treeopt.cli.export import convert, export
from treeopt.cli.importing import import_
from treeopt.cli.listing import list_
from treeopt.cli.profile import profile
from treeopt.cli.run import run
from treeopt.cli.search import search
from treeopt.cli.show import plot, report, show
from treeopt.cli.train import train
from treeopt.cli.trees import import_tree, score
from treeopt.errors import TreeoptError


class Group(click.Group):
    """Prints a TreeoptError as one sentence and exits 1; lists commands in the order of their use.

    SIGTERM ends a command as Ctrl-C does: finished blocks stay, and the same command continues.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            return super().invoke(ctx)
        except TreeoptError as error:
            click.echo(f"treeopt: {error}", err=True)
            sys.exit(1)
        except KeyboardInterrupt:
            command = f"treeopt {ctx.invoked_subcommand}"
            click.echo(f"\ntreeopt: interrupted; files are whole. The same {command} command continues.", err=True)
            sys.exit(1)
        finally:
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="treeopt")
def cli() -> None:
    """Find the best speculation tree for Medusa-style decoding, and prove it by real decoding.

    \b
    treeopt run             the whole line on the built-in demo model, or on your own
    treeopt COMMAND -h      what a command does, with an example
    """


for _command in (
    run,
    calibrate,
    import_,
    profile,
    search,
    bench,
    export,
    score,
    import_tree,
    convert,
    plot,
    show,
    report,
    train,
    list_,
):
    cli.add_command(_command)


def main() -> None:
    """Entry point of the ``treeopt`` command."""
    cli()
