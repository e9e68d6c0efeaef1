"""Random weights: what their steps accept and must read."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import steps
from treeopt.errors import InvalidInput, Unsupported
from treeopt.growth.grow import product_values
from treeopt.records.calibration import Calibration
from treeopt.records.rundir import RunDirectory
from treeopt.runtime.decode import Decoder
from treeopt.runtime.random_weights import DrawnAcceptance, last_node_shares, open_random_session
from treeopt.runtime.setup import Setup
from treeopt.runtime.stepper import rows_at
from treeopt.runtime.stop import StopRule
from treeopt.trees.tree import Tree

from .conftest import HEADS, trees
from .test_profile import QUICK

CALIBRATION = Calibration(np.array([[50, 20, 10], [40, 15, 8], [30, 10, 5], [20, 8, 4]]), np.full(4, 100))

LLAMA = {"model_type": "llama", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
         "eos_token_id": 2}  # fmt: skip

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@given(trees(), st.integers(0, 100))
def test_shares_of_last_nodes_give_the_products_at_every_depth(tree, seed):
    accept = np.random.default_rng(seed).dirichlet(np.ones(7), HEADS)[:, :6]
    shares = last_node_shares(tree, accept)
    assert shares.min() > -1e-12
    assert shares.sum() == pytest.approx(1.0)
    for depth in range(tree.depth + 1):
        products = product_values(accept, tuple(p for p in tree.paths if len(p) == depth))
        assert shares[tree.depths >= depth].sum() == pytest.approx(products.sum())


def test_random_weights_accept_as_the_calibration_says(config):
    """4 standard errors of 1,600 draws: one false alarm in 16,000."""
    session, tree = open_random_session(str(config), dtype="float32"), Tree.dense([3, 2, 1])
    shares = last_node_shares(tree, CALIBRATION.accept)
    expected = float(shares @ tree.depths)
    spread = float(np.sqrt(shares @ tree.depths**2 - expected**2))
    drawn = DrawnAcceptance(CALIBRATION.accept, np.random.default_rng(0))
    setup = Setup(session.target, session.drafter, StopRule(frozenset(), 10**6, at_loops=False), drawn)
    decoder, found = Decoder(setup), []
    while len(found) < 1600:
        for _ in zip(range(21), decoder.answer([[1, 2, 3]] * 4, tree, 4), strict=False):
            pass
        found += [accepted for row in decoder.live for accepted in row.accepted]
    assert abs(np.mean(found) - expected) < 4 * spread / np.sqrt(len(found))


def test_random_weights_are_profiled_and_named(config, tmp_path):
    run = RunDirectory(tmp_path / "run")
    session = open_random_session(str(config), num_heads=3)
    CALIBRATION.save(config / "calibration.json")
    result = steps.profile(
        run,
        session,
        batch_sizes=(2,),
        contexts=(48,),
        sizes=(2, 8),
        calibration=str(config / "calibration.json"),
        **QUICK,
    )
    assert result.settings == [(2, 48)]
    assert result.runtime["weights"] == "random weights"
    assert result.info["provenance"]["model"].startswith("random weights of")
    assert result.info["inputs"].keys() == {"calibration.json"}


def test_random_weights_never_end_at_eos(config):
    session = open_random_session(str(config))
    _, stop = rows_at(64, [[1, 2]], session.target)
    assert session.target.eos_ids == {2}
    assert stop.eos_ids == frozenset()
    assert not stop.at_loops


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        *(({"model_type": "x", key: 8}, Unsupported, f"dense models, but .* has {key} = 8") for key in EXPERTS),
        ({"model_type": "x", "text_config": {"num_experts": 8}}, Unsupported, "dense models"),
        ({"model_type": None}, InvalidInput, "with a model_type"),
        ({"model_type": "no-such-model"}, InvalidInput, "config of a causal LM"),
    ],
)
def test_experts_and_what_is_no_config_are_refused(config, changes, error, message):
    (config / "config.json").write_text(json.dumps({k: v for k, v in {**LLAMA, **changes}.items() if v}))
    for name in (config, config / "config.json"):
        with pytest.raises(error, match=message):
            open_random_session(str(name))
