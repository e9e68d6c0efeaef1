"""Damaged files of every kind: a reader refuses them in one sentence or loads them right, and runs or unpickles nothing.

About 1,000 files in the suite, always the same; 20,000 others on demand (``pytest -m slow tests/test_damage.py``).
"""

import json
import operator
import random
import re
import shutil
from types import SimpleNamespace
from typing import Annotated

import numpy as np
import pytest
import torch
from pydantic import PlainValidator
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from treeopt import demo
from treeopt.engines.imports import read_measurement
from treeopt.errors import InvalidInput, TreeoptError
from treeopt.files.storage import typed
from treeopt.pipeline.trees import read_tree
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import Calibration
from treeopt.records.contender import Answer, Block, Contender
from treeopt.records.plan import Plan
from treeopt.records.probe import Probe
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.trace import RankTrace
from treeopt.runtime.checkpoints import Base, load_heads
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.drafters.protocol import TreeTensors
from treeopt.runtime.prompts.sets import load_prompts
from treeopt.runtime.target import load_target
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

from .conftest import examples, random_trace
from .helpers.engine_files import EVERYTHING
from .helpers.prompt_files import write
from .helpers.synthetic import synthetic
from .test_coverage import random_probe
from .test_planner import staircase

# Ways of damage


VALUES = [None, True, 0, -1, 2**31, 2**63, 10**30, 10**400, 0.5, 1e308, "", "x", "\x1b[2J\0", "\ud800", [], {}, [[]], [None],
          {"a": []}, [1, [2]], [0] * 300, "9" * 5000]  # fmt: skip
NO_NUMBERS = ("1e999", "-Infinity", "NaN", "1" * 5000, "[" * 5000, "[" * 5000 + "]" * 5000, '"', "0x1", "1 2")


def damage_bytes(path, rng):
    """Flip, cut, repeat, insert or truncate, once or a few times."""
    data = path.read_bytes()
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(data) + 1)
        to = min(len(data), at + rng.choice([1, 4, 64]))
        change = rng.randrange(5)
        if change == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        elif change == 1:
            data = data[:at] + data[to:]
        elif change == 2:
            data = data[:to] + data[at:to] + data[to:]
        elif change == 3:
            data = data[:at] + rng.randbytes(rng.choice([1, 8])) + data[at:]
        else:
            data = data[:at]
        data = data or b"\0"
    path.write_bytes(data)


def changed_json(text: str, rng: random.Random) -> str:
    """Replace, drop or rename something at a random place."""
    document = json.loads(text)
    places = []

    def walk(value):
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, child in list(items):
            places.append((value, key))
            walk(child)

    walk(document)
    for _ in range(rng.choice([1, 1, 2]) if places else 0):
        owner, key = rng.choice(places)
        if (isinstance(owner, list) and key >= len(owner)) or (isinstance(owner, dict) and key not in owner):
            continue
        change = rng.randrange(3)
        if change == 0:
            del owner[key]
        elif change == 1 and isinstance(owner, dict):
            owner[rng.choice(["x", "size", "hits"])] = owner.pop(key)
        else:
            owner[key] = rng.choice(VALUES)
    said = json.dumps(document)
    if rng.random() < 0.1 and (numbers := list(re.finditer(r"\b\d+(\.\d+)?\b", said))):
        number = rng.choice(numbers)
        said = said[: number.start()] + rng.choice(NO_NUMBERS) + said[number.end() :]
    return said


def damage_json(path, rng):
    path.write_text(changed_json(path.read_text(), rng))


def damage_line(path, rng):
    lines = path.read_text().splitlines()
    at = rng.randrange(len(lines))
    lines[at] = changed_json(lines[at], rng)
    path.write_text("\n".join(lines))


