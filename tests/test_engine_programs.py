"""Programs that are written for libraries, run by the engine itself or by a stand-in."""

import json
import runpy
import shutil
import sys
from unittest.mock import MagicMock

import pytest
import torch

from tests.helpers.engine_rows import export
from treeopt import demo
from treeopt.engines.registry import ENGINES
from treeopt.engines.templates import SCRIPT
from treeopt.runtime.engines.openvino import EXACT
from treeopt.trees.draft import DynamicTree
from treeopt.trees.tree import Tree

FILE = "generation_config.json"
NAMES = ("transformers", "openvino", "mlc-llm", "mlx-lm", "exllamav3")
FIXED = [(name, way) for name in NAMES for way in ENGINES[name].methods if way.limits.only_chains]
SAMPLED = {"rule": "sample-then-match", "temperature": 0.7, "top_p": 0.9, "top_k": None, "seed": 0}
REJECTED = {**SAMPLED, "rule": "rejection"}
RULES = {"sample": SAMPLED, "reject": REJECTED}

PROMPT = "def area(width, height):\n    return width *"


def with_settings(source, folder, settings):
    """A copy of a checkpoint whose own generation config has these settings."""
    shutil.copytree(source, folder)
    path = folder / FILE
    known = json.loads(path.read_text()) if path.exists() else {"eos_token_id": 0}
    path.write_text(json.dumps({**known, **settings}))
    return folder


def files_of(engine, drafter, length=3, **others):
    tree = others.pop("dynamic", None)
    return dict(export(engine, tree or Tree.chain(length), tree and "dynamic-tree", drafter=drafter, **others).files)


class TestTransformers:
    """Its generate.py on the demo model: the engine itself says whether the settings reached it."""

    @pytest.fixture
    def generate(self, tmp_path, monkeypatch, capsys):
        """The text, and how many tokens were guessed at each step."""
        from transformers.generation import candidate_generator

        guessed = []

        def spy(cls):
            made = cls.get_candidates

            def get_candidates(self, ids, **options):
                found = made(self, ids, **options)
                guessed.append(found[0].shape[1] - ids.shape[1])
                return found

            monkeypatch.setattr(cls, "get_candidates", get_candidates)

        def run(drafter, argument=None, length=3, *, model=demo.MODEL, prompt=PROMPT, **others):
            guessed.clear()
            spy(candidate_generator.AssistedCandidateGenerator)
            spy(candidate_generator.AssistedCandidateGeneratorDifferentTokenizers)
            spy(candidate_generator.PromptLookupCandidateGenerator)
            for name, text in files_of("transformers", drafter, length, **others).items():
                (tmp_path / name).write_text(text.replace("max_new_tokens=128", "max_new_tokens=24"))
            words = [model, *([argument] if argument else []), prompt]
            monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, words)])
            torch.manual_seed(0)
            runpy.run_path(str(tmp_path / SCRIPT))
            monkeypatch.undo()
            return capsys.readouterr().out, list(guessed)

        return run

    def test_text_and_length(self, generate):
        """Every drafter guesses chains of the plan's length, and the text is that of plain decoding."""
        plain, none = generate("ngram", length=0)
        assert not none
        for drafter, argument in (("draft-model", demo.DRAFTERS[demo.NAME]["draft"]), ("ngram", None)):
            text, guessed = generate(drafter, argument)
            assert text == plain
            assert max(guessed) == 3
            assert drafter == "ngram" or set(guessed[:4]) == {3}  # n-grams guess only where they find something

    @pytest.mark.parametrize(
        ("setting", "rule"), [({"repetition_penalty": 1.5}, None), ({"min_p": 1.0}, REJECTED), ("pad_token_id", None)]
    )
    @pytest.mark.long
    def test_checkpoint_settings(self, generate, tmp_path, setting, rule):
        """Settings and padding of the checkpoints change neither text nor length."""
        from transformers import AutoTokenizer

        if setting == "pad_token_id":
            setting = {setting: AutoTokenizer.from_pretrained(demo.MODEL)(PROMPT)["input_ids"][3]}
        draft = demo.DRAFTERS[demo.NAME]["draft"]
        model, drafter = (with_settings(of, tmp_path / of.name, setting) for of in (demo.MODEL, draft))
        expected = generate("draft-model", draft, acceptance=rule)
        assert generate("draft-model", drafter, model=model, acceptance=rule) == expected

    @pytest.mark.long
    def test_other_vocabulary(self, generate, tmp_path):
        """A draft model with another vocabulary guesses by text."""
        from transformers import AutoModelForCausalLM

        folder = shutil.copytree(demo.DRAFTERS[demo.NAME]["draft"], tmp_path / "draft")
        draft = AutoModelForCausalLM.from_pretrained(folder)
        draft.resize_token_embeddings(draft.config.vocab_size + 8)
        draft.save_pretrained(folder)
        text, guessed = generate("draft-model", folder)
        assert text == generate("ngram", length=0)[0]
        assert any(guessed)

    @pytest.mark.long
    def test_chat_template(self, generate, tmp_path):
        """A chat model gets its template."""
        template = "<{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}>{% if add_generation_prompt %}:{% endif %}"
        folder = with_settings(demo.MODEL, tmp_path / "model", {})
        (folder / "chat_template.jinja").write_text(template)
        chat = generate("ngram", model=folder)
        assert chat == generate("ngram", prompt=f"<user: {PROMPT}>:") != generate("ngram")

    def test_known_keys(self):
        """The library knows every key."""
        from transformers import GenerationConfig

        for drafter in ("draft-model", "ngram"):
            assert not GenerationConfig().update(**json.loads(files_of("transformers", drafter)[FILE]))


