"""Dynamic trees for each engine: its names and off-by-ones by hand, its checks, and what is read back."""

import json
import random
import re

import pytest
import yaml

from treeopt.errors import InvalidInput, TreeoptError
from treeopt.export import assisted, draft_len, eagle2, fastrl, sglang
from treeopt.export.chains import flags
from treeopt.export.engine import COMMANDS, Request
from treeopt.export.table import ENGINES
from treeopt.export.write import export_request, method_of
from treeopt.trees.dynamic import MOST_LEVELS, MOST_ROWS, MOST_TOPK, DynamicTree, pool_size
from treeopt.trees.tree import Tree

WAYS = [(name, way, kind) for name, e in ENGINES.items() for way in e.methods if way.dynamic for kind in way.drafters]
named = pytest.mark.parametrize(("engine", "way", "drafter"), WAYS, ids=[f"{e}-{kind}" for e, _, kind in WAYS])
SAMPLED = {"rule": "sample-then-match", "temperature": 0.7, "top_p": None, "top_k": None, "seed": 0}


def written(engine, tree=None, drafter="eagle3", **others):
    request = Request(dynamic=tree, num_heads=8, drafter=drafter, **others)
    return export_request(request, engine, method="dynamic-tree")


def numbers_of(engine, files) -> tuple[int, int, int]:
    """Levels, topk and rows by each engine's own counting, as its documentation tells it."""
    if engine == "openvino":
        config = json.loads(files["generation_config.json"])
        nodes = config["num_assistant_tokens"]
        return config.get("tree_depth", nodes), config.get("branching_factor", 1), nodes + 1
    if engine == "tensorrt-llm":
        config = yaml.safe_load(files["llm_api_options.yml"])["speculative_config"]
        levels = config["max_draft_len"]
        return levels, config.get("dynamic_tree_max_topK", 1), config.get("max_total_draft_tokens", levels) + 1
    given = flags(files)
    if engine == "eagle2":
        return int(given["--depth"]) + 1, int(given["--top-k"]), int(given["--total-token"])
    names = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")
    return tuple(int(given[name]) for name in names)


def takes(engine, tree) -> bool:
    """Whether the engine takes these numbers, by the rules of each."""
    nodes = tree.rows - 1
    if tree.topk == 1 and engine != "eagle2":
        return nodes == tree.levels  # they all make a chain of it
    if engine == "tensorrt-llm":
        return tree.levels <= nodes <= tree.topk * tree.levels
    return nodes >= tree.levels if engine == "openvino" else nodes <= pool_size(tree.levels, tree.topk)


@named
def test_random_settings_come_back_or_are_refused(engine, way, drafter):
    rng, taken, refused = random.Random(engine), 0, 0
    for _ in range(120):
        levels, topk = rng.randint(1, MOST_LEVELS), rng.randint(1, MOST_TOPK)
        tree = DynamicTree(levels, topk, rng.randint(2, min(MOST_ROWS, pool_size(levels, topk) + 1)))
        if not takes(engine, tree):
            refused += 1
            with pytest.raises(InvalidInput):
                written(engine, tree, drafter)
            continue
        taken += 1
        files = written(engine, tree, drafter).files
        assert way.parse(files) == ((1, None, tree),)
        assert numbers_of(engine, files) == (tree.levels, tree.topk, tree.rows)
    assert taken > 10
    assert refused or engine == "eagle2"


def test_every_engine_counts_in_its_own_way():
    """The same tree: 5 levels, 4 nodes expanded on each, 15 nodes and the root verified."""
    tree = DynamicTree(5, 4, 16)
    three = "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
    assert written("sglang", tree).command == (
        "python -m sglang.launch_server --model-path MODEL --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path DRAFTER {three}"
    )
    assert written("fastrl", tree, "eagle").command.endswith(f"EAGLE --speculative-draft-model-path DRAFTER {three}")
    assert "--speculative-algorithm NEXTN --speculative-num-steps 5" in written("sglang", tree, "mtp").command
    assert written("eagle2", tree).command == (
        "python -m eagle.evaluation.gen_ea_answer_llama3chat --base-model-path MODEL --ea-model-path DRAFTER --use_eagle3 "
        "--total-token 16 --depth 4 --top-k 4 --temperature 0"
    )
    assert "--use_eagle3" not in written("eagle2", tree, "eagle").command
    assert yaml.safe_load(written("tensorrt-llm", tree).files["llm_api_options.yml"])["speculative_config"] == {
        "decoding_type": "Eagle3",
        "max_draft_len": 5,
        "max_total_draft_tokens": 15,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 4,
        "speculative_model": "DRAFTER",
    }
    files = written("openvino", tree).files
    assert json.loads(files["generation_config.json"]) == {
        "do_sample": False,
        "num_assistant_tokens": 15,
        "tree_depth": 5,
        "branching_factor": 4,
    }
    assert "{'KV_CACHE_PRECISION': 'f32'}" in files["generate.py"].replace('"', "'")
    assert files["generate.py"].count("**exact") == 2