def damage_arrays(path, rng):
    """Another value, type, shape or name in an .npz file."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    name = rng.choice(sorted(arrays))
    array = arrays.pop(name)
    change = rng.randrange(6)
    if change == 0:
        arrays["x" + name] = array
    elif change == 1:
        kinds = ["f8", "i1", "u8", "U5", "c8"] if array.dtype.kind in "iuf" else ["U5"]
        arrays[name] = array.astype(rng.choice(kinds))
    elif change == 2:
        arrays[name] = array[..., None] if rng.random() < 0.5 else array.reshape(-1)[: rng.randrange(array.size + 1)]
    elif change == 3 and array.dtype.kind in "iu":
        arrays[name] = array.astype(np.int64) + rng.choice([-100, 40000, 2**40])
    elif change == 4 and name == "meta":
        arrays[name] = np.array(changed_json(str(array), rng))
    np.savez(path, **arrays)


def damage_tensors(path, rng):
    """A tensor dropped, renamed, reshaped, of another type, or not finite."""
    pickled = path.suffix != ".safetensors"
    tensors = torch.load(path, weights_only=True) if pickled else load_file(path)
    if not isinstance(tensors, dict):
        return damage_bytes(path, rng)
    name = rng.choice(sorted(tensors))
    tensor = tensors.pop(name)
    change = rng.randrange(6)
    if change == 1:
        tensors[rng.choice(["", "x.", "medusa_head.", "9."]) + name[rng.randrange(2) :]] = tensor
    elif change == 2:
        tensors[name] = tensor[: rng.randrange(len(tensor))].clone() if tensor.ndim else tensor[None]
    elif change == 3:
        tensors[name] = tensor.to(rng.choice([torch.int64, torch.bool, torch.float64, torch.bfloat16]))
    elif change == 4:
        tensors[name] = tensor.float() * float("nan")
    elif change == 5:
        tensors[name] = tensor.flatten()
    if pickled:
        return torch.save(tensors, path)
    return save_file({n: t.contiguous().clone() for n, t in tensors.items()}, path)


def damage_header(path, rng):
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = changed_json(data[8:end].decode(), rng).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])


DAMAGES = {  # beside that of bytes
    ".json": [damage_json],
    ".jsonl": [damage_line],
    ".npz": [damage_arrays],
    ".pt": [damage_tensors],
    ".bin": [damage_tensors],
    ".safetensors": [damage_tensors, damage_tensors, damage_header],
}
INDEX, BIN, SHARD = "model.safetensors.index.json", "pytorch_model.bin", "model-00001-of-00001.safetensors"


def damage(path, rng):
    """Change a file, or one of a folder's; a model's weights may be in a pickle or behind an index first."""
    if path.is_dir():
        weights = path / "model.safetensors"
        form = rng.choice(["", "", "", BIN, INDEX]) if (path / "tokenizer.json").exists() else ""
        if form == BIN:
            torch.save(load_file(weights), path / BIN)
            weights.unlink()
        elif form == INDEX:
            held = dict.fromkeys(load_file(weights), SHARD)
            (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": held}))
            weights.rename(path / SHARD)
        path = path / form if form else rng.choice(sorted(path.iterdir()))
    ways = DAMAGES.get(path.suffix)
    (rng.choice(ways) if ways and rng.random() < 0.7 else damage_bytes)(path, rng)


# Kinds of files


def some_trace(*lengths):
    return random_trace(np.random.default_rng(0), lengths, 3, 4)


def save_profile(path):
    points = [StepTiming(1, 64, s, 1, (1.0 + s, 1.1 + s), (0, 1)) for s in (2, 4)]
    LatencyProfile(tuple(points), (StepTiming(1, 64, 1, 0, (1.0, 1.1)),), {"name": "x"}).save(path)


def save_plan(path):
    profile = staircase(lambda rows: 2.0 + rows / 8, batch_sizes=(1, 2), sizes=range(2, 7))
    plan_trees(some_trace(*[12] * 8), profile, PlanRequest(Limits(6), batch_sizes=(1, 2))).save(path)


def save_bench(path):
    block = Block(round=0, prompts=[0], tokens=4, steps=4, decode_s=0.1, group="a")
    sequence = Answer(id="x", steps=4, tokens=5, identical=True, group="a")
    contenders = [
        Contender(name=name, batch_size=1, draft=Tree.chain(n), passes=5, sequences=[sequence], blocks=[block])
        for n, name in enumerate(("plain", "chosen"))
    ]
    Benchmark(contenders=tuple(contenders), dtype="float32").save(path)


def use_bench(path, tools):
    bench = Benchmark.load(path)
    bench.document()
    for contender in bench.contenders:
        bench.speedup(contender.name, bench.contenders[0].name)
        bench.figure(contender.name)
        for group in bench.groups:
            contender.rate_of(group)


def use_calibration(path, tools):
    accept = Calibration.load(path).accept
    assert (accept >= 0).all()
    assert (accept.sum(1) <= 1).all()


def use_trace(path, tools):
    trace = RankTrace.load(path)
    assert trace.group_names is not None
    trace.select(np.arange(trace.num_sequences))


def save_probe(path):
    random_probe(np.random.default_rng(1), Tree.dense([3, 2, 1]), 60, policy=Tree.chain(2)).save(path)


ROWS = [{"prompt": f"def f{i}(x):\n    return", "category": "ab"[i % 2], "said": "x"} for i in range(6)]
TALK = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), "abc", strict=True)]


def save_prompts(path):
    rows = [*ROWS, {"messages": TALK}, {"messages": TALK}] if path.suffix == ".jsonl" else ROWS
    write(path, [{"messages": TALK}] * 2 if path.suffix == ".json" else rows)


def use_prompts(path, tools):
    columns = (("group_by", "category"), ("responses", "said"))
    options = {name: tools.rng.choice([None, column]) for name, column in columns}
    assert load_prompts(tools.demo, str(path), **options).conversations


def engine_file(name, text):
    """A name whose suffix says how the text is damaged."""
    suffix = ".txt" if text[0] not in "[{" else ".jsonl" if text[1:].count("\n{") else ".json"
    return re.sub("[^a-z]+", "-", name) + suffix


MEASUREMENTS = {  # of other tools: name, the file, options
    "table.csv": ("csv", "head,rank,hits,trials\n0,0,5,9\n0,1,2,9\n1,0,3,8\n1,1,1,8\n", {}),
    "log.txt": ("rates", "{'test/0_acc': 0.7}\n{'test/1_acc': 0.37}\n", {}),
    **{engine_file(name, texts[-1]): (kind, texts[-1], {}) for name, (kind, texts) in EVERYTHING.items()},
}


def save_measurement(path):
    path.write_text(MEASUREMENTS[path.name][1])


def use_measurement(path, tools):
    kind, _, options = MEASUREMENTS[path.name]
    calibration = read_measurement(path, kind, **options)[1].calibration
    assert np.isfinite(calibration.accept).all()


TREES = {  # as engines have them
    "tree.json": '{"medusa_choices": [[0], [1], [0, 0], [0, 0, 2]]}',
    "choices.py": "mine = [(0,), (1,), (0, 0), (0, 1)]\n",
    "tree.yaml": "engine_args:\n  medusa_num_heads: 3\n  medusa_choices:\n  - [0]\n  - [1]\n  - [0, 0]\n",
    "commands.sh": 'run --medusa_choices "[[0], [1]]"\n',
    "neuron.json": '{"0": ["1", "2"], "1": ["3"], "2": ["4"]}',
    "vllm.json": '{"speculative_token_tree": "[(0,), (1,), (0, 0)]", "num_speculative_tokens": 3}',
    "chain.txt": "serve --speculative-config '{\"num_speculative_tokens\": 3}'\n",
}


LAYOUTS = ("medusa_v01_pt", "medusa_v01_safetensors", "medusa_v2_safetensors", "medusa2_merged", "modelopt_hf",
           "hydra_mlp_pt", "eagle1_bin",
           "eagle3_safetensors")  # fmt: skip


def use_checkpoint(path, tools):
    """Heads that were loaded can be asked."""
    heads = load_heads(str(path), Base(torch.ones(40, 16), torch.ones(40, 16), dtype=torch.float32)).heads
    draft = heads.start(1, 8)
    states = 1 + heads.form.states if heads.kind == "eagle3" else 1
    draft.prefill([[1, 2, 3]], torch.ones(1, 3, heads.width * states))
    tree = TreeTensors.of(Tree.chain(min(2, heads.num_heads)), torch.device("cpu"))
    tokens = draft.propose(tree, torch.tensor([4]))
    assert bool(((tokens >= 0) & (tokens < heads.vocab_size)).all())


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def save_model(path):
    """A folder with a tiny model, the demo's tokenizer and a chat template."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=2048, num_key_value_heads=1, max_position_embeddings=96, eos_token_id=0, **sizes)
    LlamaForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL / name, path / name)
    (path / "chat_template.jinja").write_text(TEMPLATE)


