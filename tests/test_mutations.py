"""Damaged files: every reader gives a TreeoptError or a right load, and never runs or unpickles anything.

1,000 mutated files in the suite; on demand 16,000, and 4,000 model folders with tests/test_damaged_models.py
(``pytest -m slow tests/test_mutations.py tests/test_damaged_models.py``).
"""

import json
import random
import re
import shutil
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from treeopt import demo
from treeopt.errors import TreeoptError
from treeopt.importing import read_measurement
from treeopt.pipeline import import_tree, read_tree
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import Calibration
from treeopt.records.contender import Answer, Block, Contender
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.trace import RankTrace
from treeopt.runtime.checkpoints import Base, load_heads
from treeopt.runtime.drafters.protocol import TreeTensors
from treeopt.runtime.prompts.sets import load_prompts
from treeopt.runtime.target import load_target
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

from .conftest import examples, random_trace
from .engine_files import EVERYTHING
from .synthetic import synthetic

ROWS = [{"prompt": f"def f{i}(x):\n    return", "category": "ab"[i % 2], "n": i} for i in range(6)]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
    }
] * 2
LAYOUTS = (
    "medusa_v01_pt",
    "medusa_v01_safetensors",
    "medusa_v2_safetensors",
    "medusa2_merged",
    "modelopt_hf",
    "vllm_medusa",
    "vllm_medusa_token_map",
    "trtllm_medusa",
    "hydra_mlp_pt",
    "hydra_prefix_mlp_pt",
    "eagle1_bin",
    "eagle3_safetensors",
)


@pytest.fixture(scope="module")
def target():
    return load_target(str(demo.MODEL))


def write_trace(path):
    random_trace(np.random.default_rng(0), [5, 9, 3], 3, 4).save(path)


def write_calibration(path):
    trace = random_trace(np.random.default_rng(0), [9, 9, 9], 3, 4)
    Calibration.from_trace(trace).save(path)


def write_profile(path):
    points = [StepTiming(1, 64, s, 1, (1.0 + s, 1.1 + s), 0.5, (0, 1), {"draft": (0.1, 0.2)}) for s in (2, 4)]
    LatencyProfile(tuple(points), (StepTiming(1, 64, 1, 0, (1.0, 1.1)),), {"name": "x"}).save(path)


def write_plan(path):
    trace = random_trace(np.random.default_rng(0), [12] * 8, 3, 4)
    plan_trees(trace, request=PlanRequest(Limits(6), batch_sizes=(1, 2))).save(path)


def write_bench(path):
    block = Block(round=0, prompts=[0], tokens=4, steps=4, decode_s=0.1, group="a")
    sequence = Answer(id="x", steps=4, tokens=5, identical=True, group="a")
    contenders = [
        Contender(
            name=name,
            batch_size=1,
            size=1,
            medusa_choices=[],
            steps=4,
            passes=5,
            tokens=4,
            tokens_per_step=1.0,
            tokens_per_s=40.0,
            identical=1,
            compared=1,
            decode_s=[0.1],
            sequences=[sequence],
            blocks=[block],
        )
        for name in ("plain", "chosen")
    ]
    Benchmark(contenders=tuple(contenders), dtype="float32", rounds=1).save(path)


def use_bench(path):
    bench = Benchmark.load(path)
    for contender in bench.contenders:
        bench.speedup(contender.name, bench.contenders[0].name)
        for group in bench.groups:
            bench.tokens_per_step(contender.name, group)


def use_trace(path):
    trace = RankTrace.load(path)
    assert trace.group_names is not None
    trace.select(np.arange(trace.num_sequences))


def write_rows(path):
    import pandas as pd

    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS + CHATS), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(CHATS), encoding="utf-8")
    elif path.suffix == ".txt":
        path.write_text("".join(row["prompt"].split("\n")[0] + "\n" for row in ROWS), encoding="utf-8")
    elif path.suffix == ".csv":
        pd.DataFrame(ROWS).to_csv(path, index=False)
    else:
        pd.DataFrame(ROWS).to_parquet(path)


def write_tree(path):
    path.write_text(json.dumps({"medusa_choices": [[0], [1], [0, 0], [0, 0, 2]]}))


