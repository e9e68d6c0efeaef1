"""The rows of engines in their contract: what each is told of a chain, and ports of how it reads what treeopt writes.

Each gives the tree, the lengths or the settings that the engine decodes with, and raises where it would refuse or fail.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import yaml

from treeopt.engines import (
    eagle1,
    exllamav3,
    fastrl,
    hydra,
    modelopt,
    neuron,
    programs,
    sglang,
    tensorrt_llm,
    triton,
    vllm,
)
from treeopt.engines import tensorrt_trees as old
from treeopt.engines.base import COMMANDS, Lengths, Settings
from treeopt.engines.chains import LAST, Ranges, Value, merged
from treeopt.engines.lists import decoded, medusa_buffers, the_list
from treeopt.errors import InvalidInput, quoted
from treeopt.files.bounds import parse_yaml
from treeopt.trees.dynamic import DynamicTree
from treeopt.trees.tree import Tree

NO_CHAIN: Lengths = ((1, None, 0),)
NO_TREE: Settings = ((1, None, None),)
LOSSY = ("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc")  # SGLang's, 1 by default
ALGORITHMS = ("eagle", "eagle3", "deepseek_mtp", "hy3_mtp", "qwen3_5_mtp", "dflash")  # LMDeploy's
TYPES = ("draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark", "ngram-simple")  # llama.cpp's
REMOVED = {
    *("--draft", "--draft-n", "--draft-max", "--draft-min", "--draft-n-min"),
    *("--spec-ngram-size-n", "--spec-ngram-size-m", "--spec-ngram-min-hits"),
}  # llama.cpp throws
LEVELS, TOPK = "tree_depth", "branching_factor"
LENGTH, LOOKUP, UNSURE = "num_assistant_tokens", "prompt_lookup_num_tokens", "assistant_confidence_threshold"
DYNAMIC = ("max_draft_len", "dynamic_tree_max_topK", "max_total_draft_tokens")


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


def flags(files: Mapping[str, str]) -> dict[str, str]:
    """The launch command's ``--flag value`` or ``--flag=value`` pairs; "" for a flag without a value.

    Raises InvalidInput for a text that the shell could not read either.

    >>> flags({"commands.sh": "serve MODEL --eager --steps 3 # three"})
    {'--eager': '', '--steps': '3'}
    """
    try:
        words = shlex.split(files.get(COMMANDS, ""), comments=True)
    except ValueError as error:
        raise InvalidInput(f"A launch command must have its quotes closed: {error}.") from None
    found: dict[str, str] = {}
    for word, following in pairwise([*words, "--"]):
        if word.startswith("--") and "=" in word:
            name, _, found[name] = word.partition("=")
        elif word.startswith("--"):
            found[word] = "" if following.startswith("--") else following
    return found


def whole(text: str, name: str) -> int:
    """A flag's whole number, at least 0."""
    if not text.isdecimal() or len(text) > 9:
        raise InvalidInput(f"{name} must be a whole number, but got {quoted(text)}.")
    return int(text)


def numbers(given: Mapping[str, str], *names: str) -> list[int]:
    """The whole numbers of a launch command's flags; InvalidInput where one is missing or none."""
    return [whole(given.get(name, ""), name) for name in names]


def lists_of(files: Mapping[str, str]) -> Iterator[list[Any]]:
    """The list of every file; that of the launch command stands behind a flag."""
    for name, text in files.items():
        if name != COMMANDS:
            yield the_list(text)
        else:
            yield from (the_list(value) for flag, value in flags(files).items() if flag.endswith("choices"))


def same(trees: Iterable[Tree]) -> Tree:
    """The one tree that they all are; InvalidInput where files of one export differ."""
    found = list(trees)
    if any(tree != found[0] for tree in found):
        raise InvalidInput("The files of one export must have the same tree, but they differ.")
    return found[0]


def read_medusa(files: Mapping[str, str]) -> Tree:
    """The tree that Medusa's buffers of every file's list are of."""
    return same(decoded(medusa_buffers(choices)) for choices in lists_of(files))


def read_hydra(files: Mapping[str, str]) -> Tree:
    """The tree that is drafted; InvalidInput where it is another than the one verified."""
    lists = list(lists_of(files))
    verified = same(decoded(medusa_buffers(choices)) for choices in lists)
    drafts = same(hydra.drafted(choices) for choices in lists)
    if drafts != verified:
        raise InvalidInput("Hydra would draft another tree than it verifies.")
    return verified


def read_eagle1(files: Mapping[str, str]) -> Tree:
    """The tree that EAGLE-1 verifies; LookupError where the drafting side fails on it."""
    lists = list(lists_of(files))
    for choices in lists:
        eagle1.drafting_levels(choices)
    return same(eagle1.verified(choices) for choices in lists)


def read_eagle2(files: Mapping[str, str]) -> Settings:
    """The setting as EAGLE's drafter takes it; InvalidInput for more rows than its pool has, on which it fails."""
    given = flags(files)
    if "--total-token" not in given:
        return NO_TREE
    rows, depth, topk = numbers(given, "--total-token", "--depth", "--top-k")
    return ((1, None, DynamicTree(depth + 1, topk, rows)),)


