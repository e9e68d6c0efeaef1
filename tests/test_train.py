"""Training, piece by piece: schedules, labels and losses against slow loops, untrained heads."""

import math
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from treeopt.errors import InvalidInput
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import (
    NO_LABEL,
    Text,
    common_tokens,
    digest_of,
    make_batch,
    split_texts,
    texts_of_step,
)
from treeopt.runtime.training.loop import Checkpoint, Loop
from treeopt.runtime.training.losses import count, loss_of
from treeopt.runtime.training.opening import make_heads
from treeopt.runtime.training.recipe import Recipe

from .helpers.slow_drafters import slow_eagle3_logits

K = 3


def small_target(*, vocab: int = 37, layers: int = 1, dtype=torch.float64, **options) -> Target:
    """A random model; unless told otherwise of one layer, in float64 and with logits well apart."""
    torch.manual_seed(0)
    sizes = {"vocab_size": vocab, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    others = {"initializer_range": 0.5, "eos_token_id": 3, "bos_token_id": None, "pad_token_id": 0}
    config = LlamaConfig(**sizes, **others, **options)
    return Target(LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False), name="small")


@torch.no_grad()
def states_of(target: Target, batch) -> torch.Tensor:
    """(B, T, d) states of a batch's texts."""
    return target.states(input_ids=batch.tokens, use_cache=False)


@st.composite
def some_texts(draw, most: int = 6) -> list[Text]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return random_texts(rng, draw(st.integers(1, most)))


def random_texts(rng, n: int, vocab: int = 37) -> list[Text]:
    made = []
    for i in range(n):
        prompt, answer = rng.integers(1, 6), rng.integers(2, 9)
        made.append(Text(rng.integers(6, vocab, prompt + answer).astype(np.int32), int(prompt), f"{i:04d}"))
    return made


# Recipes


def test_the_learning_rate_rises_in_a_line_and_falls_by_half_a_cosine():
    recipe = Recipe(steps=200)
    for step in range(200):
        share = recipe.share(step, seconds=7.0)
        assert share == (step + 0.5) / 200
        expected = min((step + 1) / 20, 1) * (0.5 + 0.5 * math.cos(math.pi * share))
        assert recipe.rate(step, share) == pytest.approx(expected)
    assert recipe.rate(199, 1.0) == 0


