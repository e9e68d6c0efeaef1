"""Which files a command uses, and whether a result was made from other files than are there now.

Accuracies are a trace, a probe or a calibration; latencies are a profile. A path or a name that is passed comes first;
without one the run's own files are used. Results carry the ``inputs`` that they were made from: name to sha256 of each file.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from treeopt.errors import InvalidInput
from treeopt.files import npz, places, storage
from treeopt.files.storage import sha256_of
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import ENGINE_LOG, LEAST_RIGHT, Calibration
from treeopt.records.drafters import COPIES
from treeopt.records.origins import OURS, Origin, Provenance, same_origin
from treeopt.records.plan import Plan
from treeopt.records.pools import NO_PLACE
from treeopt.records.probe import Probe
from treeopt.records.profile import LatencyProfile
from treeopt.records.requestlog import RequestLog
from treeopt.records.rundir import RunDirectory
from treeopt.records.stale import changed
from treeopt.records.trace import RankTrace

Accuracies = RankTrace | Probe | Calibration
Result = Accuracies | RequestLog | LatencyProfile | Plan | Benchmark
JSON: tuple[type[Calibration | LatencyProfile | Plan | Benchmark], ...] = (Calibration, LatencyProfile, Plan, Benchmark)
ARCHIVES: tuple[type[RankTrace | Probe | RequestLog], ...] = (RankTrace, Probe, RequestLog)  # by arrays that they need
BROKEN = (
    "The drafter does not work: {}. The usual causes: it was made for another model, or loaded wrongly; the tokenizer or the chat "
    "template differs; the target is quantised; it reads other layers than it was trained on. Serve without it until guesses are "
    "right."
)


def load_result(path: str | Path) -> Result:
    """The result in a file that a command wrote, or in the shipped file of that name. Raises InvalidInput for another file.

    >>> load_result("vicuna-7b-medusa1").num_heads
    5
    """
    file = Path(path)
    if not file.exists():
        file = (places.shipped("calibration") | places.shipped("profiles")).get(str(path), file)
    if file.suffix == ".npz":
        names = npz.names(file)
        return next((kind for kind in ARCHIVES if names.issuperset(kind.required)), RankTrace).load(file)
    document = storage.load_json(file)
    schema = document.get("schema") if isinstance(document, dict) else None
    kinds = {storage.schema(kind.file_kind): kind for kind in JSON}
    if not isinstance(schema, str) or schema not in kinds:
        raise InvalidInput(
            f'{file} must be a .npz file or have a "schema" of {", ".join(kinds)}, but it has {schema!r}.'
        )
    return kinds[schema].load(file)


def read_planned(run: RunDirectory, source: str | None = None) -> tuple[Path, Accuracies]:
    """The accuracies that trees are planned on: those of a path or shipped name, or the run's probe, trace or calibration."""
    return _read(run, source, (run.probe, run.trace, run.calibration))


def read_accuracies(run: RunDirectory, source: str | None = None) -> tuple[Path, RankTrace | Calibration]:
    """The accuracies of a path or shipped name, or the run's trace, or else its calibration. Raises InvalidInput for a probe."""
    path, record = _read(run, source, (run.trace, run.calibration))
    if isinstance(record, Probe):
        raise InvalidInput(f"{path} is a probe of typical acceptance, which only treeopt search takes: pass a trace.")
    return path, record


def find_accuracies(
    run: RunDirectory, source: str | None = None, *, otherwise: str | None = None
) -> tuple[Path, RankTrace | Calibration] | None:
    """The accuracies of `read_accuracies`. A run without any has those of ``otherwise``, or None."""
    if source is None and not run.trace.exists() and not run.calibration.exists():
        return None if otherwise is None else read_accuracies(run, otherwise)
    return read_accuracies(run, source)


def _read(run: RunDirectory, source: str | None, files: Iterable[Path]) -> tuple[Path, Accuracies]:
    """The accuracies of a path or shipped name, or of the first of some files that is there."""
    if source is not None:
        files = [places.find_shipped("calibration", source)]
    path = next((file for file in files if file.exists()), None)
    if path is None:
        raise InvalidInput(
            f"{run.path} has no calibration yet. Make one with treeopt calibrate or treeopt import, or name a "
            "shipped one with `calibration` (treeopt list)."
        )
    record = load_result(path)
    if not isinstance(record, RankTrace | Probe | Calibration):
        raise InvalidInput(f"Accuracies come from a trace, a probe or a calibration, but {path} is none of them.")
    return path, record


