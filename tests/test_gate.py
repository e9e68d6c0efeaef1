"""compare as a gate: PASS, FAIL or INCONCLUSIVE for a tolerance, with the noise of drafts, prompts or launches."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from treeopt.arms.arm import Arm, Arms
from treeopt.arms.gate import FAIL, INCONCLUSIVE, PASS, arms_gate, counts_gate
from treeopt.engines.imports import read_measurement
from treeopt.errors import InvalidInput
from treeopt.records.calibration import Calibration
from treeopt.report.comparison import verdict

from .conftest import invoke
from .helpers.engine_files import exposition, response, rows_of, vllm_line

ROOT = Path(__file__).parents[1]
NAMES = ("before", "after")
WORSE = [600, 400, 250]


def counted(histograms, path):
    """The counts of requests with a histogram each."""
    rows = [response(histogram) for histogram in histograms]
    for row, histogram in zip(rows, histograms, strict=True):
        row["usage"] = {"completion_tokens": int(np.arange(1, len(histogram) + 1) @ histogram)}
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_measurement(path)[1].calibration


# Log lines after the same before: their drafts and what was accepted, the tolerance, the verdict and the exit status.
LOGS = {
    "the same": ((100_000, [80_000, 60_000, 42_000]), 2, PASS, 0),
    "worse": ((1000, WORSE), 5, FAIL, 3),
    "too few": ((100, [78, 60, 41]), 1, INCONCLUSIVE, 4),
    "better": ((1000, [900, 800, 700]), 0, PASS, 0),
}


@rows_of(LOGS)
def test_gate_of_logs(name, tmp_path):
    """The verdict and its exit status, and how many drafts would hold the tolerance."""
    after, tolerance, verdict, status = LOGS[name]
    for file, drafts in (("before.log", (100_000, [80_000, 60_000, 42_000])), ("after.log", after)):
        (tmp_path / file).write_text(vllm_line(*drafts))
    words = (tmp_path / "before.log", tmp_path / "after.log", "--tolerance", tolerance)
    document = json.loads(invoke("compare", *words, "--json", code=status).stdout)
    assert (document["gate"], document["status"]) == (verdict, status)
    assert document["verdict"].startswith(f"{verdict}: tokens per step went from 2.82 to")
    assert ("would take" in document["verdict"]) == (document["holds"] > tolerance / 100 > 0)
    assert verdict in invoke("compare", *words, code=status).stdout


def test_gate_of_prompts(tmp_path):
    """Requests are told apart in responses, so prompts are counted; four times as many hold half the tolerance."""
    for file in ("before.jsonl", "after.jsonl"):
        counted([[20 + i, 20, 18, 42 - i] for i in range(10)], tmp_path / file)
    words = (tmp_path / "before.jsonl", tmp_path / "after.jsonl", "--tolerance")
    holds = json.loads(invoke("compare", *words, 90, "--json").stdout)["holds"]
    document = json.loads(invoke("compare", *words, 50 * holds, "--json", code=4).stdout)
    assert document["needs"] == pytest.approx(40, abs=1)
    assert "With 10 prompts on each side, a loss below" in document["verdict"]
    assert document["assumed"] == ""


def test_noise_of_prompts(tmp_path):
    """The stated error of tokens per step is what prompts drawn again show (1,000 draws: within 15 %)."""
    rng = np.random.default_rng(0)

    def drawn():
        rates = rng.beta(4, 2, 60)
        lengths = [np.minimum(rng.geometric(1 - rate, 25) - 1, 4) for rate in rates]
        return [np.bincount(some, minlength=5).tolist() for some in lengths]

    def tokens(histograms):
        counts = np.sum(histograms, axis=0)
        return 1 + counts @ np.arange(5) / counts.sum()

    logs = np.log([tokens(drawn()) for _ in range(1000)])
    sides = [counted(drawn(), tmp_path / "after.jsonl") for _ in range(8)]
    errors = [counts_gate(NAMES, side, side, 0.05).changes[0].log_stderr / np.sqrt(2) for side in sides]
    assert np.mean(errors) == pytest.approx(logs.std(), rel=0.15)


def test_steps_without_a_draft():
    """Tokens per step are those of all steps: 1,000 drafts that give 1.5 tokens more beside 1,000 steps without one give 1.75."""
    counts = Calibration(np.array([[900], [600]]), np.array([1000, 900]), meta={"steps_without_draft": 1000})
    change = counts_gate(NAMES, counts, counts, 0.05).changes[0]
    emitted = np.repeat([1, 2, 3, 1], [100, 300, 600, 1000])
    assert change.before == emitted.mean() == 1.75
    assert change.log_stderr == pytest.approx(np.sqrt(2 / 2000) * emitted.std() / 1.75)


def arms(*rows, repeats=1, **others):
    """Arms by drafter, length, concurrency and tokens per second."""
    made = [Arm(drafter=d, k=k, concurrency=c, tokens_per_s=x, repeats=repeats, **others) for d, k, c, x in rows]
    return Arms(arms=tuple(made))


BEFORE = (
    ("none", 0, 1, 100.0),
    ("MTP", 2, 1, 150.0),
    ("MTP", 4, 1, 140.0),
    ("none", 0, 8, 500.0),
    ("MTP", 2, 8, 450.0),
)


@pytest.mark.parametrize(
    ("factor", "repeats", "tolerance", "verdict"),
    [(1.0, 1, 0.1, PASS), (1.0, 1, 0.02, INCONCLUSIVE), (0.8, 1, 0.05, FAIL), (0.97, 1, 0.05, INCONCLUSIVE), (1.0, 40, 0.02, PASS)],
)  # fmt: skip
def test_gate_of_arms(factor, repeats, tolerance, verdict):
    """The fastest setting of each cell is judged, by the usual noise of launches where nothing is repeated."""
    after = [(d, k, c, x * (factor if (d, k, c) == ("MTP", 2, 1) else 1)) for d, k, c, x in BEFORE]
    gate = arms_gate(NAMES, arms(*BEFORE, repeats=repeats), arms(*after, repeats=repeats), tolerance)
    assert gate.verdict in gate._repr_html_()
    assert [change.name for change in gate.changes] == ["MTP 2 (1 at once)", "off (8 at once)"]
    assert gate.verdict == verdict
    assert gate.worst.loss == pytest.approx(1 - factor)
    assert gate.noisiest.held == pytest.approx(1 - np.exp(-1.96 * 0.025 * np.sqrt(2 / repeats)), rel=0.01)
    assert gate.noisiest.runs_for(0.02) == 12


def test_one_interval_beyond_the_tolerance_is_explained():
    """Of eight settings one may lose 6.8 to 18.8 % by chance: the verdict says why it is none."""
    before, after = (
        arms(*(("MTP", 2, c, 100.0 * c * (factor if c == 1 else 1)) for c in range(1, 9))) for factor in (1, 0.87)
    )
    gate = arms_gate(NAMES, before, after, 0.05)
    assert gate.worst.loss.low > 0.05
    assert verdict(gate).startswith(INCONCLUSIVE)
    assert (
        "Of 8 settings one may lose so much by chance: in an interval that allows for it, at least 4.2 % is lost."
        in verdict(gate)
    )


@pytest.mark.parametrize("noise", [0.025, 0.1])
def test_false_alarms_of_many_cells(noise):
    """With 20 cells that did not change a gate of tolerance 0 fails in at most 5 % (300 draws, false alarm below 1 %)."""
    rng, failed = np.random.default_rng(0), 0
    for _ in range(300):
        rows = [("MTP", 2, c, 100.0 * c) for c in range(1, 21)]
        noisy = [arms(*((d, k, c, x * np.exp(rng.normal(0, noise))) for d, k, c, x in rows)) for _ in NAMES]
        failed += arms_gate(NAMES, *noisy, 0.0, noise).verdict == FAIL
    assert failed <= 25


def test_false_alarms_of_prompts_that_are_not_told_apart():
    """With 10 prompts of 60 drafts, whose rates differ by 0.15, a gate fails in at most 5 % (300 draws, false alarm below 1 %)."""
    rng, failed = np.random.default_rng(0), 0

    def drawn():
        rates = np.clip(rng.normal(0.7, 0.15, (10, 1, 1)), 0.05, 0.98)
        reached = [600, *np.cumprod(rng.random((10, 60, 3)) < rates, axis=2).sum((0, 1))]
        return Calibration(np.array(reached[1:])[:, None], np.array(reached[:-1]), meta={"requests": 10})

    for _ in range(300):
        failed += counts_gate(NAMES, drawn(), drawn(), 0.05).verdict == FAIL
    assert failed <= 25


GONE = {  # rows before that have no figure after, and what the verdict names of them
    "the fastest": ([1], ["MTP 2 (1 at once)"]),
    "a load": ([3, 4], ["off (8 at once)"]),
    "a slower one": ([2, 4], []),
}


@rows_of(GONE)
def test_what_has_no_figure_after(name):
    """What was fastest before and has no figure after is named, and is no PASS."""
    rows, gone = GONE[name]
    after = [(*row[:3], None if i in rows else row[3]) for i, row in enumerate(BEFORE)]
    gate = arms_gate(NAMES, arms(*BEFORE), arms(*after), 0.1)
    assert gate.gone == tuple(gone)
    assert gate.verdict == (INCONCLUSIVE if gone else PASS)
    assert all(setting in verdict(gate) for setting in gone)


def test_conditions_of_one_file():
    """Each condition that differs within a file is judged; numbers of tokens that are near each other are repeats."""
    rows = [("MTP", 2, 1, 100.0)]
    before, hot = (arms(*rows, about={"temperature": t, "output_tokens": n}) for t, n in (("0", "250"), ("1", "256")))
    slow, again = (
        arms(("MTP", 2, 1, x), about={"temperature": "0", "output_tokens": n})
        for x, n in ((60.0, "260"), (61.0, "249"))
    )
    both, after = Arms(arms=before.arms + hot.arms), Arms(arms=slow.arms + again.arms + hot.arms)
    gate = arms_gate(NAMES, both, after, 0.05)
    assert [(change.name, round(change.after)) for change in gate.changes] == [
        ("MTP 2 (temperature 0, 1 at once)", 60),
        ("MTP 2 (temperature 1, 1 at once)", 100),
    ]
    assert gate.verdict == FAIL
    assert not gate.assumed


def test_settings_that_do_not_match(tmp_path):
    """Settings of one side only are named, as are other ways of running, and nothing in common is refused."""
    gate = arms_gate(NAMES, arms(*BEFORE, about={"version": "1"}), arms(*BEFORE[:2], about={"version": "2"}), 0.1)
    assert gate.notes == (
        "Before and after differ in version (1 and 2) too.",
        "Run before only, and not compared: MTP 4 (1 at once), off (8 at once), MTP 2 (8 at once).",
    )
    with pytest.raises(InvalidInput, match="must be the same"):
        arms_gate(NAMES, arms(*BEFORE), arms(("EAGLE-3", 2, 1, 100.0)), 0.1)


def test_gate_of_tables(tmp_path):
    """Tables of settings that were run, and run directories that imported them, give the same verdict."""
    header, rows = "drafter,k,concurrency,tokens_per_s\n", "MTP,0,1,100\nMTP,2,1,{}\nMTP,4,1,140\n"
    for name, speed in (("before.csv", 150), ("after.csv", 100)):
        (tmp_path / name).write_text(header + rows.format(speed))
        invoke("import", tmp_path / name, "--run", tmp_path / name.removesuffix(".csv"))
    for first, second in (("before.csv", "after.csv"), ("before", "after"), ("before/arms.json", "after")):
        document = json.loads(invoke("compare", tmp_path / first, tmp_path / second, "--json", code=3).stdout)
        assert document["gate"] == FAIL
        assert document["changes"][0]["loss"]["value"] == pytest.approx(1 / 3)
    assert PASS in invoke("compare", tmp_path / "after.csv", tmp_path / "before.csv", "--tolerance", 10).stdout
    noisy = invoke("compare", tmp_path / "before.csv", tmp_path / "after.csv", "--noise", 30, "--json", code=4).stdout
    assert json.loads(noisy)["assumed"].startswith("Nothing was repeated: launches are taken to differ by 30 %")


def test_gate_of_scrapes(tmp_path):
    """A scrape's requests are its prompts; another model, and the noise of launches, are refused."""
    requests = 'vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 10\n'
    for name, text in (("a", exposition() + requests), ("b", exposition(model="other"))):
        (tmp_path / f"{name}.prom").write_text(text)
    a, b = tmp_path / "a.prom", tmp_path / "b.prom"
    document = json.loads(invoke("compare", a, a, "--json", code=4).stdout)
    assert (document["noun"], document["changes"][0]["runs"]) == ("prompt", 10)
    assert "20 % of the variance of drafts" in document["verdict"]
    assert "they differ in served model" in " ".join(invoke("compare", a, b, code=1).stderr.split())
    assert "--noise is between launches" in invoke("compare", a, a, "--noise", 3, code=1).stderr