def read_neuron_medusa(files: Mapping[str, str]) -> Tree:
    """The tree of the buffers (neuronx_distributed/utils/medusa_utils.py, which are Medusa's)."""
    return decoded(medusa_buffers(json.loads(files[neuron.MEDUSA_FILE])))


def read_neuron_tree(files: Mapping[str, str]) -> Tree:
    """The tree of ``token_tree_config``, by the rules of modules/eagle/token_tree.py."""
    return neuron.token_tree(json.loads(files[neuron.TREE_FILE]))


def read_modelopt(files: Mapping[str, str]) -> Tree:
    """The tree of the file, by the benchmark's buffers and by the library's own check."""
    choices = yaml.safe_load(files[modelopt.FILE])["engine_args"]["medusa_choices"]
    if modelopt.total_nodes(choices) != len(choices) + 1:
        raise InvalidInput(f"{modelopt.FILE} must list every choice once.")
    return decoded(medusa_buffers(choices))


def read_tensorrt_trees(files: Mapping[str, str]) -> Tree:
    """The tree of every file, as both of its runtimes read it."""
    if old.PLAIN in files[old.OPTIONS]:
        return Tree.chain(0)
    config = yaml.safe_load(files[old.OPTIONS])["speculative_config"]
    key = "medusa_choices" if config["decoding_type"] == "Medusa" else "eagle_choices"
    lists = [config[key], *([yaml.safe_load(files[old.BENCH])] if old.BENCH in files else [])]
    literal = re.search(rf"--{key} '(.*)'", files[COMMANDS])
    lists += [json.loads(literal[1])] if literal else []
    most = config["max_draft_len"] if key == "medusa_choices" else len(config[key])
    heads = config.get("num_medusa_heads", old.MOST_DEPTH)
    return same(tree for choices in lists for tree in (old.in_cpp(choices, most, heads), old.in_python(choices)))


def read_triton(files: Mapping[str, str]) -> Tree:
    """The tree that the backend decodes with; InvalidInput where it would take the default one instead."""
    value = re.search(r'key: "medusa_choices"\s+value: \{ string_value: "([^"]*)"', files[triton.CONFIG])
    filled = re.search(r"'(decoding_mode:.*)'", files[COMMANDS])
    texts = [value[1] if value else "", triton.filled_in(filled[1] if filled else "").get("medusa_choices", "")]
    lists = [triton.vectors(text) for text in texts]
    return same(old.in_cpp(paths, len(paths), old.MOST_DEPTH) for paths in lists)


def read_sglang_tree(files: Mapping[str, str]) -> Settings:
    """The dynamic tree as SGLang builds it, a chain with topk 1.

    Raises InvalidInput for what it refuses, for more rows than the pool has, on which it fails at the first step, and for
    thresholds that make it accept what the target would not have said.
    """
    given = flags(files)
    if "--speculative-algorithm" not in given:
        return NO_TREE
    if lossy := [name for name in LOSSY if given.get(name, "1") not in ("1", "1.0")]:
        raise InvalidInput(f"{' and '.join(lossy)} below 1 changes what is generated: leave it out.")
    steps, topk, rows = numbers(given, sglang.STEPS, sglang.TOPK, sglang.ROWS)
    backend = given.get("--attention-backend")
    if topk > 1 and (backend == "trtllm_mha" or (given.get("--page-size", "1") != "1" and backend not in sglang.PAGED)):
        raise InvalidInput(sglang.tree_notes([DynamicTree(steps, topk, rows)])[0])
    return ((1, None, DynamicTree(steps, topk, steps + 1 if topk == 1 else rows)),)


def read_sglang(files: Mapping[str, str]) -> Lengths:
    """The chain lengths as SGLang reads flags and config, its silent static fallback included.

    Raises InvalidInput for what it refuses, and for topk above 1, which makes no chain.
    """
    given = flags(files)
    algorithm = given.get("--speculative-algorithm")
    if algorithm is None:
        return NO_CHAIN
    if algorithm == "DSPARK":
        name = sglang.LENGTH_OF_BLOCKS["dspark"]
        return ((1, None, whole(given.get(name, ""), name)),)
    if algorithm == "DFLASH":
        name = sglang.LENGTH_OF_BLOCKS["dflash"]
        return ((1, None, whole(given.get(name, "16"), name) - 1),)
    if algorithm == "NGRAM":
        rows = whole(given.get(sglang.ROWS, "12"), sglang.ROWS)
        return ((1, None, rows - 1),)
    steps, topk = numbers(given, sglang.STEPS, sglang.TOPK)
    if "--speculative-adaptive" in given and is_adaptive(algorithm, topk):
        slots = slots_of(files.get(sglang.FILE, ""))
        if steps not in slots.values():
            raise InvalidInput(f"{sglang.STEPS} must be one of the candidate_steps, but is {steps}.")
        return ranges_of(lambda batch_size: length_at(slots, batch_size))
    if topk != 1:
        raise InvalidInput(f"A chain needs {sglang.TOPK} 1, but got {topk}.")
    return ((1, None, steps),)


