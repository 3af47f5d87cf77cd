"""Chat templates: Jinja, rendered as the `transformers` library renders them.

The environment is that library's: a sandbox in which nothing can be changed, blocks trimmed, loop controls,
`raise_exception`, `tojson` that leaves characters as they are, `dict` and `namespace` without a way out, and
`{% generation %}` … `{% endgeneration %}` around what the assistant says. A template may come from anywhere, so it gets
plain values only. Written anew here because workers must start quickly and never load torch, which `transformers` may
do; the tests hold the two against each other.

One thing differs. `strftime_now` reads the clock, and the same record must give the same tokens for ever: without a
date of the user's, a template that calls it raises `ClockRead`.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from zephon.errors import SettingError
from zephon.extras import needing
from zephon.ops.conversations import Message

CLOCK = "strftime_now"
MARKS = re.compile(r"\{\%-?\s*generation\s*-?\%\}")


class ClockRead(Exception):
    """The template asked what day it is."""


class Rendered(NamedTuple):
    """A conversation as text; `spans` are what lies between generation marks, as (first, end) characters of it."""

    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """One template with the variables that every rendering gets. Pickles as its text.

    `variables` are plain JSON values: special tokens by name (`bos_token`), and the user's. `strftime_now` among them
    is not a variable but the date, in ISO format, that the template takes for today.
    """

    def __init__(self, text: str, variables: Mapping[str, Any], where: str = "chat_template") -> None:
        self.text, self.where = text, where
        self.variables = {name: value for name, value in variables.items() if name != CLOCK}
        self.today = _date(variables[CLOCK]) if CLOCK in variables else None
        self.marked = MARKS.search(text) is not None
        self._compiled  # noqa: B018  # a mistake in the template is one in the recipe

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_compiled"}

    @cached_property
    def _compiled(self) -> Any:
        with needing("tokenize_chat"):
            import jinja2

        try:
            return _environment(self._strftime).from_string(self.text)
        except jinja2.TemplateSyntaxError as error:
            raise SettingError(f"tokenize_chat: {self.where}, line {error.lineno}: {error.message}") from error

    @cached_property
    def reads(self) -> frozenset[str]:
        """The names that the template expects to be given."""
        import jinja2.meta

        return frozenset(jinja2.meta.find_undeclared_variables(self._compiled.environment.parse(self.text)))

    def render(self, messages: list[Message], tools: list[Any] | None = None, *, prompt: bool = False) -> Rendered:
        """The text of a conversation; with `prompt`, and what makes the assistant speak.

        Raises what the template raises: `jinja2.TemplateError`, or any error of the expressions in it. ValueError where
        the place of a mark cannot be told, because the template writes what is in it elsewhere or twice.
        """
        progress = _Progress()
        given = {"documents": None, **self.variables, "messages": messages, "tools": tools}
        parts = []
        for part in self._compiled.generate({**given, "add_generation_prompt": prompt, _PROGRESS: progress}):
            parts.append(part)
            progress.length += len(part)
        return Rendered("".join(parts), progress.spans_in("".join(parts)))

    def _strftime(self, form: str) -> str:
        if self.today is None:
            raise ClockRead(
                f"tokenize_chat: {self.where} writes today's date (strftime_now) into the text, so the same record "
                "would give other tokens tomorrow. Name a day: chat_template_kwargs={'strftime_now': '2025-01-31'}, or "
                "the variable that the template takes a date from, such as 'date_string'"
            )
        return self.today.strftime(form)


class _Progress:
    """How many characters one rendering has written, and what stands between its marks."""

    def __init__(self) -> None:
        self.length = 0
        self.marked: list[tuple[int, str]] = []

    def spans_in(self, text: str) -> list[tuple[int, int]]:
        end = 0
        for start, content in self.marked:
            if start < end or not text.startswith(content, start):
                raise ValueError("{% generation %} stands in another, a macro or a {% set %}: mark where it is written")
            end = start + len(content)
        return [(start, start + len(content)) for start, content in self.marked]


_PROGRESS = "progress of the rendering"  # no name of Jinja, so no template can reach it


def _environment(strftime: Callable[[str], str]) -> Any:
    import jinja2
    import jinja2.nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}`: notes where the block stands that is written next."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_between"), [], [], body).set_lineno(line)

        @jinja2.pass_context
        def _between(self, context: Any, caller: Callable[[], str]) -> str:
            text = caller()
            progress = context[_PROGRESS]
            progress.marked.append((progress.length, text))
            return text

    class TemplateDict:
        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args, **kwargs)

    class TemplateNamespace(Namespace):
        def __init__(*args: Any, **kwargs: Any) -> None:
            self, args = args[0], args[1:]
            attributes: dict[Any, Any] = dict(*args, **kwargs)
            for name in attributes:
                _refuse_private(name)
            Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_private(name)
            super().__setitem__(name, value)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        {"raise_exception": raise_exception, CLOCK: strftime, "dict": TemplateDict(), "namespace": TemplateNamespace}
    )
    return environment


def _refuse_private(name: Any) -> None:
    from jinja2.exceptions import SecurityError

    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: its name begins with an underscore")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _date(value: Any) -> datetime.datetime:
    try:
        return datetime.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise SettingError(
            f"tokenize_chat: chat_template_kwargs[{CLOCK!r}]={value!r}: must be a date in ISO format, such as "
            "'2025-01-31'"
        ) from None