def broken(record: Accuracies) -> str | None:
    """Why the drafter does not work, where no guess was right, or of an engine's drafts fewer than one first guess in twenty.

    None for a drafter that copies text: the text may not repeat.
    """
    if (record.meta.get("drafter") or {}).get("kind") in COPIES:
        return None
    reason = "none of its guesses was right"
    if isinstance(record, Calibration):
        right, trials = int(record.hits[0].sum()), int(record.trials[0])
        nearly_none = record.meta.get("source") == ENGINE_LOG and right + 2 < LEAST_RIGHT * (trials + 4)
        works = bool(record.hits.any()) and not nearly_none
        reason = f"{right:,} of {trials:,} first guesses were right"
    elif isinstance(record, Probe):
        works = bool(record.accepted[:, 1:].any())
    else:
        places = record.pool_places
        works = bool((record.ranks >= 0).any() or (places is not None and (places < NO_PLACE).any()))
    return None if works else BROKEN.format(reason)


def find_latencies(
    run: RunDirectory, source: str | None = None, *, own: bool = True
) -> tuple[Path, LatencyProfile] | None:
    """The file and profile of a path or shipped name, or the run's; None where there is none, or ``own`` is False."""
    if source is not None:
        path = places.find_shipped("profiles", source)
        return path, LatencyProfile.load(path)
    return (run.profile, run.read_profile()) if own and run.profile.exists() else None


def inputs_of(*files: Path) -> dict[str, str]:
    """Name to sha256 of the files that a result was made from."""
    return {file.name: sha256_of(file) for file in files}


def timed_elsewhere(plan: Plan, profile: LatencyProfile | None, bench: Benchmark) -> str:
    """In what the plan's latencies (there) and the benchmark (here) differ; empty where it was decoded as they were timed.

    profile : the plan's latencies, if at hand (`read_timed`)
    """
    decoded = bench.provenance or Provenance()
    timed = Origin.of_latencies({} if profile is None else profile.info, plan.runtime or {})
    engine = {"name": OURS, **(decoded.engine or {})}
    return ", ".join(same_origin(timed, Origin.of_latencies({"provenance": decoded}, engine)))


def read_timed(run: RunDirectory, inputs: Mapping[str, str]) -> LatencyProfile | None:
    """The run's profile, if a result with these inputs was made from it."""
    name = run.profile.name
    return run.read_profile() if name in inputs and not changed(run, {name: inputs[name]}, or_gone=True) else None


def read_grown_on(run: RunDirectory, inputs: Mapping[str, str]) -> Accuracies | None:
    """The accuracies among a plan's inputs, of the run or shipped; None where they have changed since."""
    for file in (*places.shipped("calibration").values(), run.trace, run.probe, run.calibration):
        if file.name in inputs and file.is_file() and sha256_of(file) == inputs[file.name]:
            return read_planned(run, str(file))[1]
    return None


def model_and_drafter(plan: Plan, run: RunDirectory | None = None) -> tuple[str | None, str | None]:
    """Paths or hub ids of the model and the drafter that a plan is of, as far as it and its run know them."""
    record = None if run is None else read_grown_on(run, plan.inputs)
    meta = {} if record is None else record.meta
    given = meta["source"] if isinstance(meta.get("source"), Mapping) else {}
    model = str(given.get("model") or Provenance.of(meta).model)
    drafter = str(given.get("drafter") or (plan.drafter or {}).get("id"))
    return model if "/" in model else None, drafter if "/" in drafter else None


def not_a_check(differences: str) -> str:
    """The sentence that a benchmark does not check speedups whose latencies were timed elsewhere (`timed_elsewhere`)."""
    return (
        f"The benchmark (here) was not decoded as the plan's steps were timed (there), but differs in {differences}: its "
        "speedups do not check the predicted ones. Its tokens per step do."
    )