def is_adaptive(algorithm: str, topk: int) -> bool:
    """Whether SGLang heeds ``--speculative-adaptive``; where not it warns in its log, and stays static.

    NEXTN is another name of EAGLE.

    >>> is_adaptive("EAGLE3", 1), is_adaptive("EAGLE3", 4), is_adaptive("STANDALONE", 1)
    (True, False, False)
    """
    return algorithm in [sglang.ALGORITHMS[drafter] for drafter in sglang.ADAPTIVE] and topk == 1


def slots_of(text: str) -> dict[int, int]:
    """Lower bound of batch sizes to steps; InvalidInput where SGLang refuses, or would choose by itself.

    >>> slots_of('{"8": {"candidate_steps": [1]}, "strategy": "ema", "1": {"candidate_steps": [3]}}')
    {8: 1, 1: 3}
    """
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"An adaptive config must be JSON: {error}.") from None
    if not isinstance(config, dict):
        raise InvalidInput(f"An adaptive config must be a JSON object, but is {config!r}.")
    slots: dict[int, int] = {}
    for key, entry in config.items():
        if not key.isdigit():
            continue  # a setting for all batch sizes
        steps = entry.get("candidate_steps") if isinstance(entry, dict) else None
        if not isinstance(steps, list) or not steps or not all(type(s) is int and s >= 0 for s in steps):
            raise InvalidInput(f"Batch size {key} needs candidate_steps of at least 0, but has {steps!r}.")
        if len(set(steps)) > 1:
            raise InvalidInput(f"SGLang chooses among candidate_steps {steps} at run time: leave one of them.")
        slots[int(key)] = steps[0]
    if not slots:
        raise InvalidInput('An adaptive config needs a batch size, as in {"1": {"candidate_steps": [3]}}.')
    return slots


def read_fastrl(files: Mapping[str, str]) -> Settings:
    """The settings by batch size as its fixed map has them; InvalidInput where it would choose by itself, or fail."""
    given = flags(files)
    ((_, _, first),) = read_sglang_tree(files)
    if first is None:
        return NO_TREE
    begins, trees = [1], [first]
    if fastrl.CONFIGS in given:
        if given.get(fastrl.ALGORITHM) != "PREDEFINED":
            raise InvalidInput(
                f"{fastrl.ALGORITHM} {given.get(fastrl.ALGORITHM, '')} tries settings out while it serves."
            )
        parts = {*given[fastrl.CONFIGS].split(","), f"{first.levels}_{first.topk}_{first.rows}"}
        triples = [[whole(number, fastrl.CONFIGS) for number in part.split("_")] for part in sorted(parts)]
        if any(len(triple) != 3 for triple in triples):
            raise InvalidInput(f"{fastrl.CONFIGS} must have settings as in 5_4_16, but is {given[fastrl.CONFIGS]}.")
        trees = sorted((DynamicTree(*triple) for triple in triples), key=lambda tree: -tree.rows)
        begins = [whole(one, fastrl.THRESHOLD) for one in given.get(fastrl.THRESHOLD, "1,2,5,21").split(",")]
    if len(begins) != len(trees) or begins != sorted({1, *begins}):
        raise InvalidInput(
            f"{fastrl.THRESHOLD} must rise from 1, one for each of {len(trees)} settings, but is {begins}."
        )
    known = dict(zip(begins, trees, strict=True))
    most = whole(given[fastrl.UP_TO], fastrl.UP_TO) if fastrl.UP_TO in given else LAST
    return ranges_of(lambda size: known[max(begin for begin in begins if begin <= size)] if size <= most else None)


def read_tgi(files: Mapping[str, str]) -> Lengths:
    """The chain length as TGI reads it; InvalidInput for heads without one, of which it would use all."""
    given = flags(files)
    length = given.get("--speculate")
    if length is not None:
        return ((1, None, whole(length, "--speculate")),)
    if given.get("--model-id") == "HEADS":
        raise InvalidInput("Without --speculate TGI uses as many guesses as there are heads: name the length.")
    return NO_CHAIN


def read_vllm(files: Mapping[str, str]) -> Lengths:
    """The chain lengths as vLLM looks them up; none without a ``--speculative-config``.

    Raises InvalidInput for a schedule that vLLM refuses, and where file and command differ.
    """
    config = vllm_config(files)
    if config is None:
        return NO_CHAIN
    most = config.get("num_speculative_tokens")
    if type(most) is not int or most < 1:
        raise InvalidInput(f"vLLM needs num_speculative_tokens of at least 1, but got {most!r}.")
    if config.get(vllm.SCHEDULE) is None:
        return ((1, None, most),)
    # A gap and the tail carry the last length forward, and no length exceeds the most.
    lengths = {begin: min(most, length) for begin, _, length in vllm_schedule(config[vllm.SCHEDULE])}
    return ranges_of(lambda batch_size: length_at(lengths, batch_size))


