"""Chains and dynamic trees by batch size: every engine's own look-up gives back what was asked.

The look-up rules are ports of the engines' own; what they are to give is computed from the ranges alone.
"""

import json
import random

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.engine_rows import READERS, chains, export
from treeopt.engines.registry import ENGINES
from treeopt.errors import InvalidInput, Unsupported
from treeopt.records.plan import merged
from treeopt.trees.draft import MOST_LEVELS, MOST_ROWS, MOST_TOPK, DynamicTree, pool_size

BATCH_SIZES = range(1, 257)


def intended(lengths, batch_size):
    """The length that the ranges say."""
    return next(k for begin, end, k in lengths if begin <= batch_size and (end is None or batch_size <= end))


def written(engine, *lengths, drafter="eagle3", method=None, **options):
    """The export for lengths (to, K), the last to being None."""
    begins = [1, *(end + 1 for end, _ in lengths[:-1])]
    ranges = tuple((begin, end, k) for begin, (end, k) in zip(begins, lengths, strict=True))
    return export(engine, chains(*ranges), method, drafter=drafter, **options)


@st.composite
def schedules(draw, most=8):
    """One to six ranges within batch sizes 1 to 256, each of 0 to 8 guesses."""
    ends = sorted(draw(st.sets(st.integers(1, 255), max_size=5)))
    begins = [1, *(end + 1 for end in ends)]
    return tuple((a, b, draw(st.integers(0, most))) for a, b in zip(begins, [*ends, None], strict=True))


@given(schedules(), st.sampled_from([("vllm", "batch-size"), ("sglang", "adaptive"), ("tensorrt-llm", "draft-len")]))
def test_engines_look_up_what_was_asked(lengths, row):
    engine, method = row
    if engine == "tensorrt-llm":  # no range may be longer than the first
        lengths = ((*lengths[0][:2], max(k for *_, k in lengths)), *lengths[1:])
    read = READERS[engine, method](export(engine, chains(*lengths), method, drafter="mtp").files)
    assert read == merged(lengths)
    assert [intended(read, size) for size in BATCH_SIZES] == [intended(lengths, size) for size in BATCH_SIZES]


def test_sglang_gets_the_documented_form_and_no_schedule_where_it_stays_static():
    found = written("sglang", (7, 5), (63, 3), (None, 0), drafter="eagle")
    assert json.loads(found.files["adaptive.json"]) == {
        "1": {"candidate_steps": [5]},
        "8": {"candidate_steps": [3]},
        "64": {"candidate_steps": [0]},
    }
    for flag in ("num-steps 5", "eagle-topk 1", "num-draft-tokens 6", "adaptive-config adaptive.json"):
        assert f"--speculative-{flag}" in found.command
    for drafter in ("draft-model", "ngram"):
        with pytest.raises(InvalidInput, match="one draft for all batch sizes"):
            written("sglang", (8, 5), (None, 0), drafter=drafter)
        with pytest.raises((Unsupported, InvalidInput), match="eagle3, eagle, mtp"):
            written("sglang", (8, 5), (None, 0), drafter=drafter, method="adaptive")


def test_tensorrt_llm_gets_upper_bounds_as_keys():
    found = written("tensorrt-llm", (4, 4), (8, 2), (32, 1), (None, 0))
    options = yaml.safe_load(found.files["llm_api_options.yml"])["speculative_config"]
    assert options == {
        "decoding_type": "Eagle3",
        "max_draft_len": 4,
        "speculative_model": "DRAFTER",
        "draft_len_schedule": {4: 4, 8: 2, 32: 1},
    }
    assert any("PR #10860" in note for note in found.notes)


def test_tensorrt_llm_gets_the_longest_chain_first():
    with pytest.raises(InvalidInput, match="smallest key of its draft_len_schedule"):
        written("tensorrt-llm", (8, 2), (32, 4), (None, 0))


def takes(engine, tree) -> bool:
    """Whether the engine takes the numbers of a dynamic tree, by the rules of each."""
    nodes = tree.rows - 1
    if tree.topk == 1 and engine != "eagle2":
        return nodes == tree.levels  # they all make a chain of it
    if engine == "tensorrt-llm":
        return tree.levels <= nodes <= tree.topk * tree.levels
    return nodes >= tree.levels if engine == "openvino" else nodes <= pool_size(tree.levels, tree.topk)


@pytest.mark.parametrize(
    ("engine", "drafter"),
    [(name, kind) for name, e in ENGINES.items() for m in e.methods if m.limits.dynamic for kind in m.drafters],
)
def test_random_dynamic_trees_come_back_or_are_refused(engine, drafter):
    rng, taken, refused = random.Random(engine), 0, 0
    for _ in range(120):
        levels, topk = rng.randint(1, MOST_LEVELS), rng.randint(1, MOST_TOPK)
        tree = DynamicTree(levels, topk, rng.randint(2, min(MOST_ROWS, pool_size(levels, topk) + 1)))
        if not takes(engine, tree):
            refused += 1
            with pytest.raises(InvalidInput):
                export(engine, tree, "dynamic-tree", drafter=drafter)
            continue
        taken += 1
        files = export(engine, tree, "dynamic-tree", drafter=drafter).files
        assert READERS[engine, "dynamic-tree"](files) == ((1, None, tree),)
    assert taken > 10
    assert refused or engine == "eagle2"
