"""Merging: shards are one calibration again, to the byte."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.errors import InvalidInput
from treeopt.records.merging import Shard, digest, join, merge
from treeopt.records.trace import RankTrace

from .conftest import examples, invoke, random_trace, treeopt

BLOCK = 4  # prompts of a block
META = {
    "drafter": {"kind": "medusa", "sha256": "d" * 64, "num_heads": 3},
    "acceptance": {"rule": "greedy"},
    "answers": {"given": False},
    "provenance": {"model": "M", "dtype": "float64", "dataset": "prompts.jsonl", "threads": 1},
    "prompt_seed": 0,
    "source": {"model": "M"},
}
SKIPPED = [{"row": 1, "reason": "it is empty"}]


def block(rng, hashes):
    """What a block of these prompts measures: conversations of one to three turns in three groups."""
    turns = rng.integers(1, 4, len(hashes))
    trace = random_trace(rng, rng.integers(2, 9, turns.sum()), 3, 4)
    names = rng.permutation(["chat", "code", "books"]).tolist()
    group = np.repeat(rng.integers(0, 3, len(hashes)), turns)
    kept = list(dict.fromkeys(group.tolist()))
    meta = {
        **trace.meta,
        "max_new_tokens": 9,
        "prompt_sha256": np.repeat(hashes, turns).tolist(),
        "group_names": [names[g] for g in kept],
        "skipped": [{"row": int(row), "reason": "no room"} for row in rng.integers(0, 99, rng.integers(0, 3))],
        "batch_size": 2,
    }
    return RankTrace(
        trace.ranks,
        trace.starts,
        tokens=rng.integers(5, 99, len(trace.ranks)),
        end=trace.end,
        group=np.array([kept.index(g) for g in group.tolist()]),
        cluster=np.repeat(np.arange(len(hashes)) * 3, turns),
        meta=meta,
    )


def calibration(seed, num_blocks, *, prefix=""):
    """The blocks of a calibration, its prompts, and the trace that a single process makes of it."""
    rng = np.random.default_rng(seed)
    hashes = [f"{prefix}{seed}-{i}" for i in range(BLOCK * num_blocks)]
    blocks = [block(rng, hashes[i : i + BLOCK]) for i in range(0, len(hashes), BLOCK)]
    return blocks, hashes, join(blocks, {**META, "skipped": SKIPPED})


def shard(blocks, hashes, text):
    """The trace of the shard i/n."""
    which = Shard.of(text)
    own = [blocks[place] for place in which.places(len(blocks))]
    return join(own, {**META, "skipped": SKIPPED, "shard": which.record(digest(hashes), BLOCK, own)})


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A trace as a command reads it, and the bytes of one as a command writes it."""
    path = tmp_path_factory.mktemp("stored") / "trace.npz"

    def bytes_of(trace):
        trace.save(path)
        return path.read_bytes()

    def read_back(trace):
        trace.save(path)
        return RankTrace.load(path)

    return bytes_of, read_back


@examples(10)
@given(st.integers(0, 2**32), st.integers(2, 6), st.randoms(use_true_random=False))
def test_shards_in_any_order_are_the_trace_of_one_process_to_the_byte(stored, seed, num_blocks, rng):
    bytes_of, read_back = stored
    blocks, hashes, whole = calibration(seed, num_blocks)
    count = rng.randint(2, num_blocks)
    shards = [(f"run {i}", read_back(shard(blocks, hashes, f"{i}/{count}"))) for i in range(1, count + 1)]
    rng.shuffle(shards)
    assert bytes_of(merge(shards)) == bytes_of(whole)


def with_meta(trace, **changes):
    return replace(trace, meta={**trace.meta, **changes})


