"""Tokens of logged requests: ids as they are, texts as the tokenizer cuts them, messages as the chat template writes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from treeopt.runtime.prompts.logged import REASONINGS, LoggedRequest, Message
from treeopt.runtime.prompts.tokenizer import Tokenizer

Tokens = Sequence[int]
MUCH_LONGER = 1.5  # times as many tokens as here, which another tokenizer does not explain


class Encoder:
    """Makes tokens of requests, and counts what is in doubt where they come from texts.

    counted : texts, answers that came as text; unwritten_calls and otherwise, answers that the chat template writes without
              their calls of tools, or otherwise than it begins an answer; reasoning, answers whose reasoning it does not
              write; shorter, answers of far fewer tokens than the server counted
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer, self.counted = tokenizer, Counter[str]()

    def __call__(self, one: LoggedRequest) -> tuple[Tokens, Tokens]:
        """The tokens of a request's prompt and answer. ValueError where they cannot be had."""
        prompt: Tokens = one.prompt_ids or ()
        answer: Tokens = one.answer_ids or ()
        tokenizer = self.tokenizer
        if tokenizer is None and not (prompt and answer):
            raise ValueError("it has text, of which `tokenizer` makes tokens")
        if tokenizer is not None:
            is_sent = one.text and (not one.messages or not tokenizer.template or tokenizer.is_rendered(one.text))
            is_chat = bool(one.messages) and not is_sent
            written = tokenizer.write(one.messages, one.options) if is_chat and not (prompt and answer) else one.text
            bos = not (is_chat and tokenizer.template) and not tokenizer.is_rendered(written)
            prompt = prompt or tokenizer.encode(written, bos=bos)
            if not answer and one.answer is not None:
                said = self._said(tokenizer, one, written) if is_chat else self._whole(one.answer)
                answer = tokenizer.until_end(tokenizer.encode(said), limit=one.limit, was_cut=one.was_cut)
            if (most := max(max(prompt, default=0), max(answer, default=0))) >= tokenizer.size:
                raise ValueError(f"its token {most} is beyond the tokenizer's {tokenizer.size}")
        if not (prompt and answer):
            raise ValueError(f"its {'answer' if prompt else 'prompt'} has no tokens")
        self.counted["texts"] += not one.answer_ids
        self.counted["shorter"] += one.counted > MUCH_LONGER * len(answer)
        return prompt, answer

    def _said(self, tokenizer: Tokenizer, one: LoggedRequest, written: str) -> str:
        """What the template writes of the answer behind the prompt; its content where it begins answers otherwise."""
        bare = dict(one.answer or {})
        whole = tokenizer.write([*one.messages, bare], one.options, finished=True)
        plain = {name: value for name, value in bare.items() if name not in REASONINGS}
        if plain != bare and whole == tokenizer.write([*one.messages, plain], one.options, finished=True):
            bare["content"] = self._whole(bare)
            whole = tokenizer.write([*one.messages, bare], one.options, finished=True)
        called = bool(bare.pop("tool_calls", None))
        is_lost = called and whole == tokenizer.write([*one.messages, bare], one.options, finished=True)
        is_behind = whole.startswith(written)
        if not bare["content"].strip() and (is_lost or not is_behind):
            raise ValueError("its answer calls a tool, which the chat template does not write behind the prompt")
        self.counted += Counter(unwritten_calls=int(is_lost), otherwise=int(not is_behind))
        return whole[len(written) :] if is_behind else str(bare["content"])

    def _whole(self, answer: Message) -> str:
        """The reasoning and the content of an answer, without the marks that its model writes around the reasoning."""
        reasoning = answer.get("reasoning_content", "")
        self.counted["reasoning"] += bool(reasoning)
        return reasoning + str(answer["content"])
