"""Trees from other tools' files are read as they stand, or refused."""

import json
import re

import pytest

from treeopt.arms.arm import Arms
from treeopt.engines import neuron
from treeopt.engines.reading import tree_in
from treeopt.engines.registry import ENGINES
from treeopt.errors import InvalidInput
from treeopt.pipeline.importing import import_files
from treeopt.pipeline.trees import read_tree
from treeopt.records.calibration import Calibration
from treeopt.records.figure import Figure
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.rundir import RunDirectory
from treeopt.trees.tree import Tree

from .conftest import invoke
from .helpers.engine_files import rows_of
from .helpers.engine_rows import export
from .test_merge import calibration
from .test_merge import shard as shard_of

SMALL = Tree.from_choices([[0], [1], [0, 0], [0, 1]])


@pytest.mark.parametrize(
    "text",
    [
        "[[0], [1], [0, 0], [0, 1]]",
        "mine = [(0,), (1,), (0, 0), (0, 1)]\n",
        "- [0]\n- [1]\n- [0, 0]\n- [0, 1]\n",
        "speculative_config:\n  decoding_type: Medusa\n  max_draft_len: 4\n  medusa_choices: [[0], [1], [0, 0], [0, 1]]\n",
        'python examples/run.py --medusa_choices "[[0], [1], [0, 0], [0, 1]]" --temperature 1.0',
        'python -m eagle.evaluation.gen_ea_answer_vicuna --tree-choices "[[0], [1], [0, 0], [0, 1]]"',
        '{"0": ["1", "2"], "1": ["3", "4"]}',
        '{"roots": [[0], [1, 2]], "branches": [[2], [2, 0]], "Successors": [[1, 2], [3, 4], [], [], []], "size": 5}',
        "spec = {'model': MODEL, 'speculative_token_tree': str([(0,), (1,), (0, 0), (0, 1)]), 'num_speculative_tokens': 4}",
        "def main():\n    serve(model, config=dict(speculative_token_tree='[(0,), (1,), (0, 0), (0, 1)]'))\n",
        "mine = [[0], [1], [0, 0], [0, 1]]\nconfig = {'medusa_choices': mine}\nprint(mine)\n",
        "[(0,), (1,), (0, 0), (0, 1)]",
        '"[(0,), (1,), (0, 0), (0, 1)]"',
        '{"method": "eagle", "speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1)]"}',
        '{"medusa_config": {"medusa_num_heads": 4, "medusa_choices": [[0], [1], [0, 0], [0, 1]]}}',
        "engine_args:\n  medusa_num_heads: 4\n  medusa_choices: [[0], [1], [0, 0], [0, 1]]\n",
        '{"schema": "treeopt.tree/1", "medusa_choices": [[0], [1], [0, 0], [0, 1]]}',
    ],
)
def test_same_tree(text):
    """Every format gives the same tree."""
    assert tree_in(text) == SMALL


@pytest.mark.parametrize("engine", [e.name for e in ENGINES.values()])
def test_read_exports(engine):
    """Files of an export of a tree are read."""
    for method in ENGINES[engine].methods:
        if method.limits.shape == "chain":
            continue
        tree = Tree.dense([2, 2])
        written = export(engine, tree, method.name)
        for name, text in written.files.items():
            if re.search(r"--[\w-]*(-json|_params) ", text):
                continue  # a command that names the tree's file
            assert tree_in(text) == tree, name


