"""Small real models, generated trees and traces, one run of the demo, and published reference data."""

import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

# Before huggingface_hub and torch are imported, which read these once; commands that tests start inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a thread a process: two processes that spin on two cores take longer
os.environ.setdefault("MKL_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from treeopt.cli import cli, print_notes
from treeopt.engines.imports import read_measurement
from treeopt.errors import Unsupported
from treeopt.files.writing import locked
from treeopt.records.contender import Block, Prompt
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.runtime.drafters.draft_model import DraftModel
from treeopt.runtime.drafters.medusa import MedusaHeads
from treeopt.runtime.prompts.encoder import Encoder
from treeopt.runtime.prompts.sets import Conversation, PromptSet
from treeopt.runtime.stepper import Stepper
from treeopt.runtime.target import Target
from treeopt.trees.draft import Draft
from treeopt.trees.tree import Tree

signal.signal(signal.SIGINT, signal.default_int_handler)  # commands behind `nohup` or `&` ignore it
print_notes()  # tests read notes on stderr, as commands print them
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
DATA = Path(__file__).parent / "data"
VOCABULARY, CONTEXT, HEADS = 37, 96, 4

SUITE, LONG = 50, 200  # examples of a property that does not say how many
# The suite draws the same examples each time: it judges the change. Campaigns (make test-all) draw others.
for profile, number, same in (("suite", SUITE, True), ("long", LONG, True), ("campaign", LONG, False)):
    settings.register_profile(
        profile,
        deadline=None,
        derandomize=same,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=number,
    )
settings.load_profile("suite")  # --hypothesis-profile long comes after this


def examples(in_suite: int) -> settings:
    """So many examples of a property in the suite, four times as many under the profile ``long``."""
    return settings(max_examples=in_suite * settings.default.max_examples // SUITE)


def some_long(*values: object) -> list:
    """Cases that ``make test-long`` has, and the suite has not."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


@pytest.fixture(scope="session", autouse=True)
def _working_folder(tmp_path_factory) -> None:
    """Tests work in an empty folder: the clone may have a run of the demo, which commands would take for theirs."""
    os.chdir(tmp_path_factory.mktemp("work"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test in OpenVINO is skipped, with the command to run, where the model that it decodes with is not converted."""
    try:
        return (yield)
    except Unsupported as error:
        if "optimum-cli" in str(error):
            pytest.skip(str(error))
        raise


pytest_runtest_setup = pytest_runtest_call  # fixtures open the engine too


@cache
def published_data(name: str):
    """Published ``trees`` or ``figures``: see data/README.md."""
    return json.loads((DATA / f"published_{name}.json").read_text(encoding="utf-8"))


def tiny_model(kind: str = "llama", *, eos=(3, 5), dtype=torch.float64, seed: int = 0):
    """A random causal LM whose logits are well apart, in float64."""
    import transformers as library

    torch.manual_seed(seed)
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.6,
        "eos_token_id": list(eos),
        "bos_token_id": None,
        "pad_token_id": 0,
        "attn_implementation": "eager" if kind == "llama-eager" else "sdpa",
    }
    if kind.startswith("llama"):
        model = library.LlamaForCausalLM(library.LlamaConfig(**common))
    elif kind == "mistral":  # a sliding window shorter than the text, in every layer
        model = library.MistralForCausalLM(library.MistralConfig(**common, sliding_window=7))
    else:  # full attention in the first layer, sliding in the others
        sliding = {"head_dim": 16, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
        model = library.Qwen3ForCausalLM(library.Qwen3Config(**common, **sliding))
    model.generation_config.eos_token_id = list(eos)
    return model.to(dtype).eval().requires_grad_(False)


def tiny_heads(target: Target, *, num_heads: int = HEADS, seed: int = 0) -> MedusaHeads:
    """Random heads; in a vocabulary of 37 their ten candidates are right often enough."""
    torch.manual_seed(seed)
    heads = MedusaHeads.like_lm_head(target.lm_head.weight, num_heads)
    torch.nn.init.normal_(heads.projection)
    return heads.eval().requires_grad_(False)


@pytest.fixture(scope="session", params=["llama", *some_long("llama-eager", "mistral"), "qwen3"])
def any_target(request) -> Target:
    return Target(tiny_model(request.param))


@pytest.fixture(scope="session")
def target() -> Target:
    return Target(tiny_model())


@pytest.fixture(scope="session")
def heads(target) -> MedusaHeads:
    return tiny_heads(target)


def random_prompts(seed: int, most: int = 6, longest: int = 20) -> list[list[int]]:
    """1 to ``most`` prompts of 1 to ``longest`` tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest))] for _ in range(rng.randint(1, most))]


@st.composite
def trees(draw, *, most_nodes: int = 20, depth: int = HEADS, ranks: int = 6) -> Tree:
    """Any tree, gaps between sibling ranks included."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    paths: set[tuple[int, ...]] = {()}
    for _ in range(draw(st.integers(0, most_nodes - 1))):
        parent = rng.choice(sorted(p for p in paths if len(p) < depth))
        paths.add((*parent, rng.randrange(ranks)))
    return Tree.from_choices(sorted(paths - {()}, key=lambda p: rng.random()))


@st.composite
def traces(draw, *, heads: int = 3, ranks: int = 4, sequences: int = 4, longest: int = 12) -> RankTrace:
    """Small traces with misses, skewed to low ranks, ended by EOS or the limit."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = rng.integers(1, longest + 1, draw(st.integers(2, sequences)))
    return random_trace(rng, lengths, heads, ranks)


def random_trace(rng, lengths, heads: int, ranks: int) -> RankTrace:
    blocks, ends = [], []
    for n in lengths:
        block = np.minimum(rng.geometric(0.45, (n, heads)) - 1, ranks)
        block[block == ranks] = -1
        eos = bool(rng.integers(2))
        state, head = np.indices(block.shape)
        block[state + head + 2 > n] = -1 if eos else -2
        block[-1] = -2
        blocks.append(block)
        ends.append(1 if eos else 0)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return RankTrace(np.concatenate(blocks), starts, end=np.array(ends), meta={"top_k": ranks})


def first_layers(target: Target, layers: int = 2) -> DraftModel:
    """A draft model that is often right: a copy of the target's first layers."""
    model = copy.deepcopy(target.model)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    return DraftModel(Target(model, target.tokenizer), target.vocab_size)


class Letters:
    """A tokenizer of one token per character."""

    def encode(self, text, add_special_tokens=True):
        return [6 + ord(letter) % (VOCABULARY - 6) for letter in text]


def asked(prompts) -> PromptSet:
    """Conversations of one turn with these tokens, as a file would give them."""
    conversations = tuple(Conversation(tuple(p), (("user", ""),), row=i) for i, p in enumerate(prompts, 1))
    return PromptSet(conversations, "tokens", "0" * 64, Encoder(Letters(), (3, 5), VOCABULARY))


@pytest.fixture
def imported(tmp_path):
    """Files of these texts, imported: calibration and notes."""

    def read(*texts, kind=None, **options):
        paths = []
        for n, text in enumerate(texts):
            paths.append(tmp_path / f"{n}.txt")
            paths[-1].write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
        found = read_measurement(paths, kind, **options)[1]
        return found.calibration, found.notes

    return read


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory) -> Path:
    """calibrate, profile and search on the demo model, made once for all processes of a session.

    Tests read it; one that writes takes a copy, as ``own_demo_run`` is.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    run = base / "demo-run"
    with locked(base / "demo-run.lock"):
        if not (run / "plan.json").exists():
            treeopt("calibrate", "--run", run, "--num-prompts", 8, "--max-new-tokens", 24, "--dtype", "float64")
            treeopt("profile", "--run", run, "--sizes", "1,4,16", "--time-limit", 1, "--batch-size", "1,2")
            treeopt("search", "--run", run, "--budget", 16, "--batch-size", "1,2")
    return run


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    """An empty one; tests that need more in it have a fixture of this name."""
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def own_demo_run(demo_run, tmp_path) -> Path:
    return Path(shutil.copytree(demo_run, tmp_path / "demo-run"))


def invoke(*arguments: object, code: int | None = 0) -> Result:
    """Run a command, whose exit code may be any by None. Anything but a TreeoptError or a usage error is a traceback: fail."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert code in (None, result.exit_code), result.output + result.stderr
    return result


def in_new_python(code: str, *arguments: str) -> str:
    """What a program prints that must end well."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def treeopt(*arguments: object, code: int = 0) -> str:
    """What a command prints, or what it says where it could not."""
    result = invoke(*arguments, code=code)
    return result.stdout if code == 0 else result.stderr


def decoded(stepper: Stepper, draft: Draft | None, prompts: Sequence[Sequence[int]], rows: int = 1) -> Block:
    """The block of a stepper that decodes some prompts, so many at a time."""
    (block,) = stepper.decode([Prompt(prompt) for prompt in prompts], draft, rows)
    return block
