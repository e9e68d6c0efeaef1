"""The contract of engines: ports of their own readers.

A reader gives the tree, the lengths or the settings that the engine decodes with. It fails where the engine would.
"""

import ast
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import yaml

from tests.helpers import engine_readers as readers
from tests.helpers.medusa_buffers import decoded, medusa_buffers
from treeopt.engines import exllamav3, medusa, neuron, sglang, tensorrt_llm, vllm
from treeopt.engines import tensorrt_trees as old
from treeopt.engines.base import COMMANDS, LAST, About, Written
from treeopt.engines.plans import AS_PLANNED, prepare, write_served
from treeopt.engines.registry import method_of
from treeopt.engines.templates import SCRIPT
from treeopt.records.exchange import ExportOptions
from treeopt.records.plan import Plan, Ranges, for_all, merged, only
from treeopt.trees.draft import CopiedText, Draft, DynamicTree
from treeopt.trees.tree import Tree

Value = TypeVar("Value")
Lengths = Ranges[int]  # of chains, 0 for none
Settings = Ranges[DynamicTree | None]  # chains are those of topk 1
NO_CHAIN: Lengths = ((1, None, 0),)
NO_TREE: Settings = ((1, None, None),)
Files = Mapping[str, str]
Reader = Callable[[Files], Tree | Lengths | Settings | CopiedText | None]


def export(engine: str, served: Draft | Ranges[Draft], method: str | None = None, **about: Any) -> Written:
    """The export of a draft for all batch sizes, or of drafts by batch size."""
    record = About(**{"num_heads": 8, **about, "drafter": about.get("drafter") or ""})
    ranges = served if isinstance(served, tuple) else for_all(served)
    return write_served(method_of(engine, record.drafter, method), ranges, record)


def export_plan(plan: Plan, engine: str, options: ExportOptions = AS_PLANNED) -> Written:
    """The export of a plan whose draft, or schedule, is one for all batch sizes."""
    prepared = prepare(plan, engine, options)
    (part,) = prepared.parts.values()
    written = write_served(prepared.method, *part)
    return replace(written, notes=(*prepared.beyond, *prepared.notes, *written.notes))


def chains(*lengths: tuple[int, int | None, int]) -> Ranges[Draft]:
    """Chains by batch size."""
    return tuple((first, last, Tree.chain(length)) for first, last, length in lengths)


def ranges_of(rule: Callable[[int], Value]) -> Ranges[Value]:
    """What a look-up rule answers for batch sizes 1 to `LAST`; the last answer goes on.

    >>> ranges_of(lambda batch_size: 4 if batch_size <= 8 else 0)
    ((1, 8, 4), (9, None, 0))
    """
    lengths = [rule(batch_size) for batch_size in range(1, LAST + 1)]
    begins = [i + 1 for i, length in enumerate(lengths) if i == 0 or length != lengths[i - 1]]
    ends = [*(begin - 1 for begin in begins[1:]), None]
    return tuple((begin, end, lengths[begin - 1]) for begin, end in zip(begins, ends, strict=True))


def length_at(lengths: Mapping[int, int], batch_size: int) -> int:
    """A look-up by lower bounds: the length of the largest key up to the batch size, below all that of the smallest.

    >>> [length_at({2: 4, 8: 0}, batch_size) for batch_size in (1, 2, 7, 99)]
    [4, 4, 4, 0]
    """
    return lengths[max((key for key in lengths if key <= batch_size), default=min(lengths))]


def up_to(schedule: Mapping[int, int], batch_size: int) -> int:
    """TensorRT-LLM's look-up: the first key not below the batch size; 0 above the last.

    >>> [up_to({4: 4, 8: 2, 32: 1}, batch_size) for batch_size in (1, 4, 5, 32, 33)]
    [4, 4, 2, 1, 0]
    """
    return schedule[min(key for key in schedule if key >= batch_size)] if batch_size <= max(schedule) else 0


