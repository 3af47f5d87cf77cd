"""`expand_chat`: one conversation becomes a record for each turn of the assistant, which ends with that turn.

With `tokenize_chat(loss_scope="last_span")` after it each turn is learnt once, with all that was said before it,
whatever the template does to earlier turns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zephon.columns import MISSING, Block, Objects
from zephon.errors import SettingError
from zephon.ops.base import Faults, Stateless
from zephon.ops.conversations import ASSISTANT, raw_messages, role_of


class ExpandChat(Stateless):
    """A conversation to its beginnings, each through one of the assistant's messages, in order.

    The other fields are repeated. Messages stay as they are, but out of JSON if they came in that. A conversation in
    which the assistant says nothing is dropped and counted as `dropped_records`.
    """

    name = "expand_chat"
    changes_counts = True

    def __init__(self, field: str = "messages") -> None:
        if type(field) is not str or not field:
            raise SettingError(f"expand_chat: field={field!r}: must be the name of the field that holds the messages")
        self.field, self.needs = field, (field,)

    def describe(self) -> dict[str, Any]:
        return {"field": self.field}

    def requires(self, downstream: frozenset[str] | None) -> frozenset[str] | None:
        return None if downstream is None else downstream | {self.field}

    def process(self, block: Block, faults: Faults) -> Block:
        column = block.fields.get(self.field)
        values = [MISSING] * len(block) if column is None else column.to_list()
        children: list[Any] = []
        counts = np.zeros(len(block), np.int64)
        for record, value in enumerate(values):
            if value is MISSING:
                faults.lacks(block.sample_of(record), self.name, [self.field], "a list of messages")
                continue
            try:
                messages = raw_messages(value)
                turns = [at for at, message in enumerate(messages) if role_of(at, message) == ASSISTANT]
            except ValueError as error:
                faults.bad(block.sample_of(record), self.name, f"field {self.field!r}: {error}")
                continue
            children += [messages[: turn + 1] for turn in turns]
            counts[record] = len(turns)
            faults.count("dropped_records", not turns)
        others = {name: column for name, column in block.fields.items() if name != self.field}
        made = block.with_fields(others).take(np.repeat(np.arange(len(block)), counts))
        fields = {name: Objects(children) if name == self.field else made.fields[name] for name in block.fields}
        return made.with_fields(fields)
