"""The floors: what the libraries alone do, in loops as bare as can be.

    python -m tests.benchmarks.floors text FOLDER TOKENIZER fastokens|tokenizers PART PARTS
    python -m tests.benchmarks.floors mixed FOLDER TOKENIZER fastokens PART PARTS LINES
    python -m tests.benchmarks.floors ids FOLDER

Workload A: read Parquet text, tokenise a block at a time, append the end token, pack to 2049, batches of 8. Workload B:
read lists of ids, pack, batch. "mixed" is A with three blocks of ten from JSON lines; it neither shuffles nor looks for
the best fit. Each process takes every PARTS-th file, over and over.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.contest import deliver

LENGTH, BATCH = 2049, 8
DOCUMENTS_AT_ONCE, SLOWLY = 512, 64


def files(folder: Path, part: int = 0, parts: int = 1) -> list[Path]:
    """The shards that one of several processes reads."""
    return sorted(folder.glob("*.parquet"))[part::parts]


def packed(blocks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Token ids laid end to end and cut into batches `[8, 2049]`."""
    size, rest = BATCH * LENGTH, np.empty(0, np.int32)
    for block in blocks:
        data = np.concatenate((rest, block))
        whole = len(data) // size * size
        for low in range(0, whole, size):
            yield data[low : low + size].reshape(BATCH, LENGTH)
        rest = data[whole:]


def encoder(tokenizer: Path, library: str) -> Callable[[list[str]], np.ndarray]:
    """Documents to ids end to end, each with the end token behind it."""
    if library == "fastokens":
        import fastokens

        fast = fastokens.Tokenizer.from_file(str(tokenizer))
        end = fast.token_to_id("<eos>")

        def encode(texts: list[str]) -> np.ndarray:
            ids, offsets = fast.encode_batch_flat(texts, False)
            return np.insert(np.frombuffer(ids, np.int32), np.frombuffer(offsets, np.int64)[1:], end)

        return encode
    from tokenizers import Tokenizer

    slow = Tokenizer.from_file(str(tokenizer))
    last = slow.token_to_id("<eos>")

    def encode_slowly(texts: list[str]) -> np.ndarray:
        found = slow.encode_batch_fast(texts, add_special_tokens=False)
        return np.concatenate([np.array([*encoding.ids, last], np.int32) for encoding in found])

    return encode_slowly


def texts_of(paths: list[Path], at_once: int = DOCUMENTS_AT_ONCE) -> Iterator[list[str]]:
    """Blocks of documents, over and over."""
    for table in _batches(paths, "text", at_once):
        yield table.column(0).to_pylist()


def mixed_texts_of(paths: list[Path], lines: list[Path]) -> Iterator[list[str]]:
    """Blocks of documents of Parquet and of JSON lines, seven to three, over and over."""
    web, others = texts_of(paths), _lines_of(lines)
    for number in count():
        yield next(others if number % 10 in (2, 5, 8) else web)


def _lines_of(paths: list[Path]) -> Iterator[list[str]]:
    import msgspec

    class Row(msgspec.Struct):
        text: str

    decoder = msgspec.json.Decoder(Row)
    for path in cycle(paths):
        with open(path, "rb") as file:
            while found := list(islice(file, DOCUMENTS_AT_ONCE)):
                yield [row.text for row in decoder.decode_lines(b"".join(found))]


def ids_of(paths: list[Path]) -> Iterator[np.ndarray]:
    """Blocks of ids end to end, over and over."""
    for table in _batches(paths, "input_ids", DOCUMENTS_AT_ONCE):
        yield table.column(0).flatten().to_numpy()


def _batches(paths: list[Path], column: str, at_once: int) -> Iterator[Any]:
    import pyarrow.parquet as pq

    for path in cycle(paths):
        yield from pq.ParquetFile(path).iter_batches(at_once, columns=[column], use_threads=False)


def main(arguments: list[str]) -> None:
    workload, folder, *more = arguments
    if workload in ("text", "mixed"):
        tokenizer, library, part, parts, *lines = more
        encode = encoder(Path(tokenizer), library)
        at_once = DOCUMENTS_AT_ONCE if library == "fastokens" else SLOWLY
        paths = files(Path(folder), int(part), int(parts))
        if lines:
            texts = mixed_texts_of(paths, sorted(Path(lines[0]).iterdir())[int(part) :: int(parts)])
        else:
            texts = texts_of(paths, at_once)
        blocks = (encode(each) for each in texts)
    else:
        blocks = ids_of(files(Path(folder)))
    deliver(batch.size for batch in packed(blocks))


if __name__ == "__main__":
    main(sys.argv[1:])