def flags(files: Files) -> dict[str, str]:
    """The launch command's ``--flag value`` or ``--flag=value`` pairs; "" for a flag without a value.

    >>> flags({"commands.sh": "serve MODEL --eager --steps 3 # three"})
    {'--eager': '', '--steps': '3'}
    """
    options: dict[str, str] = {}
    for word, following in pairwise([*shlex.split(files[COMMANDS], comments=True), "--"]):
        if word.startswith("--") and "=" in word:
            name, _, options[name] = word.partition("=")
        elif word.startswith("--"):
            options[word] = "" if following.startswith("--") else following
    return options


# Trees


def listed(text: str) -> list[Any]:
    """The list that a text holds as it stands."""
    return ast.literal_eval(text[text.index("[") : text.rindex("]") + 1])


def lists_of(files: Files) -> Iterator[list[Any]]:
    """The list of every file; that of the launch command stands behind a flag."""
    for name, text in files.items():
        if name != COMMANDS:
            yield listed(text)
        else:
            yield from (listed(value) for flag, value in flags(files).items() if flag.endswith("choices"))


def same(trees: Iterable[Tree]) -> Tree:
    """The one tree that all files of an export are."""
    first, *others = trees
    assert all(tree == first for tree in others)
    return first


def read_medusa(files: Files) -> Tree:
    return same(decoded(medusa_buffers(choices)) for choices in lists_of(files))


def read_hydra(files: Files) -> Tree:
    """The tree that is verified, and drafted."""
    return same([read_medusa(files), *map(readers.drafted, lists_of(files))])


def read_eagle1(files: Files) -> Tree:
    """The tree that EAGLE-1 verifies; LookupError where the drafting side fails on it."""
    lists = list(lists_of(files))
    assert all(map(readers.drafting_levels, lists))
    return same(map(readers.verified, lists))


def read_modelopt(files: Files) -> Tree:
    return decoded(medusa_buffers(yaml.safe_load(files[medusa.FILE])["engine_args"]["medusa_choices"]))


def read_tensorrt_trees(files: Files) -> Tree:
    """The tree of every file, as both of its runtimes read it."""
    if old.OPTIONS not in files:
        return Tree.chain(0)
    config = yaml.safe_load(files[old.OPTIONS])["speculative_config"]
    literal = re.search(r"--medusa_choices '(.*)'", files[COMMANDS])
    lists = [config["medusa_choices"], yaml.safe_load(files[old.BENCH]), json.loads(literal[1])]
    most, heads = config["max_draft_len"], config["num_medusa_heads"]
    return same(
        tree for choices in lists for tree in (readers.in_cpp(choices, most, heads), readers.in_python(choices))
    )


def read_neuron_medusa(files: Files) -> Tree:
    alone = neuron.MEDUSA_FILE not in files
    return Tree.chain(0) if alone else decoded(medusa_buffers(json.loads(files[neuron.MEDUSA_FILE])))


def read_token_tree(files: Files) -> Tree:
    return neuron.token_tree(json.loads(files[neuron.TREE_FILE])) if neuron.TREE_FILE in files else Tree.chain(0)


# Flags of a command


def by_flag(
    on: str, length: str = "", root: bool = False, must: Callable[[dict[str, str]], bool] = lambda options: True
) -> Reader:
    """A reader of one length behind a flag; none without the flag that turns speculation on.

    root : whether the length counts it · must : what the engine needs, or it would end, or choose a length of its own
    """

    def read(files: Files) -> Lengths:
        options = flags(files)
        assert must(options), options
        return ((1, None, int(options[length or on]) - root),) if on in options else NO_CHAIN

    return read


