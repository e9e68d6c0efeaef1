"""Engines' counts of drafts in each format."""

import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.helpers.steps import import_file
from treeopt.engines.imports import read_measurement
from treeopt.engines.measured import requests
from treeopt.engines.measured.survival import CHAIN, MIXED, OPTIMISTIC, joined
from treeopt.errors import InvalidInput
from treeopt.records.calibration import Calibration
from treeopt.records.drafters import COUNTED
from treeopt.records.rundir import RunDirectory

from .conftest import invoke
from .helpers.engine_files import (
    DRAFTS,
    EVERYTHING,
    REACHED,
    SURVIVAL,
    aiperf,
    bench,
    exposition,
    lines,
    llama_process,
    llama_request,
    meta_info,
    response,
    rows_of,
    trtllm,
    trtllm_choice,
    vllm_line,
)


@rows_of(EVERYTHING)
def test_same_survival(tmp_path, name):
    """The same drafts give the same survival in every format."""
    expected, texts = EVERYTHING[name]
    paths = [tmp_path / f"{n}.txt" for n in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    kind, measurement = read_measurement(paths)
    assert kind == expected
    info = measurement.calibration.meta
    assert info["survival"] == pytest.approx(SURVIVAL, abs=1e-12)
    assert measurement.calibration.hits.tolist() == [[c] for c in REACHED]
    assert measurement.calibration.trials.tolist() == [DRAFTS, 800, 600]
    assert (info["source"], info["drafts"], info["draft_length"]) == ("engine log", DRAFTS, 3)
    assert info["draft_lengths"] == {"3": DRAFTS}
    assert CHAIN in measurement.notes
    assert MIXED not in measurement.notes


def test_binomial_errors(imported):
    """Rates along the chain multiply to its survival, with binomial errors."""
    calibration, _ = imported(exposition())
    expected = [np.sqrt(s * (1 - s) / DRAFTS) for s in SURVIVAL]
    assert calibration.survival_stderr.tolist() == pytest.approx(expected, rel=0.01)
    assert calibration.meta["survival_stderr_is_optimistic"] is True
    assert np.cumprod(calibration.accept[:, 0]) == pytest.approx(SURVIVAL)
    assert calibration.accept[:, 0].tolist() == [0.8, 0.75, 0.7]  # not the 0.8, 0.6, 0.42 that are printed
    assert np.cumprod(calibration.accept[:, 0]).tolist() == calibration.meta["survival"]


def test_errors_over_requests(imported):
    """Requests that are all right or all wrong: 40 independent things, however many drafts they have.

    The bootstrap's spread is within 12 % of the truth in 2,000 draws but for 1 in a million seeds; it is fixed.
    """
    texts = [response([0, 0, 0, 25]), response([25, 0, 0, 0])] * 20
    calibration, notes = imported(lines(*texts))
    assert calibration.meta["survival"] == [0.5, 0.5, 0.5]
    assert calibration.survival_stderr.tolist() == pytest.approx([np.sqrt(0.25 / 40)] * 3, rel=0.12)
    assert calibration.meta["survival_stderr_is_optimistic"] is False
    assert calibration.meta["requests"] == 40
    assert OPTIMISTIC not in notes


def test_emptied_draft(tmp_path):
    """50 of them, and 50 of one token that was right: half survive, whoever drafted."""
    path = tmp_path / "response.json"
    steps = {"per_step_accepted": [0, 1] * 50, "per_step_drafted": [0, 1] * 50}
    path.write_text(json.dumps(response([50, 50], num_draft_tokens=50, **steps)))
    for drafter in ("ngram", "eagle3"):
        assert read_measurement(path, drafter=drafter)[1].calibration.meta["survival"] == [0.5]


# The named drafter


def test_named_drafter(tmp_path):
    """The user names the drafter of a file that does not."""
    file, table = tmp_path / "metrics.txt", tmp_path / "table.csv"
    file.write_text(exposition())
    table.write_text("head,rank,hits,trials\n0,0,5,9\n")
    run = RunDirectory(tmp_path / "run")
    assert import_file(run, file).meta["drafter"] is None
    for kind in COUNTED:
        for path in (file, table):
            assert import_file(run, path, drafter=kind, overwrite=True).meta["drafter"] == {"kind": kind}
    again, other = tmp_path / "again.txt", tmp_path / "other.csv"
    again.write_text(exposition())
    other.write_text("head,rank,hits,trials\n0,0,6,9\n")
    for files, options, message in (
        (file, {"drafter": "psychic"}, "drafter must be one of"),
        ([file, again], {}, "given once"),
        ([table, other], {}, "imported alone"),
    ):
        with pytest.raises(InvalidInput, match=message):
            import_file(run, files, overwrite=True, **options)


START = (
    "INFO [core.py:93] Initializing a V1 LLM engine with config: model='m', speculative_config=SpeculativeConfig("
    "method='{}', model='d', num_spec_tokens=3), tokenizer='m'"
)
NAMED = {  # the lines of a log that names its drafter, its kind here, and how the engine is told
    "llama-cpp-eagle3": ([llama_process()], "eagle3", "--spec-type draft-eagle3"),
    "llama-cpp-ngram": ([llama_process(name="ngram-simple")], "ngram", "--spec-type ngram-simple"),
    "vllm-mtp": ([START.format("mtp"), vllm_line()], "mtp", "mtp"),
    "vllm-draft-model": ([START.format("draft_model"), vllm_line()], "draft-model", "draft_model"),
}


@pytest.mark.parametrize("name", NAMED)
def test_drafter_of_log(tmp_path, name):
    """A log of EAGLE-3 was exported as one of a draft model."""
    log, kind, option = NAMED[name]
    engine = "vllm" if name.startswith("vllm") else "llama-cpp"
    (tmp_path / "server.log").write_text(lines(*log))
    (tmp_path / "steps.csv").write_text("batch_size,size,step_ms\n1,1,20\n1,2,22\n1,3,23\n1,4,24\n")
    run = RunDirectory(tmp_path / "run")
    assert import_file(run, tmp_path / "server.log").meta["drafter"] == {"kind": kind}
    invoke("profile", "--from-csv", tmp_path / "steps.csv", "--run", run.path)
    invoke("search", "--for", engine, "--run", run.path)
    assert option in invoke("export", "--to", engine, "--run", run.path).stdout
    with pytest.raises(InvalidInput, match=f"has drafts of {kind}, as it says, but drafter is medusa"):
        import_file(run, tmp_path / "server.log", drafter="medusa", overwrite=True)


def test_drafter_of_shared_name(tmp_path):
    """The engine has one name for DFlash and DFlash2. Logs of two drafters are refused."""
    path, other = tmp_path / "server.log", tmp_path / "other.log"
    path.write_text(lines(llama_process(name="draft-dflash")))
    other.write_text(lines(llama_process(name="draft-dspark")))
    assert [read_measurement(path, drafter=kind)[1].drafter for kind in (None, "dflash2")] == ["dflash", "dflash2"]
    with pytest.raises(InvalidInput, match="one drafter, but has drafts of draft-dflash, draft-dspark"):
        read_measurement([path, other])


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in EVERYTHING.values()}))
def test_other_kind(imported, kind):
    """A file of another kind is refused."""
    for text in ("head,top1\n1,0.6\n", {"a": 1}, [0.5], "nothing"):
        with pytest.raises(InvalidInput):
            imported(text, kind=kind)


