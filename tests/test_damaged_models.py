"""Damaged folders of models, as --model and as --drafter: one sentence, or a right load that prompts can be asked of.

A dozen in the suite, 4,000 on demand (``pytest -m slow tests/test_damaged_models.py``).
"""

import json
import random
import shutil
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from treeopt import demo
from treeopt.errors import InvalidInput, TreeoptError
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.prompts.sets import load_prompts
from treeopt.runtime.random_weights import random_target
from treeopt.runtime.target import eos_ids, load_target

from .test_mutations import mutate_bytes, mutate_json, mutate_tensors

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TURNS = ({"role": "user", "content": "def a"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "go"})
INDEX, BIN, SHARD = "model.safetensors.index.json", "pytorch_model.bin", "model-00001-of-00001.safetensors"
NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
    "chat_template.jinja",
    INDEX,
    BIN,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny model, the demo's tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "model"
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=2048, num_key_value_heads=1, max_position_embeddings=96, eos_token_id=0, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL / name, folder / name)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder.parent / "prompts.jsonl").write_text((json.dumps({"messages": TURNS}) + "\n") * 2)
    return folder


@pytest.fixture(scope="module")
def target(model):
    return load_target(str(model))


def use(folder, target, prompts, *, as_drafter):
    """Open the folder and ask it something."""
    if as_drafter:
        open_drafter(str(folder), target)
        return
    opened = load_target(str(folder))
    found = load_prompts(opened, str(prompts))
    for conversation in found.conversations:
        found.next_prompt(conversation, [(5, 6, 7)])
    opened.logits(opened.read([found.conversations[0].first[:8]]))


def damage(folder, rng):
    """Change one of the folder's files; weights may be in a pickle or behind an index first."""
    name = rng.choice(NAMES)
    file, weights = folder / name, folder / "model.safetensors"
    if name == BIN:
        torch.save(load_file(weights), file)
        weights.unlink()
    if name == INDEX:
        held = dict.fromkeys(load_file(weights), SHARD)
        file.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": held}))
        weights.rename(folder / SHARD)
    if file.suffix == ".json" and rng.random() < 0.8:
        file.write_text(mutate_json(file.read_text(), rng))
    elif file.suffix in (".safetensors", ".bin") and rng.random() < 0.5:
        mutate_tensors(file, rng)
    elif file.suffix == ".safetensors" and rng.random() < 0.5:
        data = file.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = mutate_json(data[8:end].decode(), rng).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
    else:
        file.write_bytes(mutate_bytes(file.read_bytes(), rng))


def run(model, target, folder, seeds):
    refused = []
    for seed in seeds:
        rng = random.Random(seed)
        copy = folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(model, copy)
        damage(copy, rng)
        try:
            use(copy, target, model.parent / "prompts.jsonl", as_drafter=rng.random() < 0.3)
        except TreeoptError as error:
            refused.append(str(error))
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
    assert not [said for said in refused if "\n" in said or len(said) > 1000]
    return len(refused)


def test_damaged_models_are_refused_or_load(model, target, tmp_path):
    assert run(model, target, tmp_path, range(12))


@pytest.mark.slow
def test_many_damaged_models_are_refused_or_load(model, target, tmp_path):
    assert run(model, target, tmp_path, range(1000, 5000)) > 1000


def replaced(model, folder, **changes):
    """A copy of the model with another config."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_an_end_token_of_minus_one_is_none():
    model = SimpleNamespace(config=SimpleNamespace(eos_token_id=[2, -1]))
    assert eos_ids(model, None) == {2}
    model.config.eos_token_id = -1
    assert not eos_ids(model, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**9}, "may have 1000 layers"),
        ({"vocab_size": 10**12}, "more than these files can hold"),
        ({"num_hidden_layers": 3}, "lacks 9 of them"),
        ({"hidden_size": "x"}, "hidden_size"),
        ({"eos_token_id": [[1]]}, "eos_token_id"),
    ],
)
def test_a_config_of_another_model_is_refused_at_once(model, tmp_path, changes, said):
    folder = replaced(model, tmp_path / "copy", **changes)
    with pytest.raises(InvalidInput, match=said):
        load_target(str(folder))
    if "num_hidden_layers" in changes and "1000" in said:
        with pytest.raises(InvalidInput, match=said):
            random_target(str(folder), dtype=None, device="cpu", seed=0)


def test_a_header_of_safetensors_that_is_longer_than_any_is_refused(model, tmp_path):
    shutil.copytree(model, tmp_path / "copy")
    file = tmp_path / "copy/model.safetensors"
    file.write_bytes((2**60).to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(InvalidInput, match=r"header of model\.safetensors"):
        load_target(str(tmp_path / "copy"))


def test_numbers_of_configs_may_be_long(model, tmp_path):
    folder = replaced(model, tmp_path / "copy", model_max_length=10**30)
    assert load_target(str(folder)).num_layers == 2
    with suppress(TreeoptError):  # no heads, but no traceback
        save_file({}, folder / "medusa_lm_head.safetensors")
        open_drafter(str(folder), load_target(str(model)))
