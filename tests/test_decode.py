"""Decoding with any tree equals plain decoding, and takes the steps that replay says."""

import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeopt import demo
from treeopt.errors import InvalidInput, Unsupported
from treeopt.records.contender import Prompt
from treeopt.records.trace import End
from treeopt.runtime.acceptance.rules import Greedy
from treeopt.runtime.cache import TreeCache
from treeopt.runtime.decode import Decoder, decode
from treeopt.runtime.drafters.protocol import GivenText, top_candidates
from treeopt.runtime.drafters.states import ranks_among
from treeopt.runtime.setup import Setup
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target, check_support, context_limit, load_target
from treeopt.trees.tree import Tree

from .conftest import CONTEXT, VOCABULARY, examples, random_prompts, tiny_heads, tiny_model, trees


def generated(target: Target, prompt: list[int], limit: int) -> list[int]:
    """The answer of transformers' own greedy generation."""
    tokens = torch.tensor([prompt])
    answer = target.model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=limit
    )
    return answer[0, len(prompt) :].tolist()


@examples(12)
@given(tree=trees(), seed=st.integers(0, 10**6), limit=st.sampled_from([1, 2, 17, 40]), batch_size=st.integers(1, 4))
def test_decoding_with_any_tree_is_generate(any_target, tree, seed, limit, batch_size):
    prompts, stop = random_prompts(seed), StopRule(any_target.eos_ids, limit, at_loops=False)
    heads = tiny_heads(any_target)
    with_tree = decode(any_target, heads, prompts, tree, batch_size=batch_size, stop=stop)
    plainly = decode(any_target, None, prompts, batch_size=batch_size, stop=stop)
    for prompt, ours, plain in zip(prompts, with_tree, plainly, strict=True):
        expected = generated(any_target, prompt, limit)
        assert ours.tokens == expected
        assert plain.tokens == expected
        assert ours.steps <= plain.steps == len(expected) - 1


def test_a_decoder_makes_room_for_what_is_longer_than_before(target, heads):
    decoder = Decoder(Setup(target, heads, StopRule(target.eos_ids, 9, at_loops=False)))
    for prompt, tree in (([1], Tree.chain(0)), ([1] * 60, Tree.chain(0)), ([1] * 60, Tree.dense([4, 4, 4]))):
        (block,) = decoder.decode([Prompt(prompt)], tree, 1)
        assert block.answers[0].text == generated(target, prompt, 9)


@pytest.mark.parametrize("prompt", [[], [1] * CONTEXT])
def test_prompts_without_room_are_refused(target, heads, prompt):
    with pytest.raises(InvalidInput, match="1 to 95 tokens"):
        decode(target, heads, [prompt], batch_size=1, stop=StopRule(frozenset(), 5))


def test_a_tree_deeper_than_the_heads_is_refused(target, heads):
    with pytest.raises(InvalidInput, match="as deep as the drafter guesses, 4"):
        decode(target, heads, [[1, 2]], Tree.chain(5), batch_size=1, stop=StopRule(frozenset(), 5))


@given(st.integers(0, 2**32), st.integers(1, 12), st.sampled_from([3, 70]))
def test_candidates_are_ordered_by_logit_then_id(seed, width, rows):
    logits = torch.from_numpy(np.random.default_rng(seed).integers(0, 6, (rows, 20)).astype(np.float32))
    logits[:2] += torch.arange(20) / 20  # without ties
    logits[-1, :15] = -torch.inf
    expected = [sorted(range(20), key=lambda i: (-row[i], i))[:width] for row in logits.tolist()]
    assert top_candidates(logits, width).tolist() == expected


@given(st.integers(0, 2**16), st.sampled_from([torch.float32, torch.bfloat16]))
def test_counted_ranks_are_places_among_the_candidates(target, seed, dtype):
    torch.manual_seed(seed)
    heads = tiny_heads(target, num_heads=2, seed=seed).to(dtype)  # bfloat16 is full of ties
    hidden = torch.randn(9, 32, dtype=torch.float32).to(dtype).round(decimals=0)
    labels = torch.randint(VOCABULARY, (9, 2))
    for k in range(2):
        candidates = top_candidates(heads.logits(hidden, k), 8).tolist()
        ranks = ranks_among(partial(heads.logits, k=k), hidden, labels[:, k], 8, VOCABULARY).tolist()
        assert ranks == [
            row.index(y) if y in row else -1 for row, y in zip(candidates, labels[:, k].tolist(), strict=True)
        ]


