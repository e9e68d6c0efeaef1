"""Prompts: the shapes of rows that people have, given answers, groups, and rows that cannot be asked."""

import hashlib
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import ByT5Tokenizer

from treeopt import demo
from treeopt.errors import InvalidInput
from treeopt.runtime.prompts.encoder import Encoder
from treeopt.runtime.prompts.sets import Conversation, Skipped, demo_prompts, load_prompts
from treeopt.runtime.session import _skipped_note
from treeopt.runtime.target import load_target

from .conftest import treeopt
from .helpers.prompt_files import PLAIN, ids, load, messages, reasons, target_of


@pytest.fixture(scope="module")
def demo_target():
    from transformers import AutoTokenizer

    return target_of(AutoTokenizer.from_pretrained(demo.MODEL), eos="<|endoftext|>", context=2048)


# What people have


@pytest.mark.parametrize(
    ("row", "options", "group", "answer"),
    [
        ({"category": "letters", "turns": ["Write a letter.", "In one sentence."]}, {"group_by": "category"}, "letters", None),
        ({"question": "Ann’s 3 hens lay 2 eggs each. How many?", "answer": "#### 6"}, {"responses": "answer"}, "", "#### 6"),
        ({"instruction": "Square 3.", "input": "", "output": "It is 9."}, {"responses": "output"}, "", "It is 9."),
    ],
    ids=["mt-bench", "gsm8k", "dolly"],
)  # fmt: skip
def test_known_datasets_load_without_an_option_for_their_column(demo_target, tmp_path, row, options, group, answer):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    prompts = load_prompts(demo_target, str(path), **options)
    (c,) = prompts.conversations
    assert (c.group, c.num_turns) == (group, len(row.get("turns", "1")))
    if answer:
        assert c.answers == (answer,)
        assert prompts.given_answer(c, 0) == (*ids(demo_target, answer), 0)
    assert prompts.name == path.name
    assert prompts.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()


def test_an_instruction_is_joined_with_its_input_unless_a_column_is_named(tmp_path):
    rows = [
        {"instruction": "Translate.", "input": "Tree"},
        {"instruction": "Sing.", "input": ""},
        {"instruction": "Sum up.", "context": "It was late."},
    ]
    asked = [c.turns for c in load(tmp_path, rows).conversations]
    assert asked == [("Translate.\n\nTree",), ("Sing.",), ("Sum up.\n\nIt was late.",)]
    assert load(tmp_path, rows, column="instruction").conversations[0].turns == ("Translate.",)


def test_the_column_is_the_first_known_one_that_the_row_has(tmp_path):
    rows = [{"text": "a", "turns": ["b", "c"]}, {"text": "d", "turns": None}, {"own": "e", "text": "f"}]
    assert [c.turns for c in load(tmp_path, rows).conversations] == [("b", "c"), ("d",), ("f",)]
    assert [c.turns for c in load(tmp_path, rows, column="own").conversations] == [("e",)]


def test_messages_of_all_kinds_ask_the_same(tmp_path):
    said = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye")]
    share = [("system", "Be brief."), ("human", "Hi"), ("gpt", "Hello!"), ("human", "Bye")]
    parts = [(role, [{"type": "text", "text": text[:2]}, {"type": "text", "text": text[2:]}]) for role, text in said]
    for rows in (
        {"messages": messages(*said)},
        {"messages": messages(*parts)},
        {"conversations": messages(*share, keys=("from", "value"))},
        {"messages": [{"role": r, "content": t, "from": None, "name": None} for r, t in said]},
        {"messages": json.dumps(messages(*said))},
        {"prompt": messages(*said)},
    ):
        (found,) = load(tmp_path, [rows]).conversations
        assert found.messages == (("system", "Be brief."), ("user", "Hi"), ("user", "Bye"))
        assert found.answers == ()
        (found,) = load(tmp_path, [rows], responses=next(iter(rows))).conversations
        assert found.answers == ("Hello!",)
        assert found.turns == ("Hi",)