ALGORITHMS = (None, "eagle", "eagle3", "deepseek_mtp", "hy3_mtp", "qwen3_5_mtp", "dflash")  # LMDeploy's
BY_FLAG = {
    "tgi": by_flag("--speculate", must=lambda options: options["--model-id"] != "HEADS" or "--speculate" in options),
    "lmdeploy": by_flag(
        "--speculative-algorithm",
        "--speculative-num-draft-tokens",
        must=lambda options: options["--backend"] == "pytorch" and options.get("--speculative-algorithm") in ALGORITHMS,
    ),
    "redrafter": by_flag(
        "--beam_length", root=True, must=lambda options: "--autoregression" in options or options["--beam_width"] == "1"
    ),
    "rtp-llm": by_flag(
        "--sp_type",
        "--gen_num_per_cycle",
        must=lambda options: (
            "--sp_type" not in options
            or (
                options["--sp_type"] in ("mtp", "eagle", "dspark")
                and {"--sp_model_type", "--sp_checkpoint_path"} < options.keys()
            )
        ),
    ),
    "mlx-lm": by_flag("--draft-model", "--num-draft-tokens"),
    "exllamav3": by_flag(
        "--num_draft_tokens",
        must=lambda options: (
            "--dynamic_draft" not in options
            and any(flag.split()[0] in options for flag in exllamav3.FLAGS.values())
            == ("--num_draft_tokens" in options)
        ),
    ),
}
EDGE = by_flag("--specVerifySize", root=True, must=lambda options: "--dsparkScheduler" not in options)


def read_edge_llm(files: Files) -> Lengths:
    """The length that is verified; of a stepwise drafter as many steps, of a block one step and DFlash's own rows."""
    options = flags(files)
    if "--specDecode" in options:
        assert options["--specDraftTopK"] == "1"  # else a tree
        steps, rows = int(options["--specDraftStep"]), int(options["--specVerifySize"])
        assert steps in (1, rows - 1)  # its DFlash, JetSpec and DSpark ask for 1
        assert options.get("--dflashBlockSize", str(rows)) == str(rows)  # which verifySize is set to
    return EDGE(files)


def read_onnx_block(files: Files) -> Lengths:
    """The block of the model builder; with max_draft_tokens left out the runtime verifies 4."""
    options = dict(word.split("=") for word in shlex.split(files[COMMANDS], comments=True) if "=" in word)
    if not options:
        return NO_CHAIN
    assert options["use_paged_attention"] == "true"
    assert options.keys() >= {"aux_hidden_state_layers"}
    (kind,) = {"dflash2", "dspark"} & {name.removesuffix("_path") for name in options}
    length = int(options[f"{kind}_num_draft_tokens"])
    assert length >= (2 if kind == "dspark" else 1)
    assert int(options["max_draft_tokens"]) == length <= 16
    return ((1, None, length),)


TYPES = ("draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark", "ngram-simple")  # llama.cpp's
REMOVED = {
    *("--draft", "--draft-n", "--draft-max", "--draft-min", "--draft-n-min"),
    *("--spec-ngram-size-n", "--spec-ngram-size-m", "--spec-ngram-min-hits"),
}  # llama.cpp throws
LOSSY = {"--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"}  # SGLang's, 1 by default


def read_llama_cpp(files: Files) -> Lengths:
    """The longest chain; none where nothing is drafted."""
    options = flags(files)
    kind = options.get("--spec-type")
    assert not REMOVED & options.keys()
    if kind is None or (kind not in ("draft-mtp", "ngram-simple") and "--spec-draft-model" not in options):
        return NO_CHAIN  # a line in the log, and the server goes on
    assert kind in TYPES
    if kind == "ngram-simple":
        length, looked_up = (int(options[f"--spec-ngram-simple-size-{name}"]) for name in "mn")
        return ((1, None, length if length >= looked_up else 0),)
    assert options["--spec-draft-n-min"] == options["--spec-draft-p-min"] == "0"  # else drafts end where it is unsure
    # The limit is looked at after a token was drafted, so 0 drafts one as well.
    return ((1, None, max(1, int(options["--spec-draft-n-max"]))),)


def read_mlc(files: Files) -> Lengths:
    """The chain length; it would choose one for 0, make a tree of some width, or not fit one sequence."""
    options = flags(files)
    mode = options.get("--speculative-mode")
    if mode is None:
        return NO_CHAIN
    settings = {name: int(n) for name, _, n in (part.partition("=") for part in options["--overrides"].split(";"))}
    length = settings["spec_draft_length"]
    assert length > 0
    assert "spec_tree_width" not in settings
    assert mode != "small_draft" or settings["max_num_sequence"] > length
    return ((1, None, length),)


