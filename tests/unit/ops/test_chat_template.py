"""Rendering: what a template may do, what it may not, and where its marks stand."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import jinja2
import pytest

from tests.chat_templates import DATED, MARKED
from zephon.errors import SettingError
from zephon.ops.chat_template import ChatTemplate, ClockRead

ASKED = [{"role": "user", "content": "Hé\n"}, {"role": "assistant", "content": "xyz"}]


def spans_of(text: str, messages: list[dict[str, Any]] = ASKED) -> list[str]:
    rendered = ChatTemplate(text, {}).render(messages)
    return [rendered.text[a:b] for a, b in rendered.spans]


def test_marks_stand_where_they_are_written() -> None:
    each = "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}!{% endgeneration %};{% endfor %}"
    assert spans_of(each) == ["Hé\n!", "xyz!"]
    assert spans_of("a{% generation %}{% endgeneration %}b") == [""]
    assert spans_of("a b") == []


@pytest.mark.parametrize(
    "text",
    [
        "{% set x %}{% generation %}inner{% endgeneration %}{% endset %}before {{ x }}",
        "{% macro f() %}before {% generation %}inner{% endgeneration %}{% endmacro %}{{ f() }}",
        "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
    ],
)
def test_marks_whose_place_cannot_be_told_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="mark where it is written"):
        spans_of(text)


def test_a_template_cannot_change_or_reach_what_it_is_given() -> None:
    messages = [{"role": "user", "content": ["a"]}]
    for text in (
        "{{ messages.append(1) }}",
        "{{ messages[0].update(x=1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ dict.__init__.__globals__ }}",
        "{% set n = namespace(_x=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
    ):
        with pytest.raises(jinja2.exceptions.SecurityError):
            ChatTemplate(text, {}).render(messages)
    assert messages == [{"role": "user", "content": ["a"]}]


def test_a_mistake_in_a_template_names_its_line() -> None:
    with pytest.raises(SettingError, match="chat_template, line 2: Encountered unknown tag 'endgeneration'"):
        ChatTemplate("a\n{% endgeneration %}", {})


def test_the_clock_is_never_read() -> None:
    with pytest.raises(ClockRead, match=r"\(strftime_now\).*_kwargs=\{'strftime_now': '2025-01-31'\}.*date_string"):
        ChatTemplate(DATED, {}).render(ASKED)
    for variables in ({"date_string": "31 Jan 2025"}, {"strftime_now": "2025-01-31"}):
        assert ChatTemplate(DATED, variables).render(ASKED).text.startswith("Today Date: 31 Jan 2025\n")
    with pytest.raises(SettingError, match="'strftime_now'.*'tomorrow': must be a date in ISO format"):
        ChatTemplate(DATED, {"strftime_now": "tomorrow"})


def test_a_template_travels_and_renders_in_several_threads_at_once() -> None:
    template = ChatTemplate(MARKED["llama"], {"bos_token": "<s>"})
    copy = pickle.loads(pickle.dumps(template))
    expected = template.render(ASKED)
    assert copy.render(ASKED) == expected
    assert [expected.text[a:b] for a, b in expected.spans] == ["xyz<|eot_id|>"]
    found = []
    threads = [threading.Thread(target=lambda: found.extend(copy.render(ASKED) for _ in range(50))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 200


def test_the_names_that_a_template_reads_are_known() -> None:
    assert ChatTemplate(MARKED["mistral"], {}).reads == {"bos_token", "eos_token", "messages"}
