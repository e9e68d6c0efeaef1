"""Chat: templates applied once, turn after turn, and given answers as the target would emit them."""

import pickle
import resource

import pytest

from treeopt.errors import InvalidInput
from treeopt.runtime.prompts import confined
from treeopt.runtime.prompts.template import ChatTemplate

from .helpers.prompt_files import BRACKET, CHAT, PLAIN, byte_tokenizer, ids, load, messages, reasons, target_of


def test_the_template_alone_writes_the_special_tokens(tmp_path):
    (c,) = load(tmp_path, [{"prompt": "Hi"}], BRACKET).conversations
    assert c.first == ids(BRACKET, "<s>[INST] Hi [/INST]")
    assert c.first.count(BRACKET.tokenizer.bos_token_id) == 1
    (c,) = load(tmp_path, [{"prompt": "Hi"}], BRACKET, chat_template=False).conversations
    assert c.first == ids(BRACKET, "<s>Hi")
    (c,) = load(tmp_path, [{"prompt": "Hi"}], PLAIN).conversations
    assert c.first == ids(PLAIN, "<s>Hi")


def test_turn_by_turn_prompts_equal_a_rendering_by_hand(tmp_path):
    row = {
        "messages": messages(
            ("system", "S"), ("user", "a"), ("assistant", "no"), ("user", "b"), ("assistant", "no"), ("user", "c")
        )
    }
    answers = [ids(CHAT, "x<|im_end|>"), ids(CHAT, "y, cut")]
    rendered = {
        "chat": (
            CHAT,
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
            "x<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n",
            "y, cut<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
        ),
        "brackets": (
            BRACKET,
            "<s>[INST] S\n\na [/INST]",
            " x </s><s>[INST] b [/INST]",
            " y, cut </s><s>[INST] c [/INST]",
        ),
        "plain": (PLAIN, "<s>S\n\na", "x\n\nb", "y, cut\n\nc"),
    }
    for target, *turns in rendered.values():
        ended = [ids(CHAT, "x") + tuple(target.eos_ids), answers[1]]
        prompts = load(tmp_path, [row], target)
        (c,) = prompts.conversations
        for turn in range(3):
            assert prompts.next_prompt(c, ended[:turn]) == ids(target, "".join(turns[: turn + 1]))
        there = pickle.loads(pickle.dumps(prompts))  # as workers get them
        assert there.next_prompt(c, ended[:2]) == prompts.next_prompt(c, ended[:2])
        assert prompts.next_prompt(c, []) == c.first


def test_given_answers_end_as_the_target_would_end_them(tmp_path):
    row = {"turns": ["a", "b"], "said": ["x", "y"]}
    never = target_of(byte_tokenizer(), eos=None)
    other = target_of(byte_tokenizer("{% for m in messages %}{{ m.content }}|{% endfor %}"))
    cases = [(CHAT, "y<|im_end|>"), (BRACKET, " y </s>"), (PLAIN, "y</s>"), (never, "y"), (other, "y|</s>")]
    for target, text in cases:
        prompts = load(tmp_path, [row], target, responses="said")
        (c,) = prompts.conversations
        assert prompts.given_answer(c, 1) == ids(target, text)
    # A template whose finished message does not begin with its prompt: the answer by itself.
    odd = target_of(byte_tokenizer("{{ messages | length }}{% if add_generation_prompt %}>{% endif %}"))
    prompts = load(tmp_path, [{"prompt": "a", "said": "x"}], odd, responses="said")
    assert prompts.given_answer(prompts.conversations[0], 0) == ids(odd, "x</s>")
    # Past an end in the middle of an answer nothing is emitted.
    prompts = load(tmp_path, [{"prompt": "a", "said": "x</s>y"}], responses="said")
    assert prompts.given_answer(prompts.conversations[0], 0) == ids(PLAIN, "x</s>")


def test_a_prompt_does_not_depend_on_the_day(tmp_path):
    dated = (
        "\n{% macro day() %}{{ strftime_now('%d %b %Y') if strftime_now is defined }}{% endmacro %}"
        "{{ day() }} {{ messages[0].content }}"
    )
    target = target_of(byte_tokenizer(dated))
    assert load(tmp_path, [{"prompt": "a"}], target).conversations[0].first == ids(target, "\n01 Jan 2025 a")


def test_a_template_that_raises_skips_the_row_and_no_other(tmp_path):
    picky = "{% if 'no' in messages[-1].content %}{{ raise_exception('not\nthis') }}{% endif %}{{ messages }}"
    target = target_of(byte_tokenizer(picky))
    prompts = load(tmp_path, [{"prompt": "no"}, {"turns": ["yes", "no"]}], target)
    assert reasons(prompts) == [(1, "the chat template refuses it: not")]
    with pytest.raises(InvalidInput, match="the chat template refuses it"):
        prompts.next_prompt(prompts.conversations[0], [ids(target, "x")])
    broken = target_of(byte_tokenizer("{% if %}"))
    with pytest.raises(InvalidInput, match="chat template cannot be read"):
        load(tmp_path, [{"prompt": "a"}], broken)


BOMBS = {
    "a constant": "{{ 'a' * 10**10 }}",
    "a format": "{{ '{:>3000000000}'.format(1) }}",
    "lists": "{% set it = namespace(x=[1]) %}{% for i in range(40) %}{% set it.x = it.x + it.x %}{% endfor %}",
    "texts": "{% set it = namespace(x='a') %}{% for i in range(40) %}{% set it.x = it.x ~ it.x %}{% endfor %}",
    "loops": "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 9 ** (10 ** 9) }}",
}


@pytest.mark.parametrize(
    "name", [*list(BOMBS)[:4], *(pytest.param(n, marks=pytest.mark.long) for n in list(BOMBS)[4:])]
)
def test_a_template_is_bounded_in_memory_and_time(name, monkeypatch):
    """It took 6 GB in 10 seconds, and a loop that writes nothing went on for ever; a second call costs nothing."""
    monkeypatch.setattr(confined, "MOST_WORK", 1)
    monkeypatch.setattr(confined, "MOST_MEMORY", 2**26)
    for _ in range(1000):
        with pytest.raises(InvalidInput, match="it takes more than 5 seconds or 512 MiB"):
            ChatTemplate({"default": BOMBS[name]}, {}).write([{"role": "user", "content": "a"}])
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2**21  # KiB
    assert ChatTemplate({"default": "{{ messages[0].content }}!"}, {}).write([{"role": "user", "content": "a"}]) == "a!"


def test_an_interrupted_template_does_not_answer_the_next_call(monkeypatch):
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    with monkeypatch.context() as patched:
        patched.setattr(confined, "MOST_WAIT", "no number")
        with pytest.raises(TypeError):
            template.write([{"role": "user", "content": "old"}])
    assert template.write([{"role": "user", "content": "new"}]) == "new"


def test_of_several_templates_the_default_is_taken(tmp_path):
    named = {"default": "{{ messages[0].content }}!", "tools": "?"}
    (c,) = load(tmp_path, [{"prompt": "a"}], target_of(byte_tokenizer(named))).conversations
    assert c.first == ids(PLAIN, "a!")
    with pytest.raises(InvalidInput, match="must have a default chat template"):
        load(tmp_path, [{"prompt": "a"}], target_of(byte_tokenizer({"tools": "?"})))
