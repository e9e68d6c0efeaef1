"""The commands, as a user runs them: the whole line on the demo model, other models, wrong input."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from click import Context

from treeopt import demo
from treeopt.cli import cli
from treeopt.records.benchmark import Benchmark
from treeopt.records.plan import Plan
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace

from .conftest import in_new_python, invoke, tiny_model, treeopt

QUICK = ("--num-prompts", "6", "--max-new-tokens", "16")


@pytest.fixture
def line(own_demo_run):
    """calibrate, profile and search on the demo model, in a folder of its own."""
    return own_demo_run


def benched(run, *options):
    """The contenders of treeopt bench."""
    treeopt("bench", "--run", run, "--rounds", "1", "--batch-size", 1, *options)
    return Benchmark.load(RunDirectory(run).bench_of(1)).contenders


def test_the_line_writes_its_files_and_predicts(line):
    plan = Plan.load(line / "plan.json")
    assert [entry.batch_size for entry in plan.entries] == [1, 2]
    for entry in plan.entries:
        assert 1 <= entry.chosen.size <= 16
        assert entry.chosen.tokens_per_step.stderr is not None
    provenance = json.loads((line / "profile.json").read_text())["provenance"]
    assert provenance["model"] == "treeopt demo model"
    assert provenance["dataset_fingerprint"]


def test_search_for_a_mix_of_loads_gives_one_tree(line, tmp_path):
    document = json.loads(treeopt("search", "--run", line, "--budget", "16", "--batch-size", "1:0.7,2:0.3", "--json"))
    assert document["constraint"]["mix"] == {"1": 0.7, "2": 0.3}
    assert document["entries"][0]["medusa_choices"] == document["entries"][1]["medusa_choices"]
    assert "positive share" in treeopt("search", "--run", line, "--batch-size", "1:0,2:1", code=2)


def test_bench_decodes_the_steps_that_replay_says(line, tmp_path):
    """Decoded for real, in float64, on two held-out prompts, with a tree of the user's."""
    tree = tmp_path / "mine.json"
    tree.write_text("[[0], [1], [0, 0], [0, 2], [0, 0, 0], [3]]")
    contenders = benched(line, "--num-prompts", "2", "--tree", tree, "--dtype", "float64")
    assert (
        {"plain", "chosen", "mc_sim_7b_63", "chain", "budget", "mine"}
        >= {c.name for c in contenders}
        >= {"plain", "mine"}
    )
    for contender in contenders:
        assert [answer.replayed_steps for answer in contender.sequences] == [a.steps for a in contender.sequences]
        assert contender.identical == contender.compared == 2
        assert contender.passes == contender.steps + 2  # batch size 1: and prefills


@pytest.mark.long
def test_replay_is_exact_for_ranks_that_the_trace_does_not_tell_apart(line, tmp_path):
    tree = tmp_path / "wide.json"
    tree.write_text(json.dumps([[rank] for rank in range(60)]))
    wide = benched(line, "--tree", tree, "--num-prompts", "2", "--dtype", "float64")[-1]
    assert wide.predicted_tokens_per_step is None
    assert wide.replayed_steps == wide.steps
    taken = tmp_path / "plain.json"
    taken.write_text("[[0]]")
    assert "is taken" in treeopt("bench", "--run", line, "--tree", taken, code=1)


def test_export_and_show(line, tmp_path):
    """On latencies of a CSV, so that each batch size has a tree of its own however busy the machine is."""
    run = tmp_path / "run"
    shutil.copytree(line, run)
    (tmp_path / "steps.csv").write_text(
        "batch,context,size,ms\n"
        + "".join(f"{b},64,{n},{10 + (5 * n if b == 2 else n / 10)}\n" for b in (1, 2) for n in (1, 4, 16))
    )
    treeopt("profile", "--run", run, "--from-csv", tmp_path / "steps.csv", "--overwrite")
    treeopt("search", "--run", run, "--budget", "16", "--batch-size", "1,2")
    for engine in ("medusa", "tensorrt-llm"):
        files = json.loads(treeopt("export", "--run", run, "--to", engine, "--batch-size", 1, "--json"))["files"]
        assert files
        assert all(Path(file).read_text() for file in files)
    assert (
        "Written for batch size 1" in invoke("export", "--run", run, "--to", "medusa").stderr
    )  # one sequence at a time
    assert "rows" in treeopt("show", "--run", run)
    shown = json.loads(treeopt("show", "--run", run, "--batch-size", 2, "--json"))
    assert shown["medusa_choices"] == Plan.load(run / "plan.json").entry(2).tree.choices


@pytest.mark.long
def test_run_does_it_all(tmp_path):
    short = ("--num-prompts", 8, "--bench-prompts", 2, "--max-new-tokens", 24, "--time-limit", 1, "--budget", 6)
    out = treeopt("run", "--run", tmp_path / "run", *short)
    assert "chosen" in out
    assert "predicted" in out
    for name in ("trace.npz", "calibration.json", "profile.json", "plan.json", "bench.json"):
        assert (tmp_path / "run" / name).exists()