def engine_file(name, text):
    """A name whose suffix says how the text is mutated."""
    suffix = ".txt" if text[0] not in "[{" else ".jsonl" if text[1:].count("\n{") else ".json"
    return re.sub("[^a-z]+", "-", name) + suffix


MEASUREMENTS = {  # of other tools: name, the file, options
    "hits.pt": ("medusa-pt", [torch.eye(12)[: 12 - 3 * k, :4].bool() for k in range(3)], {}),
    "vector.pt": ("acceptance", torch.tensor([0, 0.5, 0.25, 0.25]), {"heads": 2, "trials": 8}),
    "vector.json": ("acceptance", "[0, 0.5, 0.25, 0.25]", {"heads": 2, "trials": 8}),
    "recall.json": ("recall", '{"recall": {"head_0": {"1": 0.5, "2": 0.75}}, "total_predictions": {"0": 8}}', {}),
    "table.csv": ("csv", "head,rank,hits,trials\n0,0,5,9\n0,1,2,9\n1,0,3,8\n1,1,1,8\n", {}),
    "ranks.jsonl": (
        "ranks",
        '{"ranks": [[0, 1], [2, null], [null, null]], "tokens": [1, 2, 3], "end": "eos"}\n' * 3,
        {},
    ),
    **{engine_file(name, texts[-1]): (kind, texts[-1], {}) for name, (kind, texts) in EVERYTHING.items()},
}


def write_measurement(path):
    content = MEASUREMENTS[path.name][1]
    torch.save(content, path) if path.suffix == ".pt" else path.write_text(content)


def use_measurement(path):
    kind, _, options = MEASUREMENTS[path.name]
    found = read_measurement(path, kind, **options)[1].source
    calibration = Calibration.from_trace(found) if isinstance(found, RankTrace) else found
    assert np.isfinite(calibration.accept).all()


TREES = {  # as engines have them
    "choices.py": "mine = [(0,), (1,), (0, 0), (0, 1)]\n",
    "tree.yaml": "engine_args:\n  medusa_num_heads: 3\n  medusa_choices:\n  - [0]\n  - [1]\n  - [0, 0]\n",
    "config.pbtxt": 'parameters: { key: "medusa_choices"  value: { string_value: "{0},{1},{0, 0}" } }\n',
    "commands.sh": "fill_template.py 'decoding_mode:medusa,medusa_choices:{0}\\,{1}'\nrun --medusa_choices \"[[0], [1]]\"\n",
    "neuron.json": '{"0": ["1", "2"], "1": ["3"], "2": ["4"]}',
    "vllm.json": '{"speculative_token_tree": "[(0,), (1,), (0, 0)]", "num_speculative_tokens": 3}',
    "chain.txt": "serve --speculative-config '{\"num_speculative_tokens\": 3}'\n",
}


def write_text(path):
    path.write_text(TREES[path.name.removeprefix("import-")])


READERS = {
    **dict.fromkeys(MEASUREMENTS, (write_measurement, use_measurement)),
    "trace.npz": (write_trace, use_trace),
    "calibration.json": (write_calibration, Calibration.load),
    "profile.json": (write_profile, LatencyProfile.load),
    "plan.json": (write_plan, Plan.load),
    "bench.json": (write_bench, use_bench),
    "tree.json": (write_tree, read_tree),
    **dict.fromkeys(TREES, (write_text, read_tree)),
    **{f"import-{name}": (write_text, import_tree) for name in TREES},
    **{f"prompts{suffix}": (write_rows, None) for suffix in (".jsonl", ".json", ".csv", ".parquet", ".txt")},
}
VALUES = [None, True, 0, -1, 2**31, 2**63, 10**30, 10**400, 0.5, 1e308, "", "x", "\x1b[2J\0", "\ud800", [], {}, [[]], [None],
          {"a": []}, [1, [2]], [0] * 300, "9" * 5000]  # fmt: skip
