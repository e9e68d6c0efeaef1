"""Trees from other tools' files: read, and repaired where one repair is obvious."""

import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from treeopt.engines import eagle, neuron
from treeopt.engines.base import Request
from treeopt.engines.plans import export_request
from treeopt.engines.reading import diagnose, repair
from treeopt.engines.registry import ENGINES
from treeopt.errors import InvalidInput
from treeopt.pipeline import read_tree
from treeopt.records.figure import Figure
from treeopt.records.plan import Plan, PlanEntry
from treeopt.trees.published import PUBLISHED_TREES, published_tree
from treeopt.trees.tree import Tree

from .conftest import invoke, trees

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
        'parameters: { key: "decoding_mode"  value: { string_value: "medusa" } }\n'
        'parameters: { key: "medusa_choices"  value: { string_value: "{0},{1},{0, 0},{0, 1}" } }\n',
        r"fill_template.py -i config.pbtxt 'decoding_mode:medusa,medusa_choices:{0}\,{1}\,{0\, 0}\,{0\, 1}'",
        "{0},{1},{0, 0},{0, 1}\n",
        '{"0": ["1", "2"], "1": ["3", "4"]}',
        "[(0,), (1,), (0, 0), (0, 1)]",
        '"[(0,), (1,), (0, 0), (0, 1)]"',
        '{"method": "eagle", "speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1)]"}',
        '{"medusa_config": {"medusa_num_heads": 4, "medusa_choices": [[0], [1], [0, 0], [0, 1]]}}',
        "engine_args:\n  medusa_num_heads: 4\n  medusa_choices: [[0], [1], [0, 0], [0, 1]]\n",
        '{"schema": "treeopt.tree/1", "medusa_choices": [[0], [1], [0, 0], [0, 1]]}',
    ],
)
def test_every_format_gives_the_same_tree_and_nothing_to_repair(text):
    assert diagnose(text) == (SMALL, ())


@pytest.mark.parametrize("engine", [e.name for e in ENGINES.values()])
def test_what_export_writes_is_read_without_a_complaint(engine):
    for method in ENGINES[engine].methods:
        if method.shape in ("chain", "copied"):
            continue
        tree = Tree.dense([2, 2])
        written = export_request(Request(tree=tree, num_heads=4), engine, method=method.name)
        for name, text in written.files.items():
            if re.search(r"--[\w-]*(-json|_params) ", text):
                continue  # a command that names the tree's file
            assert diagnose(text) == (tree, ()), name


@pytest.mark.parametrize("name", PUBLISHED_TREES)
def test_published_lists_keep_their_trees_and_only_the_order_is_said(name):
    tree, repaired = diagnose(json.dumps(PUBLISHED_TREES[name].choices))
    assert tree == published_tree(name)
    assert len(repaired) <= 1
    assert all("in another order" in text for text in repaired)


@given(trees(), st.integers(0, 2**32))
def test_order_and_duplicates_are_repaired_to_the_same_tree(tree, seed):
    assume(len(tree) > 1)
    rng = random.Random(seed)
    listed = tree.choices + rng.choices(tree.choices, k=3)
    rng.shuffle(listed)
    found, repaired = repair(listed)
    assert found == tree
    assert any("twice" in text for text in repaired)


@given(trees())
def test_a_list_of_leaves_gets_its_parents(tree):
    leaves = [list(path) for path in tree.paths[1:] if path not in {other[:-1] for other in tree.paths}]
    assume(any(len(leaf) > 1 for leaf in leaves))
    found, repaired = repair(leaves)
    assert found == tree
    if len(leaves) < len(tree) - 1:
        assert any("has only leaves" in text for text in repaired)


PBTXT = 'parameters: { key: "medusa_choices" value: { string_value: "[[0], [0, 0]]" } }'
# What a text means, and words of what was repaired.
MEANT = {
    "[[0,0,0,0],[0,1,0],[1,0],[1,1]]": (
        [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0]],
        "has only leaves",
    ),
    "{0, 0, 0}, {0, 1}": ([[0], [0, 0], [0, 1], [0, 0, 0]], "has only leaves"),
    "[[0], [0], [0, 0]]": ([[0], [0, 0]], "twice are kept once: [0]."),
    "[[], [0], [0, 0]]": ([[0], [0, 0]], "root was listed"),
    "[[0], (0, 0)]": ([[0], [0, 0]], "mixed"),
    "{0},{0, 0": ([[0], [0, 0]], "not closed"),
    "{{0},{0, 0}}": ([[0], [0, 0]], "around the whole list"),
    PBTXT: ([[0], [0, 0]], ""),
    '{"0": ["1"], "7": ["8"]}': ([[0]], "2 nodes that the root does not reach are left out, as Neuron silently does."),
}


@pytest.mark.parametrize("text", MEANT)
def test_what_is_meant_is_repaired_and_that_is_said(text):
    choices, words = MEANT[text]
    tree, repaired = diagnose(text)
    assert tree.choices == choices
    assert words in " ".join(repaired)


