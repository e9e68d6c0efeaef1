"""Read a row of a log: the requests that were answered there, as messages, texts or token ids, with their times.

Rows are those that servers, gateways and their users write: flat, or the request and the response of OpenAI's API, one
within the other. Here a ValueError is the reason why a row is skipped.
"""

from __future__ import annotations

import math
from array import array
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from treeopt.runtime.prompts.messages import (
    LISTS,
    REASONINGS,
    Message,
    first_of,
    joined,
    parsed_list,
    prompt_in,
    read_message,
    text_of,
)
from treeopt.runtime.prompts.rows import Record, kind_of, listed, parse_json

# Objects of a row that are looked into, so many within each other, and lists of the answers to one request.
WITHIN = ("request", "body", "response", "result", "parameters", "sampling_params", "meta_info", "details", "message")
MOST_WITHIN = 8
CHOICES = ("choices", "outputs")
# Names of values, first found; times ending in _ms are milliseconds.
PROMPTS = (*LISTS[1:], "prompt", "question", "instruction", "inputs", "input")
ANSWERS = ("response", "answer", "completion", "output", "generated_text", "content", "text")
SYSTEMS = ("system", "instructions", "system_prompt")  # what stands before the messages
PROMPT_IDS = ("prompt_token_ids", "prompt_ids", "input_ids")
ANSWER_IDS = ("token_ids", "generated_token_ids", "output_token_ids", "output_ids", "completion_token_ids",
              "response_token_ids", "answer_token_ids")  # fmt: skip
LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens", "n_predict", "num_predict")
BEGINS = ("begin_s", "start_s", "start_time", "startTime", "begin_time", "start_ms", "begin_ms", "arrival_time", "request_time",
          "created_at", "created", "timestamp", "ts")  # fmt: skip
ENDS = ("end_s", "end_time", "endTime", "end_ms", "finish_time", "finished_at", "completed_at")
SPANS = ("latency", "latency_s", "latency_ms", "duration", "duration_s", "duration_ms", "elapsed_s", "elapsed_ms")
CONVERSATIONS = ("conversation_id", "session_id", "thread_id", "chat_id", "trace_id", "conversation", "session")
STOPS, LIMITED = ("finish_reason", "stop_reason", "stop_type"), ("length", "max_tokens", "limit")
# Names that tell a server's answer from a text that a model wrote as JSON.
SERVERS = {*STOPS, *ANSWER_IDS, "usage", "meta_info", "generated_text", "done_reason", "eval_count"}
MOST = 2**31 - 1
Asked = tuple[list[Message], str, "array[int] | None"]  # messages, one text, or ids


@dataclass(frozen=True)
class LoggedRequest:
    """A request as it was written down.

    messages     : what was asked, as a chat template takes it; none where the prompt is ids, or a text sent as it stands
    text         : a prompt of one text; with ``messages`` too where it may be a user's turn
    answer       : the message that answered
    options      : what the request gave the chat template besides
    conversation : the value of a column that names it
    was_cut      : whether the limit ended the answer
    begin_s      : when it was asked; NaN where that is not known
    counted      : tokens of the answer as the server counted them; 0 where it did not
    """

    messages: tuple[Message, ...] = ()
    text: str = ""
    prompt_ids: array[int] | None = None
    answer: Message | None = None
    answer_ids: array[int] | None = None
    options: Record = field(default_factory=dict)
    limit: int = 0
    begin_s: float = math.nan
    conversation: str | None = None
    was_cut: bool = False
    counted: int = 0


def requests_in(row: Record, column: str | None = None, responses: str | None = None) -> Iterator[LoggedRequest]:
    """The requests of a row, one for each of its answers.

    column, responses : where prompt and answer stand; None: under a name that is known
    """
    fields = _flat(row)
    name, choices = first_of(fields, CHOICES, list)
    asked = _prompt(fields, column)
    if choices is None:
        yield _request(fields, None, asked, column, responses)
    elif not choices or not all(isinstance(choice, dict) for choice in choices):
        raise ValueError(f"{name} must be objects, one at least")
    else:
        for choice in choices:
            yield _request(fields, _flat(choice), asked, column, responses)


def _flat(row: Record, depth: int = MOST_WITHIN) -> dict[str, Any]:
    """What a row and the objects in it say of the request; the outer ones come first."""
    fields = outer = {name: _parsed(name, value, depth) for name, value in row.items() if value is not None}
    for name in WITHIN if depth else ():
        if isinstance(inner := outer.get(name), dict):
            fields = _flat(inner, depth - 1) | fields
    return fields


def _parsed(name: str, value: Any, depth: int) -> Any:
    """The object or the list of objects that a string holds as JSON; a text as it is, an answer that is JSON too."""
    if name not in (*WITHIN, *CHOICES) or not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        document = parse_json(value)
    except ValueError:
        return value
    return value if name in ANSWERS and not (depth and _is_response(document, depth - 1)) else document


def _is_response(document: Any, depth: int) -> bool:
    """Whether a document is what a server answers, and not a text that a model wrote as JSON."""
    if not isinstance(document, dict):
        return False
    fields = _flat(document, depth)
    choices = [choice for choice in first_of(fields, CHOICES, list)[1] or [] if isinstance(choice, dict)]
    parts = [fields, *(_flat(choice, depth) for choice in choices)]
    names = set[str]().union(document, *choices, *parts)
    return not SERVERS.isdisjoint(names) or any(part.get("role") == "assistant" for part in parts)


