"""Exports: what the engines parse back is the tree, and what they would misread is refused."""

import ast
import json

import pytest
import yaml
from hypothesis import given

from treeopt.errors import InvalidInput, Unsupported
from treeopt.export import ENGINES, export_entry
from treeopt.library import published_tree
from treeopt.plan import PlanEntry
from treeopt.tree import Tree

from .conftest import trees


def entry_of(tree: Tree, batch_size: int = 1) -> PlanEntry:
    return PlanEntry(batch_size=batch_size, context_tokens=None, size=len(tree), depth=tree.depth,
                     medusa_choices=tree.choices, tokens_per_step=1.0, step_ms=None, tokens_per_s=None,
                     speedup=None)  # fmt: skip


def medusa_buffers(choices, top_k=10):
    """The golden values that FasterDecoding/Medusa's buffers have, from its published definition."""
    paths = sorted(choices, key=lambda p: (len(p), p))
    tree_indices = [0] + [p[-1] + top_k * (len(p) - 1) + 1 for p in paths]
    leaves = [p for p in paths if not any(q[:-1] == p for q in paths)]
    return len(paths), max(tree_indices), len(leaves)


def test_the_published_tree_has_its_golden_buffers():
    files = export_entry(entry_of(published_tree()), "medusa", num_heads=4).files
    choices = ast.literal_eval(files["medusa_choices.py"].split("=")[1].strip())
    assert medusa_buffers(choices) == (63, 32, 42)
    assert json.loads(files["medusa_choices.json"]) == choices


@given(trees(ranks=3))
def test_every_file_holds_the_same_canonical_tree(tree):
    for name in ENGINES:
        try:
            files = export_entry(entry_of(tree), name, num_heads=4).files
        except InvalidInput:
            gap = name == "tensorrt-llm" and {p[0] for p in tree.paths if len(p) == 1} != set(
                range(tree.widths()[0] if len(tree) > 1 else 0)
            )
            assert len(tree) == 1 or gap
            continue
        if len(tree) == 1:
            assert "speculative_config:" not in "".join(files.values())
            continue
        if name == "medusa":
            parsed = [ast.literal_eval(files["medusa_choices.py"].split("=")[1].strip())]
        else:
            options = yaml.safe_load(files["llm_api_options.yml"])["speculative_config"]
            assert options["max_draft_len"] == len(tree) - 1
            assert options["num_medusa_heads"] == 4
            literal = files["commands.sh"].split('--medusa_choices "')[1].split('"')[0]
            parsed = [options["medusa_choices"], yaml.safe_load(files["medusa_choices.yml"]),
                      ast.literal_eval(literal)]  # fmt: skip
            assert f"--max_medusa_token_len {len(tree) - 1} " in files["commands.sh"]
        for choices in parsed:
            assert choices == tree.choices
            assert all(isinstance(choice, list) for choice in choices)


@pytest.mark.parametrize(
    ("choices", "engine", "message"),
    [
        ([], "medusa", "not to speculate"),
        ([[10]], "medusa", "--max-rank 9"),
        ([[16]], "tensorrt-llm", "--max-rank 15"),
        ([[0], [2]], "tensorrt-llm", "without gaps at depth 1"),
        ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0, 0]], "medusa", "4 deep"),
    ],
)
def test_what_an_engine_would_misread_is_refused(choices, engine, message):
    with pytest.raises(InvalidInput, match=message):
        export_entry(entry_of(Tree.from_choices(choices)), engine, num_heads=4)


def test_where_no_tree_pays_tensorrt_llm_is_built_without_one():
    export = export_entry(entry_of(Tree.chain(0), 4), "tensorrt-llm", num_heads=4)
    assert yaml.safe_load(export.files["llm_api_options.yml"]) == {}
    assert "medusa" not in export.files["commands.sh"]
    assert "without its heads" in export.notes[0]


def test_medusa_takes_gaps_and_trt_takes_them_below_the_first_level():
    gap = Tree.from_choices([[0], [0, 1]])
    for engine in ENGINES:
        assert export_entry(entry_of(gap), engine, num_heads=4).files
    assert export_entry(entry_of(Tree.from_choices([[1]])), "medusa", num_heads=4).files


def test_notes_say_what_the_engine_cannot_do():
    assert any(
        "at most 1 row" in n for n in export_entry(entry_of(published_tree(), 4), "medusa", num_heads=4).notes
    )
    full = Tree.from_choices(
        [[r] for r in range(8)] + [[0, r] for r in range(8)] + [[1, r] for r in range(16)]
    )
    assert len(full) == 33
    assert any("32 or 64" in n for n in export_entry(entry_of(full), "tensorrt-llm", num_heads=4).notes)


def test_unknown_engines_are_refused_with_the_known_ones():
    with pytest.raises(Unsupported, match="medusa, tensorrt-llm"):
        export_entry(entry_of(Tree.chain(1)), "other", num_heads=4)
