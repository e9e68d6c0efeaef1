"""transformers, OpenVINO GenAI, MLC-LLM, mlx-lm and ExLlamaV3: their files, read back by each engine's rules."""

import json
import runpy
import shutil
import subprocess
import sys
from unittest.mock import MagicMock

import pytest
import torch

from treeopt import demo
from treeopt.errors import InvalidInput
from treeopt.export import assisted, chains, local
from treeopt.export.engine import Request
from treeopt.export.table import ENGINES
from treeopt.export.write import export_request

NAMES = ("transformers", "openvino", "mlc-llm", "mlx-lm", "exllamav3")
FIXED = [(name, way) for name in NAMES for way in ENGINES[name].methods if not way.dynamic]
WAYS = [(name, way, drafter) for name, way in FIXED for drafter in way.drafters]
named = pytest.mark.parametrize(
    ("engine", "way", "drafter"), WAYS, ids=[f"{e}-{way.name}-{drafter}" for e, way, drafter in WAYS]
)
SAMPLED = {"rule": "sample-then-match", "temperature": 0.7, "top_p": 0.9, "top_k": None, "seed": 0}
REJECTED = {**SAMPLED, "rule": "rejection"}

PROMPT = "def area(width, height):\n    return width *"


def with_settings(source, folder, settings):
    """A copy of a checkpoint whose own generation config has these settings."""
    shutil.copytree(source, folder)
    path = folder / assisted.FILE
    known = json.loads(path.read_text()) if path.exists() else {"eos_token_id": 0}
    path.write_text(json.dumps({**known, **settings}))
    return folder


def files_of(engine, drafter, length=3, **others):
    request = Request(lengths=((1, None, length),), num_heads=5, drafter=drafter, **others)
    return dict(export_request(request, engine).files)


