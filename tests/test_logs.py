"""Logs of requests become token ids: every form of row, damaged ones, conversations, times; without torch or transformers."""

import json
import math
import random
import resource
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

import treeopt
from treeopt.errors import InvalidInput
from treeopt.pipeline import logs
from treeopt.pipeline.logs import BLOCK, requests_of
from treeopt.records.requestlog import RequestLog
from treeopt.records.rundir import RunDirectory
from treeopt.runtime.prompts import requests
from treeopt.runtime.prompts.encoder import Encoder
from treeopt.runtime.waiting import RUNS_MODELS

from .conftest import invoke
from .conftest import treeopt as command
from .helpers.prompt_files import BRACKETS, CHATML, byte_tokenizer
from .test_no_models import run as lacking

TOOLED = (
    "{%- if tools %}{{ tools | tojson(indent=1) }}{% endif %}{%- for m in messages %}{%- if m.role == 'skip' %}{% continue %}"
    "{% endif %}<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}<call>"
    "{{ c.function.arguments | tojson }}</call>{% endfor %}{% endgeneration %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% set day = strftime_now('%d %B %Y') %}"
)
USER, REPLY = {"role": "user", "content": "Über 2?"}, {"role": "assistant", "content": "Four & <more>."}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "a b"}'}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Tokenizers as transformers saves them, one token a byte, with chat templates or without."""
    place = tmp_path_factory.mktemp("tokenizers")
    for name, template in (("plain", None), ("chat", CHATML), ("brackets", BRACKETS), ("tools", TOOLED)):
        byte_tokenizer(template).save_pretrained(place / name)
        if name in ("chat", "tools"):
            config = place / name / "tokenizer_config.json"
            config.write_text(config.read_text().replace('"eos_token": "</s>"', '"eos_token": "<|im_end|>"'))
            (place / name / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    return {path.name: path for path in place.iterdir()}


def write(folder: Path, rows, name="logs.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def read(folder: Path, rows, tokenizer: Path | None = None, **options) -> RequestLog:
    return requests_of(
        write(folder, rows), Encoder.of_folder(tokenizer) if tokenizer else None, treeopt.Prompts(**options)
    )


def texts(log: RequestLog) -> list[tuple[str, str]]:
    """Prompts and answers of a byte tokenizer as texts, special tokens among them."""
    decode = byte_tokenizer().decode
    return [(decode(one.prompt), decode(one.answer)) for one in log.requests()]


ASKED = "<|im_start|>user\nÜber 2?<|im_end|>\n<|im_start|>assistant\n"
SAID = "Four & <more>.<|im_end|>"
FORMS = {
    "messages": {"messages": [USER, REPLY]},
    "messages go on": {"messages": [USER, REPLY, {"role": "user", "content": "never answered"}]},
    "messages and response": {"messages": [USER], "response": REPLY["content"]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Über 2?"}, {"from": "gpt", "value": "Four & <more>."}]},
    "texts": {"prompt": "Über 2?", "completion": "Four & <more>."},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Über "}, {"type": "text", "text": "2?"}]}, REPLY]},
    "flat choices": {"messages": [USER], "choices": [{"index": 0, "message": REPLY | {"tool_calls": None}}]},
    "request and response": {
        "request": {"model": "m", "messages": [USER], "max_tokens": 50},
        "response": {"id": "x", "choices": [{"message": REPLY, "finish_reason": "stop"}], "usage": {"completion_tokens": 9}},
    },
    "batch": {"custom_id": "r", "request": {"body": {"messages": [USER]}}, "response": {"status_code": 200, "body": {"choices": [{"message": REPLY}]}}},
    "message": {"request": {"messages": [USER]}, "response": {"message": REPLY, "done_reason": "stop"}},
    "rendered": {"prompt": ASKED, "generated_text": "Four & <more>."},
    "completion": {"request": {"prompt": ASKED}, "response": {"choices": [{"text": "Four & <more>.", "finish_reason": "stop"}]}},
    "instruction": {"instruction": "Über 2?", "input": "", "output": "Four & <more>."},
    "messages in a cell": {"messages": json.dumps([USER, REPLY])},
    "completion as JSON": {"prompt": ASKED, "response": json.dumps({"choices": [{"text": "Four & <more>.", "finish_reason": "stop"}]})},
    "generated text as JSON": {"prompt": ASKED, "response": json.dumps({"generated_text": "Four & <more>."})},
    "message as JSON": {"messages": [USER], "response": json.dumps(REPLY)},
    "choices in a cell": {"messages": [USER], "choices": json.dumps([{"index": 0, "message": REPLY}])},
    "request and response as JSON": {
        "request": json.dumps({"messages": [USER], "max_tokens": 50}),
        "response": json.dumps({"body": json.dumps({"choices": [{"index": 0, "message": REPLY}], "usage": {"completion_tokens": 9}})}),
    },
}  # fmt: skip


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_every_form_of_row_gives_the_same_request(folders, tmp_path, row):
    log = read(tmp_path, [row], folders["chat"])
    assert texts(log) == [(ASKED, SAID)]
    assert log.limit.tolist() == [50 if "max_tokens" in str(row) else 0]


@pytest.mark.parametrize(
    "answer", ['{"choices": ["a"], "message": "b"}', '{"result": {"details": {}}}', "{not JSON}", '[{"a": 1}]']
)
def test_answer_that_a_model_wrote_as_json_is_a_text(folders, tmp_path, answer):
    """Only a server's own object is looked into: a model may be asked for JSON."""
    (request,) = read(tmp_path, [{"messages": [USER], "response": answer}], folders["chat"]).requests()
    assert byte_tokenizer().decode(request.answer) == f"{answer}<|im_end|>"


def test_json_within_json_is_parsed_few_times(monkeypatch):
    """Every level tripled the work: a row of 400 kB took minutes."""
    parsed, row = [], {"text": "y", "usage": {}}
    monkeypatch.setattr(requests, "parse_json", lambda text: parsed.append(text) or json.loads(text))
    for _ in range(10):
        row = {"response": json.dumps(row)}
    assert list(requests.requests_in({"prompt": "x", **row}))
    assert len(parsed) <= 2 ** (requests.MOST_WITHIN + 1)


SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"
THOUGHT = [{"type": "thinking", "thinking": "Two and two. "}, {"type": "text", "text": REPLY["content"]}]


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"request": {"system": "Be brief.", "messages": [USER]}, "response": {"content": "4"}}, SYSTEM + ASKED, "4<|im_end|>"),
        ({"request": {"system": [{"type": "text", "text": "Be brief."}], "messages": [USER]}, "response": {"role": "assistant", "content": THOUGHT}},
         SYSTEM + ASKED, f"Two and two. {SAID}"),
        ({"messages": [USER], "choices": [{"message": REPLY | {"reasoning_content": "Two and two. "}}]}, ASKED, f"Two and two. {SAID}"),
        ({"messages": [USER], "choices": [{"message": {"role": "assistant", "content": None, "reasoning": "Two"}, "finish_reason": "length"}]}, ASKED, "Two"),
    ],
)  # fmt: skip
def test_system_and_reasoning(folders, tmp_path, row, prompt, answer):
    """A system text beside the messages is asked too, and reasoning was generated before the content."""
    log = read(tmp_path, [row], folders["chat"])
    assert texts(log) == [(prompt, answer)]
    assert any("with reasoning" in note for note in log.meta["notes"]) == ("Two" in answer)


