"""Read a row of a log: the requests that were answered there, as messages, texts or token ids, with their times.

Rows are those that servers, gateways and their users write: flat, or the request and the response of OpenAI's API, one
within the other. Here a ValueError is the reason why a row is skipped.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from treeopt.runtime.prompts.asked import INPUTS, LISTS, ROLES, decoded, first_of, joined, role_of, text_of
from treeopt.runtime.prompts.chat import BLANK_LINE
from treeopt.runtime.prompts.files import kind_of, listed, parse_json

# Objects of a row that are looked into, and lists of the answers to one request.
WITHIN = ("request", "body", "response", "result", "parameters", "sampling_params", "meta_info", "details", "message")
CHOICES = ("choices", "outputs")
# Names of values, first found; times ending in _ms are milliseconds.
PROMPTS = (*LISTS[1:], "prompt", "question", "instruction", "inputs", "input")
ANSWERS = ("response", "answer", "completion", "output", "generated_text", "content", "text")
SYSTEMS = ("system", "instructions", "system_prompt")  # what stands before the messages
REASONINGS = ("reasoning_content", "reasoning", "thinking")  # what was generated before an answer
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
TOOLS = {"tool": "tool", "function": "tool", "observation": "tool"}
# Names that tell a server's answer from a text that a model wrote as JSON.
SERVERS = {*STOPS, *ANSWER_IDS, "usage", "meta_info", "generated_text", "done_reason", "eval_count"}
MOST = 2**31 - 1

Row = Mapping[str, Any]
Message = Mapping[str, Any]


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
    options: Row = field(default_factory=dict)
    limit: int = 0
    begin_s: float = math.nan
    conversation: str | None = None
    was_cut: bool = False
    counted: int = 0


def read_logged(row: Row, column: str | None = None, responses: str | None = None) -> Iterator[LoggedRequest]:
    """The requests of a row, one for each of its answers.

    column, responses : where prompt and answer stand; None: under a name that is known
    """
    whole = list(_objects(row))
    name, choices = _first(_joint(whole), CHOICES, list)
    for choice in choices or ([None] if name else [{}]):
        if not isinstance(choice, dict):
            raise ValueError(f"{name} must be objects, one at least, but is {kind_of(choice)}")
        yield _request(list(_objects(choice)), whole, column, responses)


def _objects(row: Row) -> Iterator[Row]:
    """A row and the objects in it that say something of the request, also those that are JSON in a string."""
    row = {name: _parsed(name, value) if name in (*WITHIN, *CHOICES) else value for name, value in row.items()}
    yield row
    for name in WITHIN:
        if isinstance(inner := row.get(name), dict):
            yield from _objects(inner)


def _parsed(name: str, value: Any) -> Any:
    """The object or the list of objects that a string holds as JSON; a text as it is, an answer that is JSON too."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        document = parse_json(value)
    except ValueError:
        return value
    is_text = name in ANSWERS and not (isinstance(document, dict) and any(map(_is_response, _objects(document))))
    return value if is_text else document


def _is_response(document: Row) -> bool:
    """Whether an object is what a server answers, and not a text that a model wrote as JSON."""
    _, choices = _first(document, CHOICES, list)
    choice = choices[0] if choices and isinstance(choices[0], dict) else {}
    has_message = isinstance(choice.get("message", document.get("message")), dict)
    return has_message or document.get("role") == "assistant" or not SERVERS.isdisjoint([*document, *choice])


def _joint(objects: Sequence[Row]) -> Row:
    """All that objects say, the first ones before the others."""
    return {name: value for one in reversed(objects) for name, value in one.items() if value is not None}


def _first(said: Row, names: Sequence[str], *kinds: type) -> tuple[str, Any]:
    """The first of these names that has a value, of these kinds, and the value; None where none has."""
    found = ((name, said[name]) for name in names if name in said and isinstance(said[name], kinds or object))
    return next(found, ("", None))


