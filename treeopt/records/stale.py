"""Results whose inputs have changed since."""

from collections.abc import Mapping
from pathlib import Path

from treeopt.files.storage import sha256_of
from treeopt.records.plan import Plan
from treeopt.records.rundir import RunDirectory

INPUTS = ("trace.npz", "probe.npz", "requests.npz", "calibration.json", "profile.json", "plan.json")  # of a run


def changed(run: RunDirectory, inputs: Mapping[str, str], *, or_gone: bool = False) -> list[str]:
    """Names of the run's files that changed since a result was made from them: the result is stale.

    or_gone : whether a file that is missing has changed too
    """
    names = []
    for name, sha256 in inputs.items():
        file = run.path / name
        if name in INPUTS and (sha256_of(file) != sha256 if file.is_file() else or_gone):
            names.append(name)
    return names


def made_from(run: RunDirectory, file: Path, inputs: Mapping[str, str] | None) -> list[str]:
    """A sentence on each file of the run that changed, or is gone, since the result in ``file`` was made from it."""
    sentences = []
    for name in changed(run, inputs or {}, or_gone=True):
        is_there = (run.path / name).is_file()
        what = f"another {name} than the one here now" if is_there else f"{name}, which is not here any more"
        sentences.append(f"{file.name} was made from {what}.")
    return sentences


def stale_plan(run: RunDirectory, plan: Plan) -> list[str]:
    """Sentences that say why the run's plan is stale, each with the command that makes it again."""
    again = run.command("search")
    return [f"{sentence} Make it again with: {again}" for sentence in made_from(run, run.plan, plan.inputs)]
