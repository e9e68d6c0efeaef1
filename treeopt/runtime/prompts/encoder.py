"""The encoder: texts, conversations and logged requests become one model's tokens.

With a chat template every prompt is written anew from all its messages, and the template alone writes special tokens. Without
one a conversation is plain text behind the tokenizer's own BOS, and each prompt goes on where the answer ended:

    system text · blank line · turn 1 · answer 1 without its end · blank line · turn 2 · ...
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt.errors import InvalidInput, Unsupported
from treeopt.files.storage import read_text
from treeopt.runtime.folder import loadable, read_object
from treeopt.runtime.prompts.messages import BLANK_LINE, REASONINGS, Message, Said
from treeopt.runtime.prompts.requests import LoggedRequest
from treeopt.runtime.prompts.template import NO_OPTIONS, TEMPLATE, ChatTemplate, templates_of

if TYPE_CHECKING:
    from treeopt.runtime.target import Target

Tokens = tuple[int, ...]
VOCABULARY, CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
FILES = (VOCABULARY, CONFIG, TEMPLATE, GENERATION)
MUST = f"`tokenizer` must be a folder with a {VOCABULARY}, or a tokenizer that transformers makes one of"
MUCH_LONGER = 1.5  # times as many tokens as here, which another tokenizer does not explain


@dataclass(frozen=True)
class Encoder:
    """How one model's texts become tokens.

    model    : an object of the package tokenizers, or a tokenizer of transformers that is not made of one
    eos_ids  : tokens that end an answer, the tokenizer's own first
    size     : one more than the largest token that the model has
    template : None for plain text
    special  : finds special tokens in a text
    """

    model: Any
    eos_ids: Tokens
    size: int
    template: ChatTemplate | None = None
    special: re.Pattern[str] = re.compile(r"(?!)")

    def __post_init__(self) -> None:
        if hasattr(self.model, "no_truncation"):  # of the package tokenizers
            self.model.no_truncation()
            self.model.no_padding()

    @classmethod
    def of_target(cls, target: Target, *, chat_template: bool = True) -> Encoder:
        """The encoder of a loaded model, with its chat template where it has one and ``chat_template`` allows it."""
        tokenizer = target.tokenizer
        named = getattr(tokenizer, "chat_template", None) if chat_template else None
        template = None
        if named:
            special = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
            template = ChatTemplate(named if isinstance(named, dict) else {"default": named}, special)
        ends = sorted(target.eos_ids, key=lambda token: (token != tokenizer.eos_token_id, token))
        model = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if model is tokenizer:  # of transformers, in Python, which may take out spaces where it decodes
            model.clean_up_tokenization_spaces = False
        return cls(model, tuple(ends), target.vocab_size, template)

    @classmethod
    def of_folder(cls, folder: Path, *, chat_template: bool = True) -> Encoder:
        """The encoder of a folder whose model is not loaded. InvalidInput where its files cannot be used."""
        model = _model_of(folder)
        config, generation = (
            read_object(folder / name) if (folder / name).is_file() else {} for name in (CONFIG, GENERATION)
        )
        texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
        special = {name: text for name, text in texts.items() if isinstance(text, str)}
        ends = [model.token_to_id(special.get("eos_token", ""))]
        ids = generation.get("eos_token_id")
        ends += ids if isinstance(ids, list) else [ids]
        eos_ids = tuple(dict.fromkeys(token for token in ends if type(token) is int and token >= 0))
        size = 1 + max(model.get_vocab(with_added_tokens=True).values())
        named = templates_of(folder, config) if chat_template else {}
        added = [re.escape(token.content) for token in model.get_added_tokens_decoder().values() if token.special]
        template = ChatTemplate(named, special) if named else None
        return cls(model, eos_ids, size, template, re.compile("|".join(added) or r"(?!)"))

    def encode(self, text: str, *, bos: bool = False) -> Tokens:
        """The tokens of a text, behind the tokenizer's own BOS where it is wanted. InvalidInput for tokens that the model lacks."""
        try:
            encoding = self.model.encode(text, add_special_tokens=bos)
        except TypeError:
            raise InvalidInput("its text has half a character in it (a lone surrogate)") from None
        tokens = tuple(getattr(encoding, "ids", encoding))
        self.check(tokens)
        return tokens

    def check(self, tokens: Sequence[int]) -> None:
        """InvalidInput for tokens that are not in the vocabulary."""
        if (most := max(tokens, default=0)) >= self.size:
            raise InvalidInput(f"its token {most} is beyond the vocabulary of {self.size}")

    def write(
        self, messages: Sequence[Message], options: Mapping[str, Any] = NO_OPTIONS, *, finished: bool = False
    ) -> str:
        """Messages as the template writes them, or as plain text; a system text that it refuses moves into the first turn.

        InvalidInput where the template refuses them all the same. Options are those of `ChatTemplate.write`.
        """
        if self.template is None:
            return plain_text(messages)
        try:
            return self.template.write(messages, options, finished=finished)
        except InvalidInput:
            if [message["role"] for message in messages[:2]] != ["system", "user"]:
                raise
            system, turn, *others = messages
            turn = {**turn, "content": system["content"] + BLANK_LINE + turn["content"]}
            return self.template.write([turn, *others], options, finished=finished)

    def behind(self, tokens: Tokens, text: str, whole: str) -> Tokens:
        """The tokens that a text has behind its beginning, which is given as tokens and text; none where it begins otherwise."""
        if (found := self.encode(whole))[: len(tokens)] == tokens:
            return found[len(tokens) :]
        return self.encode(whole[len(text) :]) if whole.startswith(text) else ()

    def until_end(self, tokens: Tokens, *, limit: int = 0, was_cut: bool = False) -> Tokens:
        """The tokens of an answer and the one that ends it, but not where a limit did."""
        end = next((i for i, token in enumerate(tokens) if token in self.eos_ids), len(tokens))
        if was_cut or 0 < limit <= end:
            return tokens[:end]
        return tokens[:end] + (tokens[end : end + 1] or self.eos_ids[:1])

    # Conversations.

    def first_prompt(self, messages: Sequence[Said]) -> Tokens:
        """Tokens up to the first answer. InvalidInput where the template refuses the messages."""
        return self.encode(self.write(dialogue(messages, ())), bos=self.template is None)

    def next_prompt(self, messages: Sequence[Said], first: Tokens, answers: Sequence[Tokens]) -> Tokens:
        """Tokens up to the next answer, after the given answers to the turns before."""
        if not answers:
            return first
        bodies = [answer[:-1] if answer and answer[-1] in self.eos_ids else answer for answer in answers]
        if self.template is not None:
            texts = [self.model.decode(list(body), skip_special_tokens=True) for body in bodies]
            return self.encode(self.write(dialogue(messages, texts)))
        tokens = first
        later = [text for role, text in messages if role == "user"][1:]
        for body, turn in zip(bodies, later, strict=False):
            tokens += body + self.encode(BLANK_LINE + turn)
        return tokens

    def given_answer(self, messages: Sequence[Said], answers: Sequence[str], turn: int) -> Tokens:
        """Tokens of answer ``turn`` (0 for the first) as the target would emit them, cut after its EOS."""
        before = dialogue(messages, answers[:turn])
        text = self.write(before)
        whole = self.write([*before, {"role": "assistant", "content": answers[turn]}], finished=True)
        return self.until_end(self.behind(self.encode(text), text, whole) or self.encode(answers[turn]))


