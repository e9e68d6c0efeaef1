"""The Python API gives what the commands give, shows itself in a notebook, and is light to import."""

import ast
import json
import time
from dataclasses import replace
from html.parser import HTMLParser
from inspect import signature
from pathlib import Path

import pytest

import treeopt
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.report.tables import calibration_table
from treeopt.report.terminal import out
from treeopt.trees.published import published_tree
from treeopt.trees.tree import Tree

from .conftest import in_new_python
from .conftest import treeopt as command

DOCS = Path(__file__).resolve().parents[1] / "docs"
QUICK = {"num_prompts": 6, "max_new_tokens": 16, "options": treeopt.CalibrateOptions(batch_size=4)}


@pytest.fixture(scope="module")
def session():
    return treeopt.open("demo", drafter="medusa")


@pytest.fixture(scope="module")
def run(session, tmp_path_factory):
    """A run directory with a trace, and a profile written by hand."""
    folder = tmp_path_factory.mktemp("api") / "run"
    treeopt.calibrate(session, run=folder, **QUICK)
    steps = [StepTiming(b, 64, n, d, (ms,)) for b in (1, 2) for n, d, ms in ((4, 2, 11.0), (16, 4, 12.0 + b))]
    plain = [StepTiming(b, 64, 1, 0, (10.0,)) for b in (1, 2)]
    LatencyProfile(tuple(steps), tuple(plain)).save(folder / "profile.json")
    return folder


def test_the_command_measures_the_same_trace_byte_for_byte(run, tmp_path):
    words = ("--num-prompts", 6, "--max-new-tokens", 16, "--batch-size", 4, "--model", "demo", "--drafter", "medusa")
    command("calibrate", "--run", tmp_path / "run", *words)
    assert (tmp_path / "run" / "trace.npz").read_bytes() == (run / "trace.npz").read_bytes()


def test_a_search_on_files_on_records_and_by_the_command_is_one_plan(run, tmp_path):
    trace, profile = treeopt.load(run / "trace.npz"), treeopt.load(run / "profile.json")
    document = json.loads(command("search", "--run", run, "--budget", 12, "--batch-size", "1,2", "--json"))
    options = {"budget": 12, "batch_sizes": (1, 2)}
    given = treeopt.search(trace, profile, **options)

    def chosen(plan):
        return {key: value for key, value in json.loads(json.dumps(plan)).items() if key != "provenance"}

    assert chosen(given.document()) == chosen(document)
    again = json.loads(json.dumps(treeopt.search(run=run, **options).document()))
    assert again == document  # kept with its time
    on_files = treeopt.search(run / "trace.npz", run / "profile.json", **options)
    treeopt.search(trace, profile, run=tmp_path / "kept", **options)
    for plan in (on_files, Plan.load(tmp_path / "kept" / "plan.json")):
        assert chosen(plan.document()) == chosen(document)
    assert not (tmp_path / "treeopt-run").exists()


def test_a_profile_goes_with_a_named_calibration_or_the_run_s(run):
    profile = treeopt.load(run / "profile.json")
    assert treeopt.search("vicuna-7b-medusa1", profile, budget=8)[1].chosen.step_ms is not None
    assert set(treeopt.search(profile=profile, run=run, budget=8).inputs) == {"trace.npz", "profile.json"}


def test_a_plan_is_asked_by_batch_size(run):
    plan = treeopt.search(run=run, budget=12, batch_sizes=(1, 2))
    assert plan[2] is plan.entry(2)
    assert [entry.batch_size for entry in plan] == [1, 2]
    assert plan[1].tree == plan[1].draft
    with pytest.raises(treeopt.OutOfRange, match="batch sizes 1, 2, but 3"):
        plan[3]


def test_bench_decodes_with_the_plan_that_it_gets(run, session, monkeypatch):
    """On a machine that gives it half of the time."""
    monkeypatch.setattr("treeopt.runtime.stepper.time.process_time", lambda: time.perf_counter() / 2)
    plan = treeopt.search(run=run, budget=8, batch_sizes=(1,))
    result = treeopt.bench(
        plan, session, run=run, num_prompts=2, options=treeopt.BenchOptions(max_new_tokens=8, rounds=1)
    )
    assert result.contender("chosen").draft == plan[1].draft
    assert Plan.load(run / "plan.json").document() == plan.document()
    assert result.document() == treeopt.load(run / "bench.json").document()
    assert result.processor_share == pytest.approx(0.5, abs=0.02)
    assert "had the processor for 50% of" in result._repr_html_()
    assert result.plot("contenders").axes


def test_score_takes_trees_and_records(run):
    by_name = treeopt.score("mc_sim_7b_63", run=run)
    given = treeopt.score(published_tree("mc_sim_7b_63"), treeopt.load(run / "trace.npz"))
    assert given.document() == by_name.document()


