"""Draft models: what they share, cut, bound and refuse. That they guess as by whole passes: see test_guesses."""

import random
import shutil

import pytest
import torch

from treeopt import demo
from treeopt.errors import InvalidInput
from treeopt.records.trace import End
from treeopt.runtime.drafters import states
from treeopt.runtime.drafters.draft_model import DraftModel, check_same_tokenizer, load_draft_model
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.drafters.protocol import GivenText, TreeTensors
from treeopt.runtime.target import Target
from treeopt.trees.tree import Tree

from .conftest import VOCABULARY, tiny_model
from .helpers.random_drafters import OTHERS, other_model, seeded
from .helpers.slow_drafters import slow_model

CPU = torch.device("cpu")


def test_no_guess_and_no_rank_where_the_slow_way_has_none():
    """Which it has, or the contract would say nothing of them."""
    short, fewer, more = (DraftModel(Target(other_model(**sizes)), VOCABULARY) for sizes in OTHERS.values())
    assert slow_model(short, [7] * 13, None, 7, []) == []
    assert max(slow_model(fewer, [7], None, 7, [])) == 29
    assert max(slow_model(more, [7], None, 7, [])) == VOCABULARY - 1


def test_a_proposal_takes_one_pass_per_level():
    drafter = seeded("llama")
    draft, tree = drafter.start(2, 60), Tree.dense([3, 2, 1])
    draft.prefill([[1, 2, 3], [4]], torch.zeros(2, 3, 5))
    drafter.model.passes = 0
    for _ in range(3):  # plain steps cost nothing
        draft.extend([[5], [6]], torch.zeros(2, 1, 5), [[0], [0]])
    assert drafter.model.passes == 0
    draft.propose(TreeTensors.of(tree, CPU), torch.tensor([7, 8]))
    assert drafter.model.passes == tree.depth


def test_memory_for_ranks_is_bounded(monkeypatch):
    drafter, rng = seeded("llama"), random.Random(0)
    parts = [[[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))] for _ in range(2)] for _ in range(12)]
    answers = [GivenText(prompt, tokens, End.EOS, torch.zeros(len(tokens), 5)) for prompt, tokens in parts]
    at_once = [ranks.tolist() for ranks in drafter.ranks(answers, 10)]
    passed: list[tuple[int, ...]] = []
    projected: list[int] = []
    monkeypatch.setattr(states, "TOKENS_AT_ONCE", 30)
    monkeypatch.setattr(states, "states_at_once", lambda vocab_size: 4)
    hook = drafter.model.decoder.register_forward_hook(
        lambda module, args, kwargs, out: passed.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    project = drafter.model.lm_head.register_forward_hook(lambda module, args, out: projected.append(len(args[0])))
    try:
        assert [ranks.tolist() for ranks in drafter.ranks(answers, 10)] == at_once
    finally:
        hook.remove()
        project.remove()
    assert max(rows * longest for rows, longest in passed if rows > 1) <= 30
    assert sum(rows for rows, _ in passed) == len(answers)
    assert max(projected) == 4
    assert drafter.ranks([], 10) == []


def test_a_draft_that_guesses_nothing_is_refused(target):
    with pytest.raises(InvalidInput, match="at least 1, but got 0"):
        open_drafter("ngram", target, depth=0)


class Vocabulary:
    eos_token_id = 3

    def __init__(self, **ids: int) -> None:
        self.ids = ids

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)


def named(name: str, **ids: int) -> Target:
    return Target(tiny_model(), Vocabulary(**ids), name=name)


def test_only_a_draft_with_the_targets_tokens_is_taken():
    target = named("big", a=0, b=1, c=2)
    check_same_tokenizer(target, named("small", c=2, b=1, a=0))
    check_same_tokenizer(target, Target(other_model(vocab_size=45), Vocabulary(a=0, b=1, c=2)))
    for ids, said in (
        ({"a": 0, "b": 2, "c": 1}, "'b' is 1 in big and 2 in small"),
        ({"a": 0, "b": 1, "d": 2}, "'c' is 2 in big and None in small"),
        ({"a": 0, "b": 1}, "'c' is 2 in big and None in small"),
        ({"a": 0, "b": 1, "c": 2, "d": 3}, "'d' is None in big and 3 in small"),
    ):
        with pytest.raises(InvalidInput, match=said):
            check_same_tokenizer(target, named("small", **ids))
    with pytest.raises(InvalidInput, match="bare has no tokenizer"):
        check_same_tokenizer(target, Target(tiny_model(), name="bare"))


def test_a_draft_model_is_loaded_as_the_target_is(tmp_path):
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL / name, tmp_path)
    from transformers import AutoTokenizer

    target = Target(tiny_model(), AutoTokenizer.from_pretrained(tmp_path), name="big")
    drafter = load_draft_model(str(tmp_path), target, num_heads=2)
    assert (drafter.model.dtype, drafter.model.device) == (torch.float64, CPU)
    assert (drafter.kind, drafter.num_heads, drafter.vocab_size) == ("draft-model", 2, VOCABULARY)
    with pytest.raises(InvalidInput, match="must have the target's tokens"):
        load_draft_model(str(tmp_path), named("big", a=0))


def test_model_without_heads(tmp_path):
    """A model without heads is told what to name or train; a drafter that is none is told which layouts are read."""
    model = tiny_model()
    model.save_pretrained(tmp_path)
    bare = Target(model, name=str(tmp_path))
    with pytest.raises(
        InvalidInput, match=r"has no heads of its own: name heads.*as drafter, or train heads: treeopt train --model"
    ):
        open_drafter(None, bare)
    with pytest.raises(InvalidInput, match="must hold heads in a layout"):
        open_drafter(str(tmp_path), bare)