def test_fewer_tokens_than_usage(folders, tmp_path):
    """Where usage counts far more tokens than an answer has, something that was generated is not in the log."""
    rows = [{"messages": [USER, REPLY], "usage": {"completion_tokens": count}} for count in (14, 60)]
    notes = read(tmp_path, rows, folders["chat"]).meta["notes"]
    assert any(note.startswith("1 answer of far fewer") for note in notes)


def test_a_raw_text_gets_the_tokenizers_bos_and_a_template_writes_its_own(folders, tmp_path):
    row = {"request": {"prompt": "def f"}, "response": {"choices": [{"text": "(x):"}]}}
    assert texts(read(tmp_path, [row], folders["plain"])) == [("<s>def f", "(x):</s>")]
    assert texts(read(tmp_path, [{"messages": [USER, REPLY]}], folders["plain"])) == [
        ("<s>Über 2?", "Four & <more>.</s>")
    ]
    assert texts(read(tmp_path, [{"messages": [USER, REPLY]}], folders["brackets"])) == [
        ("<s>[INST] Über 2? [/INST]", " Four & <more>. </s>")
    ]


@pytest.mark.parametrize(
    "told",
    [{"finish_reason": "length"}, {"finish_reason": {"type": "length"}}, {"max_tokens": 14}, {"stop_type": "limit"}],
)
def test_an_answer_that_the_limit_ended_has_no_end_token(folders, tmp_path, told):
    (one,) = read(tmp_path, [{"messages": [USER], "response": REPLY["content"], **told}], folders["chat"]).requests()
    assert byte_tokenizer().decode(one.answer) == REPLY["content"]