def test_messages_of_the_user_in_a_row_are_one_turn_where_the_assistant_speaks(tmp_path):
    two = [("user", "a"), ("user", "b")]
    rows = [{"messages": messages(*two)}, {"messages": messages(*two, ("assistant", "c"), ("user", "d"))}]
    assert [c.turns for c in load(tmp_path, rows).conversations] == [("a", "b"), ("a\n\nb", "d")]


def test_given_answers_are_kept_up_to_the_first_turn_without_one(tmp_path):
    rows = [{"turns": ["a", "b"], "said": ["x", "y"]}, {"turns": ["c", "d"], "said": ["x", None]}]
    rows += [{"turns": ["e", "f"], "said": "x"}, {"turns": ["g", "h"], "said": " "}]
    rows += [{"turns": ["i"], "said": ["x", "y"]}, {"turns": ["j"], "said": 3}, {"turns": ["k"]}]
    prompts = load(tmp_path, rows, responses="said")
    assert [c.answers for c in prompts.conversations] == [("x", "y"), ("x",), ("x",)]
    assert [c.num_turns for c in prompts.conversations] == [2, 1, 1]
    assert reasons(prompts) == [
        (4, "it has no answer under said"),
        (5, "said has 2 answers to 1 turns"),
        (6, "said must be a text, but is a number"),
        (7, "it has no answer under said"),
    ]


# Sets


def test_an_answer_keeps_its_spaces_where_the_tokenizer_would_clean_them_up():
    tokenizer = ByT5Tokenizer(clean_up_tokenization_spaces=True)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}|{% endfor %}"
    encoder = Encoder.of_target(SimpleNamespace(tokenizer=tokenizer, eos_ids=(1,), vocab_size=400))
    answer, talk = encoder.encode("so ? Yes ."), [("user", "a"), ("user", "b")]
    assert encoder.next_prompt(talk, encoder.first_prompt(talk), [answer]) == encoder.encode("a|so ? Yes .|b|")


def test_the_hash_of_one_turn_is_that_of_its_tokens_and_of_more_turns_another():
    tokens, turn = (1, 2, 300), ("user", "a")
    digest = hashlib.sha256(np.array(tokens, "<i4").tobytes()).hexdigest()[:16]
    one = Conversation(tokens, (turn,))
    more = [Conversation(tokens, (turn, *(("user", t) for t in later))) for later in ("b", "c", "bc", "cb")]
    assert one.sha256 == digest
    assert len({c.sha256 for c in (one, *more)}) == 5


def test_duplicates_are_left_out_and_known_prompts_can_be(tmp_path):
    rows = [{"prompt": p, "answer": str(i)} for i, p in enumerate("abacb")]
    prompts = load(tmp_path, rows, responses="answer")
    assert [c.row for c in prompts.conversations] == [1, 2, 4]
    rest = prompts.without([prompts.conversations[1].sha256])
    assert [c.row for c in rest.conversations] == [1, 4]
    assert rest.fingerprint == prompts.fingerprint


def test_groups_are_named_by_a_column_and_few(tmp_path):
    rows = [{"prompt": str(i), "k": k} for i, k in enumerate(["a", 1, None, "", True, 1.5, [2]])]
    prompts = load(tmp_path, [*rows, '{"prompt": "x", "k": NaN}', {"prompt": "y"}], group_by="k")
    assert [c.group for c in prompts.conversations] == ["a", "1", "(none)", "(none)", "True", "1.5", "(none)", "(none)"]
    assert reasons(prompts) == [(7, "k must be a plain value to group by, but is a list")]
    with pytest.raises(InvalidInput, match="may have 64 different values, but k has more"):
        load(tmp_path, [{"prompt": str(i), "k": i} for i in range(65)], group_by="k")


def test_demo_prompts_are_grouped_by_module_on_request(demo_target):
    plain, grouped = demo_prompts(demo_target, most=400), demo_prompts(demo_target, group_by="module", most=400)
    assert {c.first for c in plain.conversations} == {c.first for c in grouped.conversations}
    assert {c.group for c in plain.conversations} == {""}
    assert "dataclasses" in {c.group for c in grouped.conversations}
    assert len({c.group for c in grouped.conversations}) <= 64
    with pytest.raises(InvalidInput, match="by module only"):
        demo_prompts(demo_target, group_by="category")