def vllm_schedule(schedule: object) -> list[tuple[int, int, int]]:
    """The sorted schedule; InvalidInput where vLLM's own validation raises, naming its rule."""
    if not isinstance(schedule, list) or not schedule:
        raise InvalidInput(f"{vllm.SCHEDULE} must be a list of [from, to, length], but got {schedule!r}.")
    for item in schedule:
        if not isinstance(item, list) or len(item) != 3 or not all(type(number) is int for number in item):
            raise InvalidInput(f"{vllm.SCHEDULE} must have items [from, to, length], but has {item!r}.")
        if not 1 <= item[0] <= item[1] or item[2] < 0:
            raise InvalidInput(f"{vllm.SCHEDULE} needs 1 <= from <= to and a length of at least 0: {item!r}.")
    ranges = sorted((begin, end, length) for begin, end, length in schedule)
    if ranges[0][0] != 1:
        raise InvalidInput(f"{vllm.SCHEDULE} must begin at batch size 1, but begins at {ranges[0][0]}.")
    for (*_, end, _), (begin, _, _) in pairwise(ranges):
        if begin <= end:
            raise InvalidInput(f"{vllm.SCHEDULE} must not overlap, but two ranges have batch size {begin}.")
    return ranges


def vllm_config(files: Mapping[str, str]) -> dict[str, Any] | None:
    """The speculative config of the file and of the command, which must agree; None without one."""
    texts = [text for text in (files.get(vllm.FILE), flags(files).get("--speculative-config")) if text]
    try:
        configs = [json.loads(text) for text in texts]
    except json.JSONDecodeError as error:
        raise InvalidInput(f"A speculative config must be JSON: {error}.") from None
    if not all(isinstance(config, dict) and config == configs[0] for config in configs):
        raise InvalidInput(f"{vllm.FILE} and the command must have the same JSON object, but differ.")
    return configs[0] if configs else None


def read_lmdeploy(files: Mapping[str, str]) -> Lengths:
    """The length; none for another backend than PyTorch's, which silently does not speculate."""
    given = flags(files)
    algorithm = given.get("--speculative-algorithm")
    if algorithm is None or given.get("--backend") != "pytorch":
        return NO_CHAIN
    if algorithm not in ALGORITHMS:
        raise InvalidInput(f"--speculative-algorithm must be one of {', '.join(ALGORITHMS)}, but got {algorithm!r}.")
    name = "--speculative-num-draft-tokens"
    return ((1, None, whole(given.get(name, "1"), name)),)


def read_llama_cpp(files: Mapping[str, str]) -> Lengths:
    """The longest chain; InvalidInput where llama.cpp ends with an error, none where nothing is drafted."""
    given = flags(files)
    if gone := sorted(REMOVED & given.keys()):
        raise InvalidInput(
            f"llama.cpp has no {', '.join(gone)} any more: use --spec-type, and "
            "--spec-draft-n-max or --spec-ngram-simple-size-m."
        )
    kind = given.get("--spec-type")
    if kind is None:
        return NO_CHAIN
    if kind not in TYPES:
        raise InvalidInput(f"--spec-type must be one of {', '.join(TYPES)}, but got {kind!r}.")
    if kind == "ngram-simple":
        name = "--spec-ngram-simple-size-m"
        length = whole(given.get(name, "48"), name)
        looked_up = whole(given.get("--spec-ngram-simple-size-n", "12"), "--spec-ngram-simple-size-n")
        return ((1, None, length if length >= looked_up else 0),)
    if kind != "draft-mtp" and "--spec-draft-model" not in given:
        return NO_CHAIN  # a line in the log, and the server goes on
    name = "--spec-draft-n-max"
    # The limit is looked at after a token was drafted, so 0 drafts one as well.
    return ((1, None, max(1, whole(given.get(name, "3"), name))),)


def read_redrafter(files: Mapping[str, str]) -> Lengths:
    """The beam's length without the target's own token; InvalidInput for several beams, which make a tree."""
    given = flags(files)
    if given.get("--autoregression") == "True":
        return NO_CHAIN
    if given.get("--beam_width") != "1":
        raise InvalidInput(f"A chain needs --beam_width 1, but got {given.get('--beam_width', '10, the default')}.")
    rows = whole(given.get("--beam_length", ""), "--beam_length")
    if rows < 2:
        raise InvalidInput(f"--beam_length must be more than 1, but is {rows}.")
    return ((1, None, rows - 1),)


def read_rtp_llm(files: Mapping[str, str]) -> Lengths:
    """The length; InvalidInput where RTP-LLM ends with an error."""
    given = flags(files)
    kind = given.get("--sp_type")
    if kind is None:
        return NO_CHAIN
    if kind not in ("mtp", "eagle", "dspark"):
        raise InvalidInput(f"RTP-LLM speculates with --sp_type mtp, eagle or dspark, but got {kind!r}.")
    for name in ("--sp_model_type", "--sp_checkpoint_path"):
        if not given.get(name):
            raise InvalidInput(f"--sp_type {kind} needs {name}.")
    return ((1, None, whole(given.get("--gen_num_per_cycle", "1"), "--gen_num_per_cycle")),)


