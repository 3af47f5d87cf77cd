"""Where each table and key of a TOML document stands, which `tomllib` does not tell.

The document has been parsed by then, so it is known to be valid: strings, comments and brackets are skipped, and only
headers and keys are read. A path is as one would index the parsed document: `("sources", 1, "path")`.
"""

from __future__ import annotations

import re

TomlPath = tuple[str | int, ...]

_SPACE = re.compile(r"(?:[\s]|#[^\n]*)*")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|' + r"'''.*?'{3,5}|" + r'"(?:\\.|[^"\\\n])*"|' + r"'[^'\n]*'",
    re.DOTALL,
)
_PART = re.compile(r"""[ \t]*("(?:\\.|[^"\\\n])*"|'[^'\n]*'|[A-Za-z0-9_-]+)[ \t]*(\.?)""")


class Lines:
    """The lines of a document's tables and keys, numbered from 1."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.first: dict[TomlPath, int] = {}
        """By path, in the order of the file: where it is first named."""
        self._tables: dict[TomlPath, int] = {}  # how many tables an array has so far
        self._scan()

    def of(self, path: TomlPath) -> int:
        """The line of a table or key; of what it stands in where it has none of its own (inside an inline table)."""
        while path and path not in self.first:
            path = path[:-1]
        return self.first.get(path, 1)

    def _scan(self) -> None:
        text, at = self._text, 0
        table: TomlPath = ()
        while (at := _end(_SPACE, text, at)) < len(text):
            if text[at] == "[":
                several = text.startswith("[[", at)
                keys, at = self._keys(at + 1 + several)
                table = self._header(keys, several, at)
                at = text.index("]", at) + 1 + several
            else:
                keys, at = self._keys(at)
                path = table + keys
                for length in range(len(table) + 1, len(path) + 1):
                    self._note(path[:length], at)
                at = self._value(text.index("=", at) + 1, path)

    def _keys(self, at: int) -> tuple[tuple[str, ...], int]:
        """The parts of a dotted key, and where it ends."""
        keys: list[str] = []
        while True:
            part = _PART.match(self._text, at)
            assert part is not None
            keys.append(part[1].strip("\"'"))
            at = part.end()
            if not part[2]:
                return tuple(keys), at

    def _header(self, keys: tuple[str, ...], several: bool, at: int) -> TomlPath:
        """The table that a header begins. Parts that name an array of tables mean its last one."""
        path: TomlPath = ()
        for number, key in enumerate(keys):
            path += (key,)
            self._note(path, at)
            if several and number == len(keys) - 1:
                self._tables[path] = self._tables.get(path, 0) + 1
            if path in self._tables:
                path += (self._tables[path] - 1,)
                self._note(path, at)
        return path

    def _value(self, at: int, path: TomlPath) -> int:
        """Skip a value; returns where its line ends. Inline tables in an array are noted."""
        text, depth, number = self._text, 0, 0
        while at < len(text):
            letter = text[at]
            if letter in "\"'":
                at = _end(_STRING, text, at)
                continue
            if letter == "#":
                at = text.find("\n", at) % (len(text) + 1)
                continue
            if letter == "\n" and not depth:
                break
            if letter == "{" and depth == 1:
                self._note((*path, number), at)
                number += 1
            depth += (letter in "[{") - (letter in "]}")
            at += 1
        return at

    def _note(self, path: TomlPath, at: int) -> None:
        if path not in self.first:
            self.first[path] = self._text.count("\n", 0, at) + 1


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None
    return found.end()
