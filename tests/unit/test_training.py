"""Training arrays equal a plain definition of each, token by token."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn_records import samples_of
from zephon.columns import Block, Column, Fixed, Ragged, Text, column_of
from zephon.errors import SettingError
from zephon.training import to_training

EOS = 3


@dataclass
class Drawn:
    """Rows of one batch: of one width if packed, else as long as they are."""

    packed: bool
    tokens: list[list[int]]
    real: list[int]  # tokens of each row that are not padding
    positions: list[list[int]] | None
    weights: list[list[int]] | None

    def block(self) -> Block:
        fields: dict[str, Column] = {"input_ids": self._column(self.tokens, np.int32)}
        if self.packed:
            fields["sequence_length"] = Fixed(np.array(self.real, np.int32))
        if self.positions is not None:
            fields["positions"] = self._column(self.positions, np.int32)
        if self.weights is not None:
            fields["loss_mask"] = self._column(self.weights, np.int8)
        return Block(fields, samples_of(len(self.tokens)))

    def _column(self, rows: list[list[int]], dtype: Any) -> Column:
        if self.packed:
            return Fixed(np.array(rows, dtype).reshape(len(rows), -1))
        return column_of([np.array(row, dtype) for row in rows])


@st.composite
def drawn_rows(draw: st.DrawFn) -> Drawn:
    packed, count = draw(st.booleans()), draw(st.integers(1, 4))
    width = draw(st.integers(1, 8))
    lengths = [width if packed else draw(st.integers(0, 8)) for _ in range(count)]
    real = [draw(st.integers(0, n)) if packed else n for n in lengths]
    tokens = [[draw(st.integers(1, 5)) if j < r else 0 for j in range(n)] for n, r in zip(lengths, real, strict=True)]
    positions: list[list[int]] | None = None
    if draw(st.booleans()):
        positions = []
        for n, r in zip(lengths, real, strict=True):
            row: list[int] = []
            for j in range(n):
                row.append(0 if j >= r or not row or draw(st.integers(0, 2)) == 0 else row[-1] + 1)
            positions.append(row)
    weights = [[draw(st.integers(0, 1)) for _ in range(n)] for n in lengths] if draw(st.booleans()) else None
    return Drawn(packed, tokens, real, positions, weights)


def expected(rows: Drawn, labels: bool, flatten: bool, eos: bool, sequence: bool) -> dict[str, Any]:
    longest = max(map(len, rows.tokens))
    width = max(longest - 1, 0) if labels else longest
    names = ["input_ids", "positions", "loss_mask", "padding_mask"] + ["labels"] * labels
    rectangle: dict[str, list[list[Any]]] = {name: [] for name in names}
    segments: list[int] = []
    total = valid = 0
    for i, tokens in enumerate(rows.tokens):
        shown = max(len(tokens) - labels, 0) if flatten and not rows.packed else width
        line: dict[str, list[Any]] = {name: [] for name in names}
        for j in range(shown):
            pad = j >= rows.real[i]
            line["input_ids"].append(tokens[j] if j < len(tokens) else 0)
            line["padding_mask"].append(pad)
            own = rows.positions[i][j] if rows.positions is not None and j < len(tokens) else 0
            line["positions"].append(j if sequence or rows.positions is None else own)
            starts = j == 0 or (rows.positions is not None and not pad and own == 0) or pad != (j - 1 >= rows.real[i])
            if starts:
                segments.append(total)
            total += 1
            t = j + labels
            learn = t < rows.real[i] and (rows.weights is None or rows.weights[i][t] == 1)
            learn = learn and not (eos and t > 0 and tokens[t - 1] == EOS)
            if labels:
                line["labels"].append(tokens[t] if learn else -100)
            line["loss_mask"].append(float(learn))
            valid += learn if labels else not pad
        for name in names:
            rectangle[name].append(line[name])
    out: dict[str, Any] = {n: list(chain(*v)) if flatten else v for n, v in rectangle.items()}
    bounds = [*segments, total]
    out.update(cu_seqlens=bounds, num_valid_tokens=valid)
    out["max_seqlen"] = max((b - a for a, b in pairwise(bounds)), default=0)
    return out


@given(drawn_rows(), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_training_arrays_are_what_they_are_defined_to_be(
    rows: Drawn, labels: bool, flatten: bool, eos: bool, sequence: bool
) -> None:
    found = to_training(
        rows.block(),
        output="numpy",
        return_labels=labels,
        flatten=flatten,
        eos_mask_loss=eos,
        eos_token_id=EOS,
        position_mode="sequence" if sequence else "preserve",
        return_cu_seqlens=True,
        return_loss_mask=True,
        return_num_valid_tokens=True,
        return_padding_mask=True,
    )
    assert {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in found.items()} == expected(
        rows, labels, flatten, eos, sequence
    )
    assert found["input_ids"].dtype == found["positions"].dtype == np.int64
    assert (found["loss_mask"].dtype, found["padding_mask"].dtype, found["cu_seqlens"].dtype) == (
        np.float32, np.bool_, np.int32,
    )  # fmt: skip
    bounds = found["cu_seqlens"]
    assert bounds[0] == 0
    assert bounds[-1] == found["input_ids"].size
    assert (np.diff(bounds) > 0).all()
    assert type(found["max_seqlen"]) is type(found["num_valid_tokens"]) is int
    assert all(v.flags.c_contiguous and v.flags.writeable for v in found.values() if isinstance(v, np.ndarray))


def test_case_F11_no_segment_of_the_boundaries_is_empty() -> None:
    lengths, width = [16, 8, 8, 1, 15], 17
    stream = [(doc, place) for doc, length in enumerate(lengths) for place in range(length)]
    stream += [(-1, 0)] * (-len(stream) % width)
    for start in range(0, len(stream), width):
        row = stream[start : start + width]
        positions: list[int] = []
        for j, (doc, _) in enumerate(row):
            positions.append(0 if j == 0 or doc < 0 or doc != row[j - 1][0] else positions[-1] + 1)
        block = Block(
            {
                "input_ids": Fixed(np.arange(start, start + width, dtype=np.int32)[None]),
                "positions": Fixed(np.array([positions], np.int32)),
                "sequence_length": Fixed(np.array([sum(doc >= 0 for doc, _ in row)], np.int32)),
            },
            samples_of(1),
        )
        found = to_training(block, output="numpy", return_labels=True, return_cu_seqlens=True)
        bounds = found["cu_seqlens"]
        assert (bounds[0], bounds[-1]) == (0, 16)
        assert (np.diff(bounds) > 0).all()
        assert found["max_seqlen"] == np.diff(bounds).max()
        assert (found["positions"][0][bounds[:-1]] == 0).all()
        real = block.fields["sequence_length"].values[0]  # type: ignore[attr-defined]
        inside = [j for j in range(min(16, real)) if j == 0 or row[j][0] != row[j - 1][0]]
        assert bounds[:-1].tolist() == inside + ([real] if real < 16 else [])


def tokens(*rows: list[int], **more: Column) -> Block:
    return Block({"input_ids": column_of([np.array(r, np.int32) for r in rows]), **more}, samples_of(len(rows)))


def packed(rows: list[list[int]], **more: Any) -> Block:
    fields: dict[str, Column] = {"input_ids": Fixed(np.array(rows, np.uint16))}
    return Block({**fields, **{n: Fixed(np.array(v)) for n, v in more.items()}}, samples_of(len(rows)))


def test_a_row_of_sequence_length_plus_one_gives_inputs_and_labels_shifted_by_one() -> None:
    found = to_training(packed([[1, 2, 3, 4]]), output="numpy", return_labels=True)
    assert found["input_ids"].tolist() == [[1, 2, 3]]
    assert found["labels"].tolist() == [[2, 3, 4]]
    assert list(found) == ["input_ids", "labels", "positions"]


def test_records_of_varying_length_are_padded_on_the_right() -> None:
    found = to_training(tokens([1, 2, 3], [4]), output="numpy", return_padding_mask=True, return_num_valid_tokens=True)
    assert found["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert found["padding_mask"].tolist() == [[False] * 3, [False, True, True]]
    assert found["num_valid_tokens"] == 4


def test_an_attention_mask_marks_padding_too() -> None:
    block = packed([[1, 2, 9]], attention_mask=[[1, 1, 0]])
    assert to_training(block, output="numpy", return_labels=True)["labels"].tolist() == [[2, -100]]


def test_a_loss_mask_with_weights_keeps_them() -> None:
    block = packed([[1, 2, 3]], loss_mask=[[1.0, 0.5, 0.0]])
    found = to_training(block, output="numpy", return_labels=True, return_loss_mask=True)
    assert found["loss_mask"].tolist() == [[0.5, 0.0]]
    assert found["labels"].tolist() == [[2, -100]]


@pytest.mark.parametrize("name", ["input_ids", "tokens", "token_ids"])
def test_tokens_are_found_under_the_usual_names(name: str) -> None:
    block = Block({name: Fixed(np.array([[1, 2]])), "other": Fixed(np.array([[7, 8]]))}, samples_of(1))
    assert to_training(block, output="numpy")["input_ids"].tolist() == [[1, 2]]
    assert to_training(block, output="numpy", tokens_field="other")["input_ids"].tolist() == [[7, 8]]


def test_fields_are_renamed_left_out_and_passed_on() -> None:
    names = Text(np.frombuffer(b"ab", np.uint8), np.array([0, 1, 2]))
    block = tokens([1, 2], [3, 4], names=names, score=Fixed(np.array([0.5, 1.5], np.float32)))
    found = to_training(
        block,
        output="numpy",
        return_labels=True,
        extra_fields=["score", "names"],
        rename_fields={"labels": "targets", "score": "quality"},
        exclude_fields=["positions"],
    )
    assert list(found) == ["input_ids", "targets", "quality", "names"]
    assert found["quality"].tolist() == [0.5, 1.5]
    assert found["names"] == ["a", "b"]
    assert not np.shares_memory(found["quality"], block.fields["score"].values)  # type: ignore[attr-defined]


def test_extra_fields_of_a_batch_without_records_are_empty() -> None:
    made = to_training(Block.empty(), output="numpy", extra_fields=["id"])
    assert made["id"].shape == (0,)


@pytest.mark.parametrize("block", [Block.empty(), packed([[1, 2, 3]]).slice(0, 0), tokens([1]).slice(0, 0)])
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("labels", [False, True])
def test_a_batch_without_records_gives_empty_arrays(block: Block, flatten: bool, labels: bool) -> None:
    found = to_training(
        block,
        output="numpy",
        return_labels=labels,
        flatten=flatten,
        return_cu_seqlens=True,
        return_loss_mask=True,
        return_padding_mask=True,
        return_num_valid_tokens=True,
    )
    assert found["cu_seqlens"].tolist() == [0]
    assert (found["max_seqlen"], found["num_valid_tokens"]) == (0, 0)
    for name in {"input_ids", "labels", "positions", "loss_mask", "padding_mask"} & set(found):
        assert len(found[name]) == 0
        assert found[name].ndim == (1 if flatten else 2)


def test_results_are_torch_tensors_where_torch_is_and_never_share_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    values = np.array([[1, 2, 3]])
    values.flags.writeable = False
    block = Block({"input_ids": Fixed(values), "positions": Fixed(values), "x": Fixed(values)}, samples_of(1))
    found = to_training(block, return_labels=True, return_cu_seqlens=True, extra_fields=["x"], flatten=True)
    assert found["input_ids"].dtype == found["labels"].dtype == found["positions"].dtype == torch.int64
    assert found["cu_seqlens"].dtype == torch.int32
    for name in ("input_ids", "positions", "x"):
        found[name][:] = 0
    assert values.tolist() == [[1, 2, 3]]
    assert to_training(block, dtype=torch.int32)["input_ids"].dtype == torch.int32
    assert to_training(block, output="numpy", dtype=np.int32)["input_ids"].dtype == np.int32
    assert type(to_training(block, output="numpy")["input_ids"]) is np.ndarray
    monkeypatch.delitem(sys.modules, "torch")
    assert type(to_training(block, dtype="int32")["input_ids"]) is np.ndarray


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eos_mask_loss": True}, "eos_token_id"),
        ({"eos_mask_loss": True, "eos_token_id": "<eos>"}, "eos_token_id is '<eos>'.*number"),
        ({"eos_mask_loss": True, "eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_mask_loss": True, "eos_token_id": True}, "eos_token_id is True"),
        ({"extra_fields": "text"}, "a list of names"),
        ({"position_mode": "other"}, "position_mode"),
        ({"dtype": "float32"}, "dtype"),
        ({"dtype": "nonsense"}, "dtype"),
        ({"tokens_field": "ids"}, "no field 'ids'.*input_ids, text"),
        ({"tokens_field": "text"}, "'text' does not hold one list of whole numbers"),
        ({"extra_fields": ["nothing"]}, "'nothing'"),
        ({"rename_fields": {"label": "targets"}}, "makes no 'label'"),
        ({"exclude_fields": ["label"]}, "makes no 'label'"),
        ({"rename_fields": {"positions": "input_ids"}}, "one name"),
    ],
)
def test_senseless_arguments_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        to_training(tokens([1], text=column_of(["a"])), **arguments)


def test_a_batch_without_tokens_is_refused_with_its_fields() -> None:
    block = Block({"image": Fixed(np.zeros((1, 2, 2)))}, samples_of(1))
    with pytest.raises(SettingError, match="none of input_ids, tokens, token_ids; its fields are image"):
        to_training(block)
    odd = tokens([1, 2], loss_mask=Fixed(np.array([[1, 1, 1]])))
    with pytest.raises(SettingError, match="'loss_mask' does not hold one number for each token"):
        to_training(odd, return_labels=True)
    lengths = Ragged(np.arange(3), np.array([0, 1, 3]))
    with pytest.raises(SettingError, match="'positions'"):
        to_training(tokens([1, 2], [3], positions=lengths))