def read_mlc(files: Mapping[str, str]) -> Lengths:
    """The chain length; InvalidInput where MLC-LLM would choose one, make a tree, or not fit one sequence."""
    given = flags(files)
    mode = given.get("--speculative-mode", "disable")
    if mode == "disable":
        return NO_CHAIN
    settings = dict(part.partition("=")[::2] for part in given.get("--overrides", "").split(";"))
    length, width, most = (
        whole(settings.get(key, default), key)
        for key, default in (("spec_draft_length", "0"), ("spec_tree_width", "1"), ("max_num_sequence", "4"))
    )
    if length == 0:
        raise InvalidInput("MLC-LLM chooses the length at run time, or fails, unless spec_draft_length is above 0.")
    if mode == "small_draft":
        if width != 1:
            raise InvalidInput(f"A chain needs spec_tree_width=1, but got {width}.")
        if most < 1 + length:
            raise InvalidInput(f"MLC-LLM needs max_num_sequence of at least {1 + length}, but has {most}.")
    return ((1, None, length),)


def read_mlx(files: Mapping[str, str]) -> Lengths:
    """The chain length as its server reads it."""
    given = flags(files)
    if "--draft-model" not in given:
        return NO_CHAIN
    return ((1, None, whole(given.get("--num-draft-tokens", "3"), "--num-draft-tokens")),)


def read_exllama(files: Mapping[str, str]) -> Lengths:
    """The chain length as the loader and the generator read it; InvalidInput where they would choose one."""
    given = flags(files)
    if not any(flag.split()[0] in given for flag in exllamav3.FLAGS.values()):
        return NO_CHAIN
    length = whole(given.get("--num_draft_tokens", "0"), "--num_draft_tokens")
    if length == 0:
        raise InvalidInput("Without --num_draft_tokens ExLlamaV3 takes the drafter's own number: name the length.")
    if "--dynamic_draft" in given:
        raise InvalidInput("With --dynamic_draft ExLlamaV3 ends a chain where its drafter is unsure.")
    return ((1, None, length),)


def read_transformers(files: Mapping[str, str]) -> Lengths:
    """The chain length as ``generate`` picks its drafter: early exit, prompt lookup, then an assistant.

    Raises InvalidInput for a chain that would end early or change its length, and for what transformers refuses.
    """
    calls, settings = program_calls(files), program_settings(files)
    given = calls.get("model.generate", frozenset())
    own = settings if "model.generation_config" in calls else {}
    assistants = settings if "assistant.generation_config" in calls else {}
    if "assistant_early_exit" in own:
        raise InvalidInput("With assistant_early_exit in the model's file an exit drafts with exits of its own.")
    if "assistant_early_exit" not in given and own.get(LOOKUP) is not None:
        return ((1, None, program_whole(own, LOOKUP)),)
    if not given & {"assistant_early_exit", "assistant_model"}:
        return NO_CHAIN
    drafts = own if "assistant_early_exit" in given else assistants
    if drafts.get("num_assistant_tokens_schedule", "constant") != "constant":
        raise InvalidInput("Only the schedule constant keeps the length of a chain.")
    if drafts.get(UNSURE, 0.4) != 0:
        raise InvalidInput(f"A chain stops where its drafter is unsure unless {UNSURE} is 0.")
    return ((1, None, program_whole({LENGTH: 20, **drafts}, LENGTH)),)


def read_openvino(files: Mapping[str, str]) -> Lengths:
    """The chain length as the pipeline takes it.

    Raises InvalidInput for what its config's check refuses, and where it would choose a length of its own.
    """
    calls, settings = program_calls(files), program_settings(files)
    given = calls.get("openvino_genai.LLMPipeline", frozenset())
    read = settings if "openvino_genai.GenerationConfig" in calls else {}
    if not given & {"draft_model", "prompt_lookup"}:
        return NO_CHAIN
    length = program_whole(read, LENGTH)
    if read.get(UNSURE, 0):
        raise InvalidInput(f"OpenVINO GenAI takes {LENGTH} or {UNSURE}, not both.")
    if ("prompt_lookup" in given) != (read.get("max_ngram_size", 0) > 0):
        raise InvalidInput("max_ngram_size must be above 0 for prompt lookup, and 0 without it.")
    return ((1, None, length),)