def test_epochs_become_steps_and_one_epoch_is_the_default():
    assert Recipe(epochs=1.5, batch_size=4).over(10).steps == 4
    assert Recipe().over(10).steps == 2
    assert Recipe(minutes=1).over(10).steps is None
    assert Recipe(steps=7).over(10).steps == 7


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "eagle"}, "kind must be one of"),
        ({"kind": "eagle3", "num_layers": 2}, "must be 1 for eagle3, which is one layer, but got 2"),
        ({"draft_vocab": 9}, "draft_vocab.* is for .*eagle3.* heads of the kind medusa-1 know all tokens"),
        ({"kind": "eagle3", "draft_vocab": 0}, "draft_vocab"),
        ({"num_heads": 0}, "must be at least 1, but got 0"),
        ({"batch_size": 0}, "batch_size"),
        ({"minutes": -1.0}, "minutes"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"steps": 3, "epochs": 1.0}, "steps.* and .*epochs.* exclude each other"),
        ({"steps": 3, "minutes": 1.0}, "exclude each other"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(options, said):
    with pytest.raises(InvalidInput, match=said):
        Recipe(**options)


# Texts as tensors


@given(some_texts(), st.integers(1, 5))
def test_the_labels_of_a_batch_are_the_tokens_that_follow_each_state(texts, num_heads):
    batch = make_batch(texts, num_heads, "cpu")
    expected = []
    for row, text in enumerate(texts):
        tokens = text.tokens.tolist()
        for t in range(text.answer_tokens):  # state t: its last committed token is y_t, its root y_{t+1}
            p = text.prompt_tokens - 1 + t
            ahead = [tokens[p + 1 + k] if p + 1 + k < len(tokens) else NO_LABEL for k in range(num_heads + 1)]
            expected.append((row, p, ahead))
    found = zip(batch.rows.tolist(), batch.columns.tolist(), batch.ahead.tolist(), strict=True)
    assert list(found) == expected
    for row, text in enumerate(texts):
        assert batch.tokens[row].tolist() == [*text.tokens, *[0] * (batch.tokens.shape[1] - len(text.tokens))]
    labels = [[label != NO_LABEL for label in ahead[1:]] for _, _, ahead in expected]
    assert batch.trials.tolist() == np.sum(labels, 0).tolist()


@given(st.integers(1, 20), st.integers(1, 9), st.integers(0, 3))
def test_every_text_comes_once_in_every_epoch(n, batch_size, seed):
    steps = -(-2 * n // batch_size)
    order = np.concatenate([texts_of_step(step, n, batch_size, seed) for step in range(steps)])
    for epoch in (order[:n], order[n : 2 * n]):
        assert sorted(epoch.tolist()) == list(range(n))


@given(st.integers(2, 90), st.randoms())
def test_held_out_conversations_are_whole_and_do_not_depend_on_the_order(n, random):
    texts = [Text(np.array([1, 2, 3]), 1, f"{i * 7919 % 1000:04d}") for i in range(n) for _ in range(1 + i % 2)]
    learned, held_out = split_texts(texts)
    names = {text.sha256 for text in held_out}
    assert not names & {text.sha256 for text in learned}
    assert len(learned) + len(held_out) == len(texts)
    assert len(names) == max(1, round(0.05 * n))
    random.shuffle(texts)
    assert {text.sha256 for text in split_texts(texts)[1]} == names


def test_one_conversation_is_too_few():
    with pytest.raises(InvalidInput, match="at least 2 conversations, one of them held out, but there is 1"):
        split_texts([Text(np.array([1, 2, 3]), 1, "a")] * 2)


def test_the_digest_knows_where_an_answer_begins():
    one, other = (digest_of([Text(np.array([1, 2, 3]), n, "")]) for n in (1, 2))
    assert one != other


# Losses


def slow_log_softmax(row):
    top = max(row)
    total = math.log(sum(math.exp(x - top) for x in row)) + top
    return [x - total for x in row]


def test_losses_are_those_of_slow_loops():
    rng = np.random.default_rng(0)
    logits, other = rng.normal(size=(2, 7, 5))
    labels = [0, 4, NO_LABEL, 2, 2, NO_LABEL, 1]
    text = teacher = 0.0
    for row, teacher_row, label in zip(logits.tolist(), other.tolist(), labels, strict=True):
        if label == NO_LABEL:
            continue
        now, then = slow_log_softmax(row), slow_log_softmax(teacher_row)
        text -= now[label]
        teacher -= sum(math.exp(p) * q for p, q in zip(then, now, strict=True))
    a, b, y = torch.tensor(logits), torch.tensor(other), torch.tensor(labels)
    assert float(loss_of(a, y)) == pytest.approx(text, rel=1e-12)
    assert float(loss_of(a, y, b)) == pytest.approx(teacher, rel=1e-12)


class Counting:
    """Heads of the language 0, 1, 2, ...: head k (from 1) reads p from the state and says p + k + 1."""

    num_heads, token_ids, dtype = K, None, torch.float64

    def taught(self, hidden, batch):
        for k in range(K):
            said = batch.states(hidden)[:, 0].long() + (k + 1) + 1
            yield said, lambda read: torch.nn.functional.one_hot(read, 64).double() * 9


@pytest.mark.parametrize(("shift", "right"), [(-1, 0.0), (0, 1.0), (1, 0.0)])
def test_head_k_guesses_the_token_k_plus_1_places_on(shift, right):
    """An off-by-one would look like a head near the base's own accuracy (or the token before it)."""
    texts = [Text(np.arange(first, first + 12, dtype=np.int32), 4, "") for first in (5, 20)]
    batch = make_batch(texts, K, "cpu")
    hidden = (batch.tokens[..., None] + shift).double()  # (B, T, 1)
    losses, hits = count(Counting(), hidden, batch)
    assert (hits / batch.trials).tolist() == [right] * K
    assert bool((losses < 1).all()) == bool(right)


@pytest.mark.parametrize(
    ("kind", "draft_vocab"),
    [("medusa-1", None), ("medusa-shared", None), ("hydra", None), ("eagle3", None), ("eagle3", 20)],
)
def test_the_loss_of_a_step_is_that_of_slow_loops(kind, draft_vocab, tmp_path):
    """State by state, head by head, with the true tokens, and the model's own logits as the teacher of EAGLE-3."""
    target, layers = small_target(), 1 if kind == "eagle3" else 2
    recipe = Recipe(kind, K, num_layers=layers, draft_vocab=draft_vocab, steps=1)
    texts, rng = random_texts(np.random.default_rng(2), 4), torch.Generator().manual_seed(1)
    heads = make_heads(target, recipe, texts)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=rng, dtype=parameter.dtype)
    ids = torch.arange(37) if heads.token_ids is None else heads.token_ids
    assert len(ids) == (draft_vocab or 37)
    batch = make_batch(texts, K, "cpu")
    loop = Loop(
        heads, target, recipe, texts, checkpoint=Checkpoint(tmp_path / "checkpoint.pt", {}), log=tmp_path / "log"
    )
    loss, counts = loop._pass(batch, batch.trials)

    sums, hits = [0.0] * K, [0] * K
    for text in texts:
        tokens, states = text.tokens.tolist(), target.read([text.tokens.tolist()])[0]
        teacher = target.logits(states)[:, ids].softmax(-1)
        for p in range(text.prompt_tokens - 1, len(tokens) - 1):
            for k in range(1, K + 1):
                if p + k + 1 >= len(tokens) or tokens[p + k + 1] not in ids:
                    continue
                text_before, true = (tokens[: p + 1], states[: p + 1]), tokens[p + 1 : p + 1 + k]
                if kind == "eagle3":
                    said = slow_eagle3_logits(heads, *text_before, true[0], true[1:])
                elif kind == "hydra":
                    said = heads.logits(torch.cat([states[p], *heads.embedding[true]]), k - 1)
                else:
                    said = heads.logits(states[p][None], k - 1)[0]
                hits[k - 1] += int(ids[said.argmax()] == tokens[p + k + 1])
                by_text = torch.nn.functional.one_hot((ids == tokens[p + k + 1]).nonzero()[0, 0], len(ids))
                wanted = teacher[p + k] if recipe.defaults.teacher else by_text
                sums[k - 1] -= (wanted * said.log_softmax(-1)).sum().item()
    close = partial(pytest.approx, rel=1e-5 if kind == "eagle3" else 1e-9)  # Llama's norms are in float32
    assert counts.tolist() == close([*sums, *hits])
    decay = 1.0 if kind == "hydra" else 0.8
    assert loss.item() == close(sum(decay**k * sums[k - 1] / int(batch.trials[k - 1]) for k in range(1, K + 1)))


# Heads


@pytest.mark.parametrize("kind", ["medusa-1", "medusa-shared", "hydra"])
def test_untrained_heads_say_exactly_what_the_model_says_next(kind):
    target = small_target()
    heads = make_heads(target, Recipe(kind, K, num_layers=2, steps=1))
    texts = random_texts(np.random.default_rng(0), 3)
    batch = make_batch(texts, K, "cpu")
    hidden = states_of(target, batch)
    for read, logits in heads.taught(hidden, batch):
        torch.testing.assert_close(logits(read), target.logits(batch.states(hidden)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_an_untrained_layer_says_what_the_model_says_next(layers):
    target, texts = small_target(layers=layers), random_texts(np.random.default_rng(0), 3)
    heads = make_heads(target, Recipe("eagle3", K, steps=1, draft_vocab=9), texts=texts)
    batch = make_batch(texts, K, "cpu")
    hidden = states_of(target, batch)
    read, logits = next(heads.taught(hidden, batch))
    own = target.logits(batch.states(hidden))[:, heads.token_ids]
    torch.testing.assert_close(logits(read), own, rtol=1e-5, atol=1e-5)


def test_the_rotation_of_the_target_is_taken():
    """Layers of DFlash take a target's scaled frequencies whole, as Llama 3's: making them ended in a KeyError."""
    scaled = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    target = small_target(layers=2, rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, **scaled})
    made = make_heads(target, Recipe("dflash", K), random_texts(np.random.default_rng(0), 3))
    assert made.config.rope_parameters == target.config.rope_parameters


def test_a_layer_guesses_the_tokens_that_answers_have_most_often():
    texts = random_texts(np.random.default_rng(3), 30)
    answered = Counter(token for text in texts for token in text.tokens[text.prompt_tokens :].tolist())
    order = sorted(range(37), key=lambda token: (-answered[token], token))
    for size in (1, 7, 30, 37, 50):
        assert common_tokens(texts, 37, size).tolist() == sorted(order[:size])


def test_heads_of_a_half_precision_model_learn_in_float32():
    heads = make_heads(small_target(dtype=torch.bfloat16), Recipe(steps=1))
    assert {p.dtype for p in heads.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in heads.parameters())
