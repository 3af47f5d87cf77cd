"""Every operator with small settings drawn by hypothesis, and pipelines made of any chain of them.

A chain is a list of `(name, settings)` of plain values, so that it can stand in a recipe for a real daemon. Each piece
says what it needs of the records that reach it: rows as they are read, records with tokens, or anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from hypothesis import strategies as st

import zephon
from tests.unit.small_recipes import ENDS, WORDS, tokenizer
from zephon import Dataset, InMemoryShard, MixtureSpec, Pipeline, SampleBatch, SampleRecord, StaticMixtureWorkSource
from zephon.ops import BaseOp, CountingAccumulator, OpTraits, spawn_child

Records = list[SampleRecord]
Chain = Sequence[tuple[str, Mapping[str, Any]]]
ROWS, TOKENS, PACKED = "rows", "tokens", "packed"
TEMPLATE = (
    "{% for message in messages %}{{ message.role + ' ' }}{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content + ' ' }}{% endgeneration %}{% else %}{{ message.content + ' ' }}{% endif %}{% endfor %}"
)
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.role + ' ' + message.content + ' ' }}{% endfor %}"


def row_of(name: str, number: int) -> dict[str, Any]:
    words = [WORDS[(number * 5 + j) % 40] for j in range(number * 7 % 13)]
    messages = [
        {"role": "assistant" if turn % 2 else "user", "content": " ".join(words[turn : turn + 3]) or "w0"}
        for turn in range(2 + number % 3)
    ]
    return {"id": number, "of": name, "text": " ".join(words), "raw": b"w%d" % number, "messages": messages}


def dataset(name: str, rows: int, shards: int) -> Dataset:
    bounds = [rows * shard // shards for shard in range(shards + 1)]
    return Dataset.from_dict(
        name,
        {
            f"{name}-{shard}": InMemoryShard([row_of(name, i) for i in range(bounds[shard], bounds[shard + 1])])
            for shard in range(shards)
        },
    )


# Functions of a user's, for records of any kind


def size_of(payload: Mapping[str, Any]) -> int:
    """A number that tells records of any kind apart."""
    if "id" in payload:
        return int(payload["id"])
    return sum(int(np.sum(value)) if isinstance(value, np.ndarray) else 1 for value in payload.values())


def keep_some(every: int, payload: dict[str, Any]) -> dict[str, Any] | None:
    return None if size_of(payload) % every == 0 else {**payload, "size": size_of(payload)}


def with_random(payload: dict[str, Any]) -> dict[str, Any]:
    return {**payload, "drawn": float(zephon.generator().random())}


def children(most: int, records: Records) -> Records:
    made = []
    for record in records:
        for index in range(size_of(record.payload) % (most + 1)):
            made.append(SampleRecord(spawn_child(record.meta, index), {**record.payload, "child": index}))
    return made


def stamped(records: Records) -> Records:
    for place, record in enumerate(records):
        record.payload["place"] = [place, len(records), record.meta.lane_id]
    return records


def hold(count: int, state: Records, records: Records) -> tuple[Records, Records]:
    """Records leave in groups of `count`, the last first."""
    out: Records = []
    for record in records:
        state.append(record)
        if len(state) == count:
            out += state[::-1]
            state.clear()
    return state, out


def rest(state: Records) -> Records:
    return state


def stamped_again(records: Records) -> Records:
    """What leaves says in which list it did, and draws a number."""
    for place, record in enumerate(records):
        record.payload["list"] = [place, len(records), float(zephon.generator(record.meta).random())]
    return records


def mean_length(batch: SampleBatch) -> dict[str, Any] | None:
    if batch.first_record % 3 == 2:
        return None
    return {**batch, "records": [f"{batch.lane}:{len(batch)}"] * len(batch)}


class Sized(BaseOp):
    """An operator as a class."""

    def __init__(self, at_once: int = 1) -> None:
        self.at_once = at_once

    def traits(self) -> OpTraits:
        return OpTraits(parallelism=self.at_once)

    def process_one(self, record: SampleRecord) -> Records:
        record.payload["sized"] = size_of(record.payload)
        return [record]


def long_enough(payload: Mapping[str, Any]) -> int:
    return 1 + size_of(payload) % 3


# The operators


@dataclass(frozen=True)
class Piece:
    """`method` of a pipeline; `settings` are drawn; `extra` are those that are no plain values."""

    method: str
    settings: st.SearchStrategy[dict[str, Any]]
    needs: tuple[str, ...] = (ROWS, TOKENS, PACKED)
    gives: str | None = None
    """The kind of what comes out; None: of what goes in."""
    extra: Callable[[dict[str, Any]], dict[str, Any]] = dict


def settings(**each: st.SearchStrategy[Any] | list[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({n: st.sampled_from(v) if isinstance(v, list) else v for n, v in each.items()})


def with_function(
    argument: str, function: Callable[..., Any], /, *taken: str, **more: Any
) -> Callable[..., dict[str, Any]]:
    """`function` with the drawn settings `taken` in front, as that argument."""

    def extra(drawn: dict[str, Any]) -> dict[str, Any]:
        left = {key: value for key, value in drawn.items() if key not in taken}
        return {**left, argument: partial(function, *(drawn[key] for key in taken)) if taken else function, **more}

    return extra


PACKING = {
    "max_length": [9, 16],
    "drop_oversized": [None, True],
    "min_sequence_length": [1, 3],
    "shuffle_strategy": [None, "within_bin", "bins"],
    "homogeneity": ["none", "full"],
}
BINS = {
    "num_bins": [1, 3],
    "flush_strategy": ["fifo", "fullest"],
    "max_sequences_per_bin": [None, 2],
    "candidate_pool_size": [None, 0, 2],
    "max_candidate_age": [None, 1],
}

PIECES: dict[str, Piece] = {
    "decode_text": Piece("decode_text", settings()),
    "filter": Piece("map_transform", settings(every=[2, 3]), extra=with_function("fn", keep_some, "every")),
    "random": Piece("map_transform", settings(), extra=with_function("fn", with_random)),
    "tokenize": Piece(
        "tokenize",
        settings(special_tokens=["none", "eos", "bos_eos"], preserve_upstream_payload=st.booleans()),
        needs=(ROWS,),
        gives=TOKENS,
        extra=lambda drawn: {**drawn, "tokenizer_id": tokenizer(), "field": "text"},
    ),
    "split": Piece(
        "tokenize",
        settings(max_length=[3, 4], special_tokens=["none", "eos"]),
        needs=(ROWS,),
        gives=TOKENS,
        extra=lambda drawn: {**drawn, "tokenizer_id": tokenizer(), "field": "text", "split_long_samples": True},
    ),
    "expand_chat": Piece("expand_chat", settings(), needs=(ROWS,)),
    "tokenize_chat": Piece(
        "tokenize_chat",
        settings(
            loss_scope=["all_assistant", "last_span", "after_last_user"],
            max_length=[None, 12],
            chat_template=[TEMPLATE, PLAIN_TEMPLATE],
        ),
        needs=(ROWS,),
        gives=TOKENS,
        extra=lambda drawn: {**drawn, "tokenizer_id": tokenizer()},
    ),
    "wrap": Piece(
        "pack_flat", settings(**PACKING), (TOKENS,), PACKED, lambda drawn: {**drawn, "algorithm": "wrap"}
    ),
    "pack_flat": Piece(
        "pack_flat",
        settings(algorithm=["first_fit", "best_fit", "best_fit_wrap"], **PACKING, **BINS),
        (TOKENS,),
        PACKED,
    ),
    "pack_sequences": Piece(
        "pack_sequences",
        settings(**{**PACKING, **BINS, "algorithm": ["first_fit", "best_fit"], "drop_oversized": [True]}),
        (TOKENS,),
        PACKED,
    ),
    "shuffle": Piece("shuffle", settings(buffer_size=[1, 3, 7, 100], seed=[0, 5], algorithm=["streaming", "block"])),
    "ensure_mixture": Piece("ensure_mixture", settings(max_buffer_size=[None, 2, 8]), (ROWS, TOKENS)),
    "stateful_transform": Piece(
        "stateful_transform",
        settings(count=[2, 5]),
        extra=with_function("push", hold, "count", name="hold", init_state=list, flush=rest, transform=stamped_again),
    ),
    "children": Piece(
        "add_op", settings(most=[1, 2]), extra=with_function("process_many", children, "most", op="children")
    ),
    "groups": Piece(
        "add_op",
        settings(count=[1, 3]),
        extra=lambda drawn: {
            "op": "groups",
            "process_many": stamped,
            "accumulator": CountingAccumulator(drawn["count"]),
            "batch_shape_sensitive": True,
        },
    ),
    "sized": Piece("add_op", settings(), extra=lambda _: {"op": Sized()}),
}
SPREADS = (
    "decode_text", "filter", "random", "tokenize", "split", "tokenize_chat", "children", "sized", "groups",
    "stateful_transform",
)  # fmt: skip
"""Those that `parallelism` brings to workers, where they stand behind one that holds records."""
NAMES = [name for name, piece in PIECES.items() if hasattr(Pipeline, piece.method)]
"""All but `map_batch`, which is no operator on records and comes behind the batch."""


def kind_after(names: Iterable[str]) -> str | None:
    """The kind of records that a chain ends with; None if one of its pieces cannot work on what reaches it."""
    kind = ROWS
    for name in names:
        if kind not in PIECES[name].needs:
            return None
        kind = PIECES[name].gives or kind
    return kind


def completed(names: Sequence[str]) -> list[str] | None:
    """The chain with a tokenizer where the next piece needs tokens; None if it makes no sense."""
    done: list[str] = []
    for name in names:
        if kind_after([*done, name]) is None and kind_after([*done, "tokenize", name]) is not None:
            done.append("tokenize")
        done.append(name)
    return None if kind_after(done) is None else done


def chains_of_all_pairs(most: int) -> list[list[str]]:
    """Chains of at most about `most` pieces in which every ordered pair that makes sense stands side by side."""
    left = [(a, b) for a in NAMES for b in NAMES if completed([a, b]) is not None]
    found = []
    while left:
        names = list(left.pop(0))
        while len(names) < most:
            following = [pair for pair in left if pair[0] == names[-1] and completed([*names, pair[1]]) is not None]
            if not following:
                break
            left.remove(following[0])
            names.append(following[0][1])
        found.append(completed(names) or names)
    return found


def pipeline_of(
    chain: Chain,
    *,
    rows: Sequence[int] = (42, 30),
    lanes: int = 3,
    flush_every: int = 2,
    microbatch_size: int = 2,
    drop_last: bool = False,
    map_batch: bool = False,
    source: Mapping[str, Any] | None = None,
    **options: Any,
) -> Pipeline:
    """A pipeline of these pieces over rows in memory."""
    datasets = [dataset(f"d{i}", count, 1 + count % 3) for i, count in enumerate(rows)]
    mixture = MixtureSpec({f"d{i}": 1 + i for i in range(len(rows))})
    pipeline = Pipeline(StaticMixtureWorkSource(datasets, mixture, **{"chunk_size": 4, "seed": 1, **(source or {})}))
    for name, drawn in chain:
        given = dict(drawn)
        at_once = given.pop("parallelism", None)
        arguments = PIECES[name].extra(given)
        if at_once is not None:
            arguments |= {"op": Sized(at_once)} if name == "sized" else {"parallelism": at_once}
        getattr(pipeline, PIECES[name].method)(**arguments)
    pipeline.batch(microbatch_size, drop_last=drop_last)
    if map_batch:
        pipeline.map_batch(mean_length)
    return pipeline.options(canonical_replicas=lanes, flush_every_k_chunks=flush_every, **options)


@st.composite
def chains(draw: st.DrawFn, names: Sequence[str] | None = None, most: int = 5) -> list[tuple[str, dict[str, Any]]]:
    """A chain of the pieces named, or of any, each with drawn settings."""
    if names is None:
        drawn: list[str] = []
        for _ in range(draw(st.integers(1, most))):
            fitting = [name for name in NAMES if completed([*drawn, name]) is not None]
            drawn = completed([*drawn, draw(st.sampled_from(fitting))]) or drawn
        names = drawn
    return [(name, {**draw(PIECES[name].settings), **draw(spread(name))}) for name in names]


def spread(name: str) -> st.SearchStrategy[dict[str, int]]:
    """On how many workers at once an operator is to run; mostly nothing is said of it."""
    if name not in SPREADS:
        return st.just({})
    return st.sampled_from([{}, {}, {"parallelism": 1}, {"parallelism": 2}, {"parallelism": 3}])


@st.composite
def surroundings(draw: st.DrawFn) -> dict[str, Any]:
    """The other settings of `pipeline_of`."""
    return {
        "lanes": draw(st.sampled_from([1, 2, 3, 4])),
        "flush_every": draw(st.integers(1, 3)),
        "microbatch_size": draw(st.integers(1, 3)),
        "drop_last": draw(st.booleans()),
        "map_batch": draw(st.booleans()),
        "mapping_strategy": draw(st.sampled_from(["contiguous", "interleaved"])),
        "source": {
            "chunk_size": draw(st.sampled_from([1, 3, 5])),
            "seed": draw(st.integers(0, 3)),
            "shuffle_block_size": draw(st.sampled_from([None, 7, "global"])),
            **draw(st.sampled_from(ENDS)),
        },
    }