def _model_of(folder: Path) -> Any:
    """The object of the package tokenizers for a model's folder."""
    try:
        import tokenizers
    except ImportError:
        raise Unsupported(
            "Texts become tokens by the package tokenizers, which is not installed. Install it with: "
            "pip install 'treeopt[text]'. A log of token ids needs no `tokenizer`."
        ) from None
    with loadable(MUST, str(folder)):
        if (folder / VOCABULARY).is_file():
            return tokenizers.Tokenizer.from_str(read_text(folder / VOCABULARY))
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise InvalidInput(f"{MUST} (pip install 'treeopt[models]'), but {folder} has no {VOCABULARY}.") from None
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer


def dialogue(messages: Sequence[Said], answers: Sequence[str]) -> list[Message]:
    """System text and turns with the answers between them, up to the first turn that has none.

    >>> [message["content"] for message in dialogue([("user", "1 + 1?"), ("user", "2 + 2?"), ("user", "Really?")], ["2"])]
    ['1 + 1?', '2', '2 + 2?']
    """
    spoken = [message for message in messages if message[0] != "user"]
    turns = [message for message in messages if message[0] == "user"]
    for turn, answer in zip(turns, answers, strict=False):
        spoken += [turn, ("assistant", answer)]
    spoken += turns[len(answers) : len(answers) + 1]
    return [{"role": role, "content": text} for role, text in spoken]