def test_export_writes_what_the_command_writes(tmp_path):
    plan = treeopt.search("vicuna-7b-medusa1", budget=16, run=tmp_path)
    written = plan.export("medusa", tmp_path / "out")
    command("export", "--run", tmp_path, "--to", "medusa")
    for file in written.files:
        assert file.read_text() == (tmp_path / "export" / "medusa" / file.name).read_text()
    with pytest.raises(treeopt.Unsupported, match="nowhere"):
        plan.export("nowhere", tmp_path / "other")


def test_every_result_is_a_table_in_a_notebook_and_draws_itself(run):
    trace, profile = treeopt.load(run / "trace.npz"), treeopt.load(run / "profile.json")
    plan = treeopt.search(trace, profile, budget=8, batch_sizes=(1,))
    calibration = treeopt.load(run / "calibration.json")
    for record, title in [(trace, "Head accuracy"), (calibration, "Head accuracy"), (profile, "Latency"),
                          (plan, "The best tree"), (treeopt.score(Tree.chain(2), trace), "Tokens per step")]:  # fmt: skip
        assert title in record._repr_html_()
        assert title in str(record)
    for record, name in [(trace, "accuracy"), (profile, "latency"), (plan, "throughput")]:
        assert record.plot(name).axes
    assert plan[1].speedup == plan[1].chosen.speedup
    assert plan.plot("tree", trace, batch_size=1).axes
    with pytest.raises(treeopt.OutOfRange, match=r"needs plan.json"):
        profile.plot("tree")
    with pytest.raises(treeopt.InvalidInput, match="throughput"):
        plan.plot("no-such")


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = set()

    def handle_starttag(self, tag, attributes):
        self.found.add((tag, *(name for name, _ in attributes)))


HOSTILE = "<img src=x onerror=alert(1)> [link=javascript:alert(1)]x[/link] [/x] & 'b'"


def test_hostile_names_are_text_in_a_notebook_and_in_the_terminal(run, capsys):
    calibration = treeopt.load(run / "calibration.json")
    group = {"sequences": 1, "hits": [[1]] * calibration.num_heads, "trials": [2] * calibration.num_heads}
    named = replace(calibration, meta={**calibration.meta, "groups": {HOSTILE: group}})
    plan = treeopt.search(calibration, budget=8)
    for text in (named._repr_html_(), replace(plan, runtime=None)._repr_html_()):
        tags = Tags()
        tags.feed(text)
        assert tags.found <= {("pre", "style"), ("b",)}
    assert "&lt;img src=x" in named._repr_html_()
    out(calibration_table(named))
    assert "[/x]" in capsys.readouterr().out


def test_a_session_has_its_options_already(session):
    with pytest.raises(treeopt.InvalidInput, match=r"pass prompts to treeopt.open"):
        treeopt.calibrate(session, prompts="q.jsonl")
    with pytest.raises(TypeError, match="drafters"):
        treeopt.open("demo", drafters="medusa")


def test_load_reads_every_file_of_a_run_and_refuses_others(run, tmp_path):
    for name, kind in [("trace.npz", treeopt.RankTrace), ("calibration.json", treeopt.Calibration),
                       ("profile.json", treeopt.LatencyProfile)]:  # fmt: skip
        assert isinstance(treeopt.load(run / name), kind)
    plan = treeopt.search(run=run, budget=8)
    plan.save(f"{tmp_path}/mine.json")
    assert Plan.load(f"{tmp_path}/mine.json").document() == treeopt.load(tmp_path / "mine.json").document()
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(treeopt.InvalidInput, match="schema"):
        treeopt.load(tmp_path / "other.json")


WRONG = [
    (treeopt.calibrate, {"num_prompts": 0}, "num_prompts must be at least 1, but got 0"),
    (treeopt.CalibrateOptions, {"topks": (2, 11)}, "topks must be at most 10, but got 11"),
    (treeopt.ProfileOptions, {"precision": 0}, "precision must be above 0, but got 0"),
    (treeopt.Workers, {"workers": 0}, "workers must be at least 1, but got 0"),
    (treeopt.compare, {"first": "x", "noise": 1e9}, "noise must be at most 1,000, but got 1000000000.0"),
    (treeopt.search, {"batch_sizes": 1}, "batch_sizes must be a list, but got 1"),
    (treeopt.TreeLimits, {"max_depth": 2.5}, "max_depth must be a whole number, but got 2.5"),
    (
        treeopt.search,
        {"calibration": "vicuna-7b-medusa1", "limits": treeopt.TreeLimits(method="eagle")},
        "method belongs to an engine: name the engine",
    ),
    (treeopt.train, {"output": "x", "model": object()}, "Training loads a model itself: pass its name"),
    (treeopt.tune, {"run": "no-run", "options": treeopt.Watching()}, "no-run has no settings that were run yet"),
    (treeopt.bench, {"batch_size": [1]}, r"batch_size must be a whole number, but got \[1\]"),
]