def _request(choice: list[Row], row: list[Row], column: str | None, responses: str | None) -> LoggedRequest:
    """The request of one of a row's answers, whose own objects come first."""
    said, is_choice, text, messages = _joint([*choice, *row]), bool(choice[0]), "", list[Message]()
    prompt_ids, answer_ids = (_ids(*_first(said, names)) for names in (PROMPT_IDS, ANSWER_IDS))
    name, value = _first(said, (column,) if column else PROMPTS)
    value = decoded(value, name in LISTS)
    if isinstance(value, list) and value and type(value[0]) is int:
        prompt_ids = prompt_ids or _ids(name, value)
    elif isinstance(value, list):
        messages = [_message(message, i) for i, message in enumerate(value, 1)]
        system = joined(_first(said, SYSTEMS, str, list)[1])
        if system and all(message["role"] != "system" for message in messages):
            messages.insert(0, {"role": "system", "content": system})
    elif value is not None:
        text = text_of(value, name, "a text or a list")
        extra = _first(said, INPUTS, str)[1] if name == "instruction" and column is None else None
        text += BLANK_LINE + extra if extra and extra.strip() else ""
    is_whole = bool(messages) and messages[-1]["role"] == "assistant"
    taken = [] if is_choice or responses or (answer_ids and not is_whole) else messages
    answer = _answer(choice if is_choice and responses is None else [*choice, *row], taken, responses)
    if not (messages or text or prompt_ids):
        raise ValueError(f"it has no prompt under {column or listed((*PROMPT_IDS, *PROMPTS))}")
    if not (answer_ids or answer):
        raise ValueError(f"it has no answer, or an empty one{f', under {responses}' if responses else ''}")
    if text and not is_choice:
        messages = [{"role": "user", "content": text}]
    why, named = _first(said, STOPS)[1], _first(said, CONVERSATIONS)[1]
    options = _first(said, ("chat_template_kwargs",), dict)[1] or {}
    usage = _first(said, ("usage",), dict)[1] or {}
    return LoggedRequest(
        tuple(messages),
        text,
        prompt_ids,
        answer,
        answer_ids,
        options={**options, "tools": _first(said, ("tools",), list)[1]},
        limit=min(MOST, max(0, int(_number(*_first(said, LIMITS))))),
        begin_s=_begin_s(said),
        conversation=None if named is None else str(named),
        was_cut=(why.get("type") if isinstance(why, dict) else why) in LIMITED,
        counted=_first(usage, ("completion_tokens", "output_tokens"), int)[1] or 0,
    )


def _answer(objects: Sequence[Row], messages: list[Message], responses: str | None) -> Message | None:
    """The message that answered; where nothing else did, the assistant's last is taken off the ``messages``."""
    name, said = _first(_joint(objects), (responses,) if responses else ANSWERS, str, list)
    roled = None if responses else next((one for one in objects if one.get("role") == "assistant"), None)
    if roled is not None:
        message: Message = _message(roled, len(messages) + 1)
    elif said is not None:
        reasoning = _first(_joint(objects), REASONINGS, str)[1]
        message = _message({"role": "assistant", "content": said, "reasoning_content": reasoning}, len(messages) + 1)
    elif any(one["role"] == "assistant" for one in messages):
        while (message := messages.pop())["role"] != "assistant":
            pass
    else:
        return None
    if message["content"].strip():
        text_of(message["content"], name or "its answer")
    is_empty = not (message["content"].strip() or message.get("reasoning_content") or message.get("tool_calls"))
    return None if is_empty else message


def _message(message: Any, i: int) -> Message:
    """A message as chat templates take it: its content a text, the arguments of its calls objects, nothing empty."""
    role, content = role_of(message, i, ROLES | TOOLS), message.get(first_of(message, ("content", "value")))
    reasoning = message.get(first_of(message, REASONINGS))
    if isinstance(content, list):
        thoughts = [part for part in content if isinstance(part, dict) and part.get("type") in REASONINGS]
        reasoning = reasoning or "".join(str(_first(part, (*REASONINGS, "text"))[1] or "") for part in thoughts)
        content = joined([part for part in content if part not in thoughts])
    if content is not None and not isinstance(content, str):
        raise ValueError(f"the content of message {i} must be a text, but is {kind_of(content)}")
    found = {key: value for key, value in message.items() if value not in (None, [])}
    if reasoning:
        found |= {"thinking": reasoning, "reasoning_content": reasoning}
    if calls := message.get("tool_calls"):
        if not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
            raise ValueError(f"the tool_calls of message {i} must be a list of objects")
        found["tool_calls"] = [{**call, "function": _with_arguments(call.get("function"))} for call in calls]
    return {**found, "role": role, "content": content or ""}


def _with_arguments(function: Any) -> Any:
    """A called function with its arguments as an object, of which the API has the text."""
    try:
        return {**function, "arguments": json.loads(function["arguments"])}
    except (TypeError, KeyError, ValueError, RecursionError):
        return function  # a model may write anything


def _ids(name: str, value: Any) -> array[int] | None:
    """Token ids; None where there are none."""
    if value is None:
        return None
    if not isinstance(value := decoded(value, True), list):
        raise ValueError(f"{name} must be a list of token ids, but is {kind_of(value)}")
    if not set(map(type, value)) <= {int} or (value and not 0 <= min(value) <= max(value) <= MOST):
        strange = next(one for one in value if type(one) is not int or not 0 <= one <= MOST)
        raise ValueError(f"{name} must be token ids, whole numbers from 0 to {MOST}, but one is {strange!r:.40}")
    return array("i", value)


def _begin_s(said: Row) -> float:
    """When it was asked [s], or when it was answered less what that took; NaN where that is not known."""
    begin = _time(*_first(said, BEGINS))
    if math.isnan(begin):
        name, took = _first(said, SPANS)
        begin = _time(*_first(said, ENDS)) - (math.nan if took is None else _number(name, took))
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
        found = math.nan if isinstance(value, bool) else float(value or 0)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{name} must be a finite number, but is {value!r:.40}")
    return found / 1000 if name.endswith("_ms") else found
