"""Every rule that copies text drafts what its definition says, after every step of random texts full of ties."""

import random
import sys
from functools import partial

import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from treeopt.errors import InvalidInput
from treeopt.records.requestlog import Request
from treeopt.text.engines import KINDS, text_drafter
from treeopt.text.llama_cpp import Cache, Map, Mod, Simple
from treeopt.text.matches import LongestSuffix
from treeopt.text.prompt_lookup import Lookup, SuffixLookup
from treeopt.text.replay import replay
from treeopt.text.rules import MANY
from treeopt.text.suffix import SuffixDecoding

from .helpers import slow_text

CASES = 8 * profile.default.max_examples  # texts that are drawn: 400, and 1,600 in the long suite


def texts(seed: int) -> tuple[random.Random, list[int], list[int]]:
    """A prompt and an answer of few different tokens, at times with parts of them repeated, once or in a loop."""
    rng = random.Random(seed)
    letters = rng.choice((1, 2, 3, 6))
    text = [rng.randrange(letters) for _ in range(rng.randrange(2, 40))]
    if rng.random() < 0.2:
        text += text[-rng.randrange(1, 9) :] * rng.randrange(2, 9)
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(text))
        text += text[at : at + rng.randrange(1, 20)]
    cut = rng.randrange(1, len(text))
    return rng, text[:cut], text[cut:]


def steps(drafter, prompt, answer, limit=MANY):
    """Of every step the text before it, tokens left, the draft and how many guesses are the answer's next tokens."""
    state, at = drafter.start(prompt), 1
    drafter.commit(state, answer[:1], 0)
    while at < len(answer):
        draft = drafter.draft(state, limit - at)
        accepted = draft.accepted(answer[at:])
        assert list(draft.tokens[:accepted]) == answer[at : at + accepted]
        assert draft.tokens[accepted : accepted + 1] != answer[at + accepted :][:1] or at + accepted == len(answer)
        yield prompt + answer[:at], limit - at, draft, accepted
        drafter.commit(state, answer[at : at + accepted + 1], accepted)
        at += accepted + 1