def read_openvino_tree(files: Mapping[str, str]) -> Settings:
    """The dynamic tree as the pipeline takes it; InvalidInput for what its config's check refuses."""
    ((_, _, nodes),) = read_openvino(files)
    settings = program_settings(files)
    if not nodes:
        return NO_TREE
    if not settings.get(LEVELS):
        return ((1, None, DynamicTree(nodes, 1, nodes + 1)),)
    levels, topk = program_whole(settings, LEVELS), program_whole({TOPK: 1, **settings}, TOPK)
    if nodes < levels:
        raise InvalidInput(f"{LENGTH} must be at least {LEVELS}, {levels}, but is {nodes}.")
    if settings.get("do_sample") or settings.get("num_beams", 1) != 1:
        raise InvalidInput("OpenVINO GenAI builds trees for greedy decoding only: do_sample false, num_beams 1.")
    return ((1, None, DynamicTree(levels, topk, nodes + 1)),)


def program_whole(settings: Mapping[str, Any], key: str) -> int:
    length = settings.get(key)
    if type(length) is not int or length < 1:
        raise InvalidInput(f"{key} must be a whole number of at least 1, but is {length!r}.")
    return length


def program_settings(files: Mapping[str, str]) -> dict[str, Any]:
    try:
        settings = json.loads(files.get("generation_config.json", "{}"))
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{'generation_config.json'} must be JSON: {error}.") from None
    if not isinstance(settings, dict):
        raise InvalidInput(f"{'generation_config.json'} must have a JSON object.")
    return settings


def program_calls(files: Mapping[str, str]) -> dict[str, frozenset[str | None]]:
    """What generate.py calls, or assigns the result of a call to, by its text, and the keywords of the call."""
    try:
        nodes = list(ast.walk(ast.parse(files.get(programs.SCRIPT, ""))))
    except (SyntaxError, ValueError) as error:
        raise InvalidInput(f"{programs.SCRIPT} must be Python: {error}.") from None
    calls = [(n.func, n) for n in nodes if isinstance(n, ast.Call)]
    calls += [
        (to, n.value) for n in nodes if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call) for to in n.targets
    ]
    return {ast.unparse(name): frozenset(k.arg for k in call.keywords) for name, call in calls}


def read_tensorrt_dynamic(files: Mapping[str, str]) -> Settings:
    """The dynamic tree as TensorRT-LLM's config checks it; InvalidInput where it raises."""
    try:
        options = parse_yaml(files.get(tensorrt_llm.FILE, "{}"))
    except ValueError as error:
        raise InvalidInput(f"{tensorrt_llm.FILE} must be YAML: {error}") from None
    if not isinstance(options, dict) or not isinstance(config := options.get("speculative_config", {}), dict):
        raise InvalidInput(f"{tensorrt_llm.FILE} must have options by name.")
    if not config:
        return NO_TREE
    needed = (True, bool(config.get("use_dynamic_tree")), False)
    for name, must in zip(DYNAMIC, needed, strict=True):
        value = config.get(name)
        if (must or value is not None) and (type(value) is not int or value < 1):
            raise InvalidInput(f"{name} must be a whole number of at least 1, but is {quoted(value)}.")
    levels, topk, nodes = config[DYNAMIC[0]], config.get(DYNAMIC[1]), config.get(DYNAMIC[2])
    if topk is None:
        return ((1, None, DynamicTree(levels, 1, levels + 1)),)
    nodes = nodes or topk * levels
    if not levels <= nodes <= topk * levels:
        raise InvalidInput(
            f"max_total_draft_tokens must be from max_draft_len, {levels}, to dynamic_tree_max_topK x max_draft_len, "
            f"{topk * levels}, but is {nodes}."
        )
    return ((1, None, DynamicTree(levels, topk, nodes + 1)),)


def read_tensorrt_llm(files: Mapping[str, str]) -> Lengths:
    """The chain lengths as TensorRT-LLM looks them up; InvalidInput for what it refuses."""
    text = files.get(tensorrt_llm.FILE, "")
    most = re.search(r"^ +max_draft_len: *(\d+) *$", text, re.M)
    written = re.search(r"^ +draft_len_schedule: *(\{.*\}) *$", text, re.M)
    if most is None:
        return NO_CHAIN
    if written is None:
        return ((1, None, int(most[1])),)
    meaning = (
        tensorrt_llm.LOWER if f"# draft_len_schedule: {tensorrt_llm.LOWER}" in text.splitlines() else tensorrt_llm.UPPER
    )
    try:
        keyed = json.loads(re.sub(r"(\d+) *:", r'"\1":', written[1]))
    except json.JSONDecodeError as error:
        raise InvalidInput(f"draft_len_schedule must map batch sizes to lengths: {error}.") from None
    schedule = {int(key): length for key, length in keyed.items()}
    check_schedule(schedule, int(most[1]), meaning)
    look_up = up_to if meaning == tensorrt_llm.UPPER else length_at
    return ranges_of(lambda batch_size: look_up(schedule, batch_size))


