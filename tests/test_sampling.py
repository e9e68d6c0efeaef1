"""Noise that belongs to a place in a text: its bits, the draws that come of it, and decoding with them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from treeopt.errors import InvalidInput
from treeopt.runtime.acceptance import rules as module
from treeopt.runtime.acceptance.rules import NoiseStream, Sampling, sequence_key, splitmix64, stream_states, uniforms
from treeopt.runtime.decode import decode
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target

from .conftest import examples

FALSE_ALARM = 1e-4  # of every chi-square test, were its seed drawn anew
INT64 = st.integers(-(2**63), 2**63 - 1)
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])


def fits(counts, expected) -> bool:
    return stats.chisquare(counts, expected).pvalue > FALSE_ALARM


def random_logits(*shape: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixed(z: int) -> int:
    """SplitMix64's mix in whole numbers without bounds."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


@given(state=INT64, n=st.integers(1, 5))
def test_bits_are_those_of_splitmix64(state, n):
    (ours,) = splitmix64(torch.tensor([state]), n).tolist()
    assert [token % 2**64 for token in ours] == [
        mixed((state + i * 0x9E3779B97F4A7C15) % 2**64) for i in range(1, n + 1)
    ]


def noise_along(axis: str, n: int) -> torch.Tensor:
    """(n,) uniforms of which one thing differs: position, token, seed or sequence."""
    keys, positions = torch.tensor([9]), torch.tensor([40])
    if axis == "position":
        return uniforms(stream_states(1, NoiseStream.TOKEN, keys, torch.arange(n)), 1)[:, 0]
    if axis == "token":
        return uniforms(stream_states(1, NoiseStream.TOKEN, keys, positions), n)[0]
    if axis == "key":
        return uniforms(stream_states(1, NoiseStream.TOKEN, torch.arange(n), positions), 1)[:, 0]
    return torch.cat([uniforms(stream_states(s, NoiseStream.TOKEN, keys, positions), 1)[0] for s in range(n)])


@pytest.mark.parametrize("axis", ["position", "token", "key", "seed"])
def test_noise_is_uniform_and_neighbours_are_independent(axis):
    noise = noise_along(axis, 4000).numpy()
    assert noise.min() > 0
    assert noise.max() < 1
    for scale in (16, 2.0**20 * 16):  # the first four bits, and four in the middle
        buckets = np.bincount((noise * scale).astype(np.int64) % 16, minlength=16)
        assert fits(buckets, np.full(16, 250))
    quarters = (noise * 4).astype(np.int64)
    assert fits(np.bincount(4 * quarters[:-1:2] + quarters[1::2], minlength=16), np.full(16, 125))


def test_streams_at_a_place_are_independent():
    place = torch.arange(8000)
    quarters = [
        (uniforms(stream_states(0, stream, torch.tensor(3), place), 1)[:, 0] * 4).long() for stream in NoiseStream
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        pairs = torch.bincount(4 * quarters[one] + quarters[other], minlength=16)
        assert fits(pairs.numpy(), np.full(16, 500))


def test_every_place_of_every_sequence_has_noise_of_its_own():
    keys, positions = torch.arange(20)[:, None], torch.arange(20)
    states = [stream_states(seed, stream, keys, positions) for seed in range(20) for stream in NoiseStream]
    assert len(torch.stack(states).unique()) == 20 * 3 * 20 * 20


@pytest.mark.parametrize("along", ["positions", "sequences"])
def test_tokens_are_drawn_from_the_softmax(along):
    n, fixed = 20_000, torch.tensor(7)
    keys, positions = (fixed, torch.arange(n)) if along == "positions" else (torch.arange(n), fixed)
    drawn = Sampling(0.7, seed=5).choose(LOGITS.expand(n, -1), keys, positions)
    assert fits(np.bincount(drawn, minlength=5), n * (LOGITS / 0.7).double().softmax(0).numpy())


@pytest.mark.parametrize("sampling", [Sampling(0.9, seed=3), Sampling(2.0, top_p=0.8, top_k=20, seed=-4)])
def test_a_token_depends_on_its_place_and_not_on_the_call(sampling, monkeypatch):
    """Rows alone, in any order, as a tree of any shape, in chunks: always the same token."""
    logits, keys, positions = random_logits(3, 8, 50), torch.tensor([11, -5, 11])[:, None], torch.arange(8)
    tokens = sampling.choose(logits, keys, positions)  # (3, 8)
    alone = [[int(sampling.choose(logits[i, j], keys[i, 0], positions[j])) for j in range(8)] for i in range(3)]
    assert tokens.tolist() == alone
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    flat = sampling.choose(logits.flatten(0, 1)[order], keys.expand(3, 8).flatten()[order], positions.repeat(3)[order])
    assert flat.tolist() == tokens.flatten()[order].tolist()
    monkeypatch.setattr(module, "CHUNK_NUMBERS", 170)
    assert sampling.choose(logits, keys, positions).equal(tokens)
    assert not sampling.choose(logits, keys + 1, positions).equal(tokens)
    assert not sampling.choose(logits, keys, positions + 1).equal(tokens)


@examples(30)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.05, 5),
    top_k=st.none() | st.integers(1, 40),
    top_p=st.none() | st.floats(0.01, 0.999),
)
def test_what_stays_is_what_transformers_keeps(seed, temperature, top_k, top_p):
    logits = random_logits(4, 30, seed=seed)
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p is not None:
        expected = TopPLogitsWarper(top_p)(None, expected)
    sampling = Sampling(temperature, top_p=top_p, top_k=top_k)
    assert sampling.filtered(logits).isinf().equal(expected.isinf())
    torch.testing.assert_close(sampling.probabilities(logits), expected.softmax(-1))


