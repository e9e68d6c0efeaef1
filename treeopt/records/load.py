"""Any file of ours, whatever it holds."""

from __future__ import annotations

from pathlib import Path

from treeopt.errors import InvalidInput
from treeopt.files import shipped, storage
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import Calibration
from treeopt.records.plan import Plan
from treeopt.records.probe import Probe, is_probe
from treeopt.records.profile import LatencyProfile
from treeopt.records.trace import RankTrace

Result = RankTrace | Probe | Calibration | LatencyProfile | Plan | Benchmark
JSON: dict[str, type[Calibration | LatencyProfile | Plan | Benchmark]] = {
    "calibration": Calibration,
    "profile": LatencyProfile,
    "plan": Plan,
    "bench": Benchmark,
}


def load_result(path: str | Path) -> Result:
    """What a file holds that a command wrote, or a shipped file of that name.

    >>> load_result("vicuna-7b-medusa1").num_heads
    5

    Raises InvalidInput where it is no such file.
    """
    known = {name: file for kind in ("calibration", "profiles") for name, file in shipped.shipped(kind).items()}
    file = Path(path)
    if not file.exists():
        file = known.get(str(path), file)
    if file.suffix == ".npz":
        return Probe.load(file) if is_probe(file) else RankTrace.load(file)
    document = storage.load_json(file)
    found = document.get("schema") if isinstance(document, dict) else None
    for kind, record in JSON.items():
        if found == storage.schema(kind):
            return record.load(file)
    schemas = ", ".join(storage.schema(kind) for kind in JSON)
    raise InvalidInput(f'{file} must be a .npz file or have a "schema" of {schemas}, but it has {found!r}.')