def check_schedule(schedule: Mapping[int, int], most: int, meaning: str) -> None:
    """Raise InvalidInput where TensorRT-LLM's own validation raises."""
    if not schedule or min(schedule) < 1 or min(schedule.values()) < 0:
        raise InvalidInput(f"draft_len_schedule needs keys from 1 and lengths from 0 on, but is {schedule}.")
    if meaning == tensorrt_llm.LOWER and 1 not in schedule:
        raise InvalidInput(f"draft_len_schedule must have batch size 1 in this release, but is {schedule}.")
    if schedule[min(schedule)] != most:
        raise InvalidInput(
            f"The smallest key of draft_len_schedule must have max_draft_len, {most}, but has "
            f"{schedule[min(schedule)]}."
        )
    if max(schedule.values()) > most:
        raise InvalidInput(f"draft_len_schedule must not exceed max_draft_len, {most}, but is {schedule}.")


def up_to(schedule: Mapping[int, int], batch_size: int) -> int:
    """The newer look-up: the first key not below the batch size; 0 above the last.

    >>> [up_to({4: 4, 8: 2, 32: 1}, batch_size) for batch_size in (1, 4, 5, 32, 33)]
    [4, 4, 2, 1, 0]
    """
    return schedule[min(key for key in schedule if key >= batch_size)] if batch_size <= max(schedule) else 0


def read_onnx(files):
    """The chain length of ONNX Runtime GenAI's fixed width; InvalidInput where its own check raises, or it adapts."""
    given = program_calls(files).get("params.set_speculative_options")
    options = json.loads(files["options.json"])["speculative"]
    if given is None or not options:
        return NO_CHAIN
    if options.get("min_adaptive_k", 0):
        raise InvalidInput("With min_adaptive_k the length follows the engine's timings.")
    if options.get("ngram_size", 0) not in (0, *range(2, 17)):
        raise InvalidInput("ngram_size must be 0 or from 2 to 16.")
    length = program_whole({"max_draft_tokens": 4, **options}, "max_draft_tokens")
    if length > 16:
        raise InvalidInput("max_draft_tokens must be from 1 to 16.")
    return ((1, None, length),)


# What each is told: by engine and drafter, options of a chain of three guesses, in the command or in a file

