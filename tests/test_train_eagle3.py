"""Training EAGLE-3: its unrolled steps against slow loops, what it begins as, its tokens, and a run in miniature."""

import numpy as np
import pytest
import torch

from treeopt.records.trace import End
from treeopt.runtime.checkpoints import Base, load_heads
from treeopt.runtime.drafters.protocol import GivenText
from treeopt.runtime.training.batches import common_tokens, count_trials, make_batch
from treeopt.runtime.training.heads import make_heads, save_result, size_of_heads
from treeopt.runtime.training.recipe import Recipe
from treeopt.runtime.training.trainees import FrozenStates, HeadsTrainee

from .slow_drafters import slow_eagle3_logits
from .test_train import one_thread, random_texts, scores_of, small_target  # noqa: F401  a fixture
from .test_train_run import cyclic_texts, make_loop, run

K = 3


def disturbed(heads):
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=rng, dtype=parameter.dtype)
    return heads


@pytest.mark.parametrize("draft_vocab", [None, 20])
def test_the_loss_of_a_step_is_that_of_slow_loops(draft_vocab):
    """Text by text and state by state, with the true tokens and the drafter's own states, as it decodes."""
    target, recipe = small_target(), Recipe("eagle3", K, steps=1, draft_vocab=draft_vocab)
    texts = random_texts(np.random.default_rng(2), 4)
    heads = disturbed(make_heads(target, recipe, texts=texts))
    ids = torch.arange(37) if heads.token_ids is None else heads.token_ids
    assert len(ids) == (draft_vocab or 37)
    batch, trials = make_batch(texts, K, "cpu"), count_trials(texts, K)
    hidden = FrozenStates(target, texts).of(range(4), batch)
    loss, counts = HeadsTrainee(heads, recipe, scores_of(target))(batch, hidden, torch.from_numpy(trials), 0.5)

    sums, hits = [0.0] * K, [0] * K
    for text in texts:
        tokens = text.tokens.tolist()
        states = target.read([tokens])[0]
        teacher = target.logits(states)[:, ids]
        for p in range(text.prompt_tokens - 1, len(tokens) - 1):
            for k in range(1, K + 1):
                if p + k + 1 >= len(tokens) or tokens[p + k + 1] not in ids:
                    continue
                seen = slice(0, p + 1)
                said = slow_eagle3_logits(heads, tokens[seen], states[seen], tokens[p + 1], tokens[p + 2 : p + 1 + k])
                hits[k - 1] += int(ids[said.argmax()] == tokens[p + k + 1])
                sums[k - 1] -= (teacher[p + k].softmax(-1) * said.log_softmax(-1)).sum().item()
    assert counts.tolist() == pytest.approx([*sums, *hits, 0, 0], rel=1e-5)  # Llama's norms are in float32
    expected = sum(0.8**k * sums[k - 1] / trials[k] for k in range(1, K + 1))
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_an_untrained_drafter_says_what_the_model_says_next(layers):
    target = small_target(layers=layers)
    texts = random_texts(np.random.default_rng(0), 3)
    heads = make_heads(target, Recipe("eagle3", K, steps=1, draft_vocab=9), texts=texts)
    batch = make_batch(texts, K, "cpu")
    hidden = FrozenStates(target, texts).of(range(3), batch)
    said = heads.logits(heads.predict(batch.tokens.roll(-1, 1), heads.fused(hidden)))
    torch.testing.assert_close(said, target.logits(hidden)[..., heads.token_ids], rtol=1e-5, atol=1e-5)


def test_it_guesses_the_tokens_that_answers_have_most_often():
    texts = random_texts(np.random.default_rng(3), 30)
    answered = [token for text in texts for token in text.tokens[text.prompt_tokens :].tolist()]
    for size in (1, 7, 30, 37, 50):
        ids = common_tokens(texts, 37, size).tolist()
        assert ids == sorted(set(ids))
        assert len(ids) == min(size, 37)
        left_out = set(range(37)) - set(ids)
        if left_out:
            rarest = min(ids, key=lambda token: (answered.count(token), -token))
            assert all((answered.count(t), -t) < (answered.count(rarest), -rarest) for t in left_out)


@pytest.mark.parametrize("draft_vocab", [None, 20])
def test_the_size_that_is_announced_is_that_of_the_drafter(draft_vocab):
    target, recipe = small_target(), Recipe("eagle3", K, steps=1, draft_vocab=draft_vocab)
    size = size_of_heads(target, recipe)
    heads = make_heads(target, recipe, texts=random_texts(np.random.default_rng(0), 3))
    assert size.total == sum(p.numel() for p in heads.parameters())
    assert size.parameters["projections"] == (draft_vocab or 37) * 16
    assert set(size.parameters) == {"layer", "projections"}


def certain_scores(target, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of a model that knows the language, where the target knows nothing: by what enters its first layer."""
    token = torch.cdist(hidden[:, 16:32], target.model.get_input_embeddings().weight).argmin(-1)
    return 50.0 * torch.nn.functional.one_hot(6 + (token - 6 + 1) % 12, 37)


def test_a_drafter_learns_a_language_and_its_file_has_the_same_ranks(tmp_path):
    target, texts = small_target(dtype=torch.float32), cyclic_texts()
    recipe = Recipe("eagle3", K, steps=60, batch_size=6, learning_rate=0.02, draft_vocab=16)
    loop = make_loop(tmp_path / "run", target, recipe, texts)
    loop.trainee.scores = lambda hidden: certain_scores(target, hidden)
    before = loop.count(texts, loop.states)
    run(loop)
    after = loop.count(texts, loop.states)
    assert all(now < then / 2 for now, then in zip(after["head_loss_nats"], before["head_loss_nats"], strict=True))
    assert max(before["accuracy"]) < 0.5
    assert min(after["accuracy"]) > 0.9

    files = save_result(loop.trainee, target, recipe, tmp_path / "made")
    assert [file.name for file in files] == ["model.safetensors", "config.json"]
    base = Base(target.lm_head.weight, target.model.get_input_embeddings().weight, target.config, num_heads=K)
    loaded = load_heads(str(tmp_path / "made"), base).heads
    assert loaded.form == loop.trainee.heads.form
    answers = [
        GivenText(t.tokens[:4].tolist(), t.tokens[4:].tolist(), End.LIMIT, target.read([t.tokens[:-1].tolist()])[0])
        for t in texts
    ]
    ours, theirs = (heads.ranks(answers, 10) for heads in (loop.trainee.heads, loaded))
    assert all((mine == other).all() for mine, other in zip(ours, theirs, strict=True))
    assert np.mean([(ranks[:-1, 0] == 0).mean() for ranks in ours]) > 0.9