EARLIER = [USER, REPLY, {"role": "user", "content": "more"}]
UNANSWERED = [
    ({"messages": EARLIER, "choices": [{"message": {"role": "assistant", "content": ""}}]}, None),
    ({"messages": EARLIER, "answers": ""}, "answers"),
    ({"messages": EARLIER, "response": {"choices": [{"text": None}]}}, None),
]


@pytest.mark.parametrize(("row", "responses"), UNANSWERED)
def test_an_earlier_answer_is_not_taken_for_one_that_is_missing(folders, tmp_path, row, responses):
    log = read(tmp_path, [GOOD, row], folders["chat"], responses=responses)
    assert "it has no answer, or an empty one" in log.meta["skipped"][0]["reason"]


@pytest.mark.parametrize("row", [{"token_ids": [7, 8]}, {"choices": [{"token_ids": [7, 8]}]}])
def test_an_earlier_answer_stays_in_the_prompt_of_one_that_is_ids(folders, tmp_path, row):
    ((prompt, _),) = texts(log := read(tmp_path, [{"messages": EARLIER, **row}], folders["chat"]))
    assert next(log.requests()).answer == [7, 8]
    assert prompt.count("Four") == 1
    assert prompt.endswith("more<|im_end|>\n<|im_start|>assistant\n")


def test_each_of_several_choices_is_a_request(folders, tmp_path):
    choices = [{"message": {"role": "assistant", "content": said}} for said in ("one", "two")]
    log = read(tmp_path, [{"messages": [USER], "choices": choices}], folders["chat"])
    assert texts(log) == [(ASKED, "one<|im_end|>"), (ASKED, "two<|im_end|>")]


def test_many_answers_to_a_long_prompt_are_read_in_one_pass():
    """The prompt was read anew for each answer: 50 kB of it took 4 seconds. A choice may have the prompt's ids."""
    row = {"messages": [USER] * 2000, "choices": [{"text": "a", "prompt_token_ids": [5, i]} for i in range(2000)]}
    began = time.process_time()
    answered = list(requests.requests_in(row))
    assert time.process_time() - began < 1
    assert len(answered) == 2000
    assert answered[7].prompt_ids.tolist() == [5, 7]


def test_the_tokens_of_a_row_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "MOST_OF_ROW", 100)
    row = {"prompt_token_ids": [5] * 50, "choices": [{"token_ids": [7]}] * 3}
    with pytest.raises(InvalidInput, match="its answers, each with the prompt, have more than 100 tokens"):
        read(tmp_path, [row])


