"""Messages: what a row asks, and what was answered, in the shapes that people keep them in.

A record has a text, a list of turns, messages with role and content, or ShareGPT's with from and value. Here a ValueError is
the reason why its row is skipped.
"""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from treeopt.runtime.prompts.rows import Record, kind_of, listed, parse_json

Message = Mapping[str, Any]  # role, content and what a chat template may take besides
Said = tuple[str, str]  # role (system, user or assistant), text
BLANK_LINE = "\n\n"
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
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
REASONINGS = ("reasoning_content", "reasoning", "thinking")  # what was generated before an answer
NO_GROUP = "(none)"


def read_conversation(
    record: Record, column: str | None, responses: str | None
) -> tuple[tuple[Said, ...], tuple[str, ...]]:
    """System text and turns, and the given answers, one per turn or none at all."""
    name, value = prompt_in(record, (column,) if column else COLUMNS)
    if value is None:
        raise ValueError(f"it has nothing under {column or listed(COLUMNS)}")
    system = ""
    if _has_messages(value):
        system, turns, _ = _exchanges(value)
    elif isinstance(value, list):
        turns = [text_of(turn, f"turn {i} of {name}") for i, turn in enumerate(value, 1)]
    else:
        turns = [text_of(value, name, "a text or a list")]
    if not turns:
        raise ValueError(f"{name} has no turn of the user's")
    answers: tuple[str, ...] = ()
    if responses is not None:
        answers = _given_answers(parsed_list(record.get(responses), isinstance(value, list)), responses, len(turns))
        turns = turns[: len(answers)]
    head: tuple[Said, ...] = (("system", system),) if system else ()
    return head + tuple(("user", turn) for turn in turns), answers


def first_of(record: Record, names: Sequence[str], kinds: Any = object) -> tuple[str, Any]:
    """The first of these names that has a value of these kinds, and the value; None where none has."""
    for name in names:
        if isinstance(value := record.get(name), kinds) and value is not None:
            return name, value
    return "", None


def prompt_in(record: Record, columns: Sequence[str]) -> tuple[str, Any]:
    """The first of these columns that has a value, and the value; an instruction with its input, unless it is the only column."""
    name, value = first_of(record, columns)
    value = parsed_list(value, name in LISTS)
    if name == "instruction" and len(columns) > 1 and isinstance(value, str):
        inputs = (record.get(key) for key in INPUTS)
        value = BLANK_LINE.join([value, *[text for text in inputs if isinstance(text, str) and text.strip()][:1]])
    return name, value


def parsed_list(value: Any, is_list: bool) -> Any:
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


def _exchanges(values: Sequence[Any]) -> tuple[str, list[str], list[str]]:
    """System text, the user's turns and what the assistant said to each ("" for nothing).

    Where the assistant speaks at all, messages of the user's with no answer between them are one turn.
    """
    messages = [read_message(value, i) for i, value in enumerate(values, 1)]
    speaks = any(message["role"] == "assistant" for message in messages)
    system: list[str] = []
    turns: list[list[str]] = []
    answers: list[list[str]] = []
    for i, message in enumerate(messages, 1):
        role, content = message["role"], message["content"]
        if role == "user":
            if not turns or answers[-1] or not speaks:
                turns.append([])
                answers.append([])
            turns[-1].append(text_of(content, f"message {i}"))
        elif role == "assistant":
            if not turns:
                raise ValueError("its first message after the system text must be the user's")
            answers[-1].append(content)  # "" also for a call of a tool
        elif role == "tool" or turns:
            raise ValueError(f"message {i} must not be the {role}'s here")
        elif content:
            system.append(text_of(content, f"message {i}"))
    join = BLANK_LINE.join
    return join(system), [join(turn) for turn in turns], [join(filter(None, texts)) for texts in answers]


def read_message(value: Any, i: int) -> Message:
    """A message as chat templates take it: its content a text, the arguments of its calls objects, nothing empty."""
    if not isinstance(value, dict):
        raise ValueError(f"message {i} must be an object, but is {kind_of(value)}")
    _, role = first_of(value, ("role", "from"))
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(
            f"the role of message {i} must be system, user, assistant or tool, but is "
            f"{repr(role[:20]) if isinstance(role, str) else kind_of(role)}"
        )
    _, content = first_of(value, ("content", "value"))
    _, reasoning = first_of(value, REASONINGS)
    if isinstance(content, list):
        thoughts = [part for part in content if isinstance(part, dict) and part.get("type") in REASONINGS]
        reasoning = reasoning or "".join(str(first_of(part, (*REASONINGS, "text"))[1] or "") for part in thoughts)
        content = joined([part for part in content if part not in thoughts])
    if content is not None and not isinstance(content, str):
        raise ValueError(f"the content of message {i} must be a text, but is {kind_of(content)}")
    message = {name: part for name, part in value.items() if part not in (None, [])}
    if reasoning:
        message |= {"thinking": reasoning, "reasoning_content": reasoning}
    if calls := message.get("tool_calls"):
        if not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
            raise ValueError(f"the tool_calls of message {i} must be a list of objects")
        message["tool_calls"] = [{**call, "function": _with_arguments(call.get("function"))} for call in calls]
    return {**message, "role": ROLES[role], "content": content or ""}


def _with_arguments(function: Any) -> Any:
    """A called function with its arguments as an object, where the API has their text."""
    try:
        return {**function, "arguments": json.loads(function["arguments"])}
    except (TypeError, KeyError, ValueError, RecursionError):
        return function  # a model may write anything


def joined(content: Any) -> Any:
    """The text of a content in parts; any other content as it is."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
        raise ValueError("a content in parts must have parts of type text only")
    return "".join(part["text"] for part in content)


def text_of(value: Any, name: str, kinds: str = "a text") -> str:
    """The value, which must be a text that is not blank."""
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


def _given_answers(value: Any, name: str, n_turns: int) -> tuple[str, ...]:
    """Given answers up to the first turn that has none."""
    given = _exchanges(value)[2] if _has_messages(value) else value if isinstance(value, list) else [value]
    if len(given) > n_turns:
        raise ValueError(f"{name} has {len(given)} answers to {n_turns} turns")
    spoken = takewhile(lambda answer: answer is not None and str(answer).strip(), given)
    answers = tuple(text_of(answer, name) for answer in spoken)
    if not answers:
        raise ValueError(f"it has no answer under {name}")
    return answers


def read_group(record: Record, group_by: str | None) -> str:
    """The group of a record: the value of a column as a text."""
    if group_by is None:
        return ""
    value = record.get(group_by)
    if isinstance(value, list | dict):
        raise ValueError(f"{group_by} must be a plain value to group by, but is {kind_of(value)}")
    if value is None or (isinstance(value, float) and math.isnan(value)) or not str(value).strip():
        return NO_GROUP
    return str(value).encode("utf-8", "replace").decode()
