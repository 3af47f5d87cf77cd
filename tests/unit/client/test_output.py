"""What batches come as: torch or numpy, in place or copied, pinned or on a device."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.client.peer import Peer, ids
from zephon.errors import BatchesHeld, SettingError
from zephon.transport import protocol as p
from zephon_client import settings

Make = Callable[..., Peer]
Join = Callable[..., Any]
torch = pytest.importorskip("torch")


def test_torch_tensors_lie_in_the_slot_itself_and_hold_it(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2)
    loader = join(peer, output="torch")
    tensor = next(loader)["input_ids"]
    assert isinstance(tensor, torch.Tensor)
    memory = peer.rings[0].segments[0].array
    next(loader)
    loader.progress()
    assert not peer.heard(p.Returned) or (0, 0, 0) not in peer.heard(p.Returned)[-1].slots
    peer.do(lambda: memory.fill(0))
    assert not tensor.any()


def test_torch_gets_a_private_copy_where_several_ranks_share_a_slot(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2)
    loaders = [join(peer, output="torch", group_readers=2) for _ in range(2)]
    for loader in loaders:
        loader._begun()
    first, second = (next(loader)["id"] for loader in loaders)
    first += 1
    assert (first.tolist(), second.tolist()) == (ids(0, 1, 3), ids(0, 0, 2))


def test_on_a_device_fields_and_training_arrays_are_tensors_there_and_the_slot_is_free_at_once(
    make_peer: Make, join: Join
) -> None:
    peer = make_peer(lanes=1, microbatch=2, width=5)
    loader = join(peer, output="torch", device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = next(loader)
    peer.until(lambda: peer.heard(p.Returned) and peer.heard(p.Returned)[-1].slots == [(0, 0, 0)])
    assert batch["input_ids"].device.type == "meta"
    assert batch["input_ids"] is batch["input_ids"]
    assert batch.to_training(return_labels=True)["labels"].device.type == "meta"
    assert isinstance(batch.to_training(return_num_valid_tokens=True)["num_valid_tokens"], int)
    assert list(batch["text"]) == ["record 0", "record 1"]
    for other in (batch.copy(), pickle.loads(pickle.dumps(batch))):
        assert other["id"].tolist() == ids(0, 0, 2)
        assert other.digest == batch.digest


def test_what_lies_in_memory_of_its_own_for_a_device_counts_until_it_is_let_go(make_peer: Make, join: Join) -> None:
    loader = join(make_peer(lanes=1, microbatch=2), output="torch", device="meta")
    held = [next(loader)]
    loader._copies.limit = 3 * loader._copies.nbytes
    held += [next(loader), next(loader)]
    for _ in range(2):
        with pytest.raises(BatchesHeld, match="holds 3 batches"):
            next(loader)
    held.clear()
    assert next(loader).first_record == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_pinned_memory_without_a_gpu_is_ignored_with_one_warning(make_peer: Make, join: Join) -> None:
    loader = join(make_peer(lanes=1, totals=[4]), output="torch", pin_memory=True)
    with pytest.warns(UserWarning, match="pin_memory=True is ignored") as caught:
        assert [len(batch) for _ in range(2) for batch in loader] == [2, 2, 2, 2]
    assert len(caught) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(("device", "words"), [("cuda", "finds no CUDA device"), ("cuda:x", "no such device")])
def test_a_device_that_torch_does_not_have_is_refused_by_name(
    device: str, words: str, make_peer: Make, join: Join
) -> None:
    loader = join(make_peer(lanes=1), output="torch", device=device)
    with pytest.raises(SettingError, match=f"device={device!r}: .*{words}"):
        next(loader)


def test_without_torch_installed_the_output_is_numpy(
    make_peer: Make, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    assert type(next(join(make_peer(), output="torch"))["id"]).__module__ == "numpy"