def test_calls_of_tools_are_written_where_the_template_writes_them_and_said_to_be_lost_elsewhere(folders, tmp_path):
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    back = {"role": "tool", "tool_call_id": "c1", "content": "found"}
    rows = [
        {"request": {"messages": [USER], "tools": [{"a": "<b>"}]}, "response": {"choices": [{"message": called}]}},
        {"messages": [USER, called, back], "response": "done"},
        {"messages": [USER, {**called, "content": "I look."}]},
    ]
    log = read(tmp_path, rows, folders["tools"])
    assert [said for _, said in texts(log)] == [
        '<call>{"at": "a b"}</call><|im_end|>',
        "done<|im_end|>",
        'I look.<call>{"at": "a b"}</call><|im_end|>',
    ]
    assert texts(log)[0][0].startswith('[\n {\n  "a": "<b>"\n }\n]<|im_start|>user')
    log = read(tmp_path, rows, folders["chat"])
    assert [said for _, said in texts(log)] == ["done<|im_end|>", "I look.<|im_end|>"]
    assert log.meta["skipped"] == [
        {"row": 1, "reason": "its answer calls a tool, which the chat template does not write behind the prompt"}
    ]
    assert any("1 answer without the calls of tools" in said for said in log.meta["notes"])


MESSAGES = st.lists(st.text("ab \n<é|>", min_size=1).filter(str.strip), min_size=2, max_size=7)


@given(MESSAGES, st.booleans(), st.sampled_from(["chat", "brackets", "tools"]))
def test_templates_are_written_as_transformers_writes_them(folders, said, with_tools, name):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folders[name])
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    if name == "tools":
        messages[1]["tool_calls"] = [{"function": {"name": "x", "arguments": {"t": said[0]}}}]
    tools = [{"type": "function", "function": {"name": "é"}}] if with_tools else None
    ours = Encoder.of_folder(folders[name])
    for finished in (False, True):
        expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=not finished)
        assert ours.write(messages, {"tools": tools}, finished=finished) == expected
        assert list(ours.encode(expected)) == theirs(expected, add_special_tokens=False)["input_ids"]
        assert list(ours.encode(said[0], bos=True)) == theirs(said[0])["input_ids"]


def test_a_folder_without_a_tokenizer_json_is_made_one_by_transformers(folders, tmp_path):
    """As the folders of Vicuna and of Medusa's own models are, which have SentencePiece's file alone."""
    vocabulary = {token: i for i, token in enumerate(["<|endoftext|>", *sorted(ByteLevel.alphabet())])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "chat_template": CHATML})
    )
    made = Encoder.of_folder(tmp_path)
    assert (made.size, made.eos_ids) == (257, (0,))
    assert made.encode("ab") == (vocabulary["a"], vocabulary["b"])
    assert made.write([USER]).startswith("<|im_start|>user")


IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)
CLOCK = st.integers(10**9, 2 * 10**9)
ROWS = st.lists(
    st.tuples(IDS, IDS, CLOCK, st.integers(0, 1000), st.integers(0, 9), st.sampled_from("ab$")), min_size=1, max_size=8
)
SHAPES = [
    lambda p, a, b, t, n, g: {"prompt_token_ids": p, "token_ids": a, "begin_s": b, "end_s": b + t, "max_tokens": n, "kind": g},
    lambda p, a, b, t, n, g: {
        "kind": g, "request": {"prompt": p, "max_completion_tokens": n or None}, "start_time": 1000 * b,
        "response": {"choices": [{"token_ids": a, "finish_reason": "stop"}]}, "latency_ms": 1000 * t,
    },
    lambda p, a, b, t, n, g: {
        "prompt_token_ids": p, "outputs": [{"index": 0, "text": None, "token_ids": a}], "sampling_params": {"max_tokens": n},
        "created": str(b), "end_time": str(10**9 * (b + t)), "kind": g,
    },
    lambda p, a, b, t, n, g: {
        "input_ids": json.dumps(p), "output_ids": a, "duration": t, "finished_at": b + t, "max_new_tokens": str(n), "kind": g,
    },
]  # fmt: skip


