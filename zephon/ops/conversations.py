"""What a conversation is: a list of messages, each a dict with `role` and `content`, made of plain JSON values.

Data come in two shapes, and both leave here in the first: `{"role": …, "content": …}`, and ShareGPT's
`{"from": …, "value": …}`, whose speakers get the usual names. The whole list may be JSON in a string, as Parquet files
often hold it. Keys whose value is null are left out: a Parquet struct has every key in every message, and chat
templates tell a missing key from one that is null. Whatever else a message holds (`tool_calls`, `reasoning_content`, …)
is the template's business, as long as JSON could hold it.

A conversation that is none raises `ValueError`, whose text says what was expected and what was found.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

Message = dict[str, Any]

ASSISTANT, USER = "assistant", "user"
SPEAKERS = {
    "human": USER, "user": USER, "gpt": ASSISTANT, "chatgpt": ASSISTANT, "assistant": ASSISTANT, "model": ASSISTANT,
    "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
"""ShareGPT's speakers, and the roles that they have."""
SAYS_SOMETHING = ("content", "tool_calls", "function_call", "reasoning_content", "thinking", "reasoning")
"""A message has one of these keys, or it says nothing; that is more often a misnamed key than meant."""

_SCALARS = {str, int, float, bool, type(None)}


def raw_messages(value: Any) -> list[Any]:
    """The messages as they came, out of JSON if they came in that."""
    if isinstance(value, str):
        value = _decoded(value)
    if isinstance(value, tuple) or (isinstance(value, np.ndarray) and value.dtype.hasobject):
        value = list(value)
    if not isinstance(value, list):
        hint = "; decode_text() makes text of bytes" if isinstance(value, bytes) else ""
        raise ValueError(f"expected a list of messages, found {_kind(value)}{hint}")
    if not value:
        raise ValueError("expected a list of messages, found an empty one")
    return value


def messages_of(value: Any) -> list[Message]:
    """The conversation in new dicts and lists of its own."""
    return [_message(number, message) for number, message in enumerate(raw_messages(value))]


def role_of(number: int, message: Any) -> str:
    """Who says message `number`, in either shape."""
    if not isinstance(message, dict):
        raise ValueError(f"message {number}: expected a dict with 'role' and 'content', found {_kind(message)}")
    role = message.get("role")
    if role is None and message.get("from") is not None:
        speaker = message["from"]
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise ValueError(f"message {number}: 'from': expected one of {', '.join(SPEAKERS)}, found {speaker!r}")
        return SPEAKERS[speaker]
    if not isinstance(role, str) or not role:
        found = f"{role!r}" if role is not None else f"the keys {', '.join(map(repr, message))}"
        raise ValueError(f"message {number}: 'role': expected a name, found {found}")
    return role


def tools_of(value: Any) -> list[Any] | None:
    """A record's tools, each a dict (a JSON schema), or None where it has none. JSON in a string is decoded."""
    if isinstance(value, str):
        value = _decoded(value)
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected a list of JSON schemas, found {_kind(value)}")
    tools = [_decoded(tool) if isinstance(tool, str) else tool for tool in value]
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise ValueError(f"tool {number}: expected a JSON schema (a dict), found {_kind(tool)}")
    return [plain(tool, f"tool {number}") for number, tool in enumerate(tools)]


def plain(value: Any, where: str) -> Any:
    """The value in plain JSON types, copied. Raises ValueError for what JSON does not have."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str:
                raise ValueError(f"{where}: expected keys of type str, found {key!r}")
        return {key: plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, where) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist(), where)
    if isinstance(value, np.generic):
        return plain(value.item(), where)
    raise ValueError(f"{where}: expected what JSON can hold, found {_kind(value)}")


def _message(number: int, message: Any) -> Message:
    role = role_of(number, message)
    made = {key: value for key, value in message.items() if value is not None}
    if "role" not in made:
        made = {"role": role, "content": made.pop("value", None), **{k: v for k, v in made.items() if k != "from"}}
        if made["content"] is None:
            del made["content"]
    _check_content(number, made)
    made = plain(made, f"message {number}")
    reasoning = next((made[key] for key in SAYS_SOMETHING[3:] if key in made), None)
    if reasoning is not None:  # templates read it under either name
        made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
    return made


def _check_content(number: int, message: Message) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None:
        if not any(key in message for key in SAYS_SOMETHING):
            raise ValueError(
                f"message {number}: expected 'content', found only the keys {', '.join(map(repr, message))}"
            )
    elif isinstance(content, (list, tuple, np.ndarray)):
        for place, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                found = f"the type {part.get('type')!r}" if isinstance(part, dict) else _kind(part)
                raise ValueError(
                    f"message {number}: 'content' part {place}: expected {{'type': 'text', 'text': …}}, found {found}"
                )
    else:
        raise ValueError(f"message {number}: 'content': expected str or a list of text parts, found {_kind(content)}")


def _decoded(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        said = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        begin = text if len(text) <= 40 else text[:40] + "…"
        raise ValueError(f"expected a list, or one as JSON; found str {begin!r}, which is no JSON ({said})") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
