"""The run directory: where commands find what earlier ones wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from treeopt.calibration import Calibration
from treeopt.errors import InvalidInput
from treeopt.latency import LatencyProfile
from treeopt.plan import Plan
from treeopt.storage import sha256_of
from treeopt.trace import RankTrace

T = TypeVar("T")


class RunDirectory:
    """The files of one run, under fixed names; each is made by the command named beside it.

    >>> RunDirectory("my-run").trace.name
    'trace.npz'
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.trace = self.path / "trace.npz"  # calibrate
        self.calibration = self.path / "calibration.json"  # calibrate
        self.profile = self.path / "profile.json"  # profile
        self.plan = self.path / "plan.json"  # search
        self.bench = self.path / "bench.json"  # bench
        self.export = self.path / "export"  # export

    def read_trace(self) -> RankTrace:
        return _read(self.trace, RankTrace.load, "treeopt calibrate")

    def read_calibration(self) -> Calibration:
        return _read(self.calibration, Calibration.load, "treeopt calibrate")

    def read_profile(self) -> LatencyProfile:
        return _read(self.profile, LatencyProfile.load, "treeopt profile")

    def read_plan(self) -> Plan:
        return _read(self.plan, Plan.load, "treeopt search")


def digests(*files: Path) -> dict[str, str]:
    """Name to sha256 of the files that a result was made from."""
    return {file.name: sha256_of(file) for file in files}


def _read(path: Path, load: Callable[[Path], T], command: str) -> T:
    if not path.exists():
        raise InvalidInput(f"{path} does not exist yet. Make it with: {command}")
    return load(path)
