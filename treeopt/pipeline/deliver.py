"""What leaves the run: an engine's configuration, a checkpoint in another layout."""

from __future__ import annotations

from pathlib import Path

from treeopt.console import note
from treeopt.errors import InvalidInput, OutOfRange
from treeopt.plan import Plan, PlanEntry
from treeopt.rundir import RunDirectory
from treeopt.storage import load_json, read_text, write_text
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
    return paths, (*result.notes, *_other_runtime(plan, entry, engine))


def _other_runtime(plan: Plan, entry: PlanEntry, engine: str) -> tuple[str, ...]:
    """A warning where the plan's latencies were measured in another runtime than the engine's."""
    name = (plan.runtime or {}).get("name")
    if name is None or name == engine:
        return ()
    return (
        f"The size, {entry.size} rows, rests on step latencies of {name}; a step costs otherwise in {engine}, "
        "where another size may be faster. The tokens per step hold for both.",
    )


def read_tree(path: Path, *, batch_size: int | None = None) -> Tree:
    """A tree from a file: a list of paths, an object with ``medusa_choices``, or what an export wrote.

    Of a plan the tree of ``batch_size``, which may be left out where the plan has one.
    """
    from treeopt.export import read_choices

    plan = read_plan(path)
    if plan is not None:
        return plan.entry(batch_size).tree
    if batch_size is not None:
        raise InvalidInput(f"--batch-size picks one of a plan's trees, but {path} is no plan: leave it out.")
    try:
        document = load_json(path) if path.suffix == ".json" else read_choices(read_text(path))
        if isinstance(document, dict):
            document = document.get("medusa_choices")
        if not isinstance(document, list) or not all(isinstance(choice, list | tuple) for choice in document):
            raise InvalidInput(
                "it must hold a list of paths, an object with 'medusa_choices', a plan, or an engine's "
                "configuration that treeopt export writes."
            )
        return Tree.from_choices(document)
    except InvalidInput as error:
        said = str(error)
        raise InvalidInput(said if said.startswith(str(path)) else f"{path}: {said}") from None


def read_plan(path: Path) -> Plan | None:
    """The plan in a file; None where it holds something else."""
    document = load_json(path) if path.suffix == ".json" else None
    is_plan = isinstance(document, dict) and str(document.get("schema")).startswith("treeopt.plan/")
    return Plan.load(path) if is_plan else None


def convert(
    drafter: str, folder: Path, *, layout: str, model: str | None = None, revision: str | None = None
) -> tuple[list[Path], tuple[str, ...]]:
    """Write heads in another layout: (files, what was repaired or is worth knowing)."""
    from treeopt.runtime.checkpoints import convert as write

    done = write(drafter, layout, folder, base=model, revision=revision)
    return list(done.files), done.source.notes
