"""Engines by the names that people give them, wherever a command or a function takes one."""

import json

import pytest

from tests.conftest import invoke
from treeopt.engines.imports import kinds_named
from treeopt.engines.registry import engine_named, with_engine
from treeopt.errors import InvalidInput, Unsupported
from treeopt.pipeline.copied import asked_drafters
from treeopt.pipeline.launched import bench_plan, engine_of_server
from treeopt.records.options import BenchOptions, LineOptions, Server, Source
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import ENGINES, LAUNCHABLE, STEPWISE, RunDirectory

NAMES = {
    "trtllm": "tensorrt-llm",
    "TensorRT-LLM": "tensorrt-llm",
    "vLLM": "vllm",
    "arctic": "vllm",
    "llama.cpp": "llama-cpp",
    "llama-server": "llama-cpp",
    "SGLang": "sglang",
    "text-generation-inference": "tgi",
}


def listed(name, folder):
    return json.loads(invoke("list", "engines", name, "--json").stdout)["engines"][0]["engine"]


def shown(name, folder):
    return json.loads(invoke("show", "engines", name, "--json").stdout)["engines"][0]["engine"]


def searched(name, folder):
    """The engine of a plan for a chain of a drafter that most engines run."""
    counts = folder / "calibration.json"
    figures = {"num_heads": 1, "top_k": 1, "hits": [[6]], "trials": [9], "drafter": {"kind": "ngram"}}
    counts.write_text(json.dumps({"schema": "treeopt.calibration/2", **figures}))
    command = ("search", "--calibration", counts, "--for", name, "--run", folder / "run", "--json")
    return json.loads(invoke(*command).stdout)["constraint"]["engine"]["name"]


def exported(name, folder):
    (folder / "tree.json").write_text("[[0]]")
    command = ("export", "--to", name, "--tree", folder / "tree.json", "--run", folder / "run", "--json")
    return RunDirectory(json.loads(invoke(*command).stdout)["files"][0]).path.parent.name


def tuned(name, folder):
    (folder / "table.csv").write_text("K,tokens/s\n0,100\n2,150\n")
    lines = invoke("tune", folder / "table.csv", "--for", name, "--drafter", "ngram").stdout
    return next(engine for engine, word in PROGRAMS.items() if word in lines)


PROGRAMS = {
    "tensorrt-llm": "trtllm-serve", "vllm": "vllm serve", "llama-cpp": "llama-server", "sglang": "sglang.launch_server",
    "tgi": "text-generation-launcher",
}  # fmt: skip
PLACES = {place.__name__: place for place in (listed, shown, searched, exported, tuned)}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(("name", "engine"), NAMES.items())
def test_names(name, engine, place, tmp_path):
    """A name means the same engine at every place."""
    assert place(name, tmp_path) == engine


def test_runtimes():
    """`--engine` of run, profile and bench takes any spelling of a runtime."""
    for name, runtime in (("vLLM", "vllm"), ("OpenVINO INT8", "openvino-int8"), ("OpenVINO_GenAI", "openvino")):
        assert with_engine(BenchOptions(engine=name), tuple(ENGINES)).engine == runtime
        assert with_engine(LineOptions(engine=name), STEPWISE).engine == runtime
    with pytest.raises(Unsupported, match=r"must be one of openvino, .*, but got 'transformers'\.$"):
        with_engine(LineOptions(engine="transformers"), STEPWISE)


def test_runtime_of_a_table(tmp_path):
    """`profile --runtime` keeps the engine that a name means, and any other name as it is."""
    table = tmp_path / "steps.csv"
    table.write_text("batch_size,context_tokens,size,step_ms\n1,9,1,5\n1,9,4,6\n")
    for name, runtime in (("TRT-LLM", "tensorrt-llm"), ("vllm-0.11", "vllm-0.11")):
        run = RunDirectory(tmp_path / name)
        invoke("profile", "--from-csv", table, "--runtime", name, "--run", run.path)
        assert LatencyProfile.load(run.profile).runtime["name"] == runtime


def test_launched():
    """`bench --launch --engine` takes any spelling of a server's engine."""
    assert [engine_of_server(name, LAUNCHABLE) for name in ("llama.cpp", "vLLM")] == ["llama-cpp", "vllm"]
    with pytest.raises(InvalidInput, match="must say whose server"):
        engine_of_server("", LAUNCHABLE)


def test_imports():
    """`import --from` takes the name of a kind or of an engine, and names all kinds."""
    assert list(kinds_named("vLLM")) == ["vllm-metrics", "vllm-requests"]
    assert [list(kinds_named(name)) for name in ("trtllm", "llama.cpp")] == [["tensorrt-llm"], ["llama-cpp"]]
    with pytest.raises(
        InvalidInput, match=r"csv, rates, .*, arms, shards, tree, but got 'arm'\. Did you mean 'arms'\?"
    ):
        kinds_named("arm")


def test_copied_text():
    """A search among drafters of text takes any spelling; arctic is a family of them beside vllm."""
    assert asked_drafters("Arctic", None) == ["arctic:suffix"]
    assert asked_drafters("vLLM", "suffix") == ["vllm:suffix"]
    assert asked_drafters("llama-cpp", None) == asked_drafters("llama.cpp", None) != []


@pytest.mark.parametrize(
    ("name", "engine"),
    {
        "trt": "tensorrt-llm", "trt-lm": "tensorrt-llm", "tensorrt": "tensorrt-llm", "vlm": "vllm", "vllm-omni": "vllm",
        "llama": "llama-cpp", "ollama": "llama-cpp", "llama-srver": "llama-cpp", "mlx": "mlx-lm", "sglan": "sglang",
    }.items(),
)  # fmt: skip
def test_suggestion(name, engine):
    """A suggestion is the likeliest engine."""
    with pytest.raises(Unsupported, match=rf"Did you mean '{engine}'\?"):
        engine_named(name)


def test_no_suggestion():
    """A name that is like none gets no suggestion."""
    with pytest.raises(Unsupported, match=r"but got 'triton'\.$"):
        engine_named("triton")


def test_tree_that_an_engine_does_not_take(tmp_path):
    """A search for an engine of chains says what the tree would bring that the same search without the engine chooses."""
    search = ("search", "--calibration", "vicuna-7b-medusa1", "--budget", "8", "--run", tmp_path)
    tree = json.loads(invoke(*search, "--json").stdout)["entries"][0]
    chain = json.loads(invoke(*search, "--for", "TGI", "--json").stdout)["entries"][0]
    assert chain["warnings"][-2:] == [
        "tgi takes chains only.",
        f"At batch size 1 the best draft (8 rows, 3 deep) would bring {tree['tokens_per_step']['value']:.2f} tokens per step, "
        f"the chain of 5 {chain['tokens_per_step']['value']:.2f}.",
    ]


def test_clients_of_a_plan(tmp_path):
    """Numbers of clients go with lengths; a plan has batch sizes."""
    server = Server(launch="vllm serve m --port {port} {options}", clients=(4,))
    with pytest.raises(InvalidInput, match="clients goes with lengths"):
        bench_plan(RunDirectory(tmp_path), Source(), BenchOptions(), server)
