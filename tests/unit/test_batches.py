"""A batch is a mapping whose length is its records; its digest is of its values; copies and pickles are private."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import warnings
import weakref
from collections import OrderedDict
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from tests.drawn_records import packed_blocks, samples_of
from zephon.batches import Batch
from zephon.columns import Block, Fixed, Objects, Ragged, Text, canonical
from zephon.digests import column_digest
from zephon.transport.layout import measure, read
from zephon.types import SampleBatch, SampleMeta, SampleRecord

ROWS = [
    {"input_ids": np.array([1, 2, 3], np.int32), "text": "é", "raw": b"\0", "n": np.arange(2), "extra": {"k": [1]}},
    {"input_ids": np.array([4, 5, 6], np.int32), "text": "", "raw": b"", "n": np.arange(3), "extra": None},
]


def batch_of(block: Block, kind: type[Batch] = Batch, **more: Any) -> Any:
    return kind(canonical(block), lane=3, first_record=40, dataset_names=("web", "code"), **more)


def in_memory(block: Block) -> tuple[Block, Any]:
    layout = measure(canonical(block))
    buffer = np.frombuffer(memoryview(bytearray(layout.nbytes)), np.uint8)
    layout.write(buffer)
    return read(buffer), buffer


PLAIN = Block.from_rows(ROWS, samples_of(2))


def test_a_batch_is_a_mapping_from_field_to_array_whose_length_is_its_records() -> None:
    batch = batch_of(PLAIN, ends_round=True)
    assert len(batch) == 2
    assert list(batch) == list(batch.keys()) == ["extra", "input_ids", "n", "raw", "text"]
    assert len(batch.keys()) == len(batch.items()) == len(batch.values()) == 5
    assert set(dict(batch)) == set({**batch}) == set(batch)
    assert "text" in batch
    assert "nothing" not in batch
    assert batch.get("nothing", 7) == 7
    assert (batch.lane, batch.first_record, batch.ends_round) == (3, 40, True)
    assert batch["input_ids"].dtype == np.int32
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert isinstance(batch["n"], Ragged)
    assert batch["n"][1].tolist() == [0, 1, 2]
    assert batch["text"] == ["é", ""]
    assert batch["raw"] == [b"\0", b""]
    assert batch["extra"] == [{"k": [1]}, None]
    assert "lane 3, records 40 to 42, ends the round" in repr(batch)
    assert batch != batch_of(PLAIN)
    with pytest.raises(KeyError, match="this batch of 2 records has extra, input_ids"):
        batch["nothing"]


def test_samples_name_dataset_shard_and_row_of_each_record() -> None:
    assert batch_of(PLAIN).samples == [("web", 0, 0), ("code", 1, 1)]
    assert batch_of(PLAIN, packed=True).samples == [[("web", 0, 0)], [("code", 1, 1)]]
    packed = Block(PLAIN.fields, samples_of(3), np.array([0, 1, 3]))
    assert batch_of(packed).samples == [[("web", 0, 0)], [("code", 1, 1), ("web", 2, 2)]]


@given(packed_blocks())
def test_the_digest_is_of_the_values_alone(block: Block) -> None:
    batch = batch_of(block)
    digest = batch.digest
    assert len(digest) == 32
    shared = Batch(in_memory(block)[0], lane=0, first_record=0)
    assert shared.digest == digest
    assert batch.copy().digest == pickle.loads(pickle.dumps(batch)).digest == copy.deepcopy(batch).digest == digest
    other_order = Block(dict(reversed(batch.block.fields.items())), batch.block.samples, batch.block.sample_offsets)
    assert Batch(other_order, lane=0, first_record=0).digest == digest
    assert {n: batch.field_digest(n) for n in batch} == {n: shared.field_digest(n) for n in shared}


def test_values_that_differ_in_name_type_shape_or_place_differ_in_digest() -> None:
    columns = [
        Fixed(np.array([1, 2])), Fixed(np.array([2, 1])), Fixed(np.array([1, 2], np.int32)),
        Fixed(np.array([[1], [2]])), Ragged(np.array([1, 2]), np.array([0, 1, 2])),
        Fixed(np.array([1.0, 2.0])), Objects([1, 2]), Objects([1, 2.0]), Objects([1, True]), Objects(["1", "2"]),
        Objects([(1,), 2]), Objects([[1], 2]), Objects([{1}, 2]), Objects([{1: 2}, 2]), Objects([b"1", 2]),
        Objects([None, 2]), Objects([np.int32(1), 2]), Objects([np.array(1), 2]), Objects([Decimal(1), 2]),
        Objects([frozenset([1]), 2]), Objects([2**80, 2]), Objects([int, 2]), Objects([len, 2]), Objects([0.0, 2]),
        Objects([-0.0, 2]), Objects([OrderedDict(a=1), 2]), Objects([OrderedDict(a=2), 2]), Objects([{"a": 1}, 2]),
    ]  # fmt: skip
    digests = [Batch(Block({n: c}, samples_of(2)), lane=0, first_record=0).digest for n in "ab" for c in columns]
    assert len(set(digests)) == len(digests)


def test_objects_have_one_digest_however_they_refer_to_each_other() -> None:
    word, pair = "long word", [1, 2]
    shared = Objects([[word, word], [pair, pair]])
    apart = Objects([["long " + "word", "long word"], [[1, 2], [1, 2]]])
    assert column_digest(shared) == column_digest(apart)
    assert column_digest(Objects([{"a", "b", "c", "d"}])) == column_digest(Objects([{"d", "c", "b", "a"}]))
    round_about: list[Any] = [1]
    round_about.append(round_about)
    assert column_digest(Objects([round_about])) == column_digest(pickle.loads(pickle.dumps(Objects([round_about]))))


def test_batches_without_records_have_one_digest_and_still_work() -> None:
    empty, shaped = Batch(Block.empty(), lane=1, first_record=9), batch_of(PLAIN.slice(0, 0))
    assert empty.digest == shaped.digest != batch_of(PLAIN).digest
    assert len(empty) == 0
    assert empty.samples == shaped.samples == []
    assert len(shaped["input_ids"]) == 0
    assert empty.copy().digest == empty.digest


def test_a_copy_has_memory_of_its_own_and_the_same_place() -> None:
    block, buffer = in_memory(PLAIN)
    batch = Batch(block, lane=5, first_record=7, ends_round=True, dataset_names=("web", "code"))
    private, pickled = batch.copy(), pickle.loads(pickle.dumps(batch))
    before = batch.digest
    buffer[64:] = 0
    for other in (private, pickled):
        assert (other.lane, other.first_record, other.ends_round) == (5, 7, True)
        assert other.samples == [("web", 0, 0), ("code", 1, 1)]
        assert other.digest == before
        assert not np.shares_memory(other["input_ids"], buffer)


@pytest.mark.parametrize("output", ["numpy", "torch"])
def test_the_memory_is_released_when_the_last_array_of_a_batch_dies_and_not_before(output: str) -> None:
    if output == "torch":
        pytest.importorskip("torch")
    block, buffer = in_memory(PLAIN)
    died: list[bool] = []
    weakref.finalize(buffer, died.append, True)
    batch = Batch(block, lane=0, first_record=0, output=output)
    held = batch["input_ids"][1:]
    training = batch.to_training()
    del batch, block, buffer
    gc.collect()
    assert not died
    assert held.tolist() == [[4, 5, 6]]
    del held
    assert died
    assert training["input_ids"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_torch_output_shares_writable_memory_and_copies_what_is_read_only() -> None:
    torch = pytest.importorskip("torch")
    fields = {"a": Fixed(np.arange(4)), "u": Fixed(np.arange(4, dtype=np.uint16)), "t": Text(*_text())}
    writable = Batch(Block(fields, samples_of(4)), lane=0, first_record=0, output="torch")
    assert isinstance(writable["a"], torch.Tensor)
    writable["a"][0] = 9
    assert fields["a"].values[0] == 9  # type: ignore[attr-defined]
    assert isinstance(writable["u"], np.ndarray)
    assert isinstance(writable["t"], Text)
    fields["a"].values.flags.writeable = False  # type: ignore[attr-defined]
    guarded = Batch(Block(fields, samples_of(4)), lane=0, first_record=0, output="torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guarded["a"][1] = 7
    assert guarded["a"][1] == 7
    assert fields["a"].values[1] == 1  # type: ignore[attr-defined]


def _text() -> tuple[Any, Any]:
    return np.frombuffer(b"abcd", np.uint8), np.arange(5)


def test_a_mistyped_argument_of_to_training_is_told_with_the_nearest_name() -> None:
    batch: Any = Batch(Block({"tokens": Fixed(np.zeros((1, 3), np.int64))}, samples_of(1)), lane=0, first_record=0)
    with pytest.raises(TypeError, match=r"has no argument 'return_label'; did you mean 'return_labels'"):
        batch.to_training(return_label=True)
    with pytest.raises(TypeError, match=r"to_training\(\) has no argument 'qqq'$"):
        batch.to_training(qqq=1)
    with pytest.raises(TypeError, match="positional"):
        batch.to_training(True)


def test_a_sample_batch_shows_its_records_one_by_one() -> None:
    batch = batch_of(Block(PLAIN.fields, samples_of(3), np.array([0, 1, 3])), SampleBatch)
    first, second = batch.records
    assert first.meta == SampleMeta(("web", 0, 0), lane_id=3, component_sample_counts={"web": 1})
    assert second.meta.sample_id == ("code", 1, 1)
    assert second.meta.component_sample_counts == {"code": 1, "web": 1}
    assert first.payload["text"] == "é"
    assert first.payload["input_ids"].tolist() == [1, 2, 3]
    assert batch.lane_ids == [3, 3]
    assert isinstance(batch.copy(), SampleBatch)


def test_a_sample_batch_can_be_made_of_records_of_one_lane() -> None:
    records = [SampleRecord(SampleMeta(("code", 0, i), lane_id=2), row) for i, row in enumerate(ROWS)]
    batch = SampleBatch.from_records(records)
    assert batch.samples == [("code", 0, 0), ("code", 0, 1)]
    assert batch.lane_ids == [2, 2]
    with pytest.raises(ValueError, match=r"lanes \[1, 2\]"):
        SampleBatch.from_records([*records, SampleRecord(SampleMeta(("code", 0, 9), lane_id=1), {})])


def test_batches_and_training_arrays_need_neither_torch_nor_pyarrow() -> None:
    script = (
        "import sys, numpy as np\n"
        "from zephon.batches import Batch\nfrom zephon.columns import Block\nimport zephon.transport.layout\n"
        "b = Batch(Block.from_rows([{'tokens': np.arange(3)}], np.zeros((1, 3), np.int64)), lane=0, first_record=0)\n"
        "assert type(b.to_training(return_labels=True)['labels']) is np.ndarray\n"
        "print(sorted({'torch', 'pyarrow', 'tokenizers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