@pytest.mark.parametrize(
    ("second", "why"),
    [("none.csv", "{}/none.csv does not exist."), ("run", "{}/run has none."), ("after.log", "{}/after.log has none.")],
)
def test_settings_beside_something_else(second, why, tmp_path):
    """What is not there, or is no table, is named, not the table beside it."""
    (tmp_path / "before.csv").write_text("drafter,k,concurrency,tokens_per_s\nMTP,2,1,150\n")
    (tmp_path / "after.log").write_text(vllm_line(100, [80, 60]))
    (tmp_path / "run").mkdir()
    said = invoke("compare", tmp_path / "before.csv", tmp_path / second, code=1).stderr
    assert why.format(tmp_path) in "".join(said.splitlines())


@pytest.mark.parametrize(("speed", "status"), [(100, 3), (149, 0)])
def test_gate_in_a_workflow(tmp_path, speed, status):
    """The workflow of the docs is YAML, and its step fails where the second table is slower, not where nothing is shown."""
    page = (ROOT / "docs" / "comparing.md").read_text()
    workflow = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    step = workflow["jobs"]["gate"]["steps"][-1]
    for name, tokens in (("before", 150), ("after", speed)):
        (tmp_path / f"{name}.csv").write_text(f"drafter,k,concurrency,tokens_per_s\nMTP,0,1,90\nMTP,2,1,{tokens}\n")
    command = f'treeopt() {{ {sys.executable} -m treeopt "$@"; }}\n{step["run"]}'
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, check=False).returncode == status