# Texts that are not read as a tree, and words of the refusal.
REFUSED = {
    "mask": ("[[1,0,0,0],[1,1,0,0],[1,0,1,0],[1,1,0,1]]", "an attention mask of 4 rows"),
    "mask in Python": ("mask = [[1.0, 0.0], [1.0, 1.0]]", "an attention mask of 2 rows"),
    "mask of a batch": ('{"tree_mask": [[[[true, false], [true, true]]]]}', "an attention mask of 2 rows"),
    "mask that is added": ("[[0, -1e9], [0, 0]]", "an attention mask of 2 rows"),
    "widths": ("medusa_choices = [1, 7, 6]", "widths of a dense tree (50 rows or 51 rows)"),
    "widths by depth": ("[4, 2]", "widths of a dense tree (13 rows)"),
    "adjacency list": ("[[1, 2], [3, 4], [5], [], [], []]", "got []"),
    "edges": ("[(0, 1), (0, 2), (1, 3)]", "(0, 1) lacks (0,)"),
    "leaves": ("[[0,0,0,0],[0,1,0],[1,0],[1,1]]", "(0, 0, 0, 0) lacks (0, 0, 0)"),
    "parents": ("[-1, 0, 0, 1]", "list of ranks"),
    "root": ("[[], [0], [0, 0]]", "the root is never listed"),
    "nodes that nothing reaches": ('{"0": ["1"], "7": ["8"]}', "does not reach 2"),
    "parent missing": ("[[0], [0, 0], [1, 0, 0]]", "(1, 0, 0) lacks (1, 0)"),
    "negative rank": ("[[0], [-1]]", "ranks 0, 1"),
    "rank that is no whole number": ("[[0.5]]", "got [0.5]"),
    "rank that is true": ("[[true]]", "got [True]"),
    "list of lists of lists": ("[[[0]]]", "got [[0]]"),
    "two lists": ("a = [[0]]\nb = [[0], [1]]\n", "has 2, a, b: say which"),
    "two lists by one name": ("a = [[0]]\na = [[0], [1]]\n", "has 2, a, a (line 2): say which"),
    "two configurations": (
        "C = {'x': {'speculative_token_tree': '[(0,)]'}, 'y': {'speculative_token_tree': '[(0,), (1,)]'}}",
        "has 2, C.x, C.y: say which",
    ),
    "prose": ("prose", "must hold a tree"),
    "nothing": ("", "must hold a tree"),
    # Neuron refuses these token trees too.
    "children by depth": ('{"0": ["1", "3"], "1": ["2"]}', "numbered by breadth"),
    "children with a gap": ('{"0": ["1", "3"]}', "numbered by breadth"),
    "root without children": ('{"0": []}', "at least one child"),
    "no root": ('{"1": ["2"]}', "at least one child"),
    "two parents": ('{"0": ["1", "2"], "1": ["3"], "2": ["3"]}', "two"),
    "cycle": ('{"0": ["1"], "1": ["0"]}', "two"),
    "choices twice": ("[[0], [0], [0, 0]]", "listed once"),
    "two keys": ('{"medusa_choices": [[0]], "a": {"hydra_choices": [[0], [1]]}}', "has 2, medusa_choices, a: say"),
    "two flags": ("a --medusa-choices '[[0]]'\nb --medusa-choices '[[0], [1]]'", "has 2, line 1, line 2: say"),
    "two lengths": (
        "sglang --speculative-num-steps 3\nsglang --speculative-num-steps 4",
        "has 2, line 1.speculative_num_steps, line 2.speculative_num_steps: say",
    ),
    "flags of a dynamic tree": (
        "sglang --speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16",
        "has 2, line 1.speculative_num_steps, line 1.speculative_num_draft_tokens: say",
    ),
    "comprehension alone": ("large = [[rank] for rank in range(4)]", "large, is made by code, which is not run"),
    **{
        f"code {code}": (f"small = [[0], [1]]\nlarge = {code}", "has 2, small, large (made by code, which is not run)")
        for code in (
            "small + [[2]]",
            "[*small, [2]]",
            "[path + [0] for path in small]",
            "small[:1]",
            "wider(small)",
            "small.copy()",
        )
    },
    **{
        f"code {code}": (f"small = [[0], [1]]\n{code}", "small, is made by code, which is not run")
        for code in (
            "small += [[2]]",
            "small.append([2])",
            "for rank in (2, 3):\n    small.append([rank])",
            "del small[0]",
        )
    },
}


@rows_of(REFUSED)
def test_refused_list(name):
    """Nothing is invented: a mask of 16 rows became a tree of 905 nodes."""
    text, words = REFUSED[name]
    with pytest.raises(InvalidInput, match=re.escape(words)):
        tree_in(text)


@pytest.mark.parametrize(
    "text", ["[[0], (0, 0)]", "heads = 2\nmine = [[0], [0, 0]]\nprint(heads)", "speculative-num-draft-tokens: 3"]
)
def test_other_notation(text):
    """A list is read in other notations."""
    assert tree_in(text) == Tree.chain(2)


def test_falling_children():
    """Numbers of children in a token tree may fall."""
    assert neuron.token_tree({"0": ["2", "1"]}).choices == [[0], [1]]


# The command


def test_output_is_read(tmp_path):
    """Other commands read the tree that is written."""
    listed, output = tmp_path / "theirs.py", tmp_path / "tree.json"
    listed.write_text("theirs = [(0,), (0, 0), (1,)]\n")
    result = invoke("import", listed, "--output", output)
    assert result.stdout.strip() == str(output)
    document = json.loads(output.read_text())
    assert document["schema"] == "treeopt.tree/1"
    assert read_tree(output).choices == document["medusa_choices"] == [[0], [1], [0, 0]]
    assert "[0, 0]" in invoke("show", output).stdout


