"""A pipeline under torch's DataLoader: the same batches, the same states, and no way to deliver anything wrong."""
from __future__ import annotations

import gc
import json
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, get_worker_info  # noqa: E402

from tests.unit.small_recipes import Recipe  # noqa: E402
from zephon.errors import CheckpointError, SettingError  # noqa: E402
from zephon.torch_dataset import TorchBatch  # noqa: E402

PACKED = Recipe(steps=("filter", "tokenize", "wrap", "shuffle"), rows=(80,))
RAGGED = Recipe(steps=("tokenize",), rows=(30,))
PLAIN = Recipe(rows=(40,))


@pytest.fixture(autouse=True)
def no_long_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After an error in a worker torch waits five seconds for it to leave by itself, whenever the loader is collected.
    """
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    gc.collect()


def loader(dataset, **arguments) -> DataLoader:
    return DataLoader(dataset, batch_size=None, **arguments)


def digests(batches) -> list[str]:
    return [batch.digest for batch in batches]


@pytest.mark.parametrize("recipe", [PACKED, RAGGED, PLAIN])
def test_a_data_loader_hands_on_the_pipelines_batches_as_dicts_of_tensors(recipe):
    expected = list(recipe.pipeline())
    found = list(loader(recipe.pipeline().to_torch_dataset()))
    assert digests(found) == digests(expected)
    for batch, same in zip(found, expected, strict=True):
        assert type(batch) is TorchBatch
        assert isinstance(batch, dict)
        assert (batch.lane, batch.first_record, batch.ends_round) == (same.lane, same.first_record, same.ends_round)
        assert batch.samples == same.samples
        assert list(batch) == list(same)
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                assert np.array_equal(value.numpy(), same[name])
                assert value.numpy().dtype == same[name].dtype
            elif isinstance(value[0], torch.Tensor):
                assert all(np.array_equal(a.numpy(), b) for a, b in zip(value, same[name], strict=True))
            else:
                assert value == list(same[name])


def test_training_arrays_come_from_the_item_and_are_tensors():
    batch = next(iter(loader(PACKED.pipeline().to_torch_dataset())))
    arrays = batch.to_training(return_labels=True)
    assert arrays["labels"].dtype == torch.int64
    assert arrays["labels"].shape == (2, 15)
    copied = TorchBatch(dict(batch))
    with pytest.raises(AttributeError, match="copied field by field"):
        copied.ends_round


def test_its_state_is_the_pipelines_and_either_resumes_the_other():
    whole = digests(PACKED.pipeline())
    dataset = PACKED.pipeline().to_torch_dataset()
    batches = iter(loader(dataset))
    head = [next(batches).digest for _ in range(5)]
    state = json.loads(json.dumps(dataset.state_dict()))
    assert head + digests(PACKED.pipeline().restore(state)) == whole
    other = PACKED.pipeline().to_torch_dataset()
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert digests(loader(other)) == whole[5:]
    with pytest.raises(CheckpointError):
        other.load_state_dict({"format": 9})


def test_iterating_inside_an_epoch_goes_on_and_iterating_after_it_is_the_next_epoch():
    pipeline = PACKED.pipeline()
    expected = [digests(pipeline), digests(pipeline)]
    assert expected[0] != expected[1]
    data = loader(PACKED.pipeline().to_torch_dataset())
    first = [next(iter(data)).digest for _ in range(3)]
    assert [first + digests(data), digests(data)] == expected


def test_without_state_it_has_none():
    dataset = PLAIN.pipeline().to_torch_dataset(stateful=False)
    assert not hasattr(dataset, "state_dict")
    assert not hasattr(dataset, "load_state_dict")
    assert digests(loader(dataset)) == digests(PLAIN.pipeline())


def test_several_torch_workers_are_refused_with_what_to_do():
    with pytest.raises(SettingError, match=r"num_workers=2.*num_workers=0.*runner=\"process\".*zephon_client.connect"):
        list(loader(PLAIN.pipeline().to_torch_dataset(), num_workers=2))


# One worker process


def test_one_worker_delivers_the_same_epochs_and_its_state_is_not_asked_of_the_wrong_process():
    pipeline = PACKED.pipeline()
    dataset = PACKED.pipeline().to_torch_dataset()
    data = loader(dataset, num_workers=1, persistent_workers=True)
    assert [digests(data), digests(data)] == [digests(pipeline), digests(pipeline)]
    with pytest.raises(SettingError, match="worker process.*alone knows.*StatefulDataLoader"):
        dataset.state_dict()


def test_a_second_worker_that_would_begin_again_is_refused():
    data = loader(PLAIN.pipeline().to_torch_dataset(), num_workers=1)
    assert digests(data) == digests(PLAIN.pipeline())
    with pytest.raises(SettingError, match="persistent_workers=True"):
        list(data)


def test_an_iteration_left_half_way_is_not_gone_on_with_in_a_worker():
    data = loader(PACKED.pipeline().to_torch_dataset(), num_workers=1, persistent_workers=True)
    next(iter(data))
    with pytest.raises(SettingError, match="left before its end"):
        list(data)


def test_a_dataset_that_the_training_process_has_begun_goes_to_no_worker():
    dataset = PLAIN.pipeline(runner="threads", max_workers=2).to_torch_dataset()
    next(iter(dataset))
    with pytest.raises(SettingError, match="training process has begun"):
        list(loader(dataset, num_workers=1))


def with_state(item):
    """What torchdata's StatefulDataLoader does in its worker: it asks for the state after each batch."""
    return item.digest, get_worker_info().dataset.state_dict()


def load_in_worker(state):
    return lambda _: get_worker_info().dataset.load_state_dict(state)


def test_asked_inside_the_worker_the_state_is_right_and_a_state_loaded_there_is_gone_on_from():
    whole = digests(PACKED.pipeline())
    dataset = PACKED.pipeline().to_torch_dataset()
    found = list(loader(dataset, num_workers=1, collate_fn=with_state))
    assert [digest for digest, _ in found] == whole
    state = found[6][1]
    assert digests(PACKED.pipeline().restore(state)) == whole[7:]
    again = loader(dataset, num_workers=1, worker_init_fn=load_in_worker(state))
    assert digests(again) == whole[7:]