def test_import_command(tmp_path):
    """The command shows survival and keeps the files' names."""
    before, after, run = tmp_path / "before.txt", tmp_path / "after.txt", tmp_path / "run"
    before.write_text(exposition(50, [40, 30, 20]))
    after.write_text(exposition(1050, [840, 630, 440]))
    shown = invoke("import", before, after, "--run", run, "--drafter", "eagle3")
    assert "0.600 ±0.015" in shown.stdout
    assert "0.750 " in shown.stdout
    assert "1,000 drafts" in shown.stdout
    assert "too small" in shown.stderr
    info = Calibration.load(run / "calibration.json").meta
    assert info["source"] == "engine log"
    assert info["survival"] == pytest.approx(SURVIVAL)
    assert any("For any other length it is an estimate" in note for note in info["notes"])
    imported = info["provenance"]["imported"]
    assert imported["kind"] == "vllm-metrics"
    assert [file["file"] for file in imported["files"]] == ["before.txt", "after.txt"]


# There and back.

HISTOGRAMS = st.lists(st.integers(0, 400), min_size=2, max_size=7).filter(lambda h: sum(h) > 0)


def chain_of(histogram):
    """Drafts and those that reached each depth."""
    return sum(histogram), [sum(histogram[j:]) for j in range(1, len(histogram))]


def writers(histogram):
    drafts, reached = chain_of(histogram)
    yield exposition(drafts, reached)
    yield json.dumps(bench(drafts, reached))
    yield json.dumps(response(histogram))
    yield json.dumps(aiperf(histogram))
    yield json.dumps({"meta_info": meta_info(histogram)})
    yield trtllm([drafts] * len(reached), reached)
    yield json.dumps(trtllm_choice(histogram))
    if drafts <= 900:  # three decimals tell the counts
        yield vllm_line(drafts, reached)
        yield llama_request(drafts, reached)
        yield llama_process(drafts, reached)


@settings(deadline=None, max_examples=60)
@given(HISTOGRAMS)
def test_histogram_roundtrip(tmp_path_factory, histogram):
    """Random histograms come back from every format."""
    drafts, reached = chain_of(histogram)
    expected = [c / drafts for c in reached]
    folder = tmp_path_factory.mktemp("e")
    for n, text in enumerate(writers(histogram)):
        path = folder / str(n)
        path.write_text(text)
        source = read_measurement(path)[1].calibration
        kept = source.num_heads
        assert source.hits[:, 0].tolist() == reached[:kept], text
        assert source.meta["survival"] == pytest.approx(expected[:kept])
        assert not any(expected[kept:])


ROWS = st.dictionaries(st.integers(1, 6), st.lists(st.integers(0, 50), min_size=7, max_size=7), min_size=1).map(
    lambda rows: {k: row[: k + 1] for k, row in rows.items()}
)


@given(ROWS)
def test_drafts_at_risk(rows):
    """Drafts at risk are as many as a count draft by draft gives."""
    groups = [requests.chain_of(row, k, None, "x", 0) for k, row in rows.items() if any(row)]
    assume(groups)
    (tried,), (passed,), _ = joined(groups)
    steps = [(k, a) for k, row in rows.items() for a, n in enumerate(row) for _ in range(n)]
    for j in range(1, len(tried) + 1):
        assert tried[j - 1] == pytest.approx(sum(k >= j and a >= j - 1 for k, a in steps))
        assert passed[j - 1] == sum(k >= j and a >= j for k, a in steps)
