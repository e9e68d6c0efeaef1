"""Training as a whole: runs that continue, what heads learn, and the command."""

import copy
import json
import re
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from treeopt import demo
from treeopt.errors import InvalidInput, OutOfRange
from treeopt.records.options import Source
from treeopt.records.trace import End
from treeopt.runtime.acceptance.rules import Greedy
from treeopt.runtime.checkpoints import Base, load_heads
from treeopt.runtime.decode import decode
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.drafters.protocol import GivenText
from treeopt.runtime.prompts.sets import Conversation, PromptSet, demo_prompts
from treeopt.runtime.session import open_model
from treeopt.runtime.stop import StopRule
from treeopt.runtime.training import loop as loop_module
from treeopt.runtime.training import opening
from treeopt.runtime.training.batches import Text
from treeopt.runtime.training.loop import Checkpoint, Loop
from treeopt.runtime.training.opening import Asking, given_texts, make_heads, own_texts, save_result
from treeopt.runtime.training.recipe import Recipe
from treeopt.trees.tree import Tree

from .conftest import asked, invoke, some_long, treeopt
from .test_train import random_texts, small_target

K = 2


TEXTS = random_texts(np.random.default_rng(0), 9)


def make_loop(folder, target, recipe, texts=TEXTS, **options) -> Loop:
    checkpoint, log = Checkpoint(folder / "checkpoint.pt", recipe.record()), folder / "log.jsonl"
    return Loop(make_heads(target, recipe, texts), target, recipe, texts, checkpoint=checkpoint, log=log, **options)


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def trained(module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def run(loop: Loop, steps: int | None = None, *, after: int = 0) -> dict[str, torch.Tensor]:
    """The weights after a run that goes on behind step ``after``, and is killed behind step ``steps``."""
    assert loop.resume().step == after
    for position in loop.run():
        if position.step == steps:
            break
    return trained(loop.heads)


# Runs that continue


@pytest.mark.parametrize("kind", ["medusa-1", "dflash", *some_long("medusa-shared", "hydra", "eagle3")])
def test_a_run_that_was_killed_ends_in_the_weights_of_one_that_was_not(kind, tmp_path):
    """Bit by bit, in float32; killed one step behind its last checkpoint."""
    recipe = Recipe(kind, K, num_layers=1, steps=7, batch_size=4)

    def fresh(name):
        return make_loop(tmp_path / name, small_target(dtype=torch.float32), recipe, checkpoint_steps=2)

    whole = run(fresh("whole"))
    run(fresh("killed"), steps=5)
    again = run(fresh("killed"), after=4)
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], weight) for name, weight in again.items())
    one, other = lines(tmp_path / "whole"), lines(tmp_path / "killed")
    assert [line["loss"] for line in one] == [line["loss"] for line in other]
    assert [line["step"] for line in other] == list(range(1, 8))


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("eagle3", 1),
        *(pytest.param(*row, marks=pytest.mark.long) for row in (("medusa-1", 1), ("hydra", 2), ("dflash", 2))),
    ],
)
def test_training_goes_on_from_heads_that_were_written(kind, layers, tmp_path):
    """Layers may have another MLP than the target's."""
    target = small_target(layers=7, dtype=torch.float32)
    usual, target.config.intermediate_size = target.config.intermediate_size, 24
    recipe = Recipe(kind, K, num_layers=layers, steps=3, draft_vocab=20 if "eagle" in kind else None)
    loop = make_loop(tmp_path / "first", target, recipe)
    before = run(loop)
    save_result(loop.heads, target, recipe, tmp_path / "heads")
    target.config.intermediate_size = usual
    onward = replace(recipe, start=str(tmp_path / "heads"), draft_vocab=None)
    begun = make_loop(tmp_path / "second", target, onward)
    again = trained(begun.heads)
    assert again.keys() == before.keys()
    assert all(torch.equal(weight, before[name]) for name, weight in again.items())
    assert any(not torch.equal(weight, before[name]) for name, weight in run(begun).items())
    other = "hydra" if kind != "hydra" else "medusa-1"
    with pytest.raises(InvalidInput, match=f"start must be heads of the kind {other} with 2 heads of 3 layers"):
        make_heads(target, Recipe(other, K, num_layers=3, start=str(tmp_path / "heads")))
    for wrong in ("nowhere/heads", tmp_path):
        with pytest.raises(InvalidInput, match=r"^start must be a folder"):
            make_heads(target, replace(onward, start=str(wrong)))
    if "eagle" not in kind:  # whose layers guess as far as they are asked to
        with pytest.raises(InvalidInput, match=f"start must be heads of the kind {kind} with 3 heads"):
            make_heads(target, replace(onward, num_heads=K + 1))


