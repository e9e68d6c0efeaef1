"""Exports of trees: what the engines read back is the tree, and what they would misread is refused."""

import json
import re
import shutil
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings

from tests.helpers import engine_readers as readers
from tests.helpers.engine_rows import READERS, export_plan
from tests.helpers.engine_rows import export as export_draft
from tests.helpers.medusa_buffers import medusa_buffers
from treeopt.cli import cli
from treeopt.engines import eagle, neuron, tensorrt_trees
from treeopt.engines.registry import ENGINES, method_of
from treeopt.errors import InvalidInput, TreeoptError
from treeopt.pipeline.export import export_all, export_to
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.calibration import Calibration
from treeopt.records.estimate import Estimate
from treeopt.records.plan import Plan
from treeopt.records.rundir import RunDirectory
from treeopt.trees.published import PUBLISHED_TREES, published_tree
from treeopt.trees.shapes import SHAPES, Limits
from treeopt.trees.tree import Tree

from .conftest import invoke, published_data, trees

exporting = import_module("treeopt.pipeline.export")  # a function of the same name hides it
TREES = [(e.name, m) for e in ENGINES.values() for m in e.methods if m.limits.shape != "chain"]
named = pytest.mark.parametrize(("engine", "method"), TREES, ids=[f"{e}-{m.name}" for e, m in TREES])


def export(tree, engine, method=None, *, num_heads=None, **options):
    return export_draft(engine, tree, method and method.name, num_heads=num_heads or max(tree.depth, 4), **options)


def read_back(engine, method, written):
    return READERS[engine, method.name](written.files)


def allowed(tree: Tree, method) -> bool:
    """Whether a method's row allows a tree."""
    first, limits = sorted(path[0] for path in tree.paths if len(path) == 1), method.limits
    return (
        SHAPES[limits.shape](tree)
        and len(tree) > 1
        and max(tree.ranks) <= (limits.max_rank if limits.max_rank is not None else 999)
        and tree.depth <= (limits.max_depth or 999)
        and (method.refuses is not tensorrt_trees.refuses or first == list(range(len(first))))
        and (method.write is not eagle.write or tree.depth > 1)
    )


def comes_back(tree, engine, method) -> bool:
    """Whether a tree is exported, and read back as it is; else it must be refused."""
    if len(tree) == 1:
        return False
    if not allowed(tree, method):
        with pytest.raises(TreeoptError) as refusal:
            export(tree, engine, method)
        assert engine in str(refusal.value) or "EAGLE-1" in str(refusal.value)
        return False
    written = export(tree, engine, method)
    assert read_back(engine, method, written) == tree
    assert written.command
    return True


class TestContract:
    """The contract of every method of trees."""

    @named
    def test_published_trees(self, engine, method):
        """Every published tree comes back or is refused."""
        exported = 0
        for record in published_data("trees")["trees"]:
            tree = Tree.from_choices([path for path in record["paths"] if path])
            exported += comes_back(tree, engine, method)
        assert exported > 3

    @named
    @given(tree=trees(depth=4, ranks=11, most_nodes=25))
    @settings(max_examples=40, deadline=None)
    def test_any_tree(self, engine, method, tree):
        """Any tree comes back or is refused."""
        comes_back(tree, engine, method)


# Golden values, as the engines' own builders give them


