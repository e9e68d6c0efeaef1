"""What leaves the run: an engine's configuration, a checkpoint in another layout."""

from __future__ import annotations

from pathlib import Path

from treeopt.console import note
from treeopt.errors import InvalidInput, OutOfRange
from treeopt.rundir import RunDirectory
from treeopt.storage import load_json, write_text
from treeopt.tree import Tree

STALE = "The plan was made before the run's trace or profile was measured anew: run treeopt search again."


def export(
    run: RunDirectory, engine: str, *, batch_size: int | None = None
) -> tuple[list[Path], tuple[str, ...]]:
    """Write the engine's files for one entry of the plan: (files, notes)."""
    from treeopt.export import export_entry

    plan = run.read_plan()
    if run.is_stale(plan):
        note(STALE)
    entry = plan.entry(batch_size)
    drafter = plan.drafter or {}
    num_heads, num_layers = drafter.get("num_heads"), drafter.get("num_layers") or 1
    if not isinstance(num_heads, int):
        raise OutOfRange("The export needs the number of heads, but the plan has no drafter.num_heads.")
    result = export_entry(entry, engine, num_heads=num_heads, num_layers=num_layers)
    paths = []
    folder = run.export / engine
    if len(plan.entries) > 1:
        folder /= f"batch-size-{entry.batch_size}"
    for name, text in result.files.items():
        paths.append(folder / name)
        write_text(paths[-1], text)
    return paths, result.notes


def read_tree(path: Path) -> Tree:
    """A tree from JSON: a list of paths, or an object with ``medusa_choices``."""
    document = load_json(path)
    if isinstance(document, dict):
        document = document.get("medusa_choices")
    if not isinstance(document, list) or not all(isinstance(choice, list) for choice in document):
        raise InvalidInput(f"{path} must hold a list of paths, or an object with 'medusa_choices'.")
    try:
        return Tree.from_choices(document)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None


def convert(
    drafter: str, folder: Path, *, layout: str, model: str | None = None, revision: str | None = None
) -> tuple[list[Path], tuple[str, ...]]:
    """Write heads in another layout: (files, what was repaired or is worth knowing)."""
    from treeopt.runtime.checkpoints import convert as write

    done = write(drafter, layout, folder, base=model, revision=revision)
    return list(done.files), done.source.notes