def test_the_demos_prompts_have_a_seed_too(demo_target):
    known, again, other, plain = (
        [c.first for c in demo_prompts(demo_target, seed=seed, most=20).conversations] for seed in (0, 0, 1, None)
    )
    assert known == again
    assert len({*known, *other, *plain}) > 50


# What is wrong with them


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": " \n"}, "prompt is blank"),
        ({"prompt": 3}, "prompt must be a text or a list, but is a number"),
        ({"other": "a"}, "it has nothing under"),
        ({"prompt": "\ud800"}, "half a character"),
        ({"prompt": "a\0b"}, "NUL"),
        ({"prompt": "a" * 511}, "it must have 1 to 511 tokens, but has 512"),
        ({"turns": []}, "no turn"),
        ({"turns": ["a", ""]}, "turn 2 of turns is blank"),
        ({"turns": ["a", None]}, "turn 2 of turns must be a text, but is null"),
        ({"messages": messages(("assistant", "Hi"), ("user", "a"))}, "first message"),
        ({"messages": messages(("user", "a"), ("system", "b"))}, "message 2 must not be the system's"),
        ({"messages": messages(("tool", "a"))}, "message 1 must not be the tool's here"),
        ({"messages": [{"role": "user", "content": "a"}, "b"]}, "message 2 must be an object, but is a text"),
        ({"messages": messages(("user", [{"type": "image"}]))}, "parts of type text only"),
        ({"messages": messages(("system", "a"))}, "no turn"),
        ("[1]", "it must be an object or a text, but is a list"),
        ('{"prompt": "a', "it is not JSON"),
        ('{"prompt": ' + "[" * 10**5, "it is not JSON"),
        ('{"prompt": ' + "1" * 5000 + "}", "it is not JSON"),
    ],
)
def test_a_bad_row_is_skipped_with_its_reason(tmp_path, row, reason):
    prompts = load(tmp_path, [{"prompt": "fine"}, row, {"prompt": "also"}])
    assert [c.row for c in prompts.conversations] == [1, 3]
    (skipped,) = prompts.skipped
    assert isinstance(skipped, Skipped)
    assert skipped.row == 2
    assert reason in skipped.reason
    assert [vars(one) for one in prompts.skipped] == [{"row": 2, "reason": skipped.reason}]
    with pytest.raises(InvalidInput, match=r"usable prompt, but none of the 2 in rows\.jsonl is \(row 1: "):
        load(tmp_path, [row, {"prompt": None}])


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path):
    small = SimpleNamespace(**{**vars(PLAIN), "vocab_size": 100})
    with pytest.raises(InvalidInput, match="tokenizer must belong to the model"):
        load(tmp_path, [{"prompt": "a"}], small)


def test_prompts_that_are_left_out_as_they_come_twice_are_said(demo_target, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("a = 1", "b = 2", "a = 1", "a = 1")))
    prompts = load_prompts(demo_target, str(path))
    assert (len(prompts.conversations), prompts.n_skipped, prompts.n_repeated) == (2, 0, 2)
    assert _skipped_note(prompts) == ("2 prompts left out that ask what an earlier one asks.",)


def test_a_model_without_a_tokenizer_is_refused_before_its_weights_are_read(tmp_path):
    for file in demo.MODEL.iterdir():
        if not file.name.startswith("tokenizer"):
            shutil.copy(file, tmp_path)
    with pytest.raises(InvalidInput, match="model must have its tokenizer beside the weights"):
        load_target(str(tmp_path))


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("search", "--calibration", "vicuna-7b-medusa"), "vicuna-7b-medusa1"),
        (("score", "mc_sim_7b", "--calibration", "vicuna-7b-medusa1"), "mc_sim_7b_63"),
        (("plot", "troughput"), "throughput"),
    ],
)
def test_a_name_that_is_nearly_one_gets_it(tmp_path, words, meant):
    assert f"Did you mean '{meant}'?" in treeopt(*words, "--run", tmp_path / "run", code=1).replace("\n", " ")