def test_the_examples_of_the_engines_documents():
    """EAGLE's default 60/7/10, TensorRT-LLM's 6/10/60, OpenVINO's 15/8/4 (tokens, depth, branching) and SGLang's 5/4/8."""
    eagle = {COMMANDS: "python x --total-token 60 --depth 7 --top-k 10"}
    assert eagle2.parse(eagle) == ((1, None, DynamicTree(8, 10, 60)),)
    config = "max_draft_len: 6, use_dynamic_tree: true, dynamic_tree_max_topK: 10, max_total_draft_tokens: 60"
    with pytest.raises(InvalidInput, match="60, but is 61"):
        draft_len.parse_tree({draft_len.FILE: f"speculative_config: {{{config[:-2]}61}}"})
    assert draft_len.parse_tree({draft_len.FILE: f"speculative_config: {{{config}}}"}) == (
        (1, None, DynamicTree(6, 10, 61)),
    )
    openvino = written("openvino", DynamicTree(8, 4, 16)).files
    assert '"num_assistant_tokens": 15, "tree_depth": 8, "branching_factor": 4' in openvino["generation_config.json"]
    words = "--speculative-algorithm EAGLE --speculative-num-steps 5 --speculative-eagle-topk 4"
    assert sglang.parse_tree({COMMANDS: f"x {words} --speculative-num-draft-tokens 8"}) == (
        (1, None, DynamicTree(5, 4, 8)),
    )


@named
def test_where_no_tree_pays_the_model_is_served_alone(engine, way, drafter):
    found = written(engine, None, drafter)
    assert way.parse(found.files) == ((1, None, None),)
    assert any("pays here: the command serves the base model" in note for note in found.notes)
    assert not re.search("speculat|num_assistant|use_eagle3|total-token", found.command + str(found.files.get("x")))


@named
def test_a_chain_is_a_tree_of_topk_1_and_a_wider_one_is_refused(engine, way, drafter):
    request = Request(tree=Tree.chain(3), num_heads=8, drafter=drafter)
    assert way.parse(export_request(request, engine, method=way.name).files) == ((1, None, DynamicTree(3, 1, 4)),)
    with pytest.raises(InvalidInput, match="takes chains only"):
        export_request(Request(tree=Tree.dense([2, 1]), num_heads=8), engine, method=way.name)


def test_engines_of_fixed_trees_and_chains_take_no_dynamic_ones():
    for engine in ("vllm", "medusa", "llama-cpp"):
        with pytest.raises(InvalidInput, match="takes no dynamic trees"):
            export_request(Request(dynamic=DynamicTree(2, 2, 4), num_heads=4), engine)
    assert method_of("sglang", "eagle3").name == "adaptive"  # the usual one is as it was


@pytest.mark.parametrize("engine", ["sglang", "fastrl", "eagle2", "tensorrt-llm", "openvino"])
def test_nothing_lossy_is_written(engine):
    for rule in (None, SAMPLED):
        try:
            found = written(engine, DynamicTree(3, 4, 8), acceptance=rule)
        except InvalidInput:
            assert (engine, rule) == ("openvino", SAMPLED)
            continue
        said = "".join([found.command, *found.files.values()])
        assert not re.search("threshold|relaxed|typical", said)
        if rule and engine == "eagle2":
            assert found.command.endswith("--temperature 0.7")
        if rule and engine == "tensorrt-llm":
            assert "use_rejection_sampling: false" in said
    with pytest.raises(InvalidInput, match="top_p"):
        written("eagle2", DynamicTree(3, 4, 8), acceptance={**SAMPLED, "top_p": 0.9})


