"""Which characters of a rendered conversation are learnt.

Where the template has generation marks, what lies between them. Elsewhere it is told by rendering beginnings of the
conversation: what the assistant says in message `i` is what comes, in the whole text, after the rendering of the
messages before it with the prompt that makes the assistant speak, up to the end of the rendering of the messages
through it. That needs a template that renders the beginning of a conversation as the beginning of its text; one that
does not (it drops the reasoning of earlier turns, or moves a system message to the last turn) makes the conversation a
bad record, since any guess would teach the model something else than meant.

The scope then chooses: everything the assistant says, the last span alone, or the spans after the last user message.
"""

from __future__ import annotations

from typing import Any

from zephon.ops.chat_template import ChatTemplate, ClockRead, Rendered
from zephon.ops.conversations import ASSISTANT, USER, Message

SCOPES = ("all_assistant", "last_span", "after_last_user")


def render_supervised(template: ChatTemplate, messages: list[Message], tools: list[Any] | None, scope: str) -> Rendered:
    """The text of a conversation, and the spans of it that are learnt, in order. ValueError where they cannot be told;
    else what the template raises.
    """
    whole = template.render(messages, tools)
    if template.marked:
        return Rendered(whole.text, _chosen(whole.spans, template, messages, tools, scope))
    after = _after_last_user(messages) if scope == "after_last_user" else 0
    turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT and number >= after]
    turns = turns[-1:] if scope == "last_span" else turns
    return Rendered(whole.text, [_by_beginnings(template, messages, tools, turn, whole.text) for turn in turns])


def _chosen(
    spans: list[tuple[int, int]], template: ChatTemplate, messages: list[Message], tools: list[Any] | None, scope: str
) -> list[tuple[int, int]]:
    if scope == "last_span":
        return spans[-1:]
    after = _after_last_user(messages) if scope == "after_last_user" else 0
    return spans[len(template.render(messages[:after], tools).spans) :] if after else spans


def _after_last_user(messages: list[Message]) -> int:
    """The number of the first message after the user's last; 0 where the user says nothing."""
    return max((number + 1 for number, message in enumerate(messages) if message["role"] == USER), default=0)


def _by_beginnings(
    template: ChatTemplate, messages: list[Message], tools: list[Any] | None, turn: int, whole: str
) -> tuple[int, int]:
    try:
        before = template.render(messages[:turn], tools, prompt=True).text
    except ClockRead:
        raise
    except Exception as error:
        raise ValueError(
            f"message {turn} is the assistant's, and the chat template cannot render what comes before it "
            f"({type(error).__name__}: {error}), so what is to be learnt cannot be told; {_WAY_OUT}"
        ) from error
    through = whole if turn + 1 == len(messages) else template.render(messages[: turn + 1], tools).text
    if not (through.startswith(before) and whole.startswith(through)):
        which = "the messages through it" if through.startswith(before) else "what comes before it"
        raise ValueError(
            f"message {turn}: the chat template renders {which} otherwise alone than inside the conversation, so what "
            f"is to be learnt of it cannot be told; {_WAY_OUT}"
        )
    return len(before), len(through)


_WAY_OUT = (
    "put {% generation %} and {% endgeneration %} around it in the template, or learn each turn by itself: "
    "expand_chat() before, and loss_scope='last_span'"
)