@pytest.mark.parametrize(("function", "given", "words"), WRONG, ids=lambda value: getattr(value, "__name__", None))
def test_an_error_names_the_parameter(function, given, words):
    with pytest.raises(treeopt.InvalidInput, match=words):
        function(**given)


def test_a_commands_error_names_the_option(tmp_path):
    for words, code, said in [
        (("calibrate", "--num-prompts", "0"), 2, "'--num-prompts': must be at least 1, but got 0"),
        (("profile", "--batch-size", "0"), 2, "'--batch-size': must be at least 1, but got 0"),
        (
            ("search", "--method", "eagle", "--calibration", "vicuna-7b-medusa1"),
            1,
            "--method belongs to an engine: name the --for",
        ),
        (("calibrate", "--rule", "typical:temperature=0"), 1, "is --rule greedy"),
    ]:
        assert said in command(*words, "--run", tmp_path / "run", code=code)


def test_every_name_is_there():
    assert dir(treeopt) == sorted(treeopt.__all__)
    assert None not in [getattr(treeopt, name) for name in treeopt.__all__]


@pytest.mark.long
def test_the_notebook_runs_cell_by_cell(tmp_path, monkeypatch):
    """Each cell is run, and its last expression shown, as a notebook does."""
    text = (DOCS / "notebook.py").read_text(encoding="utf-8")
    sizes = "PROMPTS, TOKENS, SECONDS = 64, 64, 30"
    assert sizes in text
    text = text.replace(sizes, "PROMPTS, TOKENS, SECONDS = 8, 12, 1")
    text = text.replace("SECONDS)", "SECONDS, options=treeopt.ProfileOptions(sizes=[8]))")
    text = text.replace("budget=64", "budget=8")
    text = text.replace("RUN, batch_size=", "RUN, num_prompts=2, options=treeopt.BenchOptions(rounds=1), batch_size=")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for cell in text.split("# %%")[1:]:
        code = cell.partition("\n")[2]
        if not cell.startswith(" [markdown]"):
            exec(compile(code, "notebook.py", "exec"), names)
    assert names["result"].contender("plain").compared
    assert names["plan"]._repr_html_()


def test_the_page_lists_all_that_is_public_and_its_calls_are_calls():
    page = (DOCS / "python.md").read_text(encoding="utf-8")
    assert [name for name in treeopt.__all__ if name not in page] == []
    for call in ast.walk(ast.parse(page.split("```python\n")[1].split("```")[0])):
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("treeopt."):
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            signature(getattr(treeopt, call.func.attr)).bind(*call.args, **given)


def test_a_picture_shows_itself_and_a_record_is_one_line():
    """As Jupyter asks for both: without pyplot it showed `<Figure size ...>`, and plans over pages."""
    calibration = treeopt.load("vicuna-7b-medusa1")
    plan = treeopt.search(calibration, budget=40)
    picture = calibration.plot("accuracy")
    assert picture._repr_png_().startswith(b"\x89PNG")
    profile = treeopt.load("a100-80gb--llama-33b-linear-layers")
    records = [plan, plan[1], calibration, profile, treeopt.score("mc_sim_7b_63", calibration),
               treeopt.compare(calibration, calibration, budget=8)]  # fmt: skip
    for record in records:
        assert repr(record).startswith(f"{type(record).__name__}(")
        assert "\n" not in repr(record)
        assert len(repr(record)) < 400
    assert "hits: 5×5" in repr(calibration)


def test_a_function_is_silent_and_logs_what_is_worth_knowing(tmp_path):
    (tmp_path / "steps.csv").write_text("batch_size,size,step_ms\n1,1,10\n1,4,11\n")
    code = """
import logging, pathlib, sys
from treeopt import RunDirectory
from treeopt.pipeline.profile.untimed import profile_from_file
sys.stderr = sys.stdout
folder = pathlib.Path(sys.argv[1])
profile_from_file(RunDirectory(folder / "run"), folder / "steps.csv")
print("quiet")
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
profile_from_file(RunDirectory(folder / "run"), folder / "steps.csv")
"""
    printed = in_new_python(code, str(tmp_path))
    assert printed.startswith("quiet")
    assert "INFO:treeopt:2 of 2 latencies have one sample each" in printed


def test_the_seed_of_the_prompts_is_that_of_training(tmp_path, monkeypatch):
    """By the API as by the command."""
    recipes = []

    def job(folder, source, recipe, mixed_precision):
        recipes.append(recipe)
        raise treeopt.InvalidInput("enough")

    monkeypatch.setattr("treeopt.pipeline.train.TrainingJob", job)
    with pytest.raises(treeopt.InvalidInput, match="enough"):
        treeopt.train(tmp_path / "heads", prompts=treeopt.Prompts(seed=7))
    assert "enough" in command("train", "--seed", "7", "-o", tmp_path / "heads", code=1)
    assert [recipe.seed for recipe in recipes] == [7, 7]