@pytest.fixture
def run_program(tmp_path, monkeypatch):
    """Runs an export's generate.py with a library that stands for the engine's."""

    def run(library, files, *words):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        monkeypatch.setitem(sys.modules, library._mock_name, library)
        monkeypatch.setattr(sys, "argv", [SCRIPT, *words])
        runpy.run_path(str(tmp_path / SCRIPT))

    return run


@pytest.mark.parametrize("length", [0, 3])
def test_openvino_settings(run_program, length):
    """OpenVINO gets the plan's settings alone."""
    files, library = files_of("openvino", "ngram", length), MagicMock(name="openvino_genai")
    run_program(library, files, "MODEL", PROMPT)
    library.GenerationConfig.assert_called_once_with(**json.loads(files[FILE]), max_new_tokens=128)
    library.LLMPipeline().generate.assert_called_once_with(PROMPT, library.GenerationConfig())


@pytest.mark.parametrize("tree", [None, DynamicTree(3, 2, 7)], ids=["chain", "tree"])
@pytest.mark.parametrize("runtime", [None, "treeopt", "openvino", "openvino-int8", "openvino-default"])
def test_openvino_precision(run_program, runtime, tree):
    """Caches in float32 alone end a pipeline that computes in bfloat16; trees need both."""
    given = {"runtime": {"name": runtime}, **({} if tree is None else {"dynamic": tree})}
    files, library = files_of("openvino", "eagle3", **given), MagicMock(name="openvino_genai")
    run_program(library, files, "MODEL", "DRAFTER", PROMPT)
    exact = tree is not None or runtime in ("openvino", "openvino-int8")
    forced = EXACT if exact else {}
    library.draft_model.assert_called_once_with("DRAFTER", "CPU", **forced)
    library.LLMPipeline.assert_called_once_with("MODEL", "CPU", draft_model=library.draft_model(), **forced)
    assert ("# All is computed in float32" if exact else "# The precision is the CPU's own") in files[SCRIPT]


@pytest.mark.parametrize(("drafter", "length"), [("ngram", 3), ("draft-model", 3), ("ngram", 0)])
def test_onnx_options(run_program, drafter, length):
    """ONNX Runtime GenAI gets the options before it generates."""
    files, library = files_of("onnx-genai", drafter, length), MagicMock(name="onnxruntime_genai")
    library.Tokenizer().encode.return_value = [1, 2, 3]
    library.Generator().is_done.side_effect = [False, True]
    run_program(library, files, "MODEL", PROMPT)
    options, params = json.loads(files["options.json"]), library.GeneratorParams()
    params.set_search_options.assert_called_once_with(max_length=131, **options["search"])
    params.set_speculative_options.assert_called_once_with(**options["speculative"])
    library.Generator().append_tokens.assert_called_once_with([1, 2, 3])
    assert options["speculative"].get("max_draft_tokens", 0) == length


@pytest.mark.parametrize("error", [None, ValueError("no template"), ImportError("no transformers")])
def test_exllama_template(run_program, capsys, error):
    """ExLlamaV3 gets the template of a chat model."""
    library, tokenizer = MagicMock(name="exllamav3"), MagicMock()
    library.model_init.init.return_value = (None, MagicMock(), None, tokenizer, None, None, None)
    library.model_init.add_args.side_effect = lambda parser, **_: [
        parser.add_argument(flag, **how)
        for flag, how in (("--num_draft_tokens", {}), ("--ngram_match_min", {}), ("--dynamic_draft", {}))
    ]
    tokenizer.hf_render_chat_template.side_effect = error or (lambda messages: f"<{messages[0]['content']}>")
    run_program(library, files_of("exllamav3", "draft-model"), "--prompt", PROMPT)
    (prompt, _), options = library.Generator().generate.call_args
    assert prompt == (PROMPT if error else f"<{PROMPT}>")
    assert (options["add_bos"], options["encode_special_tokens"]) == (bool(error), not error)
    assert not error or str(error) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine", "drafter", "rule"),
    [(name, kind, RULES[rule]) for name, way in FIXED for kind in way.drafters for rule in way.rules if rule in RULES],
)
def test_sampling_settings(engine, drafter, rule):
    """The settings of a plan for sampling have its temperature."""
    files = files_of(engine, drafter, acceptance=rule)
    if FILE in files:
        wanted = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0}
        assert wanted.items() <= json.loads(files[FILE]).items()
    if engine == "exllamav3":
        assert "--temperature 0.7 --top_p 0.9 --top_k 0 --temperature_first" in files["commands.sh"]


def test_sampling_without_temperature():
    """A rule without its temperature still samples."""
    files = files_of("transformers", "draft-model", acceptance={"rule": "rejection"})
    assert {"do_sample": True, "temperature": 1.0}.items() <= json.loads(files[FILE]).items()