def test_guesses_past_eos_are_misses_and_past_the_limit_no_trials(target):
    for end, beyond in ((End.EOS, -1), (End.LIMIT, -2), (End.LOOP, -2), (End.CONTEXT, -2)):
        answer = GivenText([1], [4, 5, 6], end, torch.empty(0))
        assert answer.labels(3).tolist() == [[5, 6, beyond], [6, beyond, beyond], [-2, -2, -2]]


@given(trees(most_nodes=12), st.integers(0, 2**32))
def test_acceptance_follows_the_targets_choices(tree, seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 50, (3, len(tree)))
    for node in range(1, len(tree)):  # siblings have distinct tokens
        siblings = np.flatnonzero(tree.parents == tree.parents[node])
        tokens[:, siblings] = np.arange(len(siblings))
    choices = rng.integers(0, 4, (3, len(tree)))
    last = Greedy().accept(tree, tokens.tolist(), choices.tolist(), torch.empty(0))
    for row in range(3):
        node = 0
        while True:
            found = [c for c in np.flatnonzero(tree.parents == node) if tokens[row, c] == choices[row, node]]
            if not found:
                break
            node = int(found[0])
        assert last[row] == node


@pytest.mark.parametrize("few", [0, 99])
def test_a_commit_keeps_the_path_of_every_row(few, monkeypatch):
    """Moved one by one or together; nothing before the step is touched."""
    monkeypatch.setattr("treeopt.runtime.cache.FEW_MOVES", few)
    cache, lengths, paths = TreeCache(2, 4, 30), [5, 3, 7, 4], [[0, 2, 4, 8], [0], [0, 1, 5], [0, 3]]
    cache.begin_prefill(lengths)
    for layer in range(2):
        cache.write(layer, *torch.rand(2, 4, 2, 7, 8))
    cache.begin_step(9, torch.tensor(lengths)[:, None])
    for layer in range(2):
        cache.write(layer, *torch.rand(2, 4, 2, 9, 8))
    before = cache._stores["all"].clone()
    cache.commit(paths)
    assert cache.lengths == [9, 4, 10, 6]
    for row, (start, path) in enumerate(zip(lengths, paths, strict=True)):
        kept = [*range(start), *(start + node for node in path)]
        assert torch.equal(cache._stores["all"][:, :, row, :, : len(kept)], before[:, :, row][..., kept, :])


def test_a_model_spread_over_devices_decodes_the_same(target, heads):
    """Its cache keeps one tensor a device; here both names mean the CPU."""
    spread = Target(tiny_model())
    spread.layer_devices = [torch.device("cpu"), torch.device("cpu", 0), torch.device("cpu")]
    prompts, stop = random_prompts(5), StopRule(target.eos_ids, 30)
    tree = Tree.dense([4, 2, 2])
    ours = decode(spread, heads, prompts, tree, batch_size=3, stop=stop)
    theirs = decode(target, heads, prompts, tree, batch_size=3, stop=stop)
    assert [row.tokens for row in ours] == [row.tokens for row in theirs]
    assert [row.accepted for row in ours] == [row.accepted for row in theirs]


def test_a_device_map_places_the_model(tmp_path):
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL / name, tmp_path)
    placed = load_target(str(tmp_path), device_map="cpu", dtype="float32")
    assert placed.device.type == "cpu"
    assert placed.vocab_size == VOCABULARY


@pytest.mark.parametrize(
    ("options", "stateful", "says"),
    [
        ({"layer_types": ("full_attention", "linear_attention")}, False, "linear_attention"),
        ({"alibi": True}, False, "ALiBi"),
        ({"_attn_implementation": "flash_attention_2"}, False, "flash_attention_2"),
        ({}, True, "Mamba has recurrent layers"),
    ],
)
def test_unsupported_models_are_refused_by_name(options, stateful, says):
    config = SimpleNamespace(**{"model_type": "tiny", "layer_types": None, "_attn_implementation": "sdpa", **options})
    with pytest.raises(Unsupported, match=says):
        check_support(type("Mamba", (), {"_is_stateful": stateful})(), config)


def test_dynamic_rope_ends_below_its_boundary():
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    config = type("C", (), {"max_position_embeddings": 4096, "rope_parameters": rope})
    assert context_limit(config) == 64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_decoding_on_a_gpu_is_plain_decoding_there():
    model = Target(tiny_model(dtype=torch.float32).cuda())
    heads, stop = tiny_heads(model), StopRule(model.eos_ids, 40)
    prompts = random_prompts(0)
    plain = decode(model, None, prompts, batch_size=2, stop=stop)
    ours = decode(model, heads, prompts, Tree.dense([4, 2]), batch_size=3, stop=stop)
    assert [row.tokens for row in ours] == [row.tokens for row in plain]
