"""treeopt convert: heads in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from treeopt.cli.options import AS_JSON, show_files


@click.command()
@click.argument("drafter")
@click.option("--to", "layout", required=True, help="Layout to write; treeopt list names them.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder to write to.")
@click.option("--model", help="Folder of the base model: for merged layouts and shared heads.")
@click.option("--revision", help="Revision of a hub checkpoint.")
@AS_JSON
def convert(drafter: str, output: Path, as_json: bool, **options: Any) -> None:
    """Write published Medusa heads in another engine's layout.

    DRAFTER is a folder, a file or a hub id in any layout that treeopt reads.

    \b
    Example:
        treeopt convert medusa-vicuna-7b-v1.3 --to vllm --output heads-for-vllm
    """
    from treeopt import pipeline

    paths, notes = pipeline.convert(drafter, output, **options)
    show_files(paths, notes, as_json)
