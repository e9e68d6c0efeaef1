"""A model's tokenizer and chat template without the model: its folder's files, read by tokenizers and jinja2 alone.

An engine puts the tokenizer's own BOS before a text, and none before what a template wrote. So does this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treeopt.errors import InvalidInput, Unsupported
from treeopt.files.storage import read_text
from treeopt.runtime.folder import loadable, read_object
from treeopt.runtime.prompts.chat import BLANK_LINE, NO_OPTIONS, ChatTemplate

VOCABULARY, CONFIG, TEMPLATE, GENERATION = FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


class Tokenizer:
    """The tokens of texts and messages, for one model. InvalidInput where its folder has none that can be used.

    eos_ids  : tokens that end an answer, the tokenizer's own first
    size     : one more than the largest token
    template : None where there is none, or it is not wanted
    """

    def __init__(self, folder: Path, *, chat_template: bool = True) -> None:
        try:
            from tokenizers import Tokenizer as Model
        except ImportError:
            raise Unsupported(
                "Texts become tokens by the package tokenizers, which is not installed. Install it with: "
                "pip install 'treeopt[text]'. A log of token ids needs no `tokenizer`."
            ) from None
        if not (file := folder / VOCABULARY).is_file():
            raise InvalidInput(f"`tokenizer` must be a folder with {VOCABULARY}, but {folder} has none.")
        with loadable("`tokenizer` must have a file of the package tokenizers", str(file)):
            self._model = Model.from_str(read_text(file))
            self._model.no_truncation()
            self._model.no_padding()
        self.size = 1 + max(self._model.get_vocab(with_added_tokens=True).values())
        config, generation = (read_object(folder / n) if (folder / n).is_file() else {} for n in (CONFIG, GENERATION))
        texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
        special = {name: text for name, text in texts.items() if isinstance(text, str)}
        own, ids = self._model.token_to_id(special.get("eos_token", "")), generation.get("eos_token_id")
        ends = (own, *(ids if isinstance(ids, list) else [ids]))
        self.eos_ids = tuple(dict.fromkeys(token for token in ends if type(token) is int and token >= 0))
        added = [token.content for token in self._model.get_added_tokens_decoder().values() if token.special]
        self.is_rendered = re.compile("|".join(map(re.escape, added)) or r"(?!)").search
        named = _templates(folder, config) if chat_template else {}
        self.template = ChatTemplate(named, special) if named else None

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """The tokens of a text. Raises ValueError for text that has no UTF-8."""
        try:
            ids: list[int] = self._model.encode(text, add_special_tokens=bos).ids
        except TypeError:
            raise ValueError("its text has half a character in it (a lone surrogate)") from None
        return ids

    def write(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] = NO_OPTIONS, *, finished: bool = False
    ) -> str:
        """Messages as `ChatTemplate.write` writes them, as plain text without a template."""
        if self.template is not None:
            return self.template.write(messages, options, finished=finished)
        return BLANK_LINE.join([*(str(message["content"]) for message in messages), *([] if finished else [""])])

    def until_end(self, ids: list[int], *, limit: int = 0, was_cut: bool = False) -> list[int]:
        """The tokens of an answer and the one that ends it, but not where a limit did."""
        end = next((i for i, token in enumerate(ids) if token in self.eos_ids), len(ids))
        if was_cut or 0 < limit <= end or not self.eos_ids:
            return ids[:end]
        return [*ids[:end], *(ids[end : end + 1] or self.eos_ids[:1])]


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a folder by name: those of its config, and those in files of their own."""
    said = config.get("chat_template")
    named = said if isinstance(said, list) else [{"name": "default", "template": said}]
    found = {
        one["name"]: one["template"] for one in named if isinstance(one, dict) and {"name", "template"} <= one.keys()
    }
    found |= {file.stem: read_text(file) for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / TEMPLATE).is_file():
        found["default"] = read_text(folder / TEMPLATE)
    return {str(name): text for name, text in found.items() if isinstance(text, str)}