def test_children_of_a_token_tree_may_fall():
    assert neuron.token_tree({"0": ["2", "1"]}).choices == [[0], [1]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[0], [0, 0], [1, 0, 0]]", r"\[1, 0, 0\] lacks \[1, 0\] where others have theirs"),
        ("[[0], [-1]]", "ranks 0, 1"),
        ("[[0.5]]", r"there is \[0.5\]"),
        ("[[true]]", r"there is \[True\]"),
        ("[[[0]]]", r"there is \[\[0\]\]"),
        ("{0.5}", "ranks 0, 1"),
        ("a = [[0]]\nb = [[0], [1]]\n", "keep one"),
        ("prose", "must hold a tree"),
        ("", "must hold a tree"),
        # Neuron refuses these token trees too.
        ('{"0": ["1", "3"], "1": ["2"]}', "numbered by breadth"),  # depth first
        ('{"0": ["1", "3"]}', "numbered by breadth"),  # a gap
        ('{"0": []}', "at least one child"),
        ('{"0": ["1", "2"], "1": ["3"], "2": ["3"]}', "two"),
        ('{"0": ["1"], "1": ["0"]}', "two"),  # a cycle
        ('{"1": ["2"]}', "at least one child"),
    ],
)
def test_what_has_no_obvious_repair_is_refused(text, words):
    with pytest.raises(InvalidInput, match=words):
        diagnose(text)


def test_eagle_counts_parents_where_it_should_place_them():
    """[1, 0] is the first node of its depth that expands, so it is drafted below [0]; the text stays right."""
    tree = Tree.from_choices([[0], [1], [0, 0], [1, 0], [1, 0, 0]])
    assert eagle.misdrafted(tree.choices) == [(1, 0)]
    written = export_request(Request(tree=tree, num_heads=4), "eagle1")
    assert any("drafts below [1, 0] from another node" in note for note in written.notes)
    assert eagle.misdrafted(published_tree("eagle_mc_sim_7b_63").choices) == []


# The command


def test_the_tree_is_written_so_that_other_commands_read_it(tmp_path):
    listed, output = tmp_path / "theirs.py", tmp_path / "tree.json"
    listed.write_text("theirs = [(0,), (0, 0), (1,), (1,)]\n")
    result = invoke("import-tree", listed, "--output", output)
    assert result.stdout.strip() == str(output)
    assert "come" not in result.stdout
    assert "kept once: [1]" in result.stderr
    document = json.loads(output.read_text())
    assert document["schema"] == "treeopt.tree/1"
    assert read_tree(output).choices == document["medusa_choices"] == [[0], [1], [0, 0]]
    assert "[0, 0]" in invoke("show", "--tree", output).stdout


def test_without_output_the_list_is_printed_and_with_json_the_document(tmp_path):
    listed = tmp_path / "theirs.txt"
    listed.write_text("{0},{0, 0}")
    assert json.loads(invoke("import-tree", listed).stdout) == [[0], [0, 0]]
    document = json.loads(invoke("import-tree", listed, "--json").stdout)
    assert document["schema"] == "treeopt.tree/1"
    assert (document["size"], document["depth"], document["repaired"]) == (3, 2, [])
    assert list(tmp_path.iterdir()) == [listed]


def plan_of(*sizes):
    figures = [Figure(draft=Tree.chain(n), batch_size=n, tokens_per_step=1.0) for n in sizes]
    return Plan(entries=tuple(PlanEntry(batch_size=one.batch_size, chosen=one) for one in figures))


def test_of_a_plan_the_tree_of_a_batch_size_is_taken(tmp_path):
    path = tmp_path / "plan.json"
    plan_of(1, 2).save(path)
    assert json.loads(invoke("import-tree", path, "--batch-size", 2).stdout) == [[0], [0, 0]]
    assert "--batch-size" in invoke("import-tree", path, code=1).stderr
    path.write_text("[[0]]")
    assert "is no plan" in invoke("import-tree", path, "--batch-size", 2, code=1).stderr


def test_nothing_is_written_where_the_file_is_refused(tmp_path):
    listed, output = tmp_path / "bad.json", tmp_path / "tree.json"
    listed.write_text("[[0], [0, 0], [1, 0, 0]]")
    said = invoke("import-tree", listed, "--output", output, code=1).stderr
    assert str(listed) in said
    assert "lacks [1, 0]" in said
    assert not output.exists()
    assert "does not exist" in invoke("import-tree", tmp_path / "none", code=1).stderr


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("command", ["import-tree tree.json --output tree.json", "export --to medusa --tree {written} --run ."])
def test_input_is_not_replaced(tmp_path, monkeypatch, command, linked):
    """No command writes over a file that it was given to read, by whatever path."""
    monkeypatch.chdir(tmp_path)
    place = Path("export/medusa/medusa_choices.json")
    place.parent.mkdir(parents=True)
    for file in (place, Path("tree.json")):
        file.write_text("[[0],[1]]")
    Path("link.json").symlink_to(place)
    said = invoke(*command.format(written="link.json" if linked else place).split(), code=1).stderr
    assert "is an input of this command" in said
    assert place.read_text() == Path("tree.json").read_text() == "[[0],[1]]"


def test_score_and_its_like_refuse_what_import_tree_repairs(tmp_path):
    """A tree that is to be measured is taken as it stands, or not at all."""
    for i, text in enumerate(["[[0], [0]]", "[[0, 0]]", "[[], [0]]", "{0},{0, 0"]):
        path = tmp_path / f"{i}.txt"
        path.write_text(text)
        with pytest.raises(InvalidInput):
            read_tree(path)
        assert json.loads(invoke("import-tree", path).stdout)