LOOKUPS = {
    "vllm-v1": (lambda k, n, m, _: Lookup(k, n, m), slow_text.vllm_v1),
    "vllm-v2": (lambda k, n, m, _: Lookup(k, n, m, latest=True, fill="last"), slow_text.vllm_v2),
    "transformers": (lambda k, n, _, end: Lookup(k, n, cut="last", ends=frozenset({end})), slow_text.transformers),
    "openvino": (lambda k, n, *_: Lookup(k, n, fill="blank", cut="spare"), slow_text.openvino),
    "exllamav3": (lambda k, _, m, end: SuffixLookup(k, m), slow_text.longest_suffix),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_look_ups_copy_what_their_definitions_say(name):
    make, slow = LOOKUPS[name]
    for seed in range(CASES):
        rng, prompt, answer = texts(seed)
        k, n = rng.randrange(1, 9), rng.randrange(1, 7)
        m, end = rng.randrange(1, n + 1), rng.choice((0, 99))
        limit = len(answer) + rng.randrange(9)
        drafter = make(k, n, m, end)
        for text, left, draft, _ in steps(drafter, prompt, answer, limit):
            wanted = slow(text, k, n, m, left, end)
            assert draft.tokens == wanted, (seed, text)
            assert draft.rows == 1 + (k if getattr(drafter, "fill", "nothing") != "nothing" else len(wanted))


TEXTS = st.lists(st.integers(0, 2), max_size=30) | st.builds(
    lambda head, loop, times, tail: head + loop * times + tail,
    *(st.lists(st.integers(0, 1), max_size=4), st.lists(st.integers(0, 2), max_size=4), st.integers(0, 12)),
    st.lists(st.integers(0, 2), max_size=9),
)


@given(TEXTS)
def test_longest_suffix(text):
    """The longest that stood before is found at its earliest place behind every token, in loops too."""
    automaton = LongestSuffix()
    assert automaton.match() == (0, 0)
    for count, token in enumerate(text, 1):
        automaton.extend([token])
        lengths = [n for n in range(1, count) if slow_text.earlier(text[:count], n)]
        longest = max(lengths, default=0)
        end = slow_text.earlier(text[:count], longest)[0] + longest if longest else 0
        assert automaton.match() == (longest, end)


def requests_of(seed: int, most: int = 40) -> tuple[random.Random, list[tuple[list[int], list[int]]]]:
    """Some requests in order: some prompts take the last text up, some only its beginning, some are new."""
    rng = random.Random(seed)
    letters, text, found = rng.choice((1, 2, 3, 8, 30)), list[int](), []
    for _ in range(rng.randrange(1, 5)):
        text = text[: rng.randrange(len(text) + 1)] if rng.random() < 0.4 else text
        text = text if text and rng.random() < 0.7 else [rng.randrange(letters) for _ in range(rng.randrange(1, most))]
        answer = [rng.randrange(letters)]
        while len(answer) < rng.randrange(2, most):
            at = rng.randrange(len(text))
            answer += text[at : at + rng.randrange(1, 12)] if rng.random() < 0.7 else [rng.randrange(letters)]
        found.append((text, answer))
        text = text + answer
    return rng, found


LLAMA = {
    "ngram-simple": (Simple, slow_text.Simple, lambda rng: (rng.randrange(1, 5), rng.randrange(1, 8))),
    "ngram-map-k": (Map, slow_text.Map, lambda rng: (rng.randrange(1, 5), rng.randrange(1, 8), 1, False)),
    "ngram-map-k4v": (
        Map,
        slow_text.Map,
        lambda rng: (rng.randrange(1, 5), rng.randrange(1, 8), rng.randrange(1, 4), True),
    ),
    "ngram-mod": (Mod, slow_text.Mod, lambda rng: (rng.randrange(1, 7), rng.randrange(6), rng.randrange(1, 9))),
    "ngram-cache": (Cache, slow_text.Cache, lambda rng: ()),
}


@pytest.mark.parametrize("name", LLAMA)
def test_llama_cpp_drafts_what_its_rules_say(name):
    """A rule hears what was accepted only where it drafted."""
    make, slow_rule, options = LLAMA[name]
    for seed in range(CASES // 4 if make is Map else CASES):
        rng, requests = requests_of(seed)
        setting = options(rng)
        drafter, slow = make(*setting), slow_rule(*setting)
        for prompt, answer in requests:
            slow.begin(prompt)
            for text, _, draft, accepted in steps(drafter, prompt, answer):
                wanted = slow.draft(text)
                assert draft.tokens == wanted, (seed, text)
                assert draft.rows == 1 + len(wanted)
                if wanted:
                    slow.accept(accepted)


SUFFIX = (
    ((1, 2, 3, 1, 2, 4, 1, 2), 1.0, [3, 1]),
    ((1, 2, 3, 1, 2, 4, 1, 2), 2.0, [3, 1, 2, 4]),
    ((1, 2, 3, 1, 2, 4, 1, 2, 4, 1, 2), 1.0, [4, 1, 2]),
)


@pytest.mark.parametrize(("text", "factor", "wanted"), SUFFIX)
def test_suffixes_that_the_compiled_package_gave(text, factor, wanted):
    drafter = SuffixDecoding(16, 24, factor)
    assert drafter.draft(drafter.start(text), MANY).tokens == wanted


def test_suffixes_of_other_answers_that_the_compiled_package_gave():
    drafter = SuffixDecoding(16, 24)
    for answer in ([7, 8, 9, 7, 8, 5, 6], [7, 8, 9, 7]):
        drafter.commit(drafter.start([]), answer, 0)
    assert drafter.draft(drafter.start([4, 7, 8, 9, 7]), MANY).tokens == [8, 5, 6]


def test_suffix_decoding_drafts_what_its_definition_says():
    """Requests that run at once, of which the oldest are given up, running or not."""
    for seed in range(CASES // 4):
        rng = random.Random(seed)
        depth, cached, letters = rng.choice((2, 3, 4, 8)), rng.choice((0, 1, 2, 9)), rng.choice((1, 2, 3, 5))
        setting = (
            rng.randrange(1, 9),
            rng.choice((0.5, 1.0, 2.0)),
            rng.choice((-1.0, 0.0, 1.0)),
            rng.choice((0.0, 0.125, 0.25)),
        )
        length, factor, offset, least = setting
        drafter, common, live, started = (
            SuffixDecoding(length, depth, factor, offset, least, cached),
            slow_text.SuffixTrie(depth),
            [],
            [],
        )
        for number in range(rng.randrange(4, 16)):
            if not live or (len(live) < 3 and rng.random() < 0.4):
                text = [rng.randrange(letters) for _ in range(rng.randrange(1, 12))]
                own = slow_text.SuffixTrie(depth)
                for token in text:
                    own.append(0, token)
                live.append((number, drafter.start(text), own, text))
                started += [number] if cached else []
                while len(started) > cached:
                    common.remove(started.pop(0))
            number, state, own, text = request = rng.choice(live)
            new = [rng.randrange(letters) for _ in range(rng.randrange(1, 5))]
            drafter.commit(state, new, 0)
            for token in new:
                text.append(token)
                own.append(0, token)
                if number in started:
                    common.append(number, token)
            (mine, score), (others, other) = (one.draft(text[-depth:], *setting) for one in (own, common))
            assert drafter.draft(state, MANY).tokens == (mine if score >= other else others), (seed, text)
            if rng.random() < 0.2:
                live.remove(request)


def test_a_published_example():
    """vLLM's own: n-grams of 2 to 3, the earliest match."""
    state = Lookup(4, longest=3, shortest=2).start([1, 2, 3, 4, 2, 3])
    assert Lookup(4, longest=3, shortest=2).draft(state, MANY).tokens == [4, 2, 3]


SMALL = {
    "num_speculative_tokens": 4, "prompt_lookup_num_tokens": 4, "num_assistant_tokens": 4, "max_ngram_size": 3, "num_draft_tokens": 4,
    "ngram_match_min": 1,
    "suffix_decoding_max_cached_requests": 0, "suffix_cache_max_requests": 0,
    **{f"spec_ngram_{rule}_size_{x}": n for rule in ("simple", "map_k", "map_k4v") for x, n in zip("nm", (2, 4), strict=True)},
    "spec_ngram_mod_n_match": 2, "spec_ngram_mod_n_min": 1, "spec_ngram_mod_n_max": 4,
}  # fmt: skip


def small(name: str, **others: int) -> dict[str, int]:
    """Settings of a kind that draft behind few tokens."""
    return {option: value for option, value in (SMALL | others).items() if option in KINDS[name].options}


def operations(function) -> int:
    """Bytecode instructions that a call executes."""
    count, before = 0, sys.gettrace()

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_looped_answer(name, period):
    """A token of a long loop is searched with as many operations as one of a short loop: once some took 200 seconds for 1,000."""
    settings, per_token = small(name, suffix_decoding_max_tree_depth=4, suffix_cache_max_depth=4), []
    for n in (500, 1000):
        request = Request([9], [i % period for i in range(n)])
        per_token.append(operations(partial(replay, [request], lambda: text_drafter(name, settings))) / n)
    short, long = per_token
    assert long < 1.1 * short < 2000


def test_a_replay_emits_every_answer_whatever_is_drafted():
    for seed in range(50):
        rng, prompt, answer = texts(seed)
        requests = [Request(prompt, answer), Request(answer, prompt), Request(prompt, answer[:1])]
        run = replay(requests, lambda: Lookup(4, longest=2), state=rng.choice(("cold", "serial")))
        emitted = [run.emitted[a:b].sum() + 1 for a, b in zip(run.starts[:-1], run.starts[1:], strict=True)]
        assert emitted == [len(request.answer) for request in requests]
        assert (run.emitted <= run.accepted + 1).all()
        assert (run.rows == 1 + run.drafted).all()


def test_transformers_verifies_a_draft_with_the_prompt_and_that_is_no_step():
    """3 1 come with the prompt's pass, and 2 behind them; of OpenVINO's the first token alone does."""
    request = Request([1, 2, 3, 1, 2], [3, 1, 2, 3, 1])
    at_once = {"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 2}
    later = {"num_assistant_tokens": 2, "max_ngram_size": 2}
    for name, settings, emitted in (("transformers", at_once, [2]), ("openvino", later, [3, 1])):
        found = replay([request], lambda name=name, settings=settings: text_drafter(f"{name}:prompt-lookup", settings))
        assert found.emitted.tolist() == emitted


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_opens_by_its_options_and_refuses_others(name):
    drafter = text_drafter(name, small(name))
    run = replay([Request([1, 2, 3], [1, 2, 3, 1, 2, 3])], lambda: drafter, state="serial")
    assert run.emitted.sum() == 5 + (drafter.first == "step")
    with pytest.raises(InvalidInput, match=f"{name} takes the options .* but got depht"):
        text_drafter(name, {"depht": 1})


def test_one_bound_of_vllm_is_both_and_none_is_five():
    for bounds, wanted in (({}, (5, 5)), ({"max": 3}, (3, 3)), ({"min": 2}, (2, 2)), ({"min": 2, "max": 4}, (4, 2))):
        settings = {"num_speculative_tokens": 3} | {f"prompt_lookup_{which}": n for which, n in bounds.items()}
        drafter = text_drafter("vllm:ngram-v1", settings)
        assert (drafter.longest, drafter.shortest) == wanted