@given(ROWS, st.lists(st.sampled_from(SHAPES), min_size=8, max_size=8))
def test_ids_come_back_as_they_were_in_the_order_of_their_times(tmp_path_factory, rows, shapes):
    folder = tmp_path_factory.mktemp("ids")
    log = read(folder, [shape(*row) for shape, row in zip(shapes, rows, strict=False)], group_by="kind")
    log.save(folder / "requests.npz")
    log = treeopt.load(folder / "requests.npz")
    expected = sorted(rows, key=lambda row: row[2])
    found = [(r.prompt, r.answer, r.limit) for r in log.requests()]
    assert found == [(p, a, max(n, len(a)) if n else None) for p, a, _, _, n, _ in expected]
    assert [log.group_names[g] for g in log.group.tolist()] == [row[-1] for row in expected]
    assert log.meta["skipped"] == []


GOOD = {"prompt_token_ids": [5, 6], "token_ids": [7]}
DAMAGE = {
    '{"prompt": "x", "respon': "it is not JSON",
    "[1, 2]": "it must be an object or a text, but is a list",
    '"only a prompt"': "it has no answer, or an empty one",
    '{"response": "y"}': "it has no prompt under prompt_token_ids",
    '{"prompt": "", "response": "y"}': "prompt is blank",
    '{"prompt": "x", "response": " "}': "it has no answer, or an empty one",
    '{"prompt": "x", "choices": []}': "choices must be objects, one at least",
    '{"prompt": "x", "choices": ["y"]}': "choices must be objects, one at least",
    '{"prompt": {"a": 1}, "response": "y"}': "prompt must be a text or a list, but is an object",
    '{"prompt": "x\\u0000", "response": "y"}': "prompt has a NUL character",
    '{"prompt": "x", "response": "\\ud800"}': "response has half a character in it",
    '{"messages": [{"role": "robot", "content": "x"}], "response": "y"}': "the role of message 1 must be system, user, assistant or tool, but is 'robot'",
    '{"messages": ["x"], "response": "y"}': "message 1 must be an object, but is a text",
    '{"messages": [{"role": "user", "content": 5}], "response": "y"}': "the content of message 1 must be a text, but is a number",
    '{"messages": [{"role": "user", "content": [{"type": "image"}]}], "response": "y"}': "must have parts of type text only",
    '{"messages": [{"role": "assistant", "content": "x", "tool_calls": 3}]}': "the tool_calls of message 1 must be a list of objects",
    '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]}': "it has no answer, or an empty one",
    '{"prompt_token_ids": [1, -2], "token_ids": [3]}': "prompt_token_ids must be token ids, whole numbers from 0 to 2147483647, but one is -2",
    '{"prompt_token_ids": [1], "token_ids": [2147483648]}': "token_ids must be token ids, whole numbers from 0 to 2147483647, but one is 2147483648",
    '{"prompt_token_ids": [1], "token_ids": [true]}': "but one is True",
    '{"prompt_token_ids": [1], "token_ids": [null]}': "but one is None",
    '{"prompt_token_ids": "x", "token_ids": [1]}': "prompt_token_ids must be a list of token ids, but is a text",
    '{"prompt_token_ids": [1], "token_ids": []}': "it has no answer, or an empty one",
    '{"prompt_token_ids": [], "token_ids": [1]}': "it has no prompt",
    '{"prompt_token_ids": [300], "token_ids": [1]}': "its token 300 is beyond the vocabulary of 260",
    '{"prompt_token_ids": [1], "token_ids": [1], "start_time": "noon"}': "start_time must be a time, but is 'noon'",
    '{"prompt_token_ids": [1], "token_ids": [1], "start_time": NaN}': "start_time must be a finite number, but is nan",
    '{"prompt_token_ids": [1], "token_ids": [1], "timestamp": [1]}': "timestamp must be a finite number, but is [1]",
    '{"prompt_token_ids": [1], "token_ids": [1], "max_tokens": "many"}': "max_tokens must be a finite number, but is 'many'",
    '{"prompt_token_ids": [1], "token_ids": [1], "kind": [1]}': "kind must be a plain value to group by",
}  # fmt: skip