def read_eagle2(files: Files) -> Settings:
    options = flags(files)
    if "--total-token" not in options:
        return NO_TREE
    return (
        (1, None, DynamicTree(int(options["--depth"]) + 1, int(options["--top-k"]), int(options["--total-token"]))),
    )


def read_sglang_tree(files: Files) -> Settings:
    """The dynamic tree as SGLang builds it, a chain with topk 1; it fails at the first step for more rows than its pool has."""
    options = flags(files)
    if "--speculative-algorithm" not in options:
        return NO_TREE
    assert not LOSSY & options.keys()
    steps, topk, rows = (int(options[name]) for name in (sglang.STEPS, sglang.TOPK, sglang.ROWS))
    return ((1, None, DynamicTree(steps, topk, steps + 1 if topk == 1 else rows)),)


def read_sglang(files: Files) -> Lengths:
    """The chain lengths as SGLang reads flags and config; with another drafter it would silently stay static."""
    options = flags(files)
    algorithm = options.get("--speculative-algorithm")
    if algorithm is None:
        return NO_CHAIN
    if algorithm == "DSPARK":
        return ((1, None, int(options["--speculative-dspark-block-size"])),)
    if algorithm in ("DFLASH", "NGRAM"):
        return ((1, None, int(options[sglang.ROWS]) - 1),)
    assert options[sglang.TOPK] == "1"
    steps = int(options[sglang.STEPS])
    if "--speculative-adaptive" not in options:
        return ((1, None, steps),)
    assert algorithm in [sglang.ALGORITHMS[drafter] for drafter in sglang.ADAPTIVE]
    slots = {int(key): entry["candidate_steps"] for key, entry in json.loads(files[sglang.FILE]).items()}
    assert all(len(candidates) == 1 for candidates in slots.values())  # among several it chooses at run time
    lengths = {key: length for key, (length,) in slots.items()}
    assert steps in lengths.values()
    return ranges_of(lambda batch_size: length_at(lengths, batch_size))


# Files of settings


def read_vllm(files: Files) -> Lengths:
    """The chain lengths as vLLM looks them up; none without a ``--speculative-config``."""
    text = flags(files).get("--speculative-config")
    assert (text is None) == (vllm.FILE not in files)
    if text is None:
        return NO_CHAIN
    config = json.loads(text)
    assert config == json.loads(files[vllm.FILE])
    most = config["num_speculative_tokens"]
    assert most > 0
    if vllm.SCHEDULE not in config:
        return ((1, None, most),)
    schedule = config[vllm.SCHEDULE]
    assert schedule[0][0] == 1
    assert all(begin <= end < following for (begin, end, _), (following, _, _) in pairwise([*schedule, [LAST + 1] * 3]))
    # A gap and the tail carry the last length forward, and no length exceeds the most.
    lengths = {begin: min(most, length) for begin, _, length in schedule}
    return ranges_of(lambda batch_size: length_at(lengths, batch_size))


def read_tensorrt_llm(files: Files) -> Lengths:
    """The chain lengths as TensorRT-LLM looks them up, with what its own validation asks."""
    text = files.get(tensorrt_llm.FILE, "{}")
    config = yaml.safe_load(text).get("speculative_config")
    if config is None:
        return NO_CHAIN
    most, schedule = config["max_draft_len"], config.get("draft_len_schedule")
    if schedule is None:
        return ((1, None, most),)
    assert "# draft_len_schedule: upper-bound" in text.splitlines()
    assert min(schedule) >= 1
    assert schedule[min(schedule)] == most == max(schedule.values())
    return ranges_of(lambda batch_size: up_to(schedule, batch_size))


def read_tensorrt_dynamic(files: Files) -> Settings:
    """The dynamic tree as TensorRT-LLM's config checks it."""
    config = yaml.safe_load(files.get(tensorrt_llm.FILE, "{}")).get("speculative_config")
    if config is None:
        return NO_TREE
    levels = config["max_draft_len"]
    if "use_dynamic_tree" not in config:
        return ((1, None, DynamicTree(levels, 1, levels + 1)),)
    assert config["use_dynamic_tree"] is True
    topk, nodes = config["dynamic_tree_max_topK"], config["max_total_draft_tokens"]
    assert levels <= nodes <= topk * levels
    return ((1, None, DynamicTree(levels, topk, nodes + 1)),)