def test_a_model_and_heads_of_ones_own(tmp_path):
    """A folder with a model and its tokenizer, Medusa heads in the published layout, prompts in JSONL."""
    from treeopt.runtime.checkpoints import save_heads
    from treeopt.runtime.drafters.medusa import MedusaHeads

    shutil.copytree(demo.MODEL, tmp_path / "model")
    heads = MedusaHeads(2, 1, 160, 2048)
    save_heads(heads, "medusa", tmp_path / "heads", base="mine")
    lines = [{"prompt": f"def add_{i}(a, b):\n    return"} for i in range(12)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    own = ("--model", tmp_path / "model", "--drafter", tmp_path / "heads", "--prompts", tmp_path / "p.jsonl")
    treeopt("calibrate", "--run", tmp_path / "run", *own, *QUICK)
    treeopt("search", "--run", tmp_path / "run", "--budget", 8)
    trace = RankTrace.load(tmp_path / "run" / "trace.npz")
    assert trace.num_heads == 2
    # The run remembers its model: no option is needed again.
    document = json.loads(treeopt("bench", "--run", tmp_path / "run", "--rounds", "1", "--num-prompts", "2", "--json"))
    assert document["provenance"]["model"] == str(tmp_path / "model")


def wrong(tmp_path):
    """(arguments, words of the one sentence)."""
    run = ("--run", tmp_path)
    (tmp_path / "long.txt").write_text("x = 1 + 2\\n" * 400)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"pro')
    (tmp_path / "nokey.jsonl").write_text('{"answer": "a"}')
    (tmp_path / "good.jsonl").write_text("".join(f'{{"prompt": "x = {i}", "kind": "a"}}\n' for i in range(4)))
    (tmp_path / "tree.json").write_text("[[0], [1, 0]]")
    (tmp_path / "other.json").write_text('{"schema": "treeopt.plan/7", "entries": []}')
    asked = ("calibrate", *run, "--model", demo.MODEL, "--drafter", demo.HEADS, "--prompts")
    shipped = ("search", *run, "--calibration", "vicuna-7b-medusa1")
    return [
        (("search", *run), "treeopt calibrate"),
        (("show", *run), "treeopt search"),
        (("report", *run), "treeopt search"),
        (("tune", "http://127.0.0.1:9", "--drafter", "mtp", "--noise", 2, *run), "--noise goes with files"),
        (("tune", "sweep.md", "--drafter", "mtp", "--minutes", 2, *run), "--minutes goes with the URL of a server"),
        (("plot", "no-such-figure", *run), "throughput"),
        (("calibrate", *run, "--model", tmp_path), "--prompts is needed"),
        (("calibrate", *run, "--dtype", "int4"), "float64, float32"),
        ((*asked, tmp_path / "long.txt"), "1 to 511 tokens"),
        ((*asked, tmp_path / "bad.jsonl"), "must leave some for bench"),
        ((*asked, tmp_path / "nokey.jsonl"), "--column"),
        ((*asked, tmp_path / "good.jsonl", "--column", "other"), "prompt, kind"),
        ((*asked, tmp_path / "good.jsonl", "--rule", "typical", "--responses", "prompt"), "leave --responses out"),
        (("calibrate", *run, "--column", "text"), "need --prompts"),
        (("calibrate", *run, "--draft-depth", "3"), "has 4 heads"),
        (("train", "--rule", "typical", "-o", tmp_path / "heads"), "writes answers to learn from greedily"),
        (("calibrate", *run, "--rule", "magic"), "greedy, sample, reject, typical"),
        (("calibrate", *run, "--rule", "greedy:epsilon=0.1"), "no parameters"),
        (("calibrate", *run, "--device", "cpu", "--device-map", "auto"), "exclude each other"),
        (("calibrate", *run, "--device", "toaster"), "--device"),
        (("convert", tmp_path / "nowhere", "--to", "medusa", "--output", tmp_path / "out"), "nowhere"),
        (("convert", demo.HEADS, "--to", "no-such", "--output", tmp_path / "out"), "neuron"),
        (("show", tmp_path / "tree.json", *run), "needs its parent in the list"),
        (("search", "--calibration", tmp_path / "other.json", *run), "schema"),
        ((*shipped, "--profile", "no-such"), "no-such"),
        ((*shipped[:1], *shipped[3:], "--run", tmp_path / "tree.json"), "cannot be written"),
    ]


def test_wrong_input_is_one_sentence_and_exit_1(tmp_path):
    for arguments, words in wrong(tmp_path):
        message = treeopt(*arguments, code=1)
        assert words in message, arguments
        assert message.splitlines()[-1].startswith("treeopt: "), arguments
        noted = "bad.jsonl" in str(arguments)  # a prompt that was left out
        assert message.count("\n") == 1 + noted, arguments


def test_misuse_is_exit_2():
    for words in ("search --budget 0", "search --batch-size 1,x", "search --bogus", "profile --sizes 0", "nonsense"):
        treeopt(*words.split(), code=2)


def required_parameters():
    """A pytest parameter for each parameter that a command cannot do without."""
    for name, command in cli.commands.items():
        for parameter in command.params:
            if parameter.required:
                yield pytest.param(command, parameter, id=f"{name}-{parameter.name}")


def words_of(parameter):
    """Words that give a required parameter a value."""
    return ["x"] if parameter.param_type_name == "argument" else [parameter.opts[-1], "x"]


@pytest.mark.parametrize(("command", "missing"), list(required_parameters()))
def test_missing_required_parameter_is_misuse(command, missing):
    """A command that lacks a required argument or option exits 2 and names it."""
    others = [parameter for parameter in command.params if parameter.required and parameter is not missing]
    message = treeopt(command.name, *(word for other in others for word in words_of(other)), code=2)
    name = (
        missing.make_metavar(Context(command)).rstrip(".")
        if missing.param_type_name == "argument"
        else missing.opts[-1]
    )
    assert "Missing" in message
    assert name in message


def test_heads_and_tokenizers_of_another_model_are_refused(tmp_path):
    from treeopt.runtime.checkpoints import save_heads
    from treeopt.runtime.drafters.medusa import MedusaHeads

    prompts = tmp_path / "p.txt"
    prompts.write_text("a = 1\nb = 2\n")
    save_heads(MedusaHeads(2, 1, 32, 37), "medusa", tmp_path / "heads", base="other")
    own = ("--prompts", prompts, "--run", tmp_path / "run")
    message = treeopt("calibrate", "--model", demo.MODEL, "--drafter", tmp_path / "heads", *own, code=1)
    assert "must fit the model (width 160, vocabulary 2048)" in message
    tiny_model().float().save_pretrained(tmp_path / "tiny")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL / name, tmp_path / "tiny")
    message = treeopt("calibrate", "--model", tmp_path / "tiny", "--drafter", tmp_path / "heads", *own, code=1)
    assert "tokenizer must belong to the model" in message


