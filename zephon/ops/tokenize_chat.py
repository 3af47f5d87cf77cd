"""`tokenize_chat`: a conversation becomes `input_ids` and a mask of the tokens that are learnt.

Each conversation is rendered by the tokenizer's chat template (`zephon.ops.chat_template`); which characters are learnt
is found then (`zephon.ops.loss_scope`); the texts of a whole block are encoded at once (`zephon.ops.chat_encoding`).
Special tokens are those that the template writes: none is added. Ids and masks are those of the `transformers` library
wherever it defines them.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from zephon.arguments import recipe_level
from zephon.columns import MISSING, Block, Column, Fixed, IntArray, Ragged, spans
from zephon.errors import SettingError
from zephon.ops.base import Faults, Stateless
from zephon.ops.chat_encoding import Encoder, Marked, load_encoder
from zephon.ops.chat_source import STANDARD_TOKENS, find_chat_templates
from zephon.ops.chat_template import ChatTemplate, ClockRead, Rendered
from zephon.ops.conversations import messages_of, plain, tools_of
from zephon.ops.loss_scope import SCOPES, render_supervised
from zephon.ops.token_fields import LOSS_MASK
from zephon.ops.tokenize import disagreement
from zephon.ops.tokenizer_backend import Disagreement
from zephon.ops.tokenizer_source import find_tokenizer

_GIVEN = ("messages", "tools", "add_generation_prompt")
_AT_ONCE = 128  # conversations that are encoded together


class TokenizeChat(Stateless):
    """Conversations to token ids and a loss mask.

    `max_length` cuts longer conversations off, mask and all. A conversation with nothing to learn from, before or after
    that, is dropped and counted as `dropped_records`.
    """

    name = "tokenize_chat"
    changes_counts = True

    def __init__(
        self,
        tokenizer: Any = None,
        tokenizer_id: str | os.PathLike[str] | None = None,
        *,
        field: str = "messages",
        chat_template: str | os.PathLike[str] | None = None,
        max_length: int | None = None,
        loss_scope: str = "all_assistant",
        tools_field: str | None = "tools",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mask_field_out: str = LOSS_MASK,
        preserve_upstream_payload: bool = False,
    ) -> None:
        _check_names(field, tools_field, mask_field_out)
        if loss_scope not in SCOPES:
            raise SettingError(f"tokenize_chat: loss_scope={loss_scope!r}: must be one of {', '.join(SCOPES)}")
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            raise SettingError(f"tokenize_chat: max_length={max_length!r}: must be None or a whole number from 1")
        self.field, self.tools_field, self.mask_field_out = field, tools_field, mask_field_out
        self.max_length, self.loss_scope = max_length, loss_scope
        self.preserve_upstream_payload = bool(preserve_upstream_payload)
        self.needs, self.keeps_fields = (field,), self.preserve_upstream_payload
        self.chat_template_kwargs = _checked_kwargs(chat_template_kwargs)
        self.tokenizer_source = find_tokenizer(tokenizer, tokenizer_id, self.name)
        found = find_chat_templates(chat_template, tokenizer, tokenizer_id)
        variables = {**found.tokens, **self.chat_template_kwargs}
        self.template = ChatTemplate(found.default, variables, found.where)
        self.tools_template = self.template
        if found.tool_use != found.default:
            self.tools_template = ChatTemplate(found.tool_use, variables, f"{found.where} 'tool_use'")
        for template in dict.fromkeys((self.template, self.tools_template)):
            _check_template(template)
        self._encoder: Encoder | None = None

    @cached_property
    def _digests(self) -> tuple[str, str]:
        read = self.template.reads | self.tools_template.reads
        tokens = {k: v for k, v in self.template.variables.items() if k in read and k not in self.chat_template_kwargs}
        content = json.dumps([self.template.text, self.tools_template.text, tokens], sort_keys=True)
        return self.tokenizer_source.digest, hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def describe(self) -> dict[str, Any]:
        tokenizer, template = self._digests
        return {
            "tokenizer": tokenizer,
            "template": template,
            "chat_template_kwargs": self.chat_template_kwargs,
            "field": self.field,
            "tools_field": self.tools_field,
            "max_length": self.max_length,
            "loss_scope": self.loss_scope,
            "mask_field_out": self.mask_field_out,
            "preserve_upstream_payload": self.preserve_upstream_payload,
        }

    def requires(self, downstream: frozenset[str] | None) -> frozenset[str] | None:
        read = frozenset({self.field} if self.tools_field is None else {self.field, self.tools_field})
        if not self.preserve_upstream_payload:
            return read
        return None if downstream is None else downstream - {"input_ids", self.mask_field_out} | read

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_encoder": None}

    def empty(self, block: Block) -> Block:
        made: dict[str, Column] = {
            "input_ids": Fixed(np.empty((0, 0), np.int32)),
            self.mask_field_out: Fixed(np.empty((0, 0), np.float32)),
        }
        return block.with_fields({**(block.fields if self.preserve_upstream_payload else {}), **made})

    def setup(self) -> None:
        self._loaded()

    @property
    def backend(self) -> str | None:
        """The library in use, once it is loaded."""
        return None if self._encoder is None else self._encoder.name

    def _loaded(self) -> Encoder:
        if self._encoder is None:
            self._encoder = load_encoder(self.tokenizer_source)
        return self._encoder

    def process(self, block: Block, faults: Faults) -> Block:
        rendered, records = self._rendered(block, faults)
        parts, good = [], []
        for low in range(0, max(1, len(rendered)), _AT_ONCE):
            piece = slice(low, low + _AT_ONCE)
            marked, found = self._encoded(rendered[piece], records[piece], block, faults)
            parts.append(marked)
            good.append(found)
            faults.moved()
        marked, records = _joined(parts), np.concatenate(good)
        if self.max_length is not None:
            marked = _truncated(marked, self.max_length)
        learnt = np.concatenate([np.zeros(1, np.int64), np.cumsum(marked.mask)])[marked.offsets]
        kept = np.flatnonzero(np.diff(learnt))
        faults.count("dropped_records", len(records) - len(kept))
        records = records[kept]
        base = block if self.preserve_upstream_payload else block.select(())
        if len(records) != len(block):
            base = base.take(records)
        ids = Ragged(marked.ids, marked.offsets)
        mask = Ragged(marked.mask.astype(np.float32), marked.offsets)
        if len(kept) != len(ids):
            ids, mask = ids.take(kept), mask.take(kept)
        return base.with_fields({**base.fields, "input_ids": ids, self.mask_field_out: mask})

    def _rendered(self, block: Block, faults: Faults) -> tuple[list[Rendered], IntArray]:
        """The conversations as text, without those that are bad, and which record each is."""
        conversations = _values(block, self.field)
        tools = _values(block, self.tools_field)
        rendered, records = [], []
        for record, (conversation, own_tools) in enumerate(zip(conversations, tools)):
            faults.moved()
            if conversation is MISSING:
                faults.lacks(block.sample_of(record), self.name, [self.field], "a list of messages")
                continue
            try:
                rendered.append(self._render(conversation, own_tools))
                records.append(record)
            except ClockRead as error:
                raise SettingError(str(error)) from None
            except _Bad as error:
                faults.bad(block.sample_of(record), self.name, str(error))
        return rendered, np.array(records, np.int64)

    def _render(self, conversation: Any, own_tools: Any) -> Rendered:
        try:
            messages = messages_of(conversation)
        except (ValueError, RecursionError) as error:
            raise _Bad(f"field {self.field!r}: {_said(error)}") from error
        try:
            tools = None if own_tools is MISSING else tools_of(own_tools)
        except (ValueError, RecursionError) as error:
            raise _Bad(f"field {self.tools_field!r}: {_said(error)}") from error
        try:
            template = self.template if tools is None else self.tools_template
            rendered = render_supervised(template, messages, tools, self.loss_scope)
            rendered.text.encode()
        except ClockRead:
            raise
        except UnicodeEncodeError as error:
            raise _Bad(f"field {self.field!r}: not valid Unicode, it holds a lone surrogate") from error
        except ValueError as error:
            raise _Bad(f"field {self.field!r}: {error}") from error
        except Exception as error:  # whatever the expressions of a template raise
            raise _Bad(f"field {self.field!r}: the chat template refuses it: {_said(error)}") from error
        return rendered

    def _encoded(
        self, rendered: list[Rendered], records: IntArray, block: Block, faults: Faults
    ) -> tuple[Marked, IntArray]:
        encoder = self._loaded()
        samples = block.samples if block.sample_offsets is None else block.samples[block.sample_offsets[:-1]]
        try:
            return encoder.encode(rendered, samples[records]), records
        except Disagreement as difference:
            raise disagreement(self.name, difference, block, records, faults) from None
        except Exception:  # somewhere in the block: each alone, to know which are bad
            parts, good = [], []
        for one, record in zip(rendered, records.tolist()):
            try:
                parts.append(encoder.encode([one], samples[record : record + 1]))
                good.append(record)
            except Disagreement as difference:
                raise disagreement(self.name, difference, block, np.array([record]), faults) from None
            except Exception as error:
                faults.bad(block.sample_of(record), self.name, error)
        return _joined(parts), np.array(good, np.int64)


class _Bad(Exception):
    """What is wrong with a record."""


def _said(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    plain_words = type(error) is ValueError or type(error).__name__ == "TemplateError"  # what raise_exception raises
    return str(error) if plain_words else f"{type(error).__name__}: {error}"


def _values(block: Block, field: str | None) -> list[Any]:
    column = None if field is None else block.fields.get(field)
    return [MISSING] * len(block) if column is None else column.to_list()


def _truncated(marked: Marked, limit: int) -> Marked:
    lengths = np.diff(marked.offsets)
    if not len(lengths) or lengths.max() <= limit:
        return marked
    lengths = np.minimum(lengths, limit)
    offsets = np.zeros(len(marked.offsets), np.int64)
    np.cumsum(lengths, out=offsets[1:])
    where = spans(marked.offsets[:-1], lengths, offsets)
    return Marked(marked.ids.take(where), offsets, marked.mask.take(where))


def _joined(parts: list[Marked]) -> Marked:
    lengths = np.concatenate([np.empty(0, np.int64), *(np.diff(part.offsets) for part in parts)])
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    ids = np.concatenate([np.empty(0, np.int32), *(part.ids for part in parts)])
    return Marked(ids, offsets, np.concatenate([np.empty(0, np.bool_), *(part.mask for part in parts)]))


def _check_names(field: str, tools_field: str | None, mask_field_out: str) -> None:
    for setting, value in (("field", field), ("tools_field", tools_field), ("mask_field_out", mask_field_out)):
        if value is None and setting == "tools_field":
            continue
        if type(value) is not str or not value:
            raise SettingError(f"tokenize_chat: {setting}={value!r}: must be the name of a field")
    if mask_field_out == "input_ids":
        raise SettingError("tokenize_chat: mask_field_out='input_ids': must be another name; the token ids are there")
    if tools_field == field:
        raise SettingError(f"tokenize_chat: tools_field={tools_field!r}: must be another field than the messages'")


def _checked_kwargs(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise SettingError(f"tokenize_chat: chat_template_kwargs={given!r}: must be a dict of template variables")
    for name in _GIVEN:
        if name in given:
            raise SettingError(f"tokenize_chat: chat_template_kwargs has {name!r}, which tokenize_chat itself gives")
    try:
        variables: dict[str, Any] = plain(dict(given), "chat_template_kwargs")
    except ValueError as error:
        raise SettingError(f"tokenize_chat: {error}") from error
    return variables


def _check_template(template: ChatTemplate) -> None:
    """Find what is wrong with a template whatever the conversation."""
    unknown = [n for n in STANDARD_TOKENS if n in template.reads and n not in template.variables]
    if unknown:
        warnings.warn(
            f"tokenize_chat: {template.where} uses {', '.join(unknown)}, which the tokenizer does not tell: rendered "
            f"as nothing. If that is wrong, pass chat_template_kwargs={{{unknown[0]!r}: …}}",
            stacklevel=recipe_level(),
        )
    try:
        template.render([{"role": "user", "content": "Hello"}], prompt=True)
    except ClockRead as error:
        raise SettingError(str(error)) from None
    except Exception:  # it may have its reasons for refusing this one
        return
