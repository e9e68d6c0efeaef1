"""Read one record: the user's turns, the system text before them, and the answers that are given.

A record comes in one of the shapes that people keep prompts in: a text, a list of turns, messages with role
and content, or ShareGPT's with from and value. Here a ValueError is the reason why its row is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from treeopt.runtime.prompts.chat import BLANK_LINE, Message
from treeopt.runtime.prompts.files import kind_of, listed, parse_json

# Columns that hold prompts, first found; the first three hold lists, in CSV cells as JSON.
LISTS = ("turns", "messages", "conversations")
COLUMNS = (*LISTS, "prompt", "text", "question", "instruction")
INPUTS = ("input", "context")  # joined to an instruction
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
NO_GROUP = "(none)"


def read_asked(
    record: Mapping[str, Any], column: str | None, responses: str | None
) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """System text and turns, and the given answers, of which there is one per turn or none."""
    name = column or next((name for name in COLUMNS if record.get(name) is not None), None)
    if name is None or record.get(name) is None:
        raise ValueError(f"it has nothing under {column or listed(COLUMNS)}")
    value = _decoded(record[name], name in LISTS)
    if name == "instruction" and column is None:
        value = _with_input(value, record)
    system, turns = _script(value, name)
    if not turns:
        raise ValueError(f"{name} has no turn of the user's")
    answers: tuple[str, ...] = ()
    if responses is not None:
        answers = _answers(_decoded(record.get(responses), isinstance(value, list)), responses, len(turns))
        turns = turns[: len(answers)]
    head: tuple[Message, ...] = (("system", system),) if system else ()
    return head + tuple(("user", turn) for turn in turns), answers


def _decoded(value: Any, is_list: bool) -> Any:
    """A list that a CSV cell holds as JSON; anything else as it is.

    In columns that are not known for lists, only messages are told from texts that begin with "[".
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = parse_json(value)
        except ValueError:
            return value
        if isinstance(parsed, list) and (is_list or (parsed and all(_is_message(v) for v in parsed))):
            return parsed
    return value


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and ("role" in value or "from" in value)


def _with_input(instruction: Any, record: Mapping[str, Any]) -> Any:
    for name in INPUTS:
        extra = record.get(name)
        if isinstance(instruction, str) and isinstance(extra, str) and extra.strip():
            return instruction + BLANK_LINE + extra
    return instruction


def _script(value: Any, name: str) -> tuple[str, list[str]]:
    """System text, and the user's turns."""
    if isinstance(value, str):
        return "", [_text(value, name)]
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a text or a list, but is {kind_of(value)}")
    if not any(isinstance(part, dict) for part in value):
        return "", [_text(turn, f"turn {i} of {name}") for i, turn in enumerate(value, 1)]
    return _messages(value)[:2]


def _messages(messages: list[Any]) -> tuple[str, list[str], list[str]]:
    """System text, the user's turns and what the assistant said to each ("" for nothing), by role or from.

    Where the assistant speaks at all, messages of the user's with no answer between them are one turn.
    """
    system: list[str] = []
    turns: list[list[str]] = []
    said: list[list[str]] = []
    roles = [_role(message, i) for i, message in enumerate(messages, 1)]
    for i, (role, message) in enumerate(zip(roles, messages, strict=True), 1):
        content = message.get("content") if message.get("content") is not None else message.get("value")
        if role == "user":
            if not turns or said[-1] or "assistant" not in roles:
                turns.append([])
                said.append([])
            turns[-1].append(_text(_joined(content), f"message {i}"))
        elif role == "assistant":
            if not turns:
                raise ValueError("its first message after the system text must be the user's")
            said[-1].append(str(_joined(content) or ""))  # "" also for a call of a tool
        else:
            if turns:
                raise ValueError(f"message {i} must not be the system's after the user has spoken")
            if content not in (None, ""):
                system.append(_text(_joined(content), f"message {i}"))
    join = BLANK_LINE.join
    return join(system), [join(turn) for turn in turns], [join(filter(None, texts)) for texts in said]


def _role(message: Any, i: int) -> str:
    if not isinstance(message, dict):
        raise ValueError(f"message {i} must be an object, but is {kind_of(message)}")
    name = message.get("role") if message.get("role") is not None else message.get("from")
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        shown = repr(name[:20]) if isinstance(name, str) else kind_of(name)
        raise ValueError(f"the role of message {i} must be system, user or assistant, but is {shown}")
    return role


def _joined(content: Any) -> Any:
    """The text of a content that comes in parts."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError("a content in parts must have parts of type text only")
    return "".join(part["text"] for part in content)


def _text(value: Any, name: str) -> str:
    """A text that can be tokenised."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, but is {kind_of(value)}")
    if not value.strip():
        raise ValueError(f"{name} is blank")
    if "\0" in value:
        raise ValueError(f"{name} has a NUL character in it: is the file text?")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} has half a character in it (a lone surrogate)") from None
    return value


def _answers(value: Any, name: str, n_turns: int) -> tuple[str, ...]:
    """Given answers up to the first turn that has none."""
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        value = _messages(value)[2]
    given = value if isinstance(value, list) else [value]
    if len(given) > n_turns:
        raise ValueError(f"{name} has {len(given)} answers to {n_turns} turns")
    answers: list[str] = []
    for answer in given:
        if answer is None or (isinstance(answer, str) and not answer.strip()):
            break
        answers.append(_text(answer, name))
    if not answers:
        raise ValueError(f"it has no answer under {name}")
    return tuple(answers)


def read_group(record: Mapping[str, Any], group_by: str | None) -> str:
    if group_by is None:
        return ""
    value = record.get(group_by)
    if isinstance(value, list | dict):
        raise ValueError(f"{group_by} must be a plain value to group by, but is {kind_of(value)}")
    if value is None or (isinstance(value, float) and math.isnan(value)) or not str(value).strip():
        return NO_GROUP
    return str(value).encode("utf-8", "replace").decode()
