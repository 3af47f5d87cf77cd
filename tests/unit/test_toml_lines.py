"""Lines of tables and keys: documents are composed line by line, so the right answer is known."""
from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from zephon.toml_lines import Lines

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VALUES = st.sampled_from(
    [
        "1", '"a # b"', "'[x]'", "true", "[1, 2]",
        "[\n  1, # ]\n  2,\n]", '"""\n[no]\nkey = 1 \\""" \n"""', "'''\n= [[x]]\n'''",
        '{ a = 1, b = "}" }', '["]", "["]', '"\\"="',
        "1979-05-27T07:32:00Z", '[ { a = "#" }, { b = [ ] } ]', '"""x"""""',
        "[[1], [2,\n3]]",
    ]
)  # fmt: skip
BLANKS = st.sampled_from(["", "\n", "# [table]\n", "   # key = '''\n", "\n\n"])
STATEMENTS = st.lists(st.tuples(st.sampled_from(["key", "dotted", "table", "tables", "below"]), VALUES, BLANKS))


@given(STATEMENTS)
def test_every_table_and_key_has_the_line_it_stands_on(statements):
    text, expected, table, tables = "", {}, (), []
    for number, (kind, value, blank) in enumerate(statements):
        text += blank
        line = text.count("\n") + 1
        if kind in ("key", "dotted"):
            keys = (f"k{number}",) if kind == "key" else (f"k{number}", "x y")
            written = f"k{number}" if kind == "key" else f'k{number} . "x y"'
            text += f"  {written} = {value}  # {number}\n"
            expected[(*table, keys[0])] = expected[(*table, *keys)] = line
        elif kind == "table":
            table = (f"t{number}",)
            text += f"[ t{number} ] # ]\n"
            expected[table] = line
        elif kind == "tables":
            table = ("many", len(tables))
            tables.append(table)
            text += "[[many]]\n"
            expected[table] = line
        elif tables:
            table = (*tables[-1], f"b{number}")
            text += f"[many.b{number}]\n"
            expected[table] = line
    document = tomllib.loads(text)
    lines = Lines(text)
    for path, line in expected.items():
        found = document
        for part in path:
            found = found[part]
        assert lines.of(path) == line, (path, text)
    inline = [path for path in lines.first if path not in expected and any(path[: len(e)] == e for e in expected)]
    assert all(isinstance(path[-1], int) for path in inline)


def test_tables_in_an_array_over_several_lines_have_lines_and_what_is_inside_them_has_theirs():
    lines = Lines('sources = [\n  { name = "a" },\n  { name = "b", more = { x = 1 } },\n]\n')
    assert lines.of(("sources", 1, "name")) == 3
    assert lines.of(("sources", 1, "more", "x")) == 3
    assert lines.of(("sources",)) == 1