ONE, OTHER = (shard(*calibration(1, 2)[:2], text) for text in ("1/2", "2/2"))
REFUSED = {
    "model": {"provenance": {**META["provenance"], "model": "other"}},
    "dtype": {"provenance": {**META["provenance"], "dtype": "bfloat16"}},
    "acceptance rule": {"acceptance": {"rule": "sample-then-match", "temperature": 1.0}},
    "drafter sha256": {"drafter": {**META["drafter"], "sha256": "e" * 64}},
    "top k": {"top_k": 9},
    "max new tokens": {"max_new_tokens": 12},
    "pools": {"pools": {"levels": 3, "topks": [2]}},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_was_measured_otherwise_is_refused_with_both_names(what):
    with pytest.raises(
        InvalidInput, match=rf"run-a \(there\) and run-b \(here\) do not belong together: they differ in {what} \("
    ):
        merge([("run-a", ONE), ("run-b", with_meta(OTHER, **REFUSED[what]))])


def test_what_is_there_twice_or_does_not_belong_together_is_refused():
    blocks, hashes, whole = calibration(3, 3)
    first, third = shard(blocks, hashes, "1/3"), shard(blocks, hashes, "3/3")
    for message, traces in (
        ("each of the 3 shards of a calibration once, but got 1, 1, 3", (first, first, third)),
        ("each of the 3 shards of a calibration once, but got 1, 3", (first, third)),
        ("but b is none", (first, whole)),
        ("but a is none", (whole, whole)),
        ("differ in .*shard prompts", (first, shard(*calibration(4, 3)[:2], "2/3"))),
        ("differ in .*shard count", (first, shard(blocks, hashes, "2/2"))),
    ):
        with pytest.raises(InvalidInput, match=message):
            merge(list(zip("abc", traces, strict=False)))


@pytest.mark.parametrize("record", [{"sequences": []}, {"sequences": [1, 1]}, {"sequences": ["x"]}, {"index": 0}])
def test_a_shard_that_contradicts_itself_is_refused(stored, record):
    blocks, hashes, _ = calibration(5, 2)
    good, bad = shard(blocks, hashes, "1/2"), shard(blocks, hashes, "2/2")
    bad = with_meta(bad, shard={**bad.meta["shard"], **record})
    with pytest.raises(InvalidInput, match=r"is not as it should be at shard|b contradicts itself"):
        merge([("a", good), ("b", stored[1](bad))])


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0", "-1/3", "١/٣"])
def test_a_shard_is_one_of_as_many_as_there_are(text):
    with pytest.raises(InvalidInput, match="shard must be i/n"):
        Shard.of(text)


# The commands.

CALIBRATE = ("calibrate", "--num-prompts", 24, "--max-new-tokens", 8, "--batch-size", 1, "--dtype", "float64")
OPTIONS = ("--topk", 2)


@pytest.mark.long
def test_shards_of_the_demo_merge_to_the_trace_of_one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    treeopt(*CALIBRATE, *OPTIONS, "--run", "whole")
    for i in (1, 2):
        treeopt(*CALIBRATE, *OPTIONS, "--shard", f"{i}/2", "--run", f"part-{i}")
    said = invoke("import", "part-2", "part-1", "--run", "merged", "--json")
    files = [(tmp_path / name / "trace.npz").read_bytes() for name in ("whole", "merged")]
    assert files[0] == files[1]
    counts = [json.loads((tmp_path / name / "calibration.json").read_text()) for name in ("whole", "merged")]
    assert counts[0]["hits"] == counts[1]["hits"] == json.loads(said.stdout)["hits"]
    assert "Merged 24 " in said.stderr
    assert "merging replaces it only if it is to be overwritten" in treeopt(
        "import", "part-1", "part-2", "--run", "merged", code=1
    )
    assert "part-1" in treeopt(*CALIBRATE, *OPTIONS, "--shard", "2/2", "--run", "part-1", code=1)
    assert "24 prompts are 6, but got 7/7" in treeopt(*CALIBRATE, "--shard", "7/7", "--run", "x", code=1)
    typical = ("--rule", "typical", "--shard", "1/2", "--run", "x")
    assert "leave --shard out" in treeopt(*CALIBRATE, *typical, code=1)
