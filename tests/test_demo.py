"""The embedded model and the prompts that are cut for it."""

import sysconfig

import pytest
import torch

from treeopt import demo
from treeopt.demo.corpus import fingerprint, is_held_out, standard_library
from treeopt.errors import InvalidInput
from treeopt.records.options import Source
from treeopt.runtime.decode import decode
from treeopt.runtime.measure.quality import logit_gap
from treeopt.runtime.prompts.sets import DEMO_TOKENS, demo_prompts
from treeopt.runtime.session import open_session
from treeopt.runtime.stop import StopRule
from treeopt.trees.published import published_tree
from treeopt.trees.tree import Tree


@pytest.fixture(scope="module")
def session():
    return open_session()


def test_the_embedded_files_are_at_most_16_mb():
    files = [*demo.MODEL.iterdir(), *demo.HEADS.iterdir()]
    assert sum(file.stat().st_size for file in files) <= 16 * 2**20


def test_no_module_of_a_held_out_package_was_trained_on():
    held_out, training = standard_library(held_out=True), standard_library(held_out=False)
    packages = [{m.name.split("/")[0].removesuffix(".py") for m in part} for part in (held_out, training)]
    assert not packages[0] & packages[1]
    assert all(is_held_out(package) for package in packages[0])
    assert 0.03 < len(held_out) / (len(held_out) + len(training)) < 0.3
    for part in packages:
        assert not part & {"test", "encodings", "pydoc_data", "idlelib", "lib2to3", "site-packages"}


def test_demo_prompts_are_cut_from_held_out_modules(session):
    texts = {module.name: module.text for module in standard_library(held_out=True)}
    prompts = session.prompts.conversations
    assert len(prompts) > 500
    assert len({p.sha256 for p in prompts}) == len(prompts)
    for prompt in prompts[:50]:
        assert len(prompt.first) <= DEMO_TOKENS[1]
        assert any(session.target.tokenizer.decode(prompt.first) in text for text in texts.values())
    assert demo_prompts(session.target).conversations == prompts
    assert session.prompts.fingerprint == fingerprint(standard_library(held_out=True))


def test_a_python_without_its_sources_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(InvalidInput, match="needs the sources of the Python standard library"):
        standard_library(held_out=True)


def demo_answers(dtype, tree, count, limit):
    """(session, prompts, rows) of the demo model decoding held-out prompts with a tree."""
    session = open_session(Source(dtype=dtype))
    prompts = [prompt.first for prompt in session.prompts.conversations[:count]]
    stop = StopRule(session.target.eos_ids, limit, at_loops=False)
    return session, prompts, decode(session.target, session.drafter, prompts, tree, batch_size=4, stop=stop)


def test_in_float64_the_demo_model_writes_what_generate_writes():
    session, prompts, rows = demo_answers("float64", published_tree(), 6, 32)
    for prompt, row in zip(prompts, rows, strict=True):
        tokens = torch.tensor([prompt])
        answer = session.target.model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=32, pad_token_id=0
        )
        assert row.tokens == answer[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=[(8, 32), pytest.param((24, 64), marks=pytest.mark.long)], ids=["few", "many"])
def reference(request):
    """(how many prompts, how many tokens, what float64 writes)."""
    return *request.param, demo_answers("float64", None, *request.param)[2]


@pytest.mark.parametrize("tree", [None, published_tree(), Tree.chain(4)])
@pytest.mark.long
def test_in_float32_answers_differ_at_near_ties_only(tree, reference):
    count, limit, reference = reference
    session, prompts, rows = demo_answers("float32", tree, count, limit)
    for prompt, row, exact in zip(prompts, rows, reference, strict=True):
        if row.tokens != exact.tokens:
            pairs = zip(row.tokens, exact.tokens, strict=False)
            at = next(i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
            assert logit_gap(session.target, prompt, row.tokens, exact.tokens, at) < 1e-4


def test_the_logit_gap_is_the_targets(session):
    prompt = session.prompts.conversations[0].first
    logits = session.target.model(torch.tensor([[*prompt, 7]])).logits[0, -1]
    gap = logit_gap(session.target, prompt, [7, 11], [7, 12], 1)
    assert gap == pytest.approx(float((logits[12] - logits[11]).abs()), abs=1e-4)
    assert logit_gap(session.target, prompt, [7], [7, 12], 1) is None
