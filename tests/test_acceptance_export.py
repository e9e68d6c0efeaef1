"""Files that other tools take in place of a drafter: every form is read back and compared with replays by hand."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from treeopt.cli import cli
from treeopt.engines.acceptance import FORMS, write
from treeopt.engines.registry import ENGINES
from treeopt.growth.drift import SURVIVAL, shares_of
from treeopt.growth.replay import chain_survival
from treeopt.records.calibration import Calibration
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import MISS, NO_TRIAL, RankTrace
from treeopt.report.engine_table import runs_here
from treeopt.report.status import status

from .conftest import traces

HALF = 0.5e-4  # by which rounding moves a number
SURVIVALS = st.lists(st.floats(0, 1), min_size=1, max_size=9).map(lambda rates: np.cumprod(rates).tolist())


def lines(files, name):
    return [line for line in files[name].splitlines() if not line.startswith("#")]


def listed(line):
    return [float(number) for number in line.rsplit(" ", 1)[1].split(",")]


def read(survival):
    """What each tool reads of a chain, as the survival or the accepted guesses that it means."""
    files = write({"all": [survival[:k] for k in range(1, len(survival) + 1)]}, "")
    vllm = json.loads(lines(files, "vllm.txt")[-1])
    assert vllm["num_speculative_tokens"] == len(vllm["synthetic_acceptance_rates"])
    dynamo = listed(lines(files, "dynamo.txt")[-1])
    (by_length,) = [rows["thinking_off"] for rows in yaml.safe_load(files["inferencex.yaml"]).values()]
    variables = dict(word.split("=") for word in lines(files, "sglang.txt")[-1].split())
    survivals = {"vllm": vllm["synthetic_acceptance_rates"], "llama.cpp": listed(lines(files, "llama-cpp.txt")[-1])}
    accepted = {
        "sglang": float(variables["SGLANG_SIMULATE_ACC_LEN"]) - 1,
        "tensorrt-llm": float(lines(files, "tensorrt-llm.txt")[-1].split("=")[1]),
        "aiconfigurator": float(lines(files, "aiconfigurator.txt")[-1].split()[-1]),
    }
    return survivals, dynamo, accepted, by_length


@given(SURVIVALS)
def test_forms_roundtrip(survival):
    """Every form means the survival that was written."""
    survivals, conditional, accepted, by_length = read(survival)
    for rates in survivals.values():
        assert rates == pytest.approx(survival, abs=HALF * 1.01)
        assert all(0 <= low <= high <= 1 for high, low in pairwise([1, *rates]))  # else engines do not start
    assert len(conditional) <= 5
    assert all(0 <= rate <= 1 for rate in conditional)
    assert np.cumprod(conditional) == pytest.approx(survival[: len(conditional)], abs=(len(conditional) + 1) * HALF)
    written = sum(survivals["vllm"])
    assert all(mean == pytest.approx(written, abs=1e-9) for mean in accepted.values())
    assert all(0 <= mean <= len(survival) for mean in accepted.values())
    assert {k: 1 + sum(survivals["vllm"][:k]) for k in by_length} == pytest.approx(by_length, abs=0.00501)


# From records


@given(traces())
@settings(max_examples=200)
def test_survival_step_by_step(trace):
    """Survival equals that of decoding step by step."""
    for length, survival in enumerate(chain_survival(trace, trace.num_heads), 1):
        right, tried = np.zeros(length), np.zeros(length)
        for start, end in pairwise(trace.starts.tolist()):
            t = start
            while t < end - 1:
                accepted = 0
                for rank in trace.ranks[t, :length].tolist():
                    tried[accepted] += rank != NO_TRIAL
                    if rank != 0:
                        break
                    right[accepted] += 1
                    accepted += 1
                t += 1 + accepted
        expected, so_far = [], 1.0
        for passed, at_risk in zip(right, tried, strict=True):
            so_far *= passed / at_risk if at_risk else 0
            expected.append(so_far)
        assert survival == pytest.approx(expected)
        assert shares_of(trace, SURVIVAL, length).values == pytest.approx(expected)


def run_with(path, trace=None, calibration=None):
    run = RunDirectory(path)
    run.replace_accuracies(calibration or Calibration.from_trace(trace), trace)
    return run


def exported(run, *more):
    return CliRunner().invoke(cli, ["export", "--to", "acceptance", "--run", str(run.path), *more])


RANKS = np.array([[0, 0], [0, 1], [0, 0], [1, 0], [0, MISS], [MISS, MISS]])
OTHER = np.array([[1, 0], [0, 0], [0, 1], [0, 0], [1, MISS], [MISS, MISS]])
TRACE = RankTrace(
    np.concatenate([RANKS, OTHER, RANKS]),
    np.array([0, 6, 12, 18]),
    group=np.array([0, 1, 0]),
    meta={"top_k": 2, "group_names": ["chat", 'co\n#"de'], "drafter": {"kind": "draft-model"}},
)


def test_lengths_and_groups(tmp_path):
    """A trace gives every length and every group of prompts."""
    result = exported(run_with(tmp_path, TRACE))
    assert result.exit_code == 0, result.output
    folder = tmp_path / "export" / "acceptance"
    by_group = yaml.safe_load((folder / "inferencex.yaml").read_text(encoding="utf-8"))
    chains = [chain_survival(part, 2) for part in (TRACE, TRACE.select(np.array([0, 2])), TRACE.select(np.array([1])))]
    assert list(by_group) == ["all", "group chat", 'group co\n#"de']
    for rows, survivals in zip(by_group.values(), chains, strict=True):
        assert rows["thinking_off"] == pytest.approx({1: 1 + sum(survivals[0]), 2: 1 + sum(survivals[1])}, abs=0.0051)
    assert all((folder / form.file).is_file() for form in FORMS)


def test_counts_alone(tmp_path):
    """Counts alone are cut to shorter chains, and notes say what they cannot tell."""
    accept = np.array([900, 800, 700, 600, 500, 400])
    counts = Calibration(accept[:, None], np.full(6, 1000), meta={"drafter": {"kind": "suffix"}})
    bare = exported(run_with(tmp_path / "bare", calibration=counts))
    assert "as if guesses were independent" in bare.output
    assert "no more than 5 guesses" in bare.output
    counts.meta.update(source="engine log", survival=np.cumprod(accept / 1000).tolist(), draft_lengths={"6": 1000})
    logged = exported(run_with(tmp_path / "logged", calibration=counts))
    assert "counted by an engine with drafts of 6: of other lengths it is an estimate" in logged.output
    assert "Drafts of suffix decoding end" in logged.output
    folder = tmp_path / "logged" / "export" / "acceptance"
    lasts = [
        listed(line) for line in (folder / "llama-cpp.txt").read_text().splitlines() if line.startswith("--spec-draft")
    ]
    assert lasts[-1] == pytest.approx(np.cumprod(accept / 1000).tolist(), abs=HALF)
    assert [len(rates) for rates in lasts] == [1, 2, 3, 4, 5, 6]
    assert lasts[2] == lasts[5][:3]


@pytest.mark.parametrize(
    ("trace", "options", "words"),
    [
        (TRACE, ["--batch-size", "4"], "--batch-size goes with a plan"),
        (TRACE, ["--beyond", "last"], "--beyond goes with a plan"),
        (TRACE, ["--anyway"], "--anyway goes with a plan"),
        (RankTrace(np.array([[MISS], [NO_TRIAL]]), np.array([0, 1, 2])), [], "no step of decoding"),
        (RankTrace(RANKS, np.array([0, 6]), meta={"acceptance": {"rule": "typical"}}), [], "--acceptance sample"),
    ],
)
def test_refused_options(tmp_path, trace, options, words):
    """Options that do not fit are refused, and nothing is written."""
    run = run_with(tmp_path, trace, Calibration(np.array([[1]]), np.array([2])))
    result = exported(run, *options)
    assert result.exit_code == 1
    assert words in result.output
    assert not run.export.exists()


def test_stale(tmp_path):
    """The files are stale if the counts changed."""
    run = run_with(tmp_path, TRACE)
    exported(run)
    run.plan.write_text("{}")  # another plan makes no difference
    states = {file.name: file.state for file in status(run).files}
    assert states["export/acceptance"] == "up to date"
    run_with(tmp_path, TRACE)
    states = {file.name: file.state for file in status(run).files}
    assert states["export/acceptance"] == "stale"


def test_page_rows():
    """The page has a row for every tool."""
    page = (Path(__file__).parents[1] / "docs" / "engines.md").read_text(encoding="utf-8")
    assert all(f"| `{form.file}` | {form.title} | {form.checked} | " in page for form in FORMS)


# Which engines run here


def test_runs_here(tmp_path, monkeypatch):
    """An engine runs here if its server is on the path."""
    monkeypatch.setenv("PATH", str(tmp_path))
    (option,) = runs_here(ENGINES["llama-cpp"])
    assert option == "--launch 'llama-server ...'"
    assert runs_here(ENGINES["llama-cpp"]) == {option: False}
    (tmp_path / "llama-server").touch(mode=0o755)
    assert runs_here(ENGINES["llama-cpp"]) == {option: True}
    rows = json.loads(CliRunner().invoke(cli, ["list", "engines", "--json"]).output)["engines"]
    assert {row["engine"] for row in rows if row["runs_here"].get(option)} == {"llama-cpp"}
    assert "llama-cpp by --launch" in CliRunner().invoke(cli, ["list", "engines"], env={"COLUMNS": "200"}).output