def _request(
    row: dict[str, Any], choice: dict[str, Any] | None, asked: Asked, column: str | None, responses: str | None
) -> LoggedRequest:
    """The request of a row, or of one of its answers, ``choice``, whose own fields come first."""
    fields = ChainMap(choice or {}, row)
    messages, text, prompt_ids = asked
    prompt_ids = _ids(*first_of(choice or {}, PROMPT_IDS)) or prompt_ids  # vLLM has them beside each answer
    answer_ids = _ids(*first_of(fields, ANSWER_IDS))
    if text and choice is None:
        messages = [{"role": "user", "content": text}]
    is_answered = bool(messages) and messages[-1]["role"] == "assistant"
    is_apart = choice is not None or responses or text or (answer_ids and not is_answered)
    own = fields if choice is None or responses else choice
    answer = _answer(own, [] if is_apart else messages, responses)
    if not (messages or text or prompt_ids):
        raise ValueError(f"it has no prompt under {column or listed((*PROMPT_IDS, *PROMPTS))}")
    if not (answer_ids or answer):
        raise ValueError(f"it has no answer, or an empty one{f', under {responses}' if responses else ''}")
    _, why = first_of(fields, STOPS)
    _, conversation = first_of(fields, CONVERSATIONS)
    options = first_of(fields, ("chat_template_kwargs",), dict)[1] or {}
    usage = first_of(fields, ("usage",), dict)[1] or {}
    return LoggedRequest(
        tuple(messages),
        text,
        prompt_ids,
        answer,
        answer_ids,
        options={**options, "tools": first_of(fields, ("tools",), list)[1]},
        limit=min(MOST, max(0, int(_number(*first_of(fields, LIMITS))))),
        begin_s=_begin_s(fields),
        conversation=None if conversation is None else str(conversation),
        was_cut=(why.get("type") if isinstance(why, dict) else why) in LIMITED,
        counted=first_of(usage, ("completion_tokens", "output_tokens"), int)[1] or 0,
    )


def _prompt(fields: Record, column: str | None) -> Asked:
    """What was asked: as messages, as one text, or as ids."""
    ids = _ids(*first_of(fields, PROMPT_IDS))
    name, value = prompt_in(fields, (column,) if column else PROMPTS)
    if isinstance(value, list) and value and type(value[0]) is int:
        return [], "", ids or _ids(name, value)
    if not isinstance(value, list):
        return [], "" if value is None else text_of(value, name, "a text or a list"), ids
    messages = [read_message(message, i) for i, message in enumerate(value, 1)]
    system = joined(first_of(fields, SYSTEMS, str | list)[1])
    if system and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    return messages, "", ids


def _answer(fields: Record, messages: list[Message], responses: str | None) -> Message | None:
    """The message that answered; where nothing else did, the assistant's last is taken off the ``messages``."""
    is_message = not responses and fields.get("role") == "assistant"
    names = (responses,) if responses else ("content",) if is_message else ANSWERS
    name, content = first_of(fields, names, str | list)
    if is_message or content is not None:
        others = {name: fields[name] for name in (*REASONINGS, "tool_calls") if name in fields}
        message = read_message({"role": "assistant", "content": content, **others}, len(messages) + 1)
    elif any(message["role"] == "assistant" for message in messages):
        while (message := messages.pop())["role"] != "assistant":
            pass
    else:
        return None
    if message["content"].strip():
        text_of(message["content"], name or "its answer")
    is_empty = not (message["content"].strip() or message.get("reasoning_content") or message.get("tool_calls"))
    return None if is_empty else message


def _ids(name: str, value: Any) -> array[int] | None:
    """Token ids; None where there are none."""
    if value is None:
        return None
    if not isinstance(value := parsed_list(value, True), list):
        raise ValueError(f"{name} must be a list of token ids, but is {kind_of(value)}")
    for token in value:
        if type(token) is not int or not 0 <= token <= MOST:
            raise ValueError(f"{name} must be token ids, whole numbers from 0 to {MOST}, but one is {token!r:.40}")
    return array("i", value)


def _begin_s(fields: Record) -> float:
    """When it was asked [s], or when it was answered less what that took; NaN where that is not known."""
    begin = _time(*first_of(fields, BEGINS))
    name, took = first_of(fields, SPANS)
    if math.isnan(begin) and took is not None:
        begin = _time(*first_of(fields, ENDS)) - _number(name, took)
    return begin


def _time(name: str, value: Any) -> float:
    """Seconds since the epoch, or since the log's clock began; NaN for none."""
    if isinstance(value, str) and not value.replace(".", "", 1).isdecimal():
        try:
            value = datetime.fromisoformat(value.strip().replace("Z", "+00:00"))
        except ValueError:
            raise ValueError(f"{name} must be a time, but is {value[:40]!r}") from None
    if isinstance(value, datetime):
        value = (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
    seconds = math.nan if value is None else _number(name, value)
    while seconds > 1e11:  # milliseconds, microseconds or nanoseconds since the epoch
        seconds /= 1000
    return seconds


def _number(name: str, value: Any) -> float:
    """A finite number, also from a cell of a table, milliseconds as seconds; 0 for none."""
    try:
        number = math.nan if isinstance(value, bool) else float(value or 0)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, but is {value!r:.40}")
    return number / 1000 if name.endswith("_ms") else number