NO_NUMBERS = ("1e999", "-Infinity", "NaN", "1" * 5000, "[" * 5000, "[" * 5000 + "]" * 5000, '"', "0x1", "1 2")


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat, insert or truncate, once or a few times."""
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
    return data


def mutate_json(text: str, rng: random.Random) -> str:
    """Replace, drop or rename something at a random place."""
    document = json.loads(text)
    places = []

    def walk(value):
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, child in list(items):
            places.append((value, key))
            walk(child)

    walk(document)
    for _ in range(rng.choice([1, 1, 2])):
        if not places:
            break
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


def mutate_arrays(path, rng: random.Random) -> None:
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
        arrays[name] = np.array(mutate_json(str(array), rng))
    np.savez(path, **arrays)


def mutate_tensors(path, rng: random.Random) -> None:
    """A tensor dropped, renamed, reshaped, of another type, or not finite."""
    pickled = path.suffix in (".pt", ".bin")
    tensors = torch.load(path, weights_only=True) if pickled else load_file(path)
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
        torch.save(tensors, path)
    else:
        save_file({n: t.contiguous().clone() for n, t in tensors.items()}, path)


def one_reader(name, seed, folder, target):
    rng = random.Random(seed)
    path = folder / name
    write, load = READERS[name]
    good = folder / "good" / name
    if not good.exists():
        good.parent.mkdir(exist_ok=True)
        write(good)
    shutil.copy(good, path)
    if path.suffix == ".json" and rng.random() < 0.7:
        path.write_text(mutate_json(path.read_text(), rng))
    elif path.suffix == ".jsonl" and rng.random() < 0.5:
        lines = path.read_text().splitlines()
        at = rng.randrange(len(lines))
        lines[at] = mutate_json(lines[at], rng)
        path.write_text("\n".join(lines))
    elif path.suffix == ".npz" and rng.random() < 0.7:
        mutate_arrays(path, rng)
    else:
        path.write_bytes(mutate_bytes(path.read_bytes(), rng))
    with suppress(TreeoptError):
        if load is None:
            load_prompts(target, str(path), group_by=rng.choice([None, "category"]))
        else:
            load(path)


def one_checkpoint(layout, seed, folder):
    rng = random.Random(seed)
    copy = folder / layout
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(synthetic(layout), copy)
    files = sorted(copy.iterdir())
    path = rng.choice(files)
    if path.suffix == ".json" and rng.random() < 0.8:
        path.write_text(mutate_json(path.read_text(), rng))
    elif rng.random() < 0.6 and path.suffix != ".json":
        mutate_tensors(path, rng)
    else:
        path.write_bytes(mutate_bytes(path.read_bytes(), rng))
    with suppress(TreeoptError):
        loaded = load_heads(str(copy), Base(torch.ones(40, 16), torch.ones(40, 16), dtype=torch.float32))
        draft = loaded.heads.start(1, 8)  # a right load: heads that can be used
        states = 1 + loaded.heads.form.states if loaded.heads.kind == "eagle3" else 1
        draft.prefill([[1, 2, 3]], torch.ones(1, 3, loaded.heads.width * states))
        tree = TreeTensors.of(Tree.chain(min(2, loaded.heads.num_heads)), torch.device("cpu"))
        tokens = draft.propose(tree, torch.tensor([4]), lambda _: None)
        assert bool(((tokens >= 0) & (tokens < loaded.heads.vocab_size)).all())


SEEDS = st.integers(0, 2**63)


def run_readers(name, folder, target, examples):
    @settings(max_examples=examples, deadline=None, database=None)
    @given(SEEDS)
    def check(seed):
        one_reader(name, seed, folder, target)

    check()


def run_checkpoints(layout, folder, examples):
    @settings(max_examples=examples, deadline=None, database=None)
    @given(SEEDS)
    def check(seed):
        one_checkpoint(layout, seed, folder)

    check()


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_refused_or_load(name, tmp_path, target):
    run_readers(name, tmp_path, target, examples(16).max_examples)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_checkpoints_are_refused_or_load(layout, tmp_path):
    run_checkpoints(layout, tmp_path, examples(20).max_examples)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_many_damaged_files_are_refused_or_load(name, tmp_path, target):
    run_readers(name, tmp_path, target, 310)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_damaged_checkpoints_are_refused_or_load(layout, tmp_path):
    run_checkpoints(layout, tmp_path, 150)


@pytest.mark.parametrize("name", READERS)
def test_files_that_nobody_damaged_are_read(name, tmp_path, target):
    write, load = READERS[name]
    write(tmp_path / name)
    load_prompts(target, str(tmp_path / name)) if load is None else load(tmp_path / name)