@pytest.mark.parametrize(("line", "reason"), DAMAGE.items(), ids=range(len(DAMAGE)))
def test_a_damaged_row_is_one_sentence_with_its_line_and_the_others_are_kept(folders, tmp_path, line, reason):
    log = read(tmp_path, [GOOD, line, GOOD | {"kind": "a"}], folders["chat"], group_by="kind")
    assert log.num_sequences == 2
    (skipped,) = log.meta["skipped"]
    assert skipped["row"] == 2
    assert reason in skipped["reason"]
    assert log.meta["counted"] == {"rows": 3, "skipped": 1}
    assert log.meta["notes"][0] == f"1 row of 3 left out, the first at line 2: {skipped['reason']}."


NAMES = [*requests.WITHIN, *requests.CHOICES, *requests.PROMPTS, *requests.ANSWERS[2:], "prompt_token_ids", "token_ids", "tools", "role",
         "tool_calls", "function", "arguments", "content", "max_tokens", "begin_s", "end_s", "latency_ms", "session_id",
         "finish_reason", "chat_template_kwargs", "self", "finished", "type", "kind"]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "a", "[1]", "user", "assistant", "\ud800", "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6),
    max_leaves=12,
)  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"])}, optional={"content": VALUES, "tool_calls": VALUES}
)


@given(
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=7),
    st.lists(MESSAGE, max_size=3),
    st.sampled_from(["plain", "chat", "tools"]),
)
@example({"tools": ["\ud800"]}, [{"role": "user"}], "tools")
def test_whatever_a_row_holds_it_is_read_or_named(folders, tmp_path_factory, row, messages, name):
    path = tmp_path_factory.mktemp("any")
    log = read(
        path,
        [GOOD, {"messages": messages, **row}, {"request": row, "messages": messages, "text": "a"}],
        folders[name],
        group_by=None,
    )
    assert log.num_sequences >= 1
    assert log.meta["counted"]["rows"] == 3


def test_a_log_without_any_request_says_why(tmp_path):
    with pytest.raises(
        InvalidInput, match=r"none of the 2 rows in logs.jsonl is one \(line 1: .*; line 2: it is not JSON"
    ):
        read(tmp_path, [{"a": 1}, "{"])
    with pytest.raises(InvalidInput, match=r"none of the 0 rows in logs.jsonl is one \(it is empty\)"):
        read(tmp_path, [])
    with pytest.raises(InvalidInput, match=r"line 1: it has text, which tokenizer makes tokens of"):
        read(tmp_path, [{"prompt": "a", "response": "b"}])


def test_a_table_is_read_as_well(tmp_path):
    lines = [
        "prompt_token_ids,token_ids,start_time,max_tokens",
        '"[1, 2]",[3],2026-01-01T00:00:01Z,9',
        '"[4]",[5],2026-01-01,',
    ]
    log = requests_of(write(tmp_path, lines, "logs.csv"), None, treeopt.Prompts())
    assert [(one.prompt, one.answer, one.limit) for one in log.requests()] == [([4], [5], None), ([1, 2], [3], 9)]


@pytest.mark.parametrize(
    "said",
    [1767225600, 1767225600.0, "1767225600", 1767225600_000, 1767225600_000_000, 1767225600_000_000_000,
     "2026-01-01T00:00:00Z", "2026-01-01 01:00:00+01:00", "2026-01-01T00:00:00.000000"],
)  # fmt: skip
def test_times_are_read_in_every_usual_form(said):
    (request,) = requests.requests_in(GOOD | {"created_at": said})
    assert request.begin_s == 1767225600


