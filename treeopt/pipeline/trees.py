"""Trees by file or name: reading one, and what it is worth here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from treeopt.errors import InvalidInput, OutOfRange, meant
from treeopt.files.notes import note
from treeopt.files.storage import load_json, read_text, sha256_of
from treeopt.trees.published import PUBLISHED_TREES, published_tree

if TYPE_CHECKING:
    from treeopt.growth.score import Score
    from treeopt.records.calibration import Calibration
    from treeopt.records.plan import Plan
    from treeopt.records.rundir import RunDirectory
    from treeopt.records.trace import RankTrace
    from treeopt.trees.tree import Tree


def named_tree(tree: str, *, batch_size: int | None = None) -> Tree:
    """The tree of a file, of FILE:NAME where a file has several, or of a published name."""
    if _split(Path(tree))[0].is_file():
        return read_tree(Path(tree), batch_size=batch_size)
    if tree not in PUBLISHED_TREES:
        raise InvalidInput(
            f"There is no file {tree}, nor a tree of that name ({', '.join(PUBLISHED_TREES)}).{meant(tree, PUBLISHED_TREES)}"
        )
    if batch_size is not None:
        raise InvalidInput(f"`batch_size` picks one of a plan's trees, but {tree} is one tree: leave it out.")
    return published_tree(tree)


def read_tree(path: Path, *, batch_size: int | None = None) -> Tree:
    """A tree from a file in any engine's format, or from a plan.

    path       : FILE:NAME where a file has several trees; of a plan NAME is a batch size
    batch_size : which of a plan's trees; may be left out where it has one
    """
    from treeopt.engines.reading import tree_in

    path, name = _split(path)
    if (plan := read_plan(path)) is not None:
        if not name.isdecimal() and (name or (batch_size is None and len(plan.entries) > 1)):
            sizes = [str(entry.batch_size) for entry in plan.entries]
            raise OutOfRange(f"{path} has trees for batch sizes {', '.join(sizes)}: name one, as in {path}:{sizes[0]}.")
        return plan.entry(int(name) if name else batch_size).tree
    if batch_size is not None:
        raise InvalidInput(f"`batch_size` picks one of a plan's trees, but {path} is no plan: leave it out.")
    try:
        return tree_in(read_text(path), name)
    except InvalidInput as error:
        raise InvalidInput(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def _split(path: Path) -> tuple[Path, str]:
    """A file, and the name of a tree in it, empty where none is given."""
    file, _, name = str(path).rpartition(":")
    return (Path(file), name) if file and not path.exists() else (path, "")


def read_plan(path: Path) -> Plan | None:
    document = load_json(path) if path.suffix == ".json" else None
    is_plan = isinstance(document, dict) and str(document.get("schema")).startswith("treeopt.plan/")
    if not is_plan:
        return None
    from treeopt.records.plan import Plan

    return Plan.load(path)


def score(
    run: RunDirectory,
    tree: Tree | str | Path,
    *,
    calibration: RankTrace | Calibration | str | Path | None = None,
    batch_size: int | None = None,
) -> Score:
    """Score a tree, given or by file or published name, on the run's trace, or on a calibration, likewise."""
    from treeopt.growth.score import score_tree
    from treeopt.records.inputs import read_accuracies
    from treeopt.records.rundir import RunDirectory
    from treeopt.report.terminal import progress

    if calibration is not None and not isinstance(calibration, str | Path):
        with RunDirectory.holding(calibration) as held:
            return score(held, tree, batch_size=batch_size)
    grown_on, plan = set[str](), None
    if isinstance(tree, str | Path):
        plan = read_plan(Path(tree)) if Path(tree).is_file() else None
        grown_on, tree = set(plan.inputs.values()) if plan else set(), named_tree(str(tree), batch_size=batch_size)
    path, source = read_accuracies(run, None if calibration is None else str(calibration))
    if calibration is None and run.probe.exists():
        note("Scored by greedy decoding: treeopt bench --tree measures what a tree reaches under typical acceptance.")
    with progress("Scoring", None):
        return score_tree(source, tree, grown_here=sha256_of(path) in grown_on)