def test_printed(tmp_path):
    """Without --output the list is printed, and with --json the document."""
    listed = tmp_path / "theirs.txt"
    listed.write_text("- [0]\n- [0, 0]\n")
    assert json.loads(invoke("import", listed).stdout) == [[0], [0, 0]]
    document = json.loads(invoke("import", listed, "--json").stdout)
    assert document["schema"] == "treeopt.tree/1"
    assert (document["rows"], document["depth"]) == (3, 2)
    assert list(tmp_path.iterdir()) == [listed]


def plan_of(*sizes):
    figures = [Figure(draft=Tree.chain(n), batch_size=n, tokens_per_step=1.0) for n in sizes]
    return Plan(entries=tuple(PlanEntry(**vars(one)) for one in figures))


def test_tree_of_plan(tmp_path):
    """The tree of a batch size is read from a plan."""
    path = tmp_path / "plan.json"
    plan_of(1, 2).save(path)
    assert json.loads(invoke("import", f"{path}:2").stdout) == [[0], [0, 0]]
    for name in ("", ":x"):
        said = invoke("import", f"{path}{name}", code=1).stderr
        assert said.startswith(f"treeopt: {path} has trees for batch sizes 1, 2: name one, as in {path}:1.")
    path.write_text("[[0]]")
    assert "must hold one tree" in invoke("import", f"{path}:2", code=1).stderr


@pytest.mark.parametrize("name", ["small", "trees.small"])
def test_tree_by_name(tmp_path, name):
    """Of several trees that which is named is read, by import and where a tree is an option."""
    file = tmp_path / "choices.py"
    file.write_text("trees = {'small': [(0,), (0, 0)], 'large': [(0,), (1,)]}\nsum = trees['small'] + [(1,)]\n")
    assert json.loads(invoke("import", f"{file}:{name}").stdout) == [[0], [0, 0]]
    assert json.loads(invoke("show", f"{file}:{name}", "--json").stdout)["rows"] == 3
    for other, words in ((f"{file}:none", "trees.small, trees.large, sum"), (f"{file}:sum", "made by code")):
        assert words in invoke("import", other, code=1).stderr


def test_refused_file_writes_nothing(tmp_path):
    """Nothing is written if the file is refused."""
    listed, output = tmp_path / "bad.json", tmp_path / "tree.json"
    listed.write_text("[[0], [0, 0], [1, 0, 0]]")
    said = invoke("import", listed, "--output", output, code=1).stderr
    assert str(listed) in said
    assert "lacks (1, 0)" in said
    assert not output.exists()
    for files in ([tmp_path / "none"], [tmp_path / "none", listed]):
        assert f"{tmp_path / 'none'} does not exist" in invoke("import", *files, code=1).stderr


@pytest.mark.parametrize("name", ["choices.py:mine", "plan.json:4", "table.csv", "counts.csv", "part"])
def test_import_by_content(tmp_path, name):
    """A tree, settings, accuracies and shards are told apart by what they are."""
    run, path = RunDirectory(tmp_path / "run"), tmp_path / name
    (tmp_path / "choices.py").write_text("mine = [(0,), (1,), (0, 0), (0, 1)]\nother = [[0]]\n")
    entries = (PlanEntry(draft=SMALL, batch_size=n, tokens_per_step=2.0) for n in (1, 4))
    Plan(entries=tuple(entries)).save(tmp_path / "plan.json")
    (tmp_path / "table.csv").write_text("k,concurrency,tokens per second\n0,1,50\n3,1,80\n")
    (tmp_path / "counts.csv").write_text("head,rank,hits,trials\n0,0,5,9\n")
    whole, other = RunDirectory(tmp_path / "part"), RunDirectory(tmp_path / "part-2")
    for number, shard in enumerate((whole, other), 1):
        blocks, hashes, _ = calibration(1, 2)
        shard_of(blocks, hashes, f"{number}/2").save(shard.trace)
    result = import_files(run, [path, other.path] if name == "part" else [path])
    content = result.content
    if isinstance(content, Tree):
        assert content == SMALL
    else:
        assert [file.name for file in run.path.iterdir() if file.suffix in (".json", ".npz")]
    kinds = {"table.csv": Arms, "counts.csv": Calibration, "part": Calibration}
    assert isinstance(content, kinds.get(name, Tree))


def test_import_nothing_known(tmp_path, run):
    """What is no tree and no table is refused as both."""
    (tmp_path / "mask.json").write_text("[[1,0],[1,1]]")
    with pytest.raises(
        InvalidInput, match=r"tokens per second.* As a tree it is refused too: .*an attention mask of 2 rows"
    ):
        import_files(run, [tmp_path / "mask.json"])