def test_a_checkpoint_of_another_run_is_left_alone_and_a_run_without_one_makes_room(tmp_path):
    """Another command once replaced a half-trained run without a word."""
    target, recipe, other = small_target(), Recipe(steps=3, num_heads=K), Recipe(steps=3, num_heads=3, seed=1)
    run(make_loop(tmp_path, target, recipe, checkpoint_steps=2), steps=2)
    log = (tmp_path / "log.jsonl").read_bytes()
    with pytest.raises(InvalidInput, match=r"differs in heads \(2, not 3\), seed \(0, not 1\): .*delete"):
        make_loop(tmp_path, target, other).resume()
    assert (tmp_path / "log.jsonl").read_bytes() == log
    run(make_loop(tmp_path, target, recipe), after=2)
    run(make_loop(tmp_path / "none", target, recipe))
    loop = make_loop(tmp_path / "none", target, other, checkpoint_steps=1)
    run(loop)
    assert (len(lines(tmp_path / "none")), loop.kept.step) == (3, 3)


def test_a_damaged_checkpoint_is_one_sentence(tmp_path):
    """Once it is deleted, the run begins anew."""
    recipe = Recipe(steps=3, num_heads=K)
    run(make_loop(tmp_path, small_target(), recipe, checkpoint_steps=2), steps=3)
    file = tmp_path / "checkpoint.pt"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InvalidInput, match=r"is damaged\. Delete it"):
        make_loop(tmp_path, small_target(), recipe).resume()
    file.unlink()
    loop = make_loop(tmp_path, small_target(), recipe)
    assert loop.resume().step == 0


@pytest.mark.parametrize(("where", "number"), [("gradient", signal.SIGINT), ("update", signal.SIGTERM)])
def test_an_interrupted_run_keeps_the_steps_that_are_done(where, number, tmp_path, monkeypatch):
    """A signal while the weights change waits for the end of the step, so that no half of it is kept."""
    recipe = Recipe(num_heads=K, steps=6, batch_size=4)
    before = signal.signal(number, signal.default_int_handler)
    whole = run(make_loop(tmp_path / "whole", small_target(), recipe))
    loop = make_loop(tmp_path, small_target(), recipe)
    owner, name = (loop, "_gradient") if where == "gradient" else (loop.optimisers[0], "step")
    calls, original = [], getattr(owner, name)

    def stopped(*arguments):
        calls.append(1)
        if len(calls) == 4:
            signal.raise_signal(number)
        return original(*arguments)

    monkeypatch.setattr(owner, name, stopped)
    with pytest.raises(KeyboardInterrupt):
        run(loop)
    assert signal.signal(number, before) is signal.default_int_handler
    done = 3 if where == "gradient" else 4
    loop.keep()
    assert loop.kept.step == loop.position.step == done
    again = run(make_loop(tmp_path, small_target(), recipe), after=done)
    assert all(torch.equal(whole[name], weight) for name, weight in again.items())
    assert len(lines(tmp_path)) == 6


@pytest.mark.parametrize("kind", ["eagle3", "dflash", *some_long("medusa-1", "hydra")])
def test_passes_change_memory_and_not_the_result(kind, tmp_path):
    recipes = [Recipe(kind, K, steps=3, batch_size=7, accumulate=n) for n in (1, 3)]
    one, three = (run(make_loop(tmp_path / str(recipe.accumulate), small_target(), recipe)) for recipe in recipes)
    for name, weight in one.items():
        torch.testing.assert_close(three[name], weight, rtol=1e-6, atol=1e-9)


def test_a_run_by_the_clock_stops_at_its_minutes(tmp_path, monkeypatch):
    """The clock is a fake: 10 s go by whenever it is read, so that a step takes 10 s."""
    ticks = iter(range(0, 10_000, 10))
    monkeypatch.setattr(loop_module.time, "perf_counter", lambda: float(next(ticks)))
    loop = make_loop(tmp_path, small_target(), Recipe(minutes=1.0, num_heads=K))
    run(loop)
    assert (loop.position.step, loop.position.seconds) == (6, 60.0)
    rates = [line["learning_rate"] for line in lines(tmp_path)]
    expected = [1e-3 * (s + 1) / 40 * (0.5 + 0.5 * np.cos(np.pi * 10 * s / 60)) for s in range(6)]
    assert rates == pytest.approx(expected)