def test_without_all_times_the_order_is_the_files(tmp_path):
    rows = [GOOD | {"start_time": 9}, GOOD | {"token_ids": [8]}, GOOD | {"start_time": 1, "end_time": 2}]
    log = read(tmp_path, rows)
    assert [one.answer for one in log.requests()] == [[7], [8], [7]]
    assert log.meta["order"] == "file"


# Conversations


def agents(rng: random.Random, edited: bool) -> list[tuple[int, dict]]:
    """Traces of agents with growing context, as rows with times, each with the number of its agent."""
    rows = []
    for agent in range(6):
        messages = [{"role": "system", "content": "You edit files."}, {"role": "user", "content": f"task {agent % 4}"}]
        for step in range(rng.randrange(1, 6)):
            reply = {"role": "assistant", "content": f"answer {agent} {step}"}
            rows.append(
                (agent, {"messages": list(messages), "choices": [{"message": reply}], "start_time": 10 * step + agent})
            )
            kept = {**reply, "content": reply["content"] + " (edited)"} if edited and agent < 4 else reply
            messages = [*messages, kept, {"role": "user", "content": f"result {step}"}]
    rng.shuffle(rows)
    return rows


@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_requests_of_one_growing_conversation_are_one_cluster(folders, tmp_path, seed, edited):
    """Agents 0 and 4, and 1 and 5, begin alike: by their answers they are told apart."""
    rows = agents(random.Random(seed), edited)
    log = read(tmp_path, [row for _, row in rows], folders["chat"])
    expected = [agent for agent, _ in sorted(rows, key=lambda row: row[1]["start_time"])]
    if edited and len({agent for agent, row in rows if row["start_time"] >= 10} & {0, 1, 4, 5}) > 2:
        return  # an edited answer tells no one apart from who began alike
    pairs = set(zip(log.clusters.tolist(), expected, strict=True))
    assert len(pairs) == len(dict(pairs)) == len({b: a for a, b in pairs})


def test_a_column_names_conversations_and_ids_are_known_by_how_they_begin(tmp_path):
    named = [GOOD | {"session_id": name} for name in ("a", "b", "a", 7, "b")]
    assert read(tmp_path, named).clusters.tolist() == [0, 1, 0, 2, 1]
    rng = np.random.default_rng(0)
    first, other = (rng.integers(0, 99, 3 * BLOCK).tolist() for _ in range(2))
    said, more = rng.integers(0, 99, 20).tolist(), rng.integers(0, 99, 9).tolist()
    rows = [(first, said), (other, said), (first + said + more, [1]), (other + more, said), (first, said[:3])]
    log = read(tmp_path, [{"prompt_token_ids": prompt, "token_ids": answer} for prompt, answer in rows])
    assert log.clusters.tolist() == [0, 1, 0, 2, 3]


def test_a_text_alone_is_said(folders, tmp_path):
    said = read(tmp_path, [{"prompt": "a", "response": "b"}], folders["plain"]).meta["notes"]
    assert "1 answer of text tokenised again: tokens may end at other places than the model's did." in said


# The command


def test_neither_torch_nor_transformers_is_imported_and_ids_need_no_tokenizer(folders, tmp_path):
    write(tmp_path, [GOOD, GOOD])
    write(tmp_path, [{"messages": [USER, REPLY]}], "texts.jsonl")
    none = (*RUNS_MODELS, "tokenizers")
    assert json.loads(lacking(tmp_path, "requests", "logs.jsonl", "--json", absent=none))["requests"] == 2
    assert treeopt.load(tmp_path / "treeopt-run" / "requests.npz").num_sequences == 2
    words = ("requests", "texts.jsonl", "--tokenizer", str(folders["chat"]), "--run", "other")
    assert "requests" in lacking(tmp_path, *words)
    assert "pip install 'treeopt[text]'" in lacking(tmp_path, *words, absent=none, code=1)