def plain_text(messages: Sequence[Message]) -> str:
    """Messages without a template: a blank line before all but the first and the answers.

    >>> plain_text(dialogue([("system", "Add."), ("user", "1 + 1 ="), ("user", "2 + 2 =")], [" 2"]))
    'Add.\\n\\n1 + 1 = 2\\n\\n2 + 2 ='
    """
    text = ""
    for message in messages:
        text += (BLANK_LINE if text and message["role"] != "assistant" else "") + message["content"]
    return text


def encode_request(
    request: LoggedRequest, encoder: Encoder | None, counts: Counter[str]
) -> tuple[Sequence[int], Sequence[int]]:
    """The tokens of a logged request's prompt and answer. ValueError where they cannot be had.

    Ids are taken as they are, texts as the tokenizer cuts them, messages as the chat template writes them. What this leaves in
    doubt is added to the counts: texts, answers that came as text; unwritten_calls and otherwise, answers that the chat template
    writes without their calls of tools, or otherwise than it begins an answer; reasoning, answers whose reasoning it does not
    write; shorter, answers of far fewer tokens than the server counted.
    """
    prompt: Sequence[int] = request.prompt_ids or ()
    answer: Sequence[int] = request.answer_ids or ()
    if not (prompt and answer):
        if encoder is None:
            raise ValueError("it has text, which `tokenizer` makes tokens of")
        is_chat = bool(request.messages) and not encoder.special.search(request.text)
        text = encoder.write(request.messages, request.options) if is_chat else request.text
        written = encoder.encode(text, bos=not (is_chat and encoder.template) and not encoder.special.search(text))
        prompt = prompt or written
        if not answer and request.answer is not None:
            if is_chat:
                tokens = _written_answer(request, encoder, written, text, counts)
            else:
                tokens = encoder.encode(_whole(request.answer, counts))
            answer = encoder.until_end(tokens, limit=request.limit, was_cut=request.was_cut)
    if encoder is not None:
        encoder.check([*prompt, *answer])
    if not (prompt and answer):
        raise ValueError(f"its {'answer' if prompt else 'prompt'} has no tokens")
    counts["texts"] += not request.answer_ids
    counts["shorter"] += request.counted > MUCH_LONGER * len(answer)
    return prompt, answer


def _written_answer(
    request: LoggedRequest, encoder: Encoder, prompt: Tokens, text: str, counts: Counter[str]
) -> Tokens:
    """What the template writes of the answer behind the prompt; its content where it begins answers otherwise."""
    answer = dict(request.answer or {})

    def whole(*left_out: str) -> str:
        part = {name: value for name, value in answer.items() if name not in left_out}
        return encoder.write([*request.messages, part], request.options, finished=True)

    written = whole()
    if "reasoning_content" in answer and written == whole(*REASONINGS):
        answer["content"] = _whole(answer, counts)
        written = whole()
    is_lost = "tool_calls" in answer and written == whole("tool_calls")
    tokens = encoder.behind(prompt, text, written)
    if not answer["content"].strip() and (is_lost or not tokens):
        raise ValueError("its answer calls a tool, which the chat template does not write behind the prompt")
    counts += Counter(unwritten_calls=int(is_lost), otherwise=int(not tokens))
    return tokens or encoder.encode(answer["content"])


def _whole(answer: Message, counts: Counter[str]) -> str:
    """The reasoning and the content of an answer, without the marks that its model writes around the reasoning."""
    counts["reasoning"] += "reasoning_content" in answer
    return str(answer.get("reasoning_content", "")) + str(answer["content"])