class TestSGLang:
    WORDS = "x --speculative-algorithm EAGLE3 --speculative-num-steps 2 --speculative-eagle-topk 2"

    def read(self, more, rows=5):
        return sglang.parse_tree({COMMANDS: f"{self.WORDS} --speculative-num-draft-tokens {rows} {more}"})

    def test_what_it_refuses_or_fails_on(self):
        assert self.read("", 7) == ((1, None, DynamicTree(2, 2, 7)),)
        with pytest.raises(InvalidInput, match="must be 2 to 7, but got 8"):  # torch.topk of 7 among 6
            self.read("", 8)
        for more in ("--attention-backend trtllm_mha", "--page-size 16", "--page-size 16 --attention-backend fa4"):
            with pytest.raises(InvalidInput, match="refuses --attention-backend trtllm_mha"):
                self.read(more)
        assert self.read("--page-size 16 --attention-backend fa3") == self.read("--page-size 1")
        for name in sglang.LOSSY:
            assert self.read(f"{name} 1.0") == self.read("")
            with pytest.raises(InvalidInput, match=f"{name} below 1 changes what is generated"):
                self.read(f"{name} 0.9")
        for wrong in ("$(x)", "-3", "1e9", ""):
            with pytest.raises(InvalidInput):
                self.read("", wrong)

    def test_topk_1_is_a_chain_whatever_rows_are_asked(self):
        files = {COMMANDS: self.WORDS.replace("topk 2", "topk 1") + " --speculative-num-draft-tokens 64"}
        assert sglang.parse_tree(files) == ((1, None, DynamicTree(2, 1, 3)),)

    def test_more_sequences_than_it_decodes_at_once_are_said(self):
        assert any(
            "--max-running-requests 64" in n for n in written("sglang", DynamicTree(2, 2, 4), batch_size=64).notes
        )


class TestTensorRT:
    def read(self, **config):
        return draft_len.parse_tree({draft_len.FILE: yaml.safe_dump({"speculative_config": config})})

    def test_its_bounds_are_tighter_than_the_pool(self):
        known = {"max_draft_len": 3, "dynamic_tree_max_topK": 2, "use_dynamic_tree": True}
        assert self.read(**known) == ((1, None, DynamicTree(3, 2, 7)),)  # topK x levels by default
        assert self.read(**known, max_total_draft_tokens=3) == ((1, None, DynamicTree(3, 2, 4)),)
        for nodes in (2, 7):  # the pool has 10
            with pytest.raises(InvalidInput, match=r"from max_draft_len, 3, to .*, 6, but is"):
                self.read(**known, max_total_draft_tokens=nodes)
        with pytest.raises(
            InvalidInput, match=r"tensorrt-llm takes up to 8 levels, and 7 rows of 3 levels with topk 2"
        ):
            written("tensorrt-llm", DynamicTree(3, 2, 8))

    @pytest.mark.parametrize("config", [
        {"max_draft_len": 0}, {"max_draft_len": None}, {"max_draft_len": True}, {"max_draft_len": "$(x)"},
        {"max_draft_len": 3, "use_dynamic_tree": True}, {"max_draft_len": 3, "dynamic_tree_max_topK": -1},
        {"max_draft_len": 3, "dynamic_tree_max_topK": 2, "max_total_draft_tokens": "4"}, {"max_draft_len": 10**18},
    ], ids=str)  # fmt: skip
    def test_what_its_config_refuses(self, config):
        with pytest.raises(InvalidInput):
            self.read(**config)

    @pytest.mark.parametrize("text", ["[", "- 1", "a: &x [*x]", "speculative_config: 3", "x"])
    def test_a_file_that_is_none_is_refused(self, text):
        with pytest.raises(InvalidInput):
            draft_len.parse_tree({draft_len.FILE: text})


class TestOpenVINO:
    def read(self, **settings):
        files = dict(written("openvino", DynamicTree(3, 4, 8)).files)
        return assisted.parse_openvino_tree({**files, assisted.FILE: json.dumps(settings)})

    def test_what_its_check_refuses(self):
        assert self.read(num_assistant_tokens=3, tree_depth=3, branching_factor=2) == ((1, None, DynamicTree(3, 2, 4)),)
        assert self.read(num_assistant_tokens=3, tree_depth=0) == ((1, None, DynamicTree(3, 1, 4)),)
        for wrong in (
            {"num_assistant_tokens": 2, "tree_depth": 3, "branching_factor": 2},
            {"num_assistant_tokens": 5, "tree_depth": 3, "branching_factor": 2, "do_sample": True},
            {"num_assistant_tokens": 5, "tree_depth": 3, "branching_factor": 2, "num_beams": 4},
            {"num_assistant_tokens": 5, "tree_depth": 3, "branching_factor": 0},
            {"num_assistant_tokens": 30, "tree_depth": 2, "branching_factor": 2},  # verifies the pool of 6
            {"num_assistant_tokens": 5, "tree_depth": "$(x)"},
        ):
            with pytest.raises(InvalidInput):
                self.read(**wrong)

    def test_trees_are_for_one_request_and_greedy_decoding(self):
        found = written("openvino", DynamicTree(3, 4, 8), batch_size=4)
        assert any("decodes at most 1 sequence" in note for note in found.notes)
        with pytest.raises(InvalidInput, match="by the rule greedy"):
            written("openvino", DynamicTree(3, 4, 8), acceptance=SAMPLED)