HEAVY = {"torch", "transformers", "datasets", "matplotlib", "scipy", "networkx"}
LIGHT = (  # the lightest first: what is done, and what has not been imported after it, beside `HEAVY`
    ("import treeopt", {"click", "numpy", "rich", "pydantic", "treeopt.cli", "treeopt.trees"}),
    ("run('--help')", {"numpy", "rich", "pydantic", "treeopt.trees", "treeopt.engines"}),
    ("run('list')", {"numpy", "rich", "pydantic", "treeopt.trees.tree", "treeopt.engines.base"}),
    ("run('show', 'mc_sim_7b_63')", {"pydantic", "treeopt.records.plan", "treeopt.engines.base"}),
    (
        "run('search', '--calibration', 'vicuna-7b-medusa1', '--budget', '8')",
        {"treeopt.arms", "treeopt.runtime.session"},
    ),
    ("run('show')", {"treeopt.arms", "treeopt.report.page", "treeopt.report.figures"}),
    ("run('export', '--to', 'vllm', '--tree', 'eagle_mc_sim_7b_63')", {"treeopt.arms.lexicon"}),
    ("import treeopt.pipeline.run, treeopt.pipeline.importing, treeopt.pipeline.proof, treeopt.pipeline.tune", set()),
)


def test_what_needs_no_model_imports_nothing_heavy(tmp_path):
    code = """
import os, sys
os.chdir(sys.argv[1])
def run(*words):
    from click.testing import CliRunner
    from treeopt.cli import cli
    result = CliRunner().invoke(cli, words)
    assert result.exit_code in (0, 1), result.output
"""
    for step, others in LIGHT:
        code += f"{step}\nassert not (found := {HEAVY | others} & set(sys.modules)), ({step!r}, found)\n"
    in_new_python(code, str(tmp_path))


class Late:
    """Signals the process when it is destroyed."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def waits() -> None:
    Late()
    time.sleep(20)


def ends() -> None:
    Late()


def ends_early() -> None:
    raise EOFError("Compressed file ended before the end-of-stream marker was reached")


@pytest.mark.parametrize(
    ("callback", "code", "words"),
    [
        (waits, 128 + signal.SIGTERM, "treeopt: interrupted."),
        (ends, 128 + signal.SIGTERM, "treeopt: interrupted."),
        (ends_early, 1, "treeopt: What was read ended early: Compressed file ended before the"),
    ],
)
def test_whatever_ends_a_command_is_said(monkeypatch, callback, code, words):
    """A signal that lands in a destructor, which Python ignores, and a library's EOFError, which click calls Aborted."""
    monkeypatch.setattr(cli.commands["status"], "callback", lambda **values: callback())
    assert words in treeopt("status", code=code)