def program_calls(files: Files) -> dict[str, frozenset[str | None]]:
    """What generate.py calls, or assigns the result of a call to, by its text, and the keywords of the call."""
    nodes = list(ast.walk(ast.parse(files[SCRIPT])))
    calls = [(n.func, n) for n in nodes if isinstance(n, ast.Call)]
    calls += [
        (to, n.value) for n in nodes if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call) for to in n.targets
    ]
    return {ast.unparse(name): frozenset(k.arg for k in call.keywords) for name, call in calls}


def read_transformers(files: Files) -> Lengths:
    """The chain length as ``generate`` picks its drafter: prompt lookup, then an assistant."""
    calls, settings = program_calls(files), json.loads(files["generation_config.json"])
    arguments = calls["model.generate"]
    defaults = settings if "model.generation_config" in calls else {}
    if "prompt_lookup_num_tokens" in defaults:
        return ((1, None, defaults["prompt_lookup_num_tokens"]),)
    if "assistant_model" not in arguments:
        return NO_CHAIN
    assert "assistant.generation_config" in calls
    assert settings["num_assistant_tokens_schedule"] == "constant"
    assert settings["assistant_confidence_threshold"] == 0  # else a chain stops where its drafter is unsure
    return ((1, None, settings["num_assistant_tokens"]),)


def read_openvino(files: Files) -> Lengths:
    """The chain length as the pipeline takes it."""
    calls, settings = program_calls(files), json.loads(files["generation_config.json"])
    arguments = calls["openvino_genai.LLMPipeline"]
    assert "openvino_genai.GenerationConfig" in calls
    if not arguments & {"draft_model", "prompt_lookup"}:
        return NO_CHAIN
    assert "assistant_confidence_threshold" not in settings
    assert ("prompt_lookup" in arguments) == ("max_ngram_size" in settings)
    return ((1, None, settings["num_assistant_tokens"]),)


def read_openvino_tree(files: Files) -> Settings:
    """The dynamic tree as the pipeline takes it."""
    ((_, _, nodes),) = read_openvino(files)
    settings = json.loads(files["generation_config.json"])
    if not nodes or "tree_depth" not in settings:
        return ((1, None, DynamicTree(nodes, 1, nodes + 1)),) if nodes else NO_TREE
    assert nodes >= settings["tree_depth"]
    assert not settings.get("do_sample")
    assert settings.get("num_beams", 1) == 1
    return ((1, None, DynamicTree(settings["tree_depth"], settings["branching_factor"], nodes + 1)),)


def read_onnx(files: Files) -> Lengths:
    """The chain length of ONNX Runtime GenAI's fixed width; with min_adaptive_k it would follow timings."""
    options = json.loads(files["options.json"])["speculative"]
    assert "params.set_speculative_options" in program_calls(files)
    if not options:
        return NO_CHAIN
    assert not options["min_adaptive_k"]
    assert options.get("ngram_size", 0) in (0, *range(2, 17))
    assert 1 <= options["max_draft_tokens"] <= 16
    return ((1, None, options["max_draft_tokens"]),)


# Drafters that copy text: examples with every option of every one, and each read back by its engine


def of_pairs(drafter: str, pairs: str) -> CopiedText:
    """A drafter with options as in "a=1 b=2"."""
    settings = {name: yaml.safe_load(value) for name, _, value in (pair.partition("=") for pair in pairs.split())}
    return CopiedText.of(drafter, settings, 9, 8)