class TestFastRL:
    TREES = (DynamicTree(5, 4, 16), DynamicTree(3, 2, 6), DynamicTree(2, 1, 3))

    def schedule(self, *settings, **others):
        return export_request(Request(settings=settings, num_heads=8, drafter="eagle3", **others), "fastrl")

    def test_a_setting_for_each_range_of_batch_sizes(self):
        a, b, c = self.TREES
        found = self.schedule((1, 4, a), (5, 8, b), (9, 32, c), (33, None, None))
        assert found.command.endswith(
            "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16 "
            "--speculative-eagle-mab-algorithm PREDEFINED --speculative-eagle-mab-configs 5_4_16,3_2_6,2_1_3 "
            "--speculative-mab-bs-threshold 1,5,9 --apdative-speculative-batch-size-threshold 32"
        )
        assert fastrl.parse(found.files) == ((1, 4, a), (5, 8, b), (9, 32, c), (33, None, None))

    def test_one_setting_up_to_a_batch_size(self):
        found = self.schedule((1, 4, self.TREES[0]), (5, None, None))
        assert fastrl.CONFIGS not in found.command
        assert found.command.endswith("--speculative-num-draft-tokens 16 --apdative-speculative-batch-size-threshold 4")

    def test_schedules_that_its_map_would_turn_around_are_refused(self):
        a, b, _ = self.TREES
        for before, after in ((b, a), (DynamicTree(4, 2, 6), b)):
            with pytest.raises(InvalidInput, match="most rows to the smallest batch sizes"):
                self.schedule((1, 4, before), (5, None, after))
        with pytest.raises(InvalidInput, match="stops speculating above one batch size"):
            self.schedule((1, 4, None), (5, None, a))
        with pytest.raises(InvalidInput, match=r"16 rows of 256 sequences are 4,096: search again with --budget 8"):
            self.schedule((1, 256, a), (257, None, b))
        with pytest.raises(InvalidInput, match="16 rows of 129 sequences"):
            self.schedule((1, None, a), batch_size=129)

    def test_its_own_reading(self):
        words = sglang.SERVE + sglang.drafter_flags("eagle3") + sglang.tree_flags(DynamicTree(5, 4, 16))

        def read(more):
            return fastrl.parse({COMMANDS: f"{words} {more}"})

        predefined = f"{fastrl.ALGORITHM} PREDEFINED {fastrl.CONFIGS}"
        turned = read(f"{predefined} 3_2_6,5_4_16 {fastrl.THRESHOLD} 1,9")  # by rows, whatever the order
        assert turned == ((1, 8, self.TREES[0]), (9, None, self.TREES[1]))
        assert read(f"{predefined} 3_2_6 {fastrl.THRESHOLD} 1,9") == turned  # the three flags are one of them
        for wrong in (
            f"{predefined} 3_2_6 {fastrl.THRESHOLD} 1,5,9",
            f"{predefined} 3_2_6 {fastrl.THRESHOLD} 2,9",
            f"{predefined} 3_2_6 {fastrl.THRESHOLD} 1,1",
            f"{predefined} 3_2_6",  # four thresholds by default
            f"{predefined} 3_2 {fastrl.THRESHOLD} 1,9",
            f"{predefined} 3_2_x {fastrl.THRESHOLD} 1,9",
            f"{fastrl.ALGORITHM} BEG {fastrl.CONFIGS} 3_2_6 {fastrl.THRESHOLD} 1,9",
        ):
            with pytest.raises(InvalidInput):
                read(wrong)


@named
def test_other_drafters_are_refused(engine, way, drafter):
    with pytest.raises(TreeoptError, match="draft-model"):
        written(engine, DynamicTree(2, 2, 4), "draft-model")
