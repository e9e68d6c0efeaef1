"""Which accuracies (a trace, a probe or a calibration) and which latencies (a profile) a command uses, and whether a result
was made from others than are there now.

A name or path that was given comes first; without one they are the run's own. Results carry the ``inputs`` that they were
made from: name to sha256 of each file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.files import places, storage
from treeopt.files.storage import sha256_of
from treeopt.records.benchmark import Benchmark
from treeopt.records.bootstrap import SEED
from treeopt.records.calibration import Calibration
from treeopt.records.origins import Provenance, elsewhere
from treeopt.records.plan import Plan, Sample
from treeopt.records.pools import NO_PLACE
from treeopt.records.probe import Probe, is_probe
from treeopt.records.profile import LatencyProfile
from treeopt.records.requestlog import RequestLog, is_log
from treeopt.records.rules import same_drafter
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace

Accuracies = RankTrace | Probe | Calibration
Result = Accuracies | RequestLog | LatencyProfile | Plan | Benchmark
JSON: tuple[type[Calibration | LatencyProfile | Plan | Benchmark], ...] = (Calibration, LatencyProfile, Plan, Benchmark)
INPUTS = ("trace.npz", "probe.npz", "requests.npz", "calibration.json", "profile.json", "plan.json")  # of a run


def load_result(path: str | Path) -> Result:
    """What a file holds that a command wrote, or a shipped file of that name; InvalidInput where it is none.

    >>> load_result("vicuna-7b-medusa1").num_heads
    5
    """
    file = Path(path)
    if not file.exists():
        file = (places.shipped("calibration") | places.shipped("profiles")).get(str(path), file)
    if file.suffix == ".npz":
        return Probe.load(file) if is_probe(file) else RequestLog.load(file) if is_log(file) else RankTrace.load(file)
    document = storage.load_json(file)
    found = document.get("schema") if isinstance(document, dict) else None
    kinds = {storage.schema(record.file_kind): record for record in JSON}
    if not isinstance(found, str) or found not in kinds:
        raise InvalidInput(
            f'{file} must be a .npz file or have a "schema" of {", ".join(kinds)}, but it has {found!r}.'
        )
    return kinds[found].load(file)


def read_accuracies(run: RunDirectory, given: str | None = None) -> tuple[Path, RankTrace | Calibration]:
    """The file and the record of a path or a shipped name, or the run's trace, or else its calibration."""
    if given is not None:
        path = places.find_shipped("calibration", given)
        if path.suffix != ".npz":
            return path, Calibration.load(path)
        if is_probe(path):
            raise InvalidInput(
                f"Accuracies come from a trace or a calibration, but {path} is a probe of typical acceptance. "
                "Only treeopt search takes one."
            )
        return path, RankTrace.load(path)
    if run.trace.exists():
        return run.trace, run.read_trace()
    if not run.calibration.exists():
        raise InvalidInput(
            f"{run.path} has no calibration yet. Make one with treeopt calibrate or treeopt import, or name a "
            "shipped one with `calibration` (treeopt list)."
        )
    return run.calibration, run.read_calibration()


def find_accuracies(
    run: RunDirectory, given: str | None = None, *, otherwise: str | None = None
) -> tuple[Path, RankTrace | Calibration] | None:
    """The accuracies of `read_accuracies`; where nothing was given or calibrated the shipped calibration ``otherwise``, or None."""
    own = run.trace.exists() or run.calibration.exists()
    given = given if given is not None or own else otherwise
    return read_accuracies(run, given) if own or given is not None else None


def read_planned(run: RunDirectory, given: str | None = None) -> tuple[Path, Accuracies]:
    """What trees are planned on: the run's probe where it has one, else as `read_accuracies` has it."""
    if given is None and run.probe.exists():
        return run.probe, run.read_probe()
    if given is not None and given.endswith(".npz") and is_probe(given):
        return Path(given), Probe.load(given)
    return read_accuracies(run, given)


def is_ever_right(record: Accuracies) -> bool:
    """Whether any guess of the drafter was right."""
    if isinstance(record, Calibration):
        return bool(record.hits.any())
    if isinstance(record, Probe):
        return bool(record.accepted[:, 1:].any())
    places = record.pool_places
    return bool((record.ranks >= 0).any() or (places is not None and (places < NO_PLACE).any()))


def sampled(record: Accuracies, conversations: int | None) -> tuple[Accuracies, Sample | None]:
    """So many conversations of a record, drawn at random, the same ones every time; all, and None, where it has no more."""
    if conversations is None:
        return record, None
    if isinstance(record, Calibration):
        raise InvalidInput("`sample` draws conversations of a trace, but a calibration has none: leave `sample` out.")
    count = record.num_conversations
    if conversations >= count:
        return record, None
    drawn = np.random.default_rng(SEED).choice(count, conversations, replace=False)
    sample = Sample(conversations=conversations, of=count, seed=SEED)
    return record.select(np.flatnonzero(np.isin(record.clusters, drawn))), sample