GOLDEN = {  # nodes per depth, leaves, largest tree index, whether leaves come last on every level
    "mc_sim_7b_63": ([10, 28, 23, 2], 42, 32, False),
    "vicuna_7b_stage2": ([10, 23, 23, 7], 42, 34, False),
    "vicuna_7b_stage1_ablation": ([10, 21, 25, 7], 42, 34, False),
    "vicuna_7b_stage1": ([10, 32, 20, 1], 44, 31, False),
    "vicuna_13b_stage2": ([10, 19, 25, 9], 42, 34, False),
    "vicuna_13b_stage1": ([10, 29, 23, 1], 44, 31, False),
    "vicuna_33b_stage2": ([10, 24, 24, 5], 43, 33, False),
    "vicuna_33b_stage1": ([10, 34, 19], 46, 29, False),
    "zephyr_stage2": ([10, 27, 23, 3], 44, 32, False),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_medusa_buffers(name):
    """Medusa's buffers have their golden values."""
    widths, leaves, largest, leaf_last = GOLDEN[name]
    tree = published_tree(name)
    buffers = medusa_buffers([list(choice) for choice in PUBLISHED_TREES[name]])
    assert np.bincount(buffers.position_ids)[1:].tolist() == widths
    assert (buffers.attention_mask.sum(0) == 1).sum() == leaves
    assert buffers.tree_indices.max() == largest
    assert (buffers.attention_mask == tree.mask).all()
    assert neuron.leaf_last(tree) == leaf_last


def test_eagle_tree():
    """EAGLE's tree has its golden values."""
    tree = published_tree("eagle_mc_sim_7b_63")
    assert (len(tree) - 1, tree.widths(), neuron.leaf_last(tree)) == (25, [4, 8, 8, 3, 2], True)
    assert readers.drafting_levels(tree.choices) == [4, 4, 1, 1]


def test_heads_and_layers():
    """TensorRT-LLM gets the numbers of heads and layers."""
    files = export(published_tree(), "tensorrt-llm", num_heads=5, num_layers=2).files
    assert yaml.safe_load(files["llm_api_options.yml"])["speculative_config"]["num_medusa_heads"] == 5
    assert "--num_medusa_heads 5 --num_medusa_layers 2 --max_medusa_token_len 63" in files["commands.sh"]


# What is refused, each beside what an engine makes of it in silence


SEVENTEEN = [[rank] for rank in range(17)]
FIRST, SECOND = [1] + [0] * 8, [1] + [0] * 7 + [1]
TEN_DEEP = [[0], *(FIRST[:depth] for depth in range(1, 9)), FIRST, SECOND, [*FIRST, 0], [*SECOND, 0]]
GAP = [[0], [2], [0, 0], [2, 0]]
# Engines, a tree that they would take for another, and why it is refused.
MISREAD = [
    ("medusa hydra eagle1 neuron-medusa modelopt", [*SEVENTEEN[:11], [0, 0]], "ranks up to 9, but the tree has 10"),
    ("tensorrt-llm", [*SEVENTEEN, [0, 0]], "ranks up to 15, but the tree has 16"),
    ("tensorrt-llm", TEN_DEEP, "up to depth 8, but this one has 10"),
    ("tensorrt-llm", GAP, "without gaps at depth 1.*--for tensorrt-llm"),
    ("hydra neuron-token-tree", [[0], [0, 1]], "without a gap.*--for (hydra|neuron-token-tree)"),
    ("hydra", [[0], [1], [1, 0]], "likeliest siblings.*--for hydra"),
    ("eagle1", [[0], [1], [2]], "depth 2 or more"),
]


@pytest.mark.parametrize(("engines", "choices", "words"), MISREAD)
def test_misread_tree(engines, choices, words):
    """A tree that an engine would take for another is refused."""
    for engine in engines.split():
        with pytest.raises(InvalidInput, match=words):
            export(Tree.from_choices(choices), engine)


@pytest.mark.parametrize("engine", ["medusa", "neuron-medusa", "tensorrt-llm", "modelopt", "tgi", "mlc-llm"])
def test_tree_deeper_than_heads(engine):
    """A tree deeper than the heads is refused."""
    with pytest.raises(InvalidInput, match=r"up to 2 deep, one guess per head, but this one is 3.*max_depth=2"):
        export(Tree.chain(3), engine, num_heads=2, drafter="medusa")


def test_tree_deeper_than_heads_of_run(tmp_path):
    """Heads of a head table count like those of --heads; EAGLE-3's drafts may be deeper than was recorded."""
    (tmp_path / "chain.json").write_text("[[0], [0, 0], [0, 0, 0]]")
    (tmp_path / "heads.csv").write_text("head,rank,accuracy\n1,0,0.6\n1,1,0.1\n2,0,0.4\n2,1,0.1\n")
    export_tree = ("export", "--to", "medusa", "--tree", tmp_path / "chain.json", "--run")
    for name, options, code in (("heads", (), 1), ("eagle3", ("--drafter", "eagle3"), 0)):
        invoke("import", tmp_path / "heads.csv", "--trials", 1000, "--run", tmp_path / name, *options)
        said = invoke(*export_tree, tmp_path / name, code=code).stderr
        assert bool("one guess per head" in said) == bool(code)
    invoke(*export_tree, tmp_path / "heads", "--heads", 3)
    invoke(*export_tree, tmp_path / "no-run")


# Warnings


def test_notes():
    """A note says what the engine cannot do or may get wrong."""

    def notes(tree, engine, method=None, **options):
        return " ".join(export(tree, engine, method, **options).notes)

    assert "at most 1 sequence" in notes(published_tree(), "medusa", batch_size=4)
    full = Tree.from_choices([[r] for r in range(8)] + [[0, r] for r in range(8)] + [[1, r] for r in range(16)])
    assert len(full) == 33
    assert "has no bit for the last node" in notes(full, "tensorrt-llm")
    assert "packed mask" not in notes(published_tree(), "tensorrt-llm")
    assert "PR #15918" in notes(published_tree(), "tensorrt-llm")
    assert "leaf comes before an inner node" in notes(published_tree(), "neuron-token-tree")
    assert "leaf comes" not in notes(published_tree("eagle_mc_sim_7b_63"), "neuron-token-tree")


# Engines, methods and plans


def plan_of(kind="medusa", **options) -> Plan:
    accept = np.outer([0.6, 0.5, 0.4], [1.0, 0.3, 0.2])
    calibration = Calibration((1000 * accept).round().astype(int), np.full(3, 1000), meta={"drafter": {"kind": kind}})
    limits = {name: options.pop(name) for name in ("shape", "max_depth", "max_rank") if name in options}
    return plan_trees(calibration, request=PlanRequest(Limits(16, **limits), **options))


@pytest.mark.parametrize(("engine", "kind"), [("tgi", "medusa"), ("sglang", "eagle3"), ("llama-cpp", "draft-model")])
def test_chain_of_plan_of_trees(engine, kind):
    """An engine of chains gets the best chain of a plan of trees, with a note."""
    plan = plan_of(kind)
    assert plan[1].chosen.draft.kind == "tree"
    written = export_plan(plan, engine)
    assert READERS[engine, method_of(engine, kind).name](written.files) == ((1, None, plan[1].best("chain").depth),)
    assert written.notes[0] == f"{engine} takes chains only: written is the best of the plan's chains."
    tree, chain = plan[1].chosen, plan[1].best("chain")
    assert written.notes[1] == (
        f"At batch size 1 the best draft ({tree.draft.words}) would bring {tree.tokens_per_step:.2f} tokens per step, "
        f"the {chain.draft.words} {chain.tokens_per_step:.2f}."
    )
    with pytest.raises(InvalidInput, match=f"takes chains only.*treeopt search --for {engine}"):
        export(plan[1].tree, engine)


def test_plan_beyond_block():
    """A chain beyond the block that the plan's record names is refused."""
    plan = plan_of("dflash", shape="chain")
    length = plan[1].chosen.depth
    for widest in (None, length, length - 1):
        wider = replace(plan, drafter={**plan.drafter, "widest": widest})
        if widest == length - 1:
            with pytest.raises(InvalidInput, match=f"up to {widest} guesses from this drafter"):
                export_plan(wider, "vllm")
        else:
            assert export_plan(wider, "vllm").files


@pytest.mark.parametrize(("engine", "is_another"), [("vLLM", False), ("sglang", True)])
def test_latencies_of_another_engine(tmp_path, engine, is_another):
    """An export says that steps were timed in another engine, however the name of its own is spelt."""
    plan = replace(plan_of("eagle3", shape="chain"), runtime={"name": "vllm"})
    notes = plan.export(engine, tmp_path).notes
    assert any("step latencies of vllm" in note for note in notes) == is_another


TYPICAL = {"rule": "typical", "temperature": 0.7, "epsilon": 0.09, "delta": 0.3}
SAMPLED = {"rule": "sample-then-match", "temperature": 0.7, "top_p": None, "top_k": None, "seed": 0}


@pytest.mark.parametrize(("engine", "kind"), [("medusa", "medusa"), ("hydra", "hydra")])
def test_typical_acceptance(engine, kind):
    """Medusa's and Hydra's scripts get the options of typical acceptance."""
    plan = replace(plan_of(kind), acceptance=TYPICAL)
    written = export_plan(plan, engine)
    options = dict(re.findall(r"--(temperature|posterior-threshold|posterior-alpha) ([\d.]+)", written.command))
    assert {name: float(value) for name, value in options.items()} == {
        "temperature": 0.7,
        "posterior-threshold": 0.09,
        "posterior-alpha": 0.3,
    }
    assert any("posterior_threshold=0.09, posterior_alpha=0.3" in note for note in written.notes)
    assert "posterior" not in export_plan(plan_of(kind), engine).command


def test_export_all(tmp_path, capsys):
    """A run exports to every engine that takes its plan."""
    run = RunDirectory(tmp_path / "run")

    def exported(plan):
        plan.save(run.plan)
        names = export_all(run, plan)
        assert sorted(names) == (sorted(p.name for p in run.export.iterdir()) if names else [])
        return set(names), capsys.readouterr().err

    trees, said = exported(replace(plan_of(), acceptance=TYPICAL))
    assert trees == {"medusa"}
    assert "none of them decodes by rule='typical" in " ".join(said.split())
    old = run.export / "medusa" / "batch-size-99"
    old.mkdir()
    (old / ".written").write_text("medusa_choices.json")
    (old / "medusa_choices.json").write_text("[]")
    exported(replace(plan_of(), acceptance=TYPICAL))
    assert not old.exists()  # the plan has no tree for that load
    shutil.rmtree(run.export)
    chains, _ = exported(plan_of("draft-model", shape="chain"))
    new = {"transformers", "openvino", "mlc-llm", "mlx-lm", "exllamav3", "onnx-genai"}
    assert {"vllm", "sglang", "tensorrt-llm", "llama-cpp", *new} == chains
    shutil.rmtree(run.export)
    nothing, said = exported(plan_of("nobody's"))
    assert not nothing
    assert "No engine that treeopt knows runs drafters of the kind nobody's" in " ".join(said.split())


def test_refusal_after_earlier_export(tmp_path):
    """A refusal names what an earlier export left."""
    folder = tmp_path / "hydra"
    wide = replace(plan_of("hydra", batch_sizes=(1, 8)), acceptance=SAMPLED)
    with pytest.raises(InvalidInput) as refused:
        export_to(folder, wide, "hydra")
    assert "earlier" not in str(refused.value)
    export_to(folder, plan_of("hydra", batch_sizes=(1, 8)), "hydra")
    with pytest.raises(InvalidInput, match="are of an earlier export"):
        export_to(folder, wide, "hydra")


def test_export_command(tmp_path, monkeypatch):
    """A command exports any tree."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["export", "--to", "neuron-medusa", "--tree", "mc_sim_7b_63"])
    assert result.exit_code == 0, result.output
    assert "--medusa-speculation-length 64 --num-medusa-heads 4" in result.stdout
    written = tmp_path / "treeopt-run" / "export" / "neuron-medusa" / "medusa_tree.json"
    assert json.loads(written.read_text()) == published_tree().choices


@pytest.mark.parametrize("slow", [1, 4])
def test_slower_batch_size(tmp_path, monkeypatch, slow):
    """Engines that take one schedule got nothing, so a run of EAGLE-3 at batch sizes 1 and 4 had no export at all."""
    run, plan = RunDirectory(tmp_path), plan_of("eagle3", shape="chain", batch_sizes=(1, 4))
    plan.save(run.plan)
    depth = {size: 0 if size == slow else plan[size].chosen.depth for size in (1, 4)}
    benches = {1: "of 1", 4: "of 4"}
    monkeypatch.setattr(exporting, "benches_of", lambda *run: benches)
    monkeypatch.setattr(exporting, "slowdown", lambda bench: Estimate(0.8) if bench == benches[slow] else None)
    monkeypatch.setattr(exporting, "doubts", lambda *rest, **options: [])
    assert {"vllm", "sglang", "llama-cpp", "openvino"} <= {*export_all(run, plan)}
    _, written = exporting.export(run, "vllm")
    assert f"Written without speculation, which was measured slower: batch size {slow}." in written.notes
    ranges = READERS["vllm", method_of("vllm", "eagle3").name](files_in(run.export / "vllm"))
    assert {size: of_size(ranges, size) for size in (1, 4)} == depth
    _, written = exporting.export(run, "vllm", anyway=True)
    assert (
        READERS["vllm", method_of("vllm", "eagle3").name](files_in(run.export / "vllm"))[0][2] == plan[1].chosen.depth
    )


def files_in(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if not path.name.startswith(".")}


def of_size(ranges, size):
    return next(length for first, last, length in ranges if first <= size <= (last or size))