NGRAM = "num_speculative_tokens=8 prompt_lookup_max=4 prompt_lookup_min=2"
SUFFIX = "num_speculative_tokens=12 suffix_decoding_max_tree_depth=32 suffix_decoding_max_cached_requests=500"
ARCTIC = (
    "suffix_speculative_tokens=12 suffix_cache_max_depth=32 suffix_cache_max_requests=500 suffix_max_spec_factor=2.0"
)
MOD = "spec_ngram_mod_n_match=16 spec_ngram_mod_n_min=2 spec_ngram_mod_n_max=8"
K4V = "spec_ngram_map_k4v_size_n=4 spec_ngram_map_k4v_size_m=8 spec_ngram_map_k4v_min_hits=2"
COPIED: dict[str, list[CopiedText]] = {
    "vllm": [
        of_pairs("vllm:suffix", f"{SUFFIX} suffix_decoding_max_spec_factor=2.0 suffix_decoding_min_token_prob=0.2"),
        of_pairs("vllm:suffix", ""),
        of_pairs("vllm:ngram-v1", NGRAM),
        of_pairs("vllm:ngram-v2", NGRAM),
        of_pairs("arctic:suffix", f"{ARCTIC} suffix_max_spec_offset=-1.0 suffix_min_token_prob=0.2"),
    ],
    "transformers": [of_pairs("transformers:prompt-lookup", "prompt_lookup_num_tokens=8 max_matching_ngram_size=3")],
    "openvino": [of_pairs("openvino:prompt-lookup", "num_assistant_tokens=8 max_ngram_size=4")],
    "exllamav3": [of_pairs("exllamav3:ngram", "num_draft_tokens=8 ngram_match_min=3")],
    "llama-cpp": [
        of_pairs("llama.cpp:ngram-mod", MOD),
        of_pairs("llama.cpp:ngram-map-k", "spec_ngram_map_k_size_n=4 spec_ngram_map_k_size_m=8"),
        of_pairs("llama.cpp:ngram-map-k4v", K4V),
        of_pairs("llama.cpp:ngram-simple", "spec_ngram_simple_size_n=4 spec_ngram_simple_size_m=8"),
        of_pairs("llama.cpp:ngram-cache", ""),
    ],
}


def read_copied(engine: str) -> Reader:
    """A reader of what a drafter that copies text is told; None where there is none."""

    def read(files: Files) -> CopiedText | None:
        name, options = READ_COPIED[engine](files)
        return CopiedText.of(name, options, 9, 8) if name else None

    return read


def options_of_flags(files: Files, *prefixes: str) -> dict[str, Any]:
    options = {name[2:].replace("-", "_"): value for name, value in flags(files).items() if name.startswith(prefixes)}
    return {name: yaml.safe_load(value or "true") for name, value in options.items()}


def copied_vllm(files: Files) -> tuple[str, dict[str, Any]]:
    """The runner looks up by its own rule; Arctic Inference alone knows its options."""
    words = shlex.split(files[COMMANDS], comments=True)
    variables = dict(word.split("=") for word in words if re.match(r"[A-Z\d_]+=", word))
    config = json.loads(flags(files).get("--speculative-config", '{"method": ""}'))
    assert config == json.loads(files.get(vllm.FILE, '{"method": ""}'))
    method = config.pop("method")
    runner = {"0": "-v1", "1": "-v2", None: ""}[variables.pop("VLLM_USE_V2_MODEL_RUNNER", None)]
    engine = "arctic" if variables.pop("ARCTIC_INFERENCE_ENABLED", "0") == "1" else "vllm"
    assert not variables
    if method == "ngram":
        shortest, longest = (config.get(f"prompt_lookup_{bound}") for bound in ("min", "max"))
        assert config["num_speculative_tokens"] > 0
        assert (shortest or longest or 5) <= (longest or shortest or 5)
    return method and f"{engine}:{method}{runner}", config


def copied_llama(files: Files) -> tuple[str, dict[str, Any]]:
    types, options = flags(files).get("--spec-type", ""), options_of_flags(files, "--spec-ngram")
    assert not REMOVED & flags(files).keys()
    assert all(0 <= value <= 1024 for value in options.values())
    return types and f"llama.cpp:{types}", options


def copied_settings(engine: str) -> Callable[[Files], tuple[str, dict[str, Any]]]:
    def read(files: Files) -> tuple[str, dict[str, Any]]:
        settings = json.loads(files["generation_config.json"])
        options = {name: value for name, value in settings.items() if re.search("assistant|lookup|ngram", name)}
        ((_, _, length),) = {"transformers": read_transformers, "openvino": read_openvino}[engine](files)
        return f"{engine}:prompt-lookup" if length else "", options

    return read