@named
@pytest.mark.parametrize("length", [0, 1, 4])
def test_what_is_written_is_read_back_and_its_programs_are_sound(engine, way, drafter, length, tmp_path):
    files = files_of(engine, drafter, length)
    assert way.parse(files) == ((1, None, length),)
    for name, text in files.items():
        if name.endswith(".py"):
            compile(text, name, "exec")
            (tmp_path / name).write_text(text)
            ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E4,E7,E9,F,I,B,S,UP", tmp_path]
            done = subprocess.run(ruff, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout
    assert (assisted.SCRIPT in files) == ("python generate.py" in files["commands.sh"])


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
            runpy.run_path(str(tmp_path / assisted.SCRIPT))
            monkeypatch.undo()
            return capsys.readouterr().out, list(guessed)

        return run

    def test_every_drafter_guesses_the_length_and_leaves_the_text(self, generate):
        plain, none = generate("ngram", length=0)
        assert not none
        for drafter, argument in (
            ("draft-model", demo.DRAFTERS[demo.NAME]["draft"]),
            ("early-exit", "2"),
            ("ngram", None),
        ):
            text, guessed = generate(drafter, argument)
            assert text == plain
            assert max(guessed) == 3
            assert drafter == "ngram" or set(guessed[:4]) == {3}  # n-grams guess only where they find something

    @pytest.mark.parametrize(
        ("setting", "rule"), [({"repetition_penalty": 1.5}, None), ({"min_p": 1.0}, REJECTED), ("pad_token_id", None)]
    )
    def test_settings_and_padding_of_the_checkpoints_change_nothing(self, generate, tmp_path, setting, rule):
        from transformers import AutoTokenizer

        if setting == "pad_token_id":
            setting = {setting: AutoTokenizer.from_pretrained(demo.MODEL)(PROMPT)["input_ids"][3]}
        folders = [with_settings(demo.MODEL, tmp_path / "model", setting)]
        folders.append(with_settings(demo.DRAFTERS[demo.NAME]["draft"], tmp_path / "draft", setting))
        for drafter, of, argument in (
            ("draft-model", demo.DRAFTERS[demo.NAME]["draft"], folders[1]),
            ("early-exit", "4", "4"),
        ):
            expected = generate(drafter, of, acceptance=rule)
            assert generate(drafter, argument, model=folders[0], acceptance=rule) == expected

    def test_a_draft_model_with_another_number_of_rows_guesses_text(self, generate, tmp_path):
        from transformers import AutoModelForCausalLM

        folder = shutil.copytree(demo.DRAFTERS[demo.NAME]["draft"], tmp_path / "draft")
        draft = AutoModelForCausalLM.from_pretrained(folder)
        draft.resize_token_embeddings(draft.config.vocab_size + 8)
        draft.save_pretrained(folder)
        text, guessed = generate("draft-model", folder)
        assert text == generate("ngram", length=0)[0]
        assert any(guessed)

    def test_a_chat_model_gets_its_template(self, generate, tmp_path):
        template = "<{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}>{% if add_generation_prompt %}:{% endif %}"
        folder = with_settings(demo.MODEL, tmp_path / "model", {})
        (folder / "chat_template.jinja").write_text(template)
        chat = generate("ngram", model=folder)
        assert chat == generate("ngram", prompt=f"<user: {PROMPT}>:") != generate("ngram")

    def test_the_library_knows_every_key(self):
        from transformers import GenerationConfig

        for drafter in ("draft-model", "ngram"):
            assert not GenerationConfig().update(**json.loads(files_of("transformers", drafter)[assisted.FILE]))

    def test_the_layer_of_the_plan_stands_in_the_command_and_no_other_text_does(self):
        for known, layer in (("early-exit:7", "7"), ("early-exit:07", "7"), ("early-exit", "LAYER"), (None, "LAYER")):
            command = files_of("transformers", "early-exit", drafter_id=known)["commands.sh"]
            assert f"MODEL {layer} PROMPT" in command
        for damaged in ("", "early-exit:", "early-exit:0", "early-exit:-1", "early-exit:7; touch x", "early-exit:$(x)"):
            with pytest.raises(InvalidInput, match="must be named early-exit:LAYER"):
                files_of("transformers", "early-exit", drafter_id=damaged)

    @pytest.mark.parametrize(
        ("settings", "program", "said"),
        [
            ({"num_assistant_tokens_schedule": "heuristic"}, None, "schedule constant"),
            ({assisted.UNSURE: 0.4}, None, "unsure"),
            ({assisted.LENGTH: 0}, None, "at least 1"),
            ({assisted.LENGTH: True}, None, "whole number"),
            ({"assistant_early_exit": 2}, None, "exits of its own"),
            ({assisted.LOOKUP: 0}, None, "at least 1"),
            ({}, "model.generate(ids, assistant_model=a, num_assistant_tokens=3)", "unsure"),  # it is ignored
        ],
    )
    def test_what_makes_another_chain_is_refused(self, settings, program, said):
        files = files_of("transformers", "draft-model")
        files[assisted.FILE] = json.dumps({**json.loads(files[assisted.FILE]), **settings})
        files[assisted.SCRIPT] = program or files[assisted.SCRIPT]
        with pytest.raises(InvalidInput, match=said):
            assisted.parse_transformers(files)

    def test_a_lookup_goes_before_an_assistant(self):
        files = files_of("transformers", "draft-model")
        files[assisted.FILE] = json.dumps({**json.loads(files[assisted.FILE]), assisted.LOOKUP: 5})
        assert assisted.parse_transformers(files) == ((1, None, 5),)


@pytest.fixture
def run_program(tmp_path, monkeypatch):
    """Runs an export's generate.py with a library that stands for the engine's."""

    def run(library, files, *words):
        (tmp_path / assisted.FILE).write_text(files.get(assisted.FILE, "{}"))
        (tmp_path / assisted.SCRIPT).write_text(files[assisted.SCRIPT])
        monkeypatch.setitem(sys.modules, library._mock_name, library)
        monkeypatch.setattr(sys, "argv", [assisted.SCRIPT, *words])
        runpy.run_path(str(tmp_path / assisted.SCRIPT))

    return run


@pytest.mark.parametrize("length", [0, 3])
def test_openvino_gets_the_plans_settings_alone(run_program, length):
    files, library = files_of("openvino", "ngram", length), MagicMock(name="openvino_genai")
    run_program(library, files, "MODEL", PROMPT)
    library.GenerationConfig.assert_called_once_with(**json.loads(files[assisted.FILE]), max_new_tokens=128)
    library.LLMPipeline().generate.assert_called_once_with(PROMPT, library.GenerationConfig())


@pytest.mark.parametrize("error", [None, ValueError("no template"), ImportError("no transformers")])
def test_exllama_gets_the_template_of_a_chat_model(run_program, capsys, error):
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
    ("drafter", "settings", "said"),
    [
        ("draft-model", {assisted.LENGTH: None}, "whole number"),
        ("draft-model", {assisted.LENGTH: 3.0}, "whole number"),
        ("draft-model", {assisted.UNSURE: 0.4}, "not both"),
        ("draft-model", {"max_ngram_size": 3}, "0 without it"),
        ("ngram", {"max_ngram_size": 0}, "above 0"),
    ],
)
def test_openvino_refuses_what_its_config_refuses(drafter, settings, said):
    files = files_of("openvino", drafter)
    files[assisted.FILE] = json.dumps({**json.loads(files[assisted.FILE]), **settings})
    with pytest.raises(InvalidInput, match=said):
        assisted.parse_openvino(files)


