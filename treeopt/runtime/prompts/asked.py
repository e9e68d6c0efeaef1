"""Read one record: the user's turns, the system text before them, and the answers that are given.

A record comes in one of the shapes that people keep prompts in: a text, a list of turns, messages with role
and content, or ShareGPT's with from and value. Here a ValueError is the reason why its row is skipped.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
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
    name = first_of(record, (column,) if column else COLUMNS)
    if name is None:
        raise ValueError(f"it has nothing under {column or listed(COLUMNS)}")
    value = decoded(record[name], name in LISTS)
    if name == "instruction" and column is None:
        extra = next((text for key in INPUTS if isinstance(text := record.get(key), str) and text.strip()), None)
        value = value + BLANK_LINE + extra if extra and isinstance(value, str) else value
    system = ""
    if _has_messages(value):
        system, turns, _ = _messages(value)
    elif isinstance(value, list):
        turns = [text_of(turn, f"turn {i} of {name}") for i, turn in enumerate(value, 1)]
    else:
        turns = [text_of(value, name, "a text or a list")]
    if not turns:
        raise ValueError(f"{name} has no turn of the user's")
    answers: tuple[str, ...] = ()
    if responses is not None:
        answers = _answers(decoded(record.get(responses), isinstance(value, list)), responses, len(turns))
        turns = turns[: len(answers)]
    head: tuple[Message, ...] = (("system", system),) if system else ()
    return head + tuple(("user", turn) for turn in turns), answers


def first_of(record: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first of these names that has a value."""
    return next((name for name in names if record.get(name) is not None), None)


def decoded(value: Any, is_list: bool) -> Any:
    """A list that a CSV cell holds as JSON; anything else as it is.

    In columns that are not known for lists, only messages are told from texts that begin with "[".
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = parse_json(value)
        except ValueError:
            return value
        is_message = [isinstance(part, dict) and ("role" in part or "from" in part) for part in parsed]
        if is_list or (parsed and all(is_message)):
            return parsed
    return value


def _has_messages(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(part, dict) for part in value)


def _messages(messages: list[Any]) -> tuple[str, list[str], list[str]]:
    """System text, the user's turns and what the assistant said to each ("" for nothing), by role or from.

    Where the assistant speaks at all, messages of the user's with no answer between them are one turn.
    """
    system: list[str] = []
    turns: list[list[str]] = []
    said: list[list[str]] = []
    roles = [role_of(message, i) for i, message in enumerate(messages, 1)]
    for i, (role, message) in enumerate(zip(roles, messages, strict=True), 1):
        content = joined(message.get(first_of(message, ("content", "value"))))
        if role == "user":
            if not turns or said[-1] or "assistant" not in roles:
                turns.append([])
                said.append([])
            turns[-1].append(text_of(content, f"message {i}"))
        elif role == "assistant":
            if not turns:
                raise ValueError("its first message after the system text must be the user's")
            said[-1].append(str(content or ""))  # "" also for a call of a tool
        elif turns:
            raise ValueError(f"message {i} must not be the system's after the user has spoken")
        elif content not in (None, ""):
            system.append(text_of(content, f"message {i}"))
    join = BLANK_LINE.join
    return join(system), [join(turn) for turn in turns], [join(filter(None, texts)) for texts in said]


def role_of(message: Any, i: int, roles: Mapping[str, str] = ROLES) -> str:
    if not isinstance(message, dict):
        raise ValueError(f"message {i} must be an object, but is {kind_of(message)}")
    name = message.get(first_of(message, ("role", "from")))
    if not isinstance(name, str) or name not in roles:
        shown = repr(name[:20]) if isinstance(name, str) else kind_of(name)
        *others, last = dict.fromkeys(roles.values())
        raise ValueError(f"the role of message {i} must be {', '.join(others)} or {last}, but is {shown}")
    return roles[name]


def joined(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
        raise ValueError("a content in parts must have parts of type text only")
    return "".join(part["text"] for part in content)


def text_of(value: Any, name: str, kinds: str = "a text") -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be {kinds}, but is {kind_of(value)}")
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
    given = _messages(value)[2] if _has_messages(value) else value if isinstance(value, list) else [value]
    if len(given) > n_turns:
        raise ValueError(f"{name} has {len(given)} answers to {n_turns} turns")
    said = takewhile(lambda answer: answer is not None and str(answer).strip(), given)
    answers = tuple(text_of(answer, name) for answer in said)
    if not answers:
        raise ValueError(f"it has no answer under {name}")
    return answers


def read_group(record: Mapping[str, Any], group_by: str | None) -> str:
    if group_by is None:
        return ""
    value = record.get(group_by)
    if isinstance(value, list | dict):
        raise ValueError(f"{group_by} must be a plain value to group by, but is {kind_of(value)}")
    if value is None or (isinstance(value, float) and math.isnan(value)) or not str(value).strip():
        return NO_GROUP
    return str(value).encode("utf-8", "replace").decode()