def copied_exllama(files: Files) -> tuple[str, dict[str, Any]]:
    options = options_of_flags(files, "--n", "--dynamic")
    return "exllamav3:ngram" if options.get("ngram_match_min") else "", options


READ_COPIED: dict[str, Callable[[Files], tuple[str, dict[str, Any]]]] = {
    "vllm": copied_vllm, "llama-cpp": copied_llama, "exllamav3": copied_exllama,
    "transformers": copied_settings("transformers"), "openvino": copied_settings("openvino"),
}  # fmt: skip


READERS: dict[tuple[str, str], Reader] = {
    ("medusa", "choices"): read_medusa,
    ("hydra", "choices"): read_hydra,
    ("eagle1", "choices"): read_eagle1,
    ("eagle2", "dynamic-tree"): read_eagle2,
    ("neuron-medusa", "medusa-tree"): read_neuron_medusa,
    ("neuron-token-tree", "token-tree"): read_token_tree,
    ("tensorrt-llm", "medusa"): read_tensorrt_trees,
    ("tensorrt-llm", "draft-len"): read_tensorrt_llm,
    ("tensorrt-llm", "ngram"): read_tensorrt_llm,
    ("tensorrt-llm", "block"): read_tensorrt_llm,
    ("edge-llm", "chain"): read_edge_llm,
    ("edge-llm", "dflash"): read_edge_llm,
    ("edge-llm", "dspark"): read_edge_llm,
    ("onnx-genai", "block"): read_onnx_block,
    ("tensorrt-llm", "dynamic-tree"): read_tensorrt_dynamic,
    ("modelopt", "specbench-medusa"): read_modelopt,
    ("tgi", "speculate"): BY_FLAG["tgi"],
    **dict.fromkeys((("vllm", name) for name in ("batch-size", "parallel", "suffix")), read_vllm),
    **dict.fromkeys((("sglang", name) for name in ("adaptive", "steps", "dflash", "dspark")), read_sglang),
    ("sglang", "dynamic-tree"): read_sglang_tree,
    ("llama-cpp", "number"): read_llama_cpp,
    **{(name, "number"): BY_FLAG[name] for name in ("lmdeploy", "rtp-llm", "mlx-lm")},
    ("rtp-llm", "block"): BY_FLAG["rtp-llm"],
    ("redrafter", "beam"): BY_FLAG["redrafter"],
    ("exllamav3", "generator"): BY_FLAG["exllamav3"],
    **dict.fromkeys((("transformers", name) for name in ("assistant", "prompt-lookup")), read_transformers),
    **dict.fromkeys((("openvino", name) for name in ("draft-model", "prompt-lookup")), read_openvino),
    ("openvino", "dynamic-tree"): read_openvino_tree,
    ("mlc-llm", "draft-length"): read_mlc,
    **dict.fromkeys((("onnx-genai", name) for name in ("draft-model", "ngram")), read_onnx),
    **{(engine, "copied-text"): read_copied(engine) for engine in COPIED},
}


def check_read_back(served: Draft | Ranges[Draft], engine: str, method: str, files: Files) -> None:
    """Fail where the engine's reader makes something else of the files than was asked."""
    ranges = merged(served if isinstance(served, tuple) else for_all(served))
    read = READERS[engine, method](files)
    if read is None:
        assert only(ranges) == Tree.chain(0)
    elif isinstance(read, CopiedText):
        assert (read.drafter, read.options) == (only(ranges).drafter, only(ranges).options)
    elif isinstance(read, Tree):
        assert read == only(ranges)
    elif all(isinstance(what, int) for *_, what in read):
        assert merged(read) == tuple((first, last, draft.depth) for first, last, draft in ranges)
    else:
        assert merged(read) == tuple((first, last, setting_of(draft)) for first, last, draft in ranges)


def setting_of(draft: Draft) -> DynamicTree | None:
    """The dynamic tree that engines are told of a draft; a chain is one of topk 1."""
    return DynamicTree(draft.depth, draft.topk or 1, draft.rows) if draft.depth else None
