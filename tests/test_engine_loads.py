"""Plans for several batch sizes on their whole method into an engine: search --for, then export --to."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.engine_rows import READERS, export_plan
from tests.helpers.steps import search
from treeopt.engines.plans import batch_sizes_to_export
from treeopt.engines.registry import ENGINES, method_of
from treeopt.errors import InvalidInput
from treeopt.pipeline.export import export, export_to
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.calibration import Calibration
from treeopt.records.plan import BatchRange
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

SIZES = (1, 4, 64)
CASES = [
    (name, method)
    for name, engine in ENGINES.items()
    for method in engine.methods
    if method.limits.dynamic is None and not method.limits.copies
]


def named(cases):
    return pytest.mark.parametrize(("engine", "method"), cases, ids=[f"{name}-{method.name}" for name, method in cases])


def measured(drafter: str) -> Calibration:
    accept = np.outer([0.6, 0.5, 0.4, 0.3], [1.0, 0.3, 0.2, 0.1])
    meta = {"drafter": {"kind": drafter, "id": drafter}}
    return Calibration((accept * 10**6).round().astype(int), np.full(4, 10**6), meta=meta)


def timed(sizes=SIZES) -> LatencyProfile:
    """Chains of 3 pay with one sequence, of 1 with 4, and none with 64."""
    cost = {1: 0.5, 4: 2.5, 64: 20.0}  # ms of a row more
    plain = tuple(StepTiming(size, 128, 1, 0, (10.0,) * 3) for size in sizes)
    steps = [
        StepTiming(size, 128, rows, depth, (10 + cost[size] * (rows - 1),) * 3)
        for size in sizes
        for depth in (1, 2, 3, 4)
        for rows in (depth + 1, 8, 16)
    ]
    return LatencyProfile(tuple(steps), plain)


@pytest.fixture
def run(tmp_path):
    found = RunDirectory(tmp_path / "run")
    timed().save(found.profile)
    return found


def what_is_read(engine, method, folder: Path):
    files = {file.name: file.read_text() for file in folder.iterdir() if file.name != ".written"}
    return READERS[engine, method.name](files)


@named(CASES)
def test_search_then_export(run, engine, method):
    """The export holds the plan that `search --for` made."""
    measured(method.drafters[0]).save(run.calibration)
    plan = search(run, budget=16, engine=engine, method=method.name)
    sizes = [entry.batch_size for entry in plan.entries]
    assert sizes == ([1] if method.max_batch_size == 1 else list(SIZES))
    assert plan.entries[0].chosen.size > 1
    paths, written = export(run, engine)
    assert paths
    assert not any("this plan is for batch size" in note for note in written.notes)
    for folder in {path.parent for path in paths}:
        read = what_is_read(engine, method, folder)
        if folder.name.startswith("batch-size-"):
            entry = plan.entry(int(folder.name.removeprefix("batch-size-")))
            assert read == (entry.tree if isinstance(read, Tree) else ((1, None, entry.chosen.depth),))
        elif isinstance(read, Tree):
            assert [read] == [entry.tree for entry in plan.entries]
        else:
            found = [next(length for first, last, length in read if first <= size <= (last or size)) for size in sizes]
            assert found == [entry.chosen.depth for entry in plan.entries]


@named([row for row in CASES if row[1].max_batch_size == 1])
def test_batch_size_beyond_engine(run, engine, method):
    """A batch size that an engine does not decode is refused."""
    measured(method.drafters[0]).save(run.calibration)
    for asked in ([1, 4], {1: 0.5, 64: 0.5}):
        with pytest.raises(InvalidInput, match="at most 1 sequence at once, but got batch_size"):
            search(run, batch_sizes=asked, engine=engine, method=method.name)
    timed((4, 64)).save(run.profile)
    with pytest.raises(InvalidInput, match="treeopt profile --batch-size 1"):
        search(run, engine=engine, method=method.name)


class TestPlansForEveryEngine:
    """Plans that were made without --for have batch sizes that some engines do not decode."""

    def plan(self, **options):
        request = PlanRequest(Limits(16, shape="chain"), batch_sizes=SIZES, **options)
        return plan_trees(measured("draft-model"), timed(), request)

    def test_shared_schedule(self, tmp_path):
        """A shared schedule does not hide the plan of batch size 1."""
        plan = self.plan()
        plan = replace(plan, schedule=(BatchRange(first=1, last=None, entry=2),))
        assert (plan.entries[0].chosen.depth, plan.entries[2].chosen.depth) == (3, 0)
        method = method_of("transformers", "draft-model")
        assert batch_sizes_to_export(plan, method) == [1]
        assert READERS["transformers", method.name](export_plan(plan, "transformers").files) == ((1, None, 3),)
        _, written = export_to(tmp_path, plan, "transformers")
        assert what_is_read("transformers", method, tmp_path / "batch-size-1") == ((1, None, 3),)
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["batch-size-1"]
        assert any("not for 4, 64." in note for note in written.notes)

    def test_one_chain_for_all(self, tmp_path):
        """A plan of one chain for all batch sizes gets no warning; a plan for a mix gets one."""
        plan = self.plan()
        entries = tuple(replace(plan.entries[0], batch_size=size) for size in SIZES)
        plan = replace(plan, entries=entries, schedule=(BatchRange(first=1, last=None, entry=0),))
        _, written = export_to(tmp_path, plan, "transformers")
        assert not any("this plan is for" in note for note in written.notes)
        mix = replace(self.plan(), entries=entries[1:], schedule=(BatchRange(first=1, last=None, entry=0),))
        assert any("this plan is for batch size 64" in note for note in export_plan(mix, "transformers").notes)

    def test_commands_name_folders(self, tmp_path):
        """Commands of several batch sizes name their folders."""
        folder = tmp_path / "my $(x)\nrm y"
        _, written = export_to(folder, self.plan(), "openvino")
        lines = written.command.splitlines()
        assert len(lines) == 2 * len(SIZES)
        for line, size in zip(lines[::2], SIZES, strict=True):
            assert line.startswith(f"# Batch size {size}, in ")
            assert line.rstrip("'").endswith(f"/batch-size-{size}")
