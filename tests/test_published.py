"""Published trees, accuracies and latencies: what others found, treeopt finds again."""

import re

import numpy as np
import pytest

from treeopt.files.places import shipped
from treeopt.growth.grow import grow_products
from treeopt.records.calibration import Calibration
from treeopt.records.profile import LatencyProfile
from treeopt.trees.published import PUBLISHED_TREES, published_tree
from treeopt.trees.shapes import Limits

from .conftest import published_data, treeopt

MEDUSA = [name for name in PUBLISHED_TREES if not name.startswith("eagle")]
PROFILE = "a100-80gb--llama-33b-linear-layers"


def table_of(record) -> np.ndarray:
    """A table of accuracies; null was never compared, so it is never accepted."""
    return np.array([[rate or 0.0 for rate in row] for row in record["table"]])


@pytest.mark.parametrize("name", PUBLISHED_TREES)
def test_published_trees_are_the_lists_of_their_authors_in_order(name):
    listed = {t["name"]: t for t in published_data("trees")["trees"]}
    record = listed[name.replace("eagle_", "eagle/") if name.startswith("eagle") else f"medusa/{name}"]
    assert [list(path) for path in PUBLISHED_TREES[name]] == record["paths"]
    assert (len(published_tree(name)), published_tree(name).depth) == (record["with_root"], record["depth"])


def tables_of_accuracies() -> list:
    """Tree, table and tokens per step by it; not of every tree a table was found that fits measured figures too."""
    figures = published_data("figures")
    mc_sim = figures["mc_sim_7b_63_from_csv"]
    cases = [pytest.param("mc_sim_7b_63", mc_sim, 2.5141, id="mc_sim of ten ranks")]
    for name in MEDUSA:
        for kind, record in figures["reconstructed_tables"][f"medusa/{name}"].items():
            if kind in ("max_margin", "calibrated"):
                tokens = record["check"]["expected_tokens_per_step"]
                cases.append(pytest.param(name, record, tokens, id=f"{name} {kind}"))
    return cases


@pytest.mark.parametrize(("name", "record", "tokens_per_step"), tables_of_accuracies())
def test_accuracies_grow_the_published_list_in_order(name, record, tokens_per_step):
    """Its authors' search takes siblings by rank, as sibling-closed trees do."""
    family = grow_products(table_of(record), Limits(64))
    assert list(family.paths[1:]) == PUBLISHED_TREES[name]
    assert family.tokens_per_step(64) == pytest.approx(tokens_per_step, abs=5e-5)


@pytest.mark.parametrize("size", ["7b", "13b", "33b"])
def test_shipped_accuracies_add_up_to_the_published_cumulative_ones(size):
    published = published_data("figures")["medusa_head_accuracy_csv"]["cumulative"][size]
    calibration = Calibration.load(shipped("calibration")[f"vicuna-{size}-medusa1"])
    assert np.cumsum(calibration.accept, axis=1) == pytest.approx(np.array(published), abs=1e-6)


def test_the_shipped_profile_is_table_8_of_the_medusa_paper():
    """2 x rows x 6656 x 17920 operations at the published rate, for all 56 points."""
    table = published_data("figures")["medusa_table8"]
    profile = LatencyProfile.load(shipped("profiles")[PROFILE])
    ms = {(p.batch_size, p.size): p.step_ms[0] for p in profile.points}
    wanted = {
        (int(batch), size): 2 * int(batch) * size * 6656 * 17920 / (tflops * 1e12) * 1e3
        for batch, row in table["rows"].items()
        for size, (tflops, _) in zip(table["candidates"], row, strict=True)
    }
    assert ms == pytest.approx(wanted, rel=1e-5)
    assert {p.batch_size: p.step_ms[0] for p in profile.autoregressive} == {
        batch: ms[batch, 1] for batch in profile.batch_sizes
    }


def test_of_a_part_of_a_step_ratios_are_shown_and_absolute_rates_are_not(tmp_path):
    """0.19 ms of linear layers would be 12,064 tokens per second, which no decoder reaches; nor is a single sample exact."""
    asked = ("--calibration", "vicuna-33b-medusa1", "--profile", PROFILE, "--batch-size", "1,8", "--run", tmp_path)
    shown = treeopt("search", *asked)
    assert not re.search(r"tokens/s\b|tokens per second| ms\b", shown)
    assert re.search(r"step over.*\d\.\d\d ±\?", shown, re.DOTALL)
    assert "±0.00" not in shown


def test_sequoias_demo_vector_gives_its_published_chain():
    """Sequoia's demo: one vector at every depth, a draft step a level, steps timed at six sizes.

    Its dynamic programme picks 4 nodes in a chain, 2.045921 times as fast as without. The vector is not
    monotone in rank. Level 1 is the root, so ``levels`` of them are trees of depth levels - 1; sizes that
    were not timed are not chosen.
    """
    figures = published_data("figures")
    demo, vector = figures["sequoia_demo"], np.array(figures["sequoia_acceptance_vector"]["vector"])
    assert (np.diff(vector[1:-1]) > 0).any()
    config, found = demo["config"], demo["independent_dp_computed_here"]
    choices = []
    for levels in range(2, config["max_depth"] + 1):
        accept = np.tile(vector[1:-1], (levels - 1, 1))  # index 0 is unused, the last is "none accepted"
        family = grow_products(accept, Limits(max(config["valid_budget"]), max_rank=accept.shape[1] - 1))
        for size, target_time in zip(config["valid_budget"], config["target_time"], strict=True):
            tree = family.tree(size)
            if tree.depth == levels - 1:  # a shallower one is another entry's
                time = target_time + levels * config["draft_time"]
                speedup = family.tokens_per_step(size) / time * config["target_time"][0]
                choices.append((speedup, tree))
    speedup, tree = max(choices, key=lambda choice: choice[0])
    assert tree.choices == [[0], [0, 0], [0, 0, 0]]  # their Successors: [[1], [2], [3], []]
    assert len(tree) == demo["published_output"]["size"]
    assert speedup == pytest.approx(found["speedup"], abs=1e-6)