def use_model(path, tools):
    """As --drafter, or as --model, of which prompts can be asked."""
    if tools.rng.random() > 0.7:
        open_drafter(str(path), tools.tiny)
        return
    opened = load_target(str(path))
    (path.parent / "talk.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 2)
    found = load_prompts(opened, str(path.parent / "talk.jsonl"))
    for conversation in found.conversations:
        found.next_prompt(conversation, [(5, 6, 7)])
    opened.logits(opened.read([found.conversations[0].first[:8]]))


FILES = {
    "trace.npz": (some_trace(5, 9, 3).save, use_trace),
    "probe.npz": (save_probe, lambda path, tools: Probe.load(path).select(np.arange(1))),
    "calibration.json": (Calibration.from_trace(some_trace(9, 9, 9)).save, use_calibration),
    "profile.json": (save_profile, lambda path, tools: LatencyProfile.load(path).document()),
    "plan.json": (save_plan, lambda path, tools: Plan.load(path).document()),
    "bench.json": (save_bench, use_bench),
    **dict.fromkeys(MEASUREMENTS, (save_measurement, use_measurement)),
    **{name: (lambda path: path.write_text(TREES[path.name]), lambda path, t: read_tree(path)) for name in TREES},
    **{
        f"prompts.{kind}": (save_prompts, use_prompts)
        for kind in ("jsonl", "json", "csv", "parquet", "txt", "jsonl.gz")
    },
    **dict.fromkeys(LAYOUTS, (lambda path: shutil.copytree(synthetic(path.name), path), use_checkpoint)),
    "model": (save_model, use_model),
}


class First:
    """Draws what a file that nobody damaged is read for."""

    choice = operator.itemgetter(0)
    random = float


def damage_many(name, folder, tools, times, seeds):
    """So many copies, each damaged and used; how many were refused."""
    save, use = FILES[name]
    (folder / "good").mkdir()
    whole = folder / "good" / name
    save(whole)
    tools.rng = First()
    use(whole, tools)
    refused = []
    for _ in range(times):
        seed = seeds.randrange(2**63)
        tools.rng, path = random.Random(seed), folder / name
        if whole.is_dir():
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(whole, path)
        else:
            shutil.copy(whole, path)
        try:
            damage(path, tools.rng)
            use(path, tools)
        except TreeoptError as error:
            refused.append(str(error))
        except BaseException as error:
            raise AssertionError(f"{name}, seed {seed}") from error
    assert not [said for said in refused if "\n" in said or len(said) > 1000]
    return len(refused)


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_model(folder)
    return SimpleNamespace(demo=load_target(str(demo.MODEL)), tiny=load_target(str(folder)))


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_refused_in_a_sentence_or_load(name, tmp_path, tools):
    damage_many(name, tmp_path, tools, examples(18).max_examples, random.Random(name))


@pytest.mark.parametrize(
    "record", [{"9\n\x1b" * 500: [0.5]}, {"x": [[0] * 5000]}, {"x": "9" * 5000}, {"x": ["9" * 5000]}]
)
def test_a_message_cuts_long_places_and_long_values(record):
    with pytest.raises(InvalidInput) as refused:
        typed(dict[str, list[Annotated[object, PlainValidator(_refuse)]]], record, "x")
    assert len(str(refused.value)) < 450
    assert str(refused.value).isprintable()


def _refuse(value):
    raise ValueError(f"it has {value}")


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_many_damaged_files_are_refused_in_a_sentence_or_load(name, tmp_path, tools):
    assert damage_many(name, tmp_path, tools, 4000 if name == "model" else 300, random.SystemRandom())
