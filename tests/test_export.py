"""Exports: what the engines parse back is the tree, and what they would misread is refused."""

import ast
import json
from dataclasses import replace

import pytest
import yaml
from hypothesis import given

from treeopt.errors import InvalidInput, Unsupported
from treeopt.export import ENGINES, export_entry
from treeopt.plan import PlanEntry
from treeopt.published import published_tree
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
    for name in (name for name, engine in ENGINES.items() if not engine.chain):
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


def chain_entry(plain_tokens_per_s, batch_size=1):
    """A tree of 2.0 tokens per step, and a chain of depth 3 that makes 1.6 and 400 tokens/s."""
    chain = {"size": 4, "depth": 3, "tokens_per_step": 1.6, "step_ms": 4.0, "tokens_per_s": 400.0}
    curve = [{"size": 1, "tokens_per_s": plain_tokens_per_s}]
    return replace(entry_of(Tree.dense([2, 2]), batch_size), best_chain=chain, curve=curve,
                   tokens_per_step=2.0, tokens_per_s=450.0)  # fmt: skip


def test_tgi_takes_the_best_chain_and_its_price_is_said():
    export = export_entry(chain_entry(300.0), "tgi", num_heads=4)
    assert "--speculate 3\n" in export.files["commands.sh"]
    assert "the 4 heads" in export.files["commands.sh"]
    assert "1.60 tokens per step instead of 2.00, 400 tokens/s instead of 450" in export.notes[0]
    assert len(export.notes) == 1


def test_tgi_serves_the_base_where_no_chain_pays():
    for entry in (chain_entry(401.0), entry_of(Tree.chain(0))):
        export = export_entry(entry, "tgi", num_heads=4)
        assert "--speculate" not in export.files["commands.sh"]
        assert "No chain pays" in export.notes[0]


def test_tgi_is_said_to_stop_speculating_above_128_rows():
    assert len(export_entry(chain_entry(300.0, 32), "tgi", num_heads=4).notes) == 1
    assert "above 128 rows" in export_entry(chain_entry(300.0, 33), "tgi", num_heads=4).notes[1]


def test_tensorrt_llm_builds_with_the_heads_that_the_checkpoint_has():
    files = export_entry(entry_of(Tree.dense([2, 2])), "tensorrt-llm", num_heads=3, num_layers=2).files
    assert "--num_medusa_heads 3 --num_medusa_layers 2 --max_medusa_token_len 6" in files["commands.sh"]