@pytest.mark.parametrize("parse", [assisted.parse_transformers, assisted.parse_openvino])
def test_damaged_files_are_named(parse):
    files = files_of("openvino", "ngram")
    for name, text in ((assisted.FILE, "{"), (assisted.FILE, "[3]"), (assisted.SCRIPT, "def"), (assisted.SCRIPT, "\0")):
        with pytest.raises(InvalidInput, match=name):
            parse({**files, name: text})


@pytest.mark.parametrize(("length", "batch_size", "rows"), [(1, 1, 2), (5, 1, 6), (3, 8, 32)])
def test_mlc_gets_room_for_every_row_of_its_sequences(length, batch_size, rows):
    command = files_of("mlc-llm", "draft-model", length, batch_size=batch_size)["commands.sh"]
    assert f"'spec_draft_length={length};max_num_sequence={rows}'" in command


@pytest.mark.parametrize(
    ("engine", "drafter", "was", "becomes", "said"),
    [
        ("mlc-llm", "draft-model", "spec_draft_length=3", "spec_draft_length=0", "at run time"),
        ("mlc-llm", "draft-model", "spec_draft_length=3;", "", "at run time"),
        ("mlc-llm", "draft-model", "max_num_sequence=4", "max_num_sequence=3", "at least 4"),
        ("mlc-llm", "draft-model", "max_num", "spec_tree_width=2;max_num", "spec_tree_width=1"),
        ("mlc-llm", "eagle", "spec_draft_length=3", "spec_draft_length=x", "whole number"),
        ("mlx-lm", "draft-model", "tokens 3", "tokens x", "whole number"),
        ("exllamav3", "mtp", "--num_draft_tokens 3", "", "drafter's own number"),
        ("exllamav3", "ngram", "--num_draft_tokens 3", "--num_draft_tokens 0", "drafter's own number"),
        ("exllamav3", "draft-model", "--prompt", "--dynamic_draft --prompt", "unsure"),
    ],
)
def test_flags_that_make_another_chain_are_refused(engine, drafter, was, becomes, said):
    files = files_of(engine, drafter)
    assert was in files["commands.sh"]
    files["commands.sh"] = files["commands.sh"].replace(was, becomes)
    with pytest.raises(InvalidInput, match=said):
        ENGINES[engine].methods[0].parse(files)


def test_flags_that_are_left_out_have_the_engines_defaults():
    assert local.parse_mlx({"commands.sh": "mlx_lm.server --draft-model DRAFTER"}) == ((1, None, 3),)
    for parse, command in ((local.parse_mlx, local.MLX), (local.parse_mlc, local.MLC), (local.parse_exllama, "x")):
        assert parse({"commands.sh": command}) == chains.NO_SPECULATION


def test_mlc_takes_no_more_guesses_than_medusa_has_heads():
    with pytest.raises(InvalidInput, match="number of heads, 5"):
        files_of("mlc-llm", "medusa", 6)


@named
@pytest.mark.parametrize("rule", [SAMPLED, REJECTED], ids=["sample", "reject"])
def test_a_plan_for_sampling_goes_only_where_the_source_does_the_same(engine, way, drafter, rule):
    name = "sample" if rule is SAMPLED else "reject"
    if name not in way.rules:
        with pytest.raises(InvalidInput, match="the plan holds for --acceptance"):
            files_of(engine, drafter, acceptance=rule)
        return
    files = files_of(engine, drafter, acceptance=rule)
    if assisted.FILE in files:
        wanted = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0}
        assert wanted.items() <= json.loads(files[assisted.FILE]).items()
    if engine == "exllamav3":
        assert "--temperature 0.7 --top_p 0.9 --top_k 0 --temperature_first" in files["commands.sh"]


def test_a_rule_without_its_temperature_still_samples():
    files = files_of("transformers", "draft-model", acceptance={"rule": "rejection"})
    assert {"do_sample": True, "temperature": 1.0}.items() <= json.loads(files[assisted.FILE]).items()