DRAFT = "--speculative-draft-model-path DRAFTER"
STEPS = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
LLAMA = "--spec-draft-n-max 3 --spec-draft-n-min 0 --spec-draft-p-min 0"
RTP = "--sp_model_type DRAFTER_TYPE --sp_checkpoint_path DRAFTER --gen_num_per_cycle 3"
NUMBER = "--speculative-num-draft-tokens 3"
VLLM = {"model": "DRAFTER", "num_speculative_tokens": 3}
TRT = {"max_draft_len": 3}
ASSISTED = {"do_sample": False, "num_assistant_tokens": 3}
FIXED = {"max_draft_tokens": 3, "min_adaptive_k": 0, "cooldown": False}
TOLD = {
    ("exllamav3", "draft-model"): "--draft_model_dir DRAFTER --num_draft_tokens 3",
    ("exllamav3", "mtp"): "--mtp --num_draft_tokens 3",
    ("exllamav3", "ngram"): "--ngram_match_min 1 --num_draft_tokens 3",
    ("llama-cpp", "draft-model"): f"--spec-type draft-simple --spec-draft-model DRAFTER.gguf {LLAMA}",
    ("llama-cpp", "eagle3"): f"--spec-type draft-eagle3 --spec-draft-model DRAFTER.gguf {LLAMA}",
    ("llama-cpp", "mtp"): f"--spec-type draft-mtp {LLAMA}",  # its own layers
    ("llama-cpp", "dflash"): f"--spec-type draft-dflash --spec-draft-model DRAFTER.gguf {LLAMA}",
    ("llama-cpp", "dspark"): f"--spec-type draft-dspark --spec-draft-model DRAFTER.gguf {LLAMA}",
    ("llama-cpp", "ngram"): "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 3",
    ("lmdeploy", "eagle3"): f"--speculative-algorithm eagle3 --speculative-draft-model DRAFTER {NUMBER}",
    ("lmdeploy", "mtp"): f"--backend pytorch --speculative-algorithm deepseek_mtp {NUMBER}",
    ("lmdeploy", "dflash"): f"--speculative-algorithm dflash --speculative-draft-model DRAFTER {NUMBER}",
    ("mlc-llm", "draft-model"): "small_draft --overrides 'spec_draft_length=3;max_num_sequence=4'",
    ("mlc-llm", "eagle"): "--speculative-mode eagle --overrides spec_draft_length=3",
    ("mlx-lm", "draft-model"): "--draft-model DRAFTER --num-draft-tokens 3",
    ("onnx-genai", "draft-model"): {"search": {"do_sample": False}, "speculative": FIXED},
    ("onnx-genai", "ngram"): {
        "search": {"do_sample": False},
        "speculative": {**FIXED, "ngram_size": 4, "ngram_chained_lookup": False},
    },
    ("openvino", "draft-model"): ASSISTED,
    ("openvino", "ngram"): {**ASSISTED, "max_ngram_size": 3},
    ("redrafter", "redrafter"): "--greedy_search=True --beam_width=1 --beam_length=4",
    ("rtp-llm", "mtp"): f"--sp_type mtp {RTP}",
    ("rtp-llm", "eagle3"): f"--sp_type eagle {RTP}",
    ("rtp-llm", "dspark"): f"--sp_type dspark {RTP}",
    ("sglang", "eagle3"): f"--speculative-algorithm EAGLE3 {DRAFT} {STEPS}",
    ("sglang", "mtp"): f"--speculative-algorithm NEXTN {STEPS}",
    ("sglang", "draft-model"): f"--speculative-algorithm STANDALONE {DRAFT} {STEPS}",
    ("sglang", "ngram"): "NGRAM --speculative-num-draft-tokens 4 --speculative-ngram-max-bfs-breadth 1",
    ("sglang", "dflash"): f"DFLASH {DRAFT} --speculative-num-draft-tokens 4",  # the root too
    ("sglang", "dspark"): f"DSPARK {DRAFT} --speculative-dspark-block-size 3",
    ("tensorrt-llm", "eagle3"): {"decoding_type": "Eagle3", **TRT, "speculative_model": "DRAFTER"},
    ("tensorrt-llm", "mtp"): {"decoding_type": "MTP", **TRT},
    ("tensorrt-llm", "draft-model"): {"decoding_type": "Draft_Target", **TRT, "speculative_model": "DRAFTER"},
    ("tensorrt-llm", "ngram"): {"decoding_type": "NGram", **TRT, "max_matching_ngram_size": 3},
    ("tgi", "medusa"): "text-generation-launcher --model-id HEADS --speculate 3",
    ("tgi", "ngram"): "text-generation-launcher --model-id BASE --speculate 3",
    ("transformers", "draft-model"): {
        **ASSISTED,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    },
    ("transformers", "ngram"): {"do_sample": False, "prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 3},
    ("vllm", "eagle3"): {"method": "eagle3", **VLLM},
    ("vllm", "dspark"): {"method": "dspark", **VLLM},
    ("vllm", "draft-model"): {"method": "draft_model", **VLLM},
    ("vllm", "mtp"): {"method": "mtp", "num_speculative_tokens": 3},
    ("vllm", "ngram"): {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1, "num_speculative_tokens": 3},
    ("vllm", "suffix"): {"method": "suffix", "num_speculative_tokens": 3},
    ("vllm", "medusa"): {"method": "medusa", **VLLM, "model": "HEADS"},
}

READERS: dict[tuple[str, str], Callable[[Mapping[str, str]], Tree | Lengths | Settings]] = {
    ("medusa", "choices"): read_medusa,
    ("hydra", "choices"): read_hydra,
    ("eagle1", "choices"): read_eagle1,
    ("eagle2", "dynamic-tree"): read_eagle2,
    ("neuron-medusa", "medusa-tree"): read_neuron_medusa,
    ("neuron-token-tree", "token-tree"): read_neuron_tree,
    ("tensorrt-llm", "medusa"): read_tensorrt_trees,
    ("tensorrt-llm", "draft-len"): read_tensorrt_llm,
    ("tensorrt-llm", "dynamic-tree"): read_tensorrt_dynamic,
    ("tensorrt-llm", "eagle"): read_tensorrt_trees,
    ("triton", "medusa"): read_triton,
    ("modelopt", "specbench-medusa"): read_modelopt,
    ("tgi", "speculate"): read_tgi,
    **dict.fromkeys((("vllm", name) for name in ("batch-size", "suffix", "medusa")), read_vllm),
    **dict.fromkeys((("sglang", name) for name in ("adaptive", "steps", "dflash", "dspark")), read_sglang),
    ("sglang", "dynamic-tree"): read_sglang_tree,
    ("fastrl", "dynamic-tree"): read_fastrl,
    ("lmdeploy", "number"): read_lmdeploy,
    ("llama-cpp", "number"): read_llama_cpp,
    ("redrafter", "beam"): read_redrafter,
    **dict.fromkeys((("rtp-llm", name) for name in ("number", "block")), read_rtp_llm),
    **dict.fromkeys((("transformers", name) for name in ("assistant", "prompt-lookup")), read_transformers),
    **dict.fromkeys((("openvino", name) for name in ("draft-model", "prompt-lookup")), read_openvino),
    ("openvino", "dynamic-tree"): read_openvino_tree,
    ("mlc-llm", "draft-length"): read_mlc,
    ("mlx-lm", "number"): read_mlx,
    ("exllamav3", "generator"): read_exllama,
    **dict.fromkeys((("onnx-genai", name) for name in ("draft-model", "ngram")), read_onnx),
}


def check_read_back(request, engine, method, files):
    """Fail where the engine's reader makes something else of the files than was asked."""
    read = READERS[engine, method](files)
    if isinstance(read, Tree):
        assert read == (request.tree or Tree.chain(0))
        return
    if request.tree is not None:
        request = replace(request, lengths=((1, None, request.tree.depth),), tree=None)
    is_chain = all(isinstance(what, int) for *_, what in read)
    assert merged(read) == merged(request.lengths if is_chain else request.dynamics)