def test_of_equal_tokens_top_k_keeps_all_and_top_p_the_first():
    equal = torch.zeros(1, 4)
    assert Sampling(1.0, top_k=2).probabilities(equal).tolist() == [[0.25] * 4]
    assert Sampling(1.0, top_p=0.5).probabilities(equal).tolist() == [[0.5, 0.5, 0, 0]]
    assert Sampling(1.0, top_p=0.5, top_k=1).probabilities(equal).tolist() == [[0.5, 0.5, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-9, 1e-320])
def test_next_to_no_temperature_is_greedy(temperature):
    logits = random_logits(500, 40).to(torch.float32)
    drawn = Sampling(temperature).choose(logits, torch.tensor(1), torch.arange(500))
    assert drawn.equal(logits.argmax(-1))


def test_answers_are_drawn_token_by_token(target):
    """Plain decoding is one draw after the other from the full model's own logits."""
    acceptance, prompt = Sampling(2.0, top_k=30, seed=8), [4, 9, 1]
    (row,) = decode(
        target, None, [prompt], batch_size=1, stop=StopRule(frozenset(), 30, at_loops=False), acceptance=acceptance
    )
    tokens, key = prompt.copy(), torch.tensor(sequence_key(prompt))
    for _ in range(30):
        logits = target.model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(acceptance.choose(logits, key, torch.tensor(len(tokens)))))
    assert prompt + row.tokens == tokens


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": 0.0}, "temperature must be above 0, but got 0.0"),
        ({"temperature": -1.0}, "temperature must be above 0, but got -1.0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, but got 0.0"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": 0}, "top_k must be at least 1, but got 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, says):
    with pytest.raises(InvalidInput, match=says):
        Sampling(**options)


def test_the_record_says_what_the_text_depends_on():
    record = Sampling(0.7, top_p=0.9, seed=3).record
    assert record == {"rule": "sample-then-match", "temperature": 0.7, "top_p": 0.9, "top_k": None, "seed": 3}
    assert Sampling(0.7, top_p=1.0).record == Sampling(0.7).record


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("granite", {"logits_scaling": 4.0}),
        ("cohere2", {"logit_scale": 0.3}),
        ("gemma3_text", {"final_logit_softcapping": 3.0, "head_dim": 8}),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (
                ("granitemoe", {"logits_scaling": 3.0}),
                ("cohere", {"logit_scale": 0.0625}),
                ("gemma2", {"final_logit_softcapping": 5.0, "head_dim": 8}),
                ("gemma2", {"final_logit_softcapping": None}),
                ("nanochat", {}),
                ("hyperclovax", {"logits_scaling": 0.2}),
                ("minicpm3", {"dim_model_base": 8, "num_key_value_heads": 4}),
            )
        ),
    ],
)
def test_scores_are_the_models_own_logits(kind, options):
    """In bfloat16, where a factor that is rounded otherwise shows."""
    common = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.6}
    common |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    try:
        config = AutoConfig.for_model(kind, **common | options)
    except ValueError as error:
        pytest.skip(f"this transformers does not have {kind}: {error}")
    torch.manual_seed(0)
    target = Target(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval())
    tokens = torch.arange(2, 12)[None]
    with torch.inference_mode():
        own = target.model(tokens).logits
        logits = target.logits(target.decoder(tokens).last_hidden_state)
    assert target.scores(logits).equal(own)
    assert logits.equal(own) == (kind == "llama" or options.get("final_logit_softcapping", 1) is None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_what_a_cpu_draws():
    states = stream_states(3, NoiseStream.TOKEN, torch.arange(50), torch.arange(50))
    assert splitmix64(states.cuda(), 1000).cpu().equal(splitmix64(states, 1000))
    logits, keys, positions = random_logits(6, 16, 2000), torch.arange(6)[:, None], torch.arange(16)
    for sampling in (Sampling(0.8), Sampling(1.2, top_p=0.9, top_k=100, seed=7)):
        there = sampling.choose(logits.cuda(), keys.cuda(), positions.cuda())
        assert there.cpu().equal(sampling.choose(logits, keys, positions))