def test_more_passes_than_texts_and_a_step_without_memory_say_what_helps(tmp_path, monkeypatch):
    with pytest.raises(InvalidInput, match="batch_size must be at least 1 for each pass, 4, but got 3"):
        make_loop(tmp_path, small_target(), Recipe(steps=1, batch_size=3, accumulate=4))
    loop = make_loop(tmp_path, small_target(), Recipe(steps=1, num_heads=K))

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loop, "_pass", full)
    with pytest.raises(OutOfRange, match="use more passes"):
        run(loop)


def test_a_head_that_had_nothing_to_guess_has_no_rates(tmp_path):
    """A loss of 0 once said so."""
    texts = [Text(np.array([6, 7, 8, 9], dtype=np.int32), 1, str(i)) for i in range(3)]
    loop = make_loop(tmp_path, small_target(), Recipe(num_heads=3, steps=1), texts)
    counts = loop.count(loop.texts)
    assert counts["trials"] == [6, 3, 0]
    for rates in (counts["accuracy"], counts["head_loss_nats"]):
        assert [rate is None for rate in rates] == [False, False, True]
    run(loop)
    assert lines(tmp_path)[0]["head_loss_nats"][2] is None


# What is learned


def cyclic_texts() -> list[Text]:
    """The language 6, 7, ..., 17, 6, 7, ...: after any token all that follow are certain."""
    return [Text((6 + (first + np.arange(20)) % 12).astype(np.int32), 4, f"{first:04d}") for first in range(12)]


@pytest.mark.parametrize(
    ("kind", "steps", "least"),
    [
        ("hydra", 50, 0.95),
        pytest.param("medusa-1", 50, 0.95, marks=pytest.mark.long),
        pytest.param("medusa-shared", 300, 0.55, marks=pytest.mark.long),
    ],
)
def test_heads_learn_a_language_without_surprises(kind, steps, least, tmp_path):
    """As far as they can by a projection that is the model's own."""
    texts = cyclic_texts()
    recipe = Recipe(kind, K, steps=steps, batch_size=6, learning_rate=0.1)
    loop = make_loop(tmp_path, small_target(dtype=torch.float32), recipe, texts)
    before = loop.count(loop.texts)
    run(loop)
    after = loop.count(loop.texts)
    assert max(before["accuracy"]) < 0.5
    assert min(after["accuracy"]) > least
    assert after["trials"] == [12 * 15, 12 * 14]