def find_latencies(
    run: RunDirectory, given: str | None = None, *, own: bool = True
) -> tuple[Path, LatencyProfile] | None:
    """The file and the profile of a path or a shipped name, or the run's ``own``; None where there is none."""
    if given is not None:
        path = places.find_shipped("profiles", given)
        return path, LatencyProfile.load(path)
    return (run.profile, run.read_profile()) if own and run.profile.exists() else None


def inputs_of(*files: Path) -> dict[str, str]:
    """Name to sha256 of the files that a result was made from."""
    return {file.name: sha256_of(file) for file in files}


def of_all(inputs: Mapping[str, str]) -> dict[str, str]:
    """The inputs of a plan for all groups, as a plan of one group says them."""
    return {f"../../{name}": sha256 for name, sha256 in inputs.items()}


def changed(run: RunDirectory, inputs: Mapping[str, str], *, or_gone: bool = False) -> list[str]:
    """Names of the run's files that are not what they were when a result was made from them: the result is stale.

    or_gone : whether a file that is missing has changed too
    """
    found = [(name, run.path / name, sha256) for name, sha256 in inputs.items() if name in INPUTS]
    return [name for name, file, sha256 in found if (sha256_of(file) != sha256 if file.is_file() else or_gone)]


def made_from(run: RunDirectory, file: Path, inputs: Mapping[str, str] | None) -> list[str]:
    """A sentence on each file of the run that a result in ``file`` was made from and that is another now, or gone."""
    found = []
    for name in changed(run, inputs or {}, or_gone=True):
        there = (run.path / name).is_file()
        what = f"another {name} than the one here now" if there else f"{name}, which is not here any more"
        found.append(f"{file.name} was made from {what}.")
    return found


def stale_plan(run: RunDirectory, plan: Plan) -> list[str]:
    """Why the run's plan is stale, in sentences with the command that makes it again."""
    again = run.command("search")
    return [f"{said} Make it again with: {again}" for said in made_from(run, run.plan, plan.inputs)]


def timed_elsewhere(run: RunDirectory, plan: Plan, bench: Benchmark) -> str:
    """Where the plan's latencies were timed, "in vllm", if not where the benchmark was decoded; else empty."""
    profile = read_timed(run, plan.inputs)
    timed = Provenance.of({} if profile is None else profile.info)
    return elsewhere(plan.runtime or {}, timed, bench.provenance or Provenance())


def read_timed(run: RunDirectory, inputs: Mapping[str, str]) -> LatencyProfile | None:
    """The run's profile, where it is the one that a result with these inputs was made from."""
    name = run.profile.name
    return run.read_profile() if name in inputs and not changed(run, {name: inputs[name]}, or_gone=True) else None


def read_grown_on(run: RunDirectory, inputs: Mapping[str, str]) -> Accuracies | None:
    """The accuracies among a plan's inputs, of the run or shipped; None where they have changed since."""
    files = {file.name: file for file in places.shipped("calibration").values()}
    files |= {file.name: file for file in (run.trace, run.probe, run.calibration)}
    found = (files[name] for name in inputs if name in files and files[name].is_file())
    return next((read_planned(run, str(file))[1] for file in found if sha256_of(file) == inputs[file.name]), None)


def not_a_check(where: str, engine: str = "") -> str:
    """What a benchmark is worth where latencies were timed elsewhere, in a sentence."""
    return (
        f"The plan's latencies and speedups are of steps timed {where}, but the benchmark was decoded by "
        f"{engine or 'treeopt'} here: its speedups do not check the predicted ones. Its tokens per step do."
    )


def other_origins(record: Accuracies, profile: LatencyProfile) -> list[tuple[str, str, str]]:
    """(what, of the accuracies, of the latencies) of each origin that differs in what a step costs, where both are known."""
    ours, theirs = (Provenance.of(info) for info in (record.meta, profile.info))
    drafters: list[Mapping[str, Any]] = [record.meta.get("drafter") or {}, theirs.drafter or {}]
    found: list[tuple[str, Any, Any]] = [
        (key, getattr(ours, key), getattr(theirs, key)) for key in ("model", "dtype", "device")
    ]
    if not same_drafter(*drafters, weights=False):
        keys = ("id", "kind", "num_heads", "num_layers")
        mine, other = (", ".join(f"{key} {one[key]}" for key in keys if one.get(key)) for one in drafters)
        found.insert(0, ("drafter", mine, other))
    return [(what, str(mine), str(other)) for what, mine, other in found if mine and other and mine != other]
