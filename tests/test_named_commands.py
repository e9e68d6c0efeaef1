"""Printed commands have the names of the model and the drafter where the run, its plan, a table or a server knows them."""

from dataclasses import replace

import numpy as np
import pytest

from treeopt.arms.arm import Arm, Arms
from treeopt.arms.choices import decide_arms
from treeopt.arms.tuned import launch_lines
from treeopt.engines.base import About, Names
from treeopt.engines.plans import write_served
from treeopt.engines.registry import method_of
from treeopt.pipeline.export import export
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.calibration import Calibration
from treeopt.records.inputs import inputs_of
from treeopt.records.plan import for_all
from treeopt.records.rundir import RunDirectory
from treeopt.report.page import _deployment
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

KNOWN = Names("org/model", "/heads/of mine")


def run_of(folder, kind="medusa", **meta) -> RunDirectory:
    """A run with a calibration and a plan of it."""
    counts = (1000 * np.outer([0.6, 0.5], [1.0, 0.3])).round().astype(int)
    run = RunDirectory(folder)
    Calibration(counts, np.full(2, 1000), meta={"drafter": {"kind": kind}, **meta}).save(run.calibration)
    plan = plan_trees(Calibration.load(run.calibration), request=PlanRequest(Limits(8)))
    replace(plan, inputs=inputs_of(run.calibration)).save(run.plan)
    return run


def test_names_of_a_run(tmp_path):
    """A run of a session knows both paths, and so do the export, its files and the report."""
    run = run_of(tmp_path, "eagle3", source={"model": "/models/target", "drafter": "/models/heads"})
    paths, written = export(run, "vllm")
    assert written.command.startswith("vllm serve /models/target --speculative-config ")
    assert '"model": "/models/heads"' in written.command
    assert not any("MODEL" in path.read_text() or "DRAFTER" in path.read_text() for path in paths)
    assert "/models/target" in _deployment(run, run.read_plan(), NoBenches(), [])[1]


class NoBenches:
    def benches(self):
        return {}


def test_names_of_a_plan(tmp_path):
    """A plan of a published calibration knows hub ids."""
    drafter = {"kind": "medusa", "id": "org/heads"}
    run = run_of(tmp_path, drafter=drafter, provenance={"model": "org/model"})
    written = export(run, "tgi")[1]
    assert written.command.startswith("text-generation-launcher --model-id HEADS --speculate "), "convert makes HEADS"
    assert "treeopt convert org/heads --to medusa --output HEADS" in " ".join(written.notes)
    assert "--tokenizer_dir org/model" in export(run, "tensorrt-llm")[1].command
    assert "--model-path org/heads" in export(run, "medusa")[1].command


@pytest.mark.parametrize("meta", [{}, {"provenance": {"model": "demo"}, "source": {"drafter": "hydra"}}])
def test_names_that_are_not_known(tmp_path, meta):
    """The demo's names are no paths, and stay places to fill in."""
    assert "--tokenizer_dir MODEL" in export(run_of(tmp_path, **meta), "tensorrt-llm")[1].command


def test_names_that_shells_do_not_read():
    """A name that a shell or a file would not read as it is stays a place; so does a file in another format."""
    written = write_served(
        method_of("llama-cpp", "draft-model"), for_all(Tree.chain(2)), About(num_heads=2, names=KNOWN)
    )
    assert "--model MODEL.gguf" in written.command
    assert "--spec-draft-model DRAFTER.gguf" in written.command
    assert (
        Names("a.gguf").put_into("--model MODEL.gguf --model_type MODEL_TYPE")
        == "--model a.gguf --model_type MODEL_TYPE"
    )


def test_names_of_a_table():
    """A table's model stands in the launch line, with speculation and without."""
    arms = [
        Arm(model="org/model", drafter=drafter, k=k, tokens_per_s=s)
        for drafter, k, s in (("none", 0, 9.0), ("eagle3", 2, 20.0))
    ]
    (line,), _ = launch_lines(decide_arms(Arms(arms=tuple(arms))), "vllm")
    assert "\nvllm serve org/model --speculative-config" in line
    (line,), _ = launch_lines(decide_arms(Arms(arms=tuple(arms[:1]))), "vllm")
    assert line.endswith("\nvllm serve org/model")


def test_files_in_commands(tmp_path):
    """A printed command finds the files that it names from any folder; the file of commands lies beside them."""
    written = export(run_of(tmp_path / "my run"), "neuron-medusa")[1]
    folder = tmp_path / "my run" / "export" / "neuron-medusa"
    assert f"--medusa-tree-json '{folder}/medusa_tree.json'" in written.command
    assert "--medusa-tree-json medusa_tree.json" in (folder / "commands.sh").read_text()