def certain_scores(target, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of a model that knows the language, where the target knows nothing: by what enters its first layer."""
    token = torch.cdist(hidden[:, 16:32], target.model.get_input_embeddings().weight).argmin(-1)
    return 50.0 * torch.nn.functional.one_hot(6 + (token - 6 + 1) % 12, 37)


def test_a_drafter_learns_of_its_teacher_and_its_file_has_the_same_ranks(tmp_path):
    """The base stays as it is."""
    target, texts = small_target(dtype=torch.float32), cyclic_texts()
    weights = copy.deepcopy(target.model.state_dict())
    recipe = Recipe("eagle3", K, steps=60, batch_size=6, learning_rate=0.02, draft_vocab=16)
    loop = make_loop(tmp_path / "run", target, recipe, texts)
    target.scored = lambda hidden: certain_scores(target, hidden)
    before = loop.count(loop.texts)
    run(loop)
    after = loop.count(loop.texts)
    assert all(now < then / 2 for now, then in zip(after["head_loss_nats"], before["head_loss_nats"], strict=True))
    assert max(before["accuracy"]) < 0.5
    assert min(after["accuracy"]) > 0.9
    assert all(torch.equal(weights[name], weight) for name, weight in target.model.state_dict().items())

    files = save_result(loop.heads, target, recipe, tmp_path / "made")
    assert [file.name for file in files] == ["model.safetensors", "config.json"]
    base = Base(target.lm_head.weight, target.model.get_input_embeddings().weight, target.config, num_heads=K)
    loaded = load_heads(str(tmp_path / "made"), base).heads
    assert loaded.form == loop.heads.form
    answers = [
        GivenText(t.tokens[:4].tolist(), t.tokens[4:].tolist(), End.LIMIT, target.read([t.tokens[:-1].tolist()])[0])
        for t in texts
    ]
    ours, theirs = (heads.ranks(answers, 10) for heads in (loop.heads, loaded))
    assert all((mine == other).all() for mine, other in zip(ours, theirs, strict=True))
    assert np.mean([(ranks[:-1, 0] == 0).mean() for ranks in ours]) > 0.9


# Texts


def asking(limit=12, most_tokens=64, acceptance=None) -> Asking:
    return Asking(StopRule(frozenset({3}), limit), acceptance or Greedy(), most_tokens)


def seeds(n=5, turns=1) -> PromptSet:
    rng = np.random.default_rng(1)
    plain = asked([])
    made = [
        Conversation(tuple(rng.integers(6, 37, 4).tolist()), tuple(("user", f"turn {t}") for t in range(turns)), row=i)
        for i in range(n)
    ]
    return PromptSet(tuple(made), "seeds", "0" * 64, plain.encoder)


def test_own_answers_are_what_plain_decoding_writes_turn_by_turn(tmp_path):
    target, prompts = small_target(), seeds(turns=2)
    found = iter(own_texts(target, prompts, tmp_path, asking()))
    for conversation in prompts.conversations:
        answers = []
        for _ in range(2):
            prompt = prompts.next_prompt(conversation, answers)
            (row,) = decode(target, None, [prompt], batch_size=1, stop=asking().stop)
            answers.append(row.tokens)
            if len(row.tokens) > 1:
                text = next(found)
                assert text.tokens.tolist() == [*prompt, *row.tokens]
                assert (text.prompt_tokens, text.sha256) == (len(prompt), conversation.sha256)
    assert next(found, None) is None


def test_answers_are_written_once_for_the_same_question(tmp_path, monkeypatch):
    target, prompts = small_target(), seeds()
    once = own_texts(target, prompts, tmp_path, asking())
    calls = []
    original = opening.decode
    monkeypatch.setattr(opening, "decode", lambda *a, **o: calls.append(1) or original(*a, **o))
    again = own_texts(target, prompts, tmp_path, asking())
    assert not calls
    assert [t.tokens.tolist() for t in again] == [t.tokens.tolist() for t in once]
    cut = own_texts(target, prompts, tmp_path, asking(most_tokens=7))
    assert not calls
    assert {len(t.tokens) for t in cut} <= {6, 7}
    own_texts(target, prompts, tmp_path, asking(limit=11))
    with torch.no_grad():
        target.lm_head.weight += 0.1
    own_texts(target, prompts, tmp_path, asking())  # another model under the same name
    assert len(calls) == 2


def test_given_answers_are_cut_where_they_loop():
    target, plain = small_target(), asked([])
    first = plain.encoder.first_prompt([("user", "ab")])
    conversation = Conversation(first, (("user", "ab"), ("user", "c")), ("xyz" * 5, "q"), row=1)
    prompts = PromptSet((conversation,), "", "", plain.encoder)
    one, two = given_texts(target, prompts, asking(limit=40))
    letters = plain.encoder.encode
    assert one.tokens.tolist() == [*first, *letters("xyz" * 3)]
    assert two.tokens.tolist() == [*first, *letters("xyz" * 5 + "\n\nc" + "q"), 3]


# The command


@pytest.mark.parametrize("kind", ["medusa-1", *some_long("hydra", "eagle3")])
def test_a_command_makes_heads_that_decode_what_the_model_says(kind, tmp_path):
    out = tmp_path / "heads"
    options = ["--num-prompts", 6, "--max-new-tokens", 10, "--batch-size", 2, "--heads", 2, "--layers", 1]
    options += ["--dtype", "float32"]
    done = invoke("train", "--kind", kind, *options, "--steps", 3, "-o", out, code=0)
    assert "1 held out, too few to tell" in done.stderr
    saved = json.loads((out / "training/training.json").read_text())
    assert (saved["schema"], saved["steps"], saved["recipe"]["kind"]) == ("treeopt.training/1", 3, kind)
    assert len(saved["texts"]["prompt_sha256"]) == 6
    for counts in saved["held_out"].values():
        assert all(f"{accuracy:.3f}" in done.stdout for accuracy in counts["accuracy"])
    assert not (out / "training/checkpoint.pt").exists()
    assert not list(out.rglob(".treeopt-*"))
    assert len(lines(out / "training")) == 3

    target = open_model(Source(device="cpu"))
    opened = open_drafter(str(out), target, depth=2 if kind == "eagle3" else None)
    assert opened.record["layout"] == {"medusa-1": "medusa", "eagle3": "eagle-3"}.get(kind, kind)
    prompts, stop = [c.first for c in demo_prompts(target).conversations[:2]], StopRule(target.eos_ids, 12)
    plain = decode(target, None, prompts, batch_size=2, stop=stop)
    tree = decode(target, opened.drafter, prompts, Tree.dense([2, 1]), batch_size=2, stop=stop)
    assert [row.tokens for row in tree] == [row.tokens for row in plain]
    assert done.stdout.rstrip().endswith(f"treeopt run --drafter {out}")
    other = "hydra" if kind != "hydra" else "medusa-1"
    refusal = treeopt("train", "--kind", other, *options, "--steps", 1, "-o", out, code=1)
    assert "--output must be a folder without other weights" in refusal


def test_heads_of_ones_own_model_learn_from_given_answers(tmp_path):
    rows = [{"prompt": f"def f{i}(x):", "answer": f"\n    return x + {i}\n"} for i in range(6)]
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model", demo.MODEL, "--prompts", tmp_path / "said.jsonl", "--responses", "answer"]
    out = tmp_path / "made"
    assert "--rule says how" in treeopt("train", *options, "--rule", "sample", "-o", out, code=1)
    done = json.loads(treeopt("train", *options, "--steps", 1, "--heads", 1, "-o", out, "--json"))
    assert done["texts"]["learned"] + done["texts"]["held_out"] == 6
    assert done["texts"]["own_answers"] is False
    assert done["provenance"]["acceptance"] is None
    assert done["command"] == f"treeopt run --model {options[1]} --drafter {out} --prompts OTHER_PROMPTS"
    assert not list((out / "training").glob("answers-*"))


def test_training_prompts_are_none_of_calibrations():
    target = open_model(Source(device="cpu"))
    seen = {c.sha256 for c in demo_prompts(target).conversations}
    learned = opening.open_seeds(Source(), target, 300)
    assert 250 < len(learned.conversations) <= 300
    assert not seen & {c.sha256 for c in learned.conversations}
    assert "training modules" in learned.name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--drafter", "heads"], "No such option"),
        (["--drafter", "medusa"], "No such option"),
        (["--kind", "eagle"], "is not one of"),
        (["--heads", "0"], "must be at least 1, but got 0"),
        (
            ["--num-prompts", "4", "--max-new-tokens", "6", "--heads", "6"],
            "--heads must be below 6, the tokens of the longest answer",
        ),
    ],
)
def test_the_command_refuses_what_makes_no_sense(options, said, tmp_path):
    assert said in treeopt("train", "-o", tmp_path / "x", *options, code=1 if "below" in said else 2)


def test_train_has_no_options_of_a_drafter():
    flags = set(re.findall("--[a-z-]+", treeopt("train", "--help-all")))
    assert {"--rule", "--model", "--kind"} <= flags
    assert flags.isdisjoint({"--drafter", "--draft-depth", "--engine-python", "--group-by"})


def test_an_interrupted_command_says_where_it_goes_on(tmp_path, monkeypatch):
    options = [
        "train",
        *["--num-prompts", "6", "--max-new-tokens", "10", "--batch-size", "2", "--heads", "2", "--steps", "3", "-o"],
        tmp_path / "x",
    ]
    original = loop_module.Loop._gradient

    def stopped(self, step, seconds):
        if step == 2:
            raise KeyboardInterrupt
        return original(self, step, seconds)

    with monkeypatch.context() as patched:
        patched.setattr(loop_module.Loop, "_gradient", stopped)
        assert "Stopped after step 2: the same command goes on there." in treeopt(*options, code=130)
    assert "half-trained run that differs in kind" in treeopt(*options, "--kind", "hydra", code=1)
    assert "Continuing after 2 steps." in invoke(*options, code=0).stderr
    assert json.loads((tmp_path / "x/training/training.json").read_text())["steps"] == 3


@pytest.mark.parametrize(
    ("given", "device", "dtype", "wanted"),
    [
        (None, "cuda", torch.float16, "bf16"),
        (None, "cuda", torch.float32, "no"),
        (None, "cpu", torch.bfloat16, "no"),
        ("no", "cuda", torch.float16, "no"),
        ("bf16", "cpu", torch.float32, "bf16"),
    ],
)
def test_half_precision_on_cuda_learns_in_bf16_unless_something_else_is_said(given, device, dtype, wanted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert opening.wanted_precision(given, SimpleNamespace(device=torch.device(device), dtype=dtype)) == wanted


def test_products_in_bfloat16_learn_too(tmp_path):
    target, recipe = small_target(dtype=torch.float32), Recipe(num_heads=K, steps=3)
    whole, half = (run(make_loop(tmp_path / name, target, recipe, precision=name)) for name in ("no", "bf16"))
    assert all(weight.dtype == torch.float32 for weight in half.values())
    assert not torch.equal(whole["blocks"], half["blocks"])
    torch.testing.assert_close(whole["blocks"], half["blocks"], rtol=0.0, atol=0.01)


def test_a_model_of_ones_own_needs_prompts():
    with pytest.raises(InvalidInput, match="prompts is needed with a model of your own"):
        opening.open_seeds(Source("mine"), small_target(), 8)