def test_the_command_shows_groups_and_names_are_only_names(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "$(x) `y`; [red]z"
    (tmp_path / name).mkdir()
    rows = [{"messages": [USER, REPLY], "kind": kind, "start_time": i} for i, kind in enumerate((name, "b", name))]
    path = write(tmp_path / name, [*rows, "{"], f"{name}.jsonl")
    words = ("requests", str(path), "--tokenizer", str(folders["chat"]), "--group-by", "kind", "--run", name)
    done = invoke(*words)
    assert all(word in done.stdout for word in ("requests", "conversations", name, "1 row left out"))
    assert f"treeopt search --for ENGINE --run '{name}'" in done.stderr
    told = json.loads(command(*words, "--json"))
    assert json.loads(command("status", "--run", name, "--json"))["next"].startswith("treeopt search --for ENGINE")
    assert told["groups"][name]["requests"] == 2
    assert told["source"]["log"] == str(path)
    assert set(told["tokenizer"]) == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    assert len(told["log_sha256"]) == 64
    assert told["provenance"]["dataset"] == path.name


def test_a_run_has_one_record_which_is_not_replaced_unasked(tmp_path):
    run = RunDirectory(tmp_path / "run")
    file = write(tmp_path, [GOOD])
    first = treeopt.requests(file, run=run)
    assert treeopt.requests(str(file), run=run).tokens.tolist() == first.tokens.tolist()
    write(tmp_path, [GOOD, GOOD])
    with pytest.raises(InvalidInput, match=r"requests.npz \(there\) and the log .* differ in log sha256"):
        treeopt.requests(file, run=run)
    assert treeopt.requests(file, run=run, overwrite=True).num_sequences == 2
    run.replace_accuracies(treeopt.load("vicuna-7b-medusa1"))
    assert run.accuracies() == [run.calibration]
    with pytest.raises(InvalidInput, match=r"calibration.json exists, and a log replaces it only"):
        treeopt.requests(file, run=run)
    treeopt.requests(file, run=run, overwrite=True)
    assert run.accuracies() == [run.requests]
    assert run.read_requests().num_sequences == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"log": "nowhere.jsonl"}, "nowhere.jsonl is none"),
        ({"log": __file__}, "must end in .jsonl"),
        ({"tokenizer": Path(__file__).parent}, "tokenizer must be a folder with a tokenizer.json"),
        ({"columns": treeopt.Prompts(group_by="kinds")}, "group_by must be a column of logs.jsonl: .* but got kinds"),
    ],
)
def test_what_does_not_go_with_logs_is_refused(tmp_path, options, said):
    with pytest.raises(InvalidInput, match=said):
        treeopt.requests(**{"log": write(tmp_path, [GOOD]), "run": tmp_path / "run", **options})


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("tokenizer.json", "{}", "must be a folder with a tokenizer.json, .* that transformers makes one of, but .*: "),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("chat_template.jinja", "{% for %}", "chat template cannot be read: .*Leave it out with chat_template=False"),
    ],
)
def test_a_damaged_tokenizer_is_one_sentence(folders, tmp_path, file, text, said):
    for source in folders["chat"].iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / file).write_text(text)
    with pytest.raises(InvalidInput, match=said):
        Encoder.of_folder(tmp_path)


@pytest.mark.slow
def test_a_million_rows_take_bounded_memory(tmp_path):
    with (tmp_path / "logs.jsonl").open("w") as stream:
        for i in range(10**6):
            stream.write(
                f'{{"prompt_token_ids": [{i}, 2, 3, 4], "token_ids": [5, {i}], "session_id": {i // 3}, "begin_s": {i}}}\n'
            )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    log = requests_of(tmp_path / "logs.jsonl", None, treeopt.Prompts())
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 600  # MiB
    assert (log.num_sequences, log.num_conversations, len(log.tokens)) == (10**6, math.ceil(10**6 / 3), 6 * 10**6)
