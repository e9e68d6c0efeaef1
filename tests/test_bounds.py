"""Small files that would take hours or gigabytes are refused at once, in a sentence: bombs of every format."""

import json
import zipfile

import numpy as np
import pytest
import torch

from treeopt.errors import InvalidInput
from treeopt.export.diagnosis import diagnose
from treeopt.files import npz
from treeopt.files.bounds import MOST_NESTED, MOST_ROWS, few, loads, parse_yaml
from treeopt.files.storage import load_json, to_json
from treeopt.importing import read_measurement
from treeopt.importing.requests import bodies
from treeopt.pipeline.trees import import_tree, read_tree
from treeopt.records.load import load_result
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import MOST_DEPTH, MOST_NODES, Tree

HEADER = np.lib.format.magic(1, 0)


def member(shape: str, kind: str = "<i8", zeros: int = 0) -> bytes:
    """An array's header, which may say more than there is, and so many bytes of it."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return HEADER + len(text).to_bytes(2, "little") + text.encode() + bytes(zeros)


def archive(path, members: dict[str, bytes], method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


SMALL = {
    "ranks.npy": member("(2, 1)", zeros=8) + (-2).to_bytes(8, "little", signed=True),
    "starts.npy": member("(2,)", zeros=8) + (2).to_bytes(8, "little"),
}
NPZ = {
    "zeros that unpack to a gigabyte": {**SMALL, "ranks.npy": member(f"({2**27}, 1)", zeros=2**20)},
    "a header that says a petabyte": {**SMALL, "ranks.npy": member(f"({2**47}, 1)")},
    "a long text": {**SMALL, "meta.npy": member("()", f"<U{2**28}")},
    "a negative length": {**SMALL, "ranks.npy": member(f"(-1, {2**40})"), "tokens.npy": member(f"({2**40},)")},
    "a header that is long itself": {**SMALL, "ranks.npy": np.lib.format.magic(2, 0) + b"\xff\xff\xff\x7f"},
    "a header that is nested": {**SMALL, "ranks.npy": member("(" * 3000 + ")" * 3000)},
    "members that are no arrays": {"ranks.npy": b"hello", "starts.npy": b""},
    "no member's name": {"ranks": b"hello", "starts": b""},
    "many members": {**SMALL, **{f"{i}.npy": b"" for i in range(3000)}},
    "meta that is nested": {**SMALL, "meta.npy": member("()", "<U8000", 0) + ("[" * 8000).encode("utf-32-le")},
    "meta that is bytes": {**SMALL, "meta.npy": member("()", "|S2") + b"{}"},
    "meta that is no character": {**SMALL, "meta.npy": member("()", "<U1") + b"\xff\xff\xff\xff"},
}


@pytest.mark.parametrize("name", NPZ)
def test_archives_say_how_large_they_are_before_they_are_read(name, tmp_path):
    with pytest.raises(InvalidInput):
        load_result(archive(tmp_path / "t.npz", NPZ[name]))


def test_arrays_that_nobody_asked_for_are_not_read(tmp_path):
    path = archive(tmp_path / "t.npz", {**SMALL, "other.npy": member(f"({2**40},)"), "note.txt": b"hello"})
    assert load_result(path).num_heads == 1
    assert npz.names(path) == {"ranks", "starts", "other"}


MEGABYTE, DEEP = 2**20, 100_000
JSON = {
    "nested lists": ("[" * DEEP + "]" * DEEP, "100 deep"),
    "nested objects": ('{"a":' * DEEP + "1" + "}" * DEEP, "100 deep"),
    "nested, and cut off": ("[" * DEEP, "100 deep"),
    "just too deep": ("[" * (MOST_NESTED + 1) + "]" * (MOST_NESTED + 1), "100 deep"),
    "more digits than Python reads": (f"[{'1' * 5000}]", "64 bits"),
    "a number beyond 64 bits": (f"[{2**63}]", "64 bits"),
    "infinity by its exponent": ("[1e999]", "finite"),
    "infinity by its name": ("[-Infinity]", "finite"),
    "half a character": ('["\\ud800"]', "surrogate"),
}


@pytest.mark.parametrize("name", JSON)
def test_json_is_read_within_bounds(name, tmp_path):
    text, said = JSON[name]
    for file in ("x.json", "plan.json"):
        (tmp_path / file).write_text(text)
        with pytest.raises(InvalidInput, match=said):
            load_json(tmp_path / file)
    with pytest.raises(InvalidInput):
        read_tree(tmp_path / "x.json")
    with pytest.raises(InvalidInput):
        read_measurement(tmp_path / "x.json")
    np.savez(tmp_path / "t.npz", ranks=[[0]], starts=[0, 1], meta=np.array(text))
    with pytest.raises(InvalidInput):
        load_result(tmp_path / "t.npz")


def test_json_at_the_bounds_is_read():
    assert loads("[" * MOST_NESTED + "]" * MOST_NESTED)
    assert loads(f"[{2**63 - 1}, -1e308, null]") == [2**63 - 1, -1e308, None]
    assert loads("null") is None
    assert loads('["\\ud83d\\ude00"]') == ["\U0001f600"]  # two halves are a character


def test_json_with_millions_of_values_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("[" + "0," * 2**23 + "0]")
    with pytest.raises(InvalidInput, match="values and lines"):
        load_json(tmp_path / "x.json")


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("text", [LAUGHS, "[" * 5000 + "]" * 5000, "- [0]\n" * 30_000], ids=["laughs", "deep", "long"])
def test_yaml_is_read_within_bounds(text, tmp_path):
    with pytest.raises(ValueError, match="YAML may"):
        parse_yaml(text)
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(InvalidInput):
        read_tree(tmp_path / "t.yaml")


SPACES, WORDS = " " * 200_000, "w" * 200_000
TREES = {
    "a choice of 20,000 ranks": f"[[{'0, ' * 20_000}0]]",
    "999 guesses in a row": '{"num_speculative_tokens": 999}',
    "999 guesses in a row, as a flag": "--speculative-num-steps 999",
    "30,000 choices": json.dumps([[i] for i in range(30_000)]),
    "30,000 nodes of Neuron": json.dumps({str(i): [str(i + 1)] for i in range(30_000)}),
    "30,000 paths in braces": ",".join(f"{{{i}}}" for i in range(30_000)),
    "a number of 5,000 digits": f"[[{'1' * 5000}]]",
    "5,000 digits in braces": f"{{{'1' * 5000}}}",
    "5,000 digits in YAML": f"- [{'1' * 5000}]",
    "a long file": "[" + " " * 2**21 + "]",
    "words": WORDS,
    "words and colons": "a:," * 60_000,
    "open arguments": "--medusa-choices=" * 12_000,
    "a key and spaces": f'key: "medusa_choices"{SPACES}value',
    "a brace and spaces": f"{{{SPACES}x",
    "nested calls": "f(" * 50_000,
    "signs": "-" * 50_000 + "1",
}


@pytest.mark.parametrize("name", TREES)
def test_trees_larger_than_any_are_refused_at_once(name, tmp_path):
    (tmp_path / "tree.txt").write_text(TREES[name])
    for read in (read_tree, import_tree):
        with pytest.raises(InvalidInput) as refused:
            read(tmp_path / "tree.txt")
        assert len(str(refused.value)) < 1000


def test_the_largest_tree_is_read_and_diagnosed():
    comb = [[rank] + [0] * depth for rank in range(256) for depth in range(16)]
    found = diagnose(json.dumps(comb, separators=(",", ":")))
    assert (len(found.tree), found.tree.depth) == (MOST_NODES + 1, 16)
    with pytest.raises(InvalidInput, match="nodes"):
        Tree.from_choices([*comb, [256]])
    with pytest.raises(InvalidInput, match="nodes"):
        Tree.dense([10**9])
    with pytest.raises(InvalidInput, match="256 deep"):
        Tree.chain(MOST_DEPTH + 1)


@pytest.mark.parametrize("limit", [{"budget": MOST_NODES + 1}, {"max_depth": 257}, {"max_rank": 32768}])
def test_limits_are_those_of_trees(limit):
    with pytest.raises(InvalidInput, match="must be at most"):
        Limits(**limit)


def test_texts_in_lists_stay_as_they_are():
    document = {"a [ b ]": ["[  1,  2 ]", [1, 2.5, None], []], "n": np.array([[1, 2]]), 3: {}, "t": [True]}
    assert json.loads(to_json(document)) == {
        "a [ b ]": ["[  1,  2 ]", [1, 2.5, None], []],
        "n": [[1, 2]],
        "3": {},
        "t": [True],
    }
    assert "\n    [1, 2.5, null],\n" in to_json(document)


LOGS = {
    "vllm-metrics": "SpecDecoding metrics: Mean acceptance length: 1, Accepted: " * 20_000,
    "llama-cpp": "statistics a: #gen drafts = 1, #acc drafts = " * 20_000,
    "csv": "head," + "x" * 200_000 + "\n0,1\n",
    "acceptance": "[" + "0," * 100_000 + "0]",
    "recall": json.dumps({f"head_{i}": {"recall@1": 0.5} for i in range(9000)}),
    "ranks": json.dumps({"ranks": [[0] * 30_000] * 2}),
    "tensorrt-llm": "specDecodingStats" + "(" * 100_000,
}


@pytest.mark.parametrize("kind", LOGS)
def test_measurements_are_read_within_bounds(kind, tmp_path):
    (tmp_path / "x.txt").write_text(LOGS[kind])
    for kind_or_none in (kind, None):
        with pytest.raises(InvalidInput) as refused:
            read_measurement(tmp_path / "x.txt", kind_or_none)
        assert len(str(refused.value)) < 1000


def test_rows_are_counted_as_they_are_read():
    assert len(list(few(range(MOST_ROWS), "x"))) == MOST_ROWS
    with pytest.raises(InvalidInput, match="131,072 rows"):
        list(bodies([[]] * (MOST_ROWS + 1)))


def test_an_exposition_of_a_million_series_is_refused(tmp_path):
    line = 'vllm:spec_decode_num_drafts_total{{engine="{}"}} 1.0\n'
    (tmp_path / "x.txt").write_text("".join(map(line.format, range(20_000))))
    with pytest.raises(InvalidInput, match="10,000 counters"):
        read_measurement(tmp_path / "x.txt")


def test_tensors_are_not_taken_more_often_than_fits(tmp_path):
    torch.save([torch.zeros(1000, 1000, dtype=torch.bool)] * 100, tmp_path / "hits.pt")
    with pytest.raises(InvalidInput, match="256 MiB"):
        read_measurement(tmp_path / "hits.pt")
    torch.save([torch.zeros(MEGABYTE)], tmp_path / "stored.pt")
    with zipfile.ZipFile(tmp_path / "stored.pt") as stored:
        archive(tmp_path / "packed.pt", {name: stored.read(name) for name in stored.namelist()})
    with pytest.raises(InvalidInput, match="not readable"):
        read_measurement(tmp_path / "packed.pt")
