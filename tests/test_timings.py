"""Latencies that others timed: tables and SGLang's JSON lines."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.errors import InvalidInput
from treeopt.files.storage import sha256_of
from treeopt.latency.costs import StepCosts
from treeopt.pipeline.profile.untimed import LatencyRow, profile_from_file, profile_of, read_rows
from treeopt.records.profile import LatencyProfile
from treeopt.trees.tree import FIXED, Cost


def table(tmp_path, text, name="steps.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_by_hand(run, tmp_path):
    file = table(
        tmp_path,
        "batch_size,context_tokens,size,depth,step_ms,round\n"
        "1,512,1,,10.0,0\n1,512,8,3,12.0,0\n1,512,1,0,20.0,1\n1,512,8,3,26.0,1\n",
    )
    profile = profile_from_file(run, file, runtime="vllm 0.11")
    assert profile.runtime == {"name": "vllm 0.11"}
    assert profile.info["measures"] == "step"
    assert profile.info["inputs"] == {"steps.csv": sha256_of(file)}
    assert profile.info["provenance"]["machine"] is None
    (point,) = profile.points
    assert (point.size, point.depth, point.step_ms, point.round) == (8, 3, (12.0, 26.0), (0, 1))
    assert StepCosts(profile, 1, 512).ms([Cost(FIXED, 8, 3)])[0] == pytest.approx(
        15.0 * 1.25, rel=1e-3
    )  # plain's median by paired ratios
    assert LatencyProfile.load(run.profile).points == profile.points


def test_speeds_become_latencies_and_nodes_become_sizes(tmp_path):
    file = table(tmp_path, "batch;choices;depth;tokens_per_s;tokens_per_step\n8;0;;800;1\n8;63;4;1600;2.5\n")
    plain, tree = read_rows(file)
    assert (plain.size, plain.step_ms) == (1, pytest.approx(10.0))
    assert (tree.size, tree.depth, tree.step_ms) == (64, 4, pytest.approx(12.5))


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.sampled_from([0, 128, 4096]), st.integers(2, 64), st.floats(0.1, 1e3)),
        min_size=1,
        max_size=20,
    )
)
def test_no_sample_is_lost_between_rows_and_profile(samples):
    every = [*samples, *((batch, context, 1, 1.0) for batch, context in {(b, c) for b, c, *_ in samples})]
    names = ("batch_size", "context_tokens", "size", "step_ms")
    rows = [LatencyRow.model_construct(**dict(zip(names, one, strict=True)), depth=min(one[2] - 1, 4)) for one in every]
    profile = profile_of(rows, "rows", 0, 4)
    found = sorted((p.batch_size, p.context_tokens, p.size, ms) for p in profile.points for ms in p.step_ms)
    assert found == sorted(samples)


def test_lines_of_sglangs_bench_speculative(run, tmp_path):
    """num_draft_tokens counts the root, step_time is in seconds, 0 steps are plain decoding."""
    said = ((0, 0, 0, 1.0, 0.010), (3, 1, 4, 2.82, 0.01692), (3, 4, 16, 3.1, 0.02))
    keys = ("steps", "topk", "num_draft_tokens", "acc_length", "step_time")
    lines = [{"batch_size": 8, **dict(zip(keys, one, strict=True)), "completion_tokens": 512.0} for one in said]
    file = table(tmp_path, "\n".join(map(json.dumps, lines)) + "\n", "sweep.jsonl")
    profile = profile_from_file(run, file, contexts=(1024,))
    assert [(p.size, p.depth, p.step_ms) for p in profile.points] == [(4, 3, (pytest.approx(16.92),)), (16, 3, (20.0,))]
    assert profile.settings == [(8, 1024)]
    assert StepCosts(profile, 8, 1024).plain.ms == 10.0


def test_depths_that_are_not_said_are_the_deepest_that_fit(run, tmp_path, capsys):
    """All larger sizes have one depth then, and a plan may go between them."""
    file = table(tmp_path, "batch,size,ms\n1,1,10\n1,2,11\n1,8,12\n1,16,14\n")
    for deepest, profile in (
        (4, profile_from_file(run, file)),  # of a drafter that is not known yet
        (3, profile_from_file(run, file, num_heads=3, overwrite=True)),
    ):
        assert [(p.size, p.depth) for p in profile.points] == [(2, 1), (8, deepest), (16, deepest)]
        assert not np.isnan(StepCosts(profile, 1, 0).ms([Cost(FIXED, 12, deepest)]))
    said = capsys.readouterr().err.replace("\n", " ")
    assert "The file has no depths" in said
    assert "have one sample" in said
    assert "do not say their context" in said


HEAD = "batch_size,size,step_ms"
WRONG = [
    (HEAD + "\n", "must have rows of timings"),
    ("size,step_ms\n1,2\n", "line 2: batch_size must be given, but is missing"),
    ("batch_size,step_ms\n1,2\n", "line 2: a row must have a size .* or a number of nodes"),
    ("batch,size,nodes,ms\n1,1,0,2\n", "line 2: a row must have a size .* one of them"),
    ("batch,size\n1,1\n", "line 2: a row must have step_ms, or tokens_per_s and tokens_per_step"),
    ("batch,batch_size,size,ms\n1,1,1,2\n", "line 2: a row must give each value once, but has batch and batch_size"),
    ("batch,size,size,ms\n1,1,1,2\n", "columns, each once"),
    (HEAD + "\n1,1,10\n1,8\n", "line 3 must have 3 cells, but it has 2"),
    (HEAD + "\n1,1,10\nx,8,12\n", "line 3: batch_size must be a whole number of at least 1, but got 'x'"),
    (HEAD + "\n1,1.5,10\n", "line 2: size must be a whole number"),
    (HEAD + "\n1,1,-3\n", "line 2: step_ms must be a number above 0, but got '-3'"),
    (HEAD + "\n1,1,nan\n", "line 2: step_ms must be a number above 0"),
    (HEAD + ",depth\n1,1,10,\n1,4,11,4\n", "line 3: depth must be at least 1 and less than size, .* 4 and 4"),
    (HEAD + ",round\n1,1,10,0\n1,4,11,\n", "must say the round of every row, or of none"),
    (HEAD + "\n1,1,10\n4,8,12\n", "plain row, of size 1, .* batch size 4 has none: time plain decoding too"),
    ('{"batch_size": 1, "size": 1, "ms": 2}\n{"batch', "line 2 must be one JSON object"),
    ('{"batch_size": true, "size": 1, "ms": 2}\n', "line 1: batch_size must be a whole number"),
    ('{"batch_size": 1, "step_time": 0.1, "steps": 3, "num_draft_tokens": "a"}', "line 1: num_draft_tokens must be"),
    (
        '{"batch_size": 1, "step_time": 0, "steps": 0, "num_draft_tokens": 1}',
        "line 1: step_time must be a number above 0",
    ),
    ('{"batch_size": 1, "ms": 2}', "line 1"),
    ('"a\n1,2', "line"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_wrong_tables_are_refused_in_one_sentence_with_the_line(run, tmp_path, text, message):
    with pytest.raises(InvalidInput, match=message):
        profile_from_file(run, table(tmp_path, text))
    assert not run.profile.exists()


CELLS = st.sampled_from(["1", "8", "", "x", '"', "-1", "1e9", "nan"])
ROWS = st.lists(st.lists(CELLS, min_size=1, max_size=4), max_size=6)
KEYS = st.sampled_from(["batch_size", "size", "step_ms", "step_time", "steps", "num_draft_tokens"])
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
TABLES = ROWS.map(lambda rows: "batch,size,ms\n" + "\n".join(map(",".join, rows)))


@given(st.one_of(st.text(max_size=80), TABLES, st.dictionaries(KEYS, VALUES).map(json.dumps)))
def test_any_text_is_rows_or_a_sentence(tmp_path_factory, text):
    file = tmp_path_factory.mktemp("any") / "any.csv"
    file.write_bytes(text.encode("utf-8", "replace"))
    try:
        rows = read_rows(file)
    except InvalidInput as error:
        said, rows = str(error), []
    else:
        said = str(file)
    assert str(file) in said
    assert all(row.step_ms > 0 and row.batch_size >= 1 and row.size >= 1 for row in rows)


def test_missing_and_binary_files_are_refused(run, tmp_path):
    with pytest.raises(InvalidInput, match="does not exist"):
        profile_from_file(run, tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(InvalidInput, match="cannot be read"):
        profile_from_file(run, tmp_path / "b.csv")
    with pytest.raises(InvalidInput, match="one context"):
        profile_from_file(run, tmp_path / "b.csv", contexts=(1, 2))


def test_table_in_prose(tmp_path):
    """A Markdown table of steps is read as it is pasted: with text around it, headings in words, and bold cells."""
    file = tmp_path / "steps.md"
    file.write_text(
        "On our box:\n\n| Batch size | rows | step ms |\n|---:|---:|---|\n| 1 | 1 | 20 |\n| 1 | **4** | 24.5 |\n\nThanks, all.\n"
    )
    assert [(row.batch_size, row.size, row.step_ms) for row in read_rows(file)] == [(1, 1, 20.0), (1, 4, 24.5)]
