"""A corpus of real text, made from what a Python installation ships, and a tokenizer trained on it.

Two datasets, one of each format: `code` (JSON lines), pieces of modules, cut between top-level statements where those
are not too long, and `prose` (Parquet), docstrings, the language reference and text files. Modules of the standard
library come first, then those of site-packages, by name; so one installation always gives the same corpus. Tests,
tables of character sets, and files that are not UTF-8 are left out.
"""

from __future__ import annotations

import ast
import json
import os
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

VOCABULARY = 4096
END = "<eos>"
TOKENIZER_BYTES = 3_000_000
"""How much of the corpus the tokenizer is trained on."""

_LEFT_OUT = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "pydoc_data", "encodings"}
_LARGEST_FILE = 1_000_000
_PIECE, _LONGEST = 1500, 6000
"""Characters of a document: cut where it can be from the first number on, and anyway at the second."""
_SHORTEST = 200
"""What is shorter is left out."""
_SHARDS = {"code": 8, "prose": 4}


@dataclass(frozen=True)
class Document:
    """A text, and where it is from: a file and the place in it."""

    source: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """What was written: documents and bytes of text of each dataset."""

    documents: dict[str, int]
    bytes: dict[str, int]


def make_corpus(folder: Path, sizes: dict[str, int], roots: list[Path] | None = None) -> Corpus:
    """Write `code/` and `prose/` under `folder`, each of `sizes` bytes of text or what there is.

    `roots` are the folders to read; by default those of the running Python.
    """
    documents = collect(installed() if roots is None else roots, sizes, reference=roots is None)
    for name, write in (("code", _write_json_lines), ("prose", _write_parquet)):
        (folder / name).mkdir(parents=True)
        shards = _SHARDS[name]
        for shard in range(shards):
            low, high = (len(documents[name]) * bound // shards for bound in (shard, shard + 1))
            write(folder / name / f"{name}-{shard:02d}", documents[name][low:high])
    return Corpus(
        {name: len(found) for name, found in documents.items()},
        {name: _bytes(found) for name, found in documents.items()},
    )


def installed() -> list[Path]:
    """Where this Python keeps its modules: the standard library, then site-packages."""
    paths = sysconfig.get_paths()
    return [Path(path) for path in dict.fromkeys(paths[kind] for kind in ("stdlib", "purelib", "platlib"))]


def collect(roots: list[Path], sizes: dict[str, int], *, reference: bool) -> dict[str, list[Document]]:
    """The documents of both datasets, in order, until each has its size or there is no more."""
    found: dict[str, list[Document]] = {"code": [], "prose": []}
    left = dict(sizes)

    def add(name: str, documents: Iterator[Document]) -> None:
        for document in documents:
            if left[name] <= 0:
                return
            try:
                size = len(document.text.encode())
            except UnicodeEncodeError:  # an escape in a docstring may be half a character
                continue
            found[name].append(document)
            left[name] -= size

    if reference:
        add("prose", _language_reference())
    for root in roots:
        for path in _files(root):
            source = path.relative_to(root).as_posix()
            text = _text(path)
            if path.suffix != ".py":
                add("prose", _paragraphs(source, text))
            elif (module := _parsed(text)) is not None:
                add("code", _statements(source, text, module))
                add("prose", _docstrings(source, module))
            if max(left.values()) <= 0:
                return found
    return found


def train_tokenizer(folder: Path, target: Path) -> None:
    """Train a byte-level BPE on evenly spread documents of both datasets and save it as a `tokenizer.json`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [document.text for name in ("code", "prose") for document in read_documents(folder / name)]
    every = max(1, sum(map(len, texts)) // TOKENIZER_BYTES)
    tokenizer.train_from_iterator(texts[::every], trainer)
    tokenizer.save(str(target))


def read_documents(folder: Path) -> Iterator[Document]:
    """The documents of one dataset's folder, in order."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as file:
                yield from (Document(**json.loads(line)) for line in file)
        else:
            import pyarrow.parquet

            yield from (Document(**row) for row in pyarrow.parquet.read_table(path).to_pylist())


def _files(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if name not in _LEFT_OUT)
        for name in sorted(names):
            path = Path(folder, name)
            if (path.suffix in (".py", ".md", ".rst", ".txt") or name == "METADATA") and path.is_file():
                yield path


def _text(path: Path) -> str:
    """The file's text; empty if it is no text, or larger than a person would write."""
    try:
        return "" if path.stat().st_size > _LARGEST_FILE else path.read_bytes().decode().replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return ""


def _parsed(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's escapes
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _statements(source: str, text: str, module: ast.Module) -> Iterator[Document]:
    """The module as runs of whole top-level statements, with the comments between them."""
    lines = list(StringIO(text, newline="\n"))  # not splitlines: it counts form feeds, which `ast` does not
    first = 0
    for statement in [*module.body[1:], None]:
        end = len(lines) if statement is None else _first_line(statement) - 1
        piece = "".join(lines[first:end])
        if len(piece) >= _PIECE or statement is None:
            yield from _cut(source, first + 1, piece)
            first = end


def _first_line(statement: ast.stmt) -> int:
    """Where it begins, counted from 1, its decorators included."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _docstrings(source: str, module: ast.Module) -> Iterator[Document]:
    waiting: list[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]] = [("", module)]
    while waiting:
        name, node = waiting.pop()
        text = ast.get_docstring(node)
        if text:
            yield from _cut(f"{source} {name}".strip(), 1, text + "\n")
        for inner in reversed(node.body):
            if isinstance(inner, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                waiting.append((f"{name}.{inner.name}".lstrip("."), inner))


def _paragraphs(source: str, text: str) -> Iterator[Document]:
    piece, first = "", 1
    for paragraph in text.split("\n\n"):
        piece += paragraph + "\n\n"
        if len(piece) >= _PIECE:
            yield from _cut(source, first, piece)
            first, piece = first + piece.count("\n"), ""
    yield from _cut(source, first, piece)


def _cut(source: str, first: int, text: str) -> Iterator[Document]:
    """The text, which begins in line `first`, in parts of whole lines, none of them much too long or too short."""
    part: list[str] = []
    length = 0
    for line in [*text.splitlines(keepends=True), ""]:
        if part and (length + len(line) > _LONGEST or not line):
            if length >= _SHORTEST:
                yield Document(f"{source}:{first}", "".join(part))
            first, part, length = first + len(part), [], 0
        part.append(line)
        length += len(line)


def _language_reference() -> Iterator[Document]:
    """What `help()` shows of the language itself; some systems package Python without it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for topic in sorted(topics):
        yield from _paragraphs(f"reference/{topic}", topics[topic])


def _write_json_lines(path: Path, documents: list[Document]) -> None:
    lines = [json.dumps({"source": d.source, "text": d.text}, ensure_ascii=False) + "\n" for d in documents]
    path.with_suffix(".jsonl").write_text("".join(lines), encoding="utf-8")


def _write_parquet(path: Path, documents: list[Document]) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {"source": [d.source for d in documents], "text": [d.text for d in documents]}
    table = pyarrow.table(columns, schema=pyarrow.schema([("source", pyarrow.string()), ("text", pyarrow.string())]))
    pyarrow.parquet.write_table(table, path.with_suffix(".parquet"), row_group_size=512)


def _bytes(documents: list[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)
