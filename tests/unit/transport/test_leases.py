"""An array over a slot owns it: the slot comes back exactly once, when the last array dies, whatever was made of it."""

from __future__ import annotations

import gc
import os
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.errors import ProtocolError
from zephon.transport.rings import LeaseKeeper, SlotLease
from zephon.transport.segments import PAGE, Segment

KEY = (3, 0, 1)

#: Everything that a trainer may make of an array without copying it.
DERIVE: dict[str, Callable[[Any], Any]] = {
    "slice": lambda array: array[1:],
    "step": lambda array: array[::2],
    "reverse": lambda array: array[::-1],
    "reshape": lambda array: array[: len(array) // 2 * 2].reshape(2, -1),
    "dtype": lambda array: array[: array.size // 4 * 4].view(np.int32),
    "transpose": lambda array: array.T,
    "asarray": np.asarray,
    "memoryview": lambda array: np.frombuffer(memoryview(array), dtype=np.uint8),
    "strided": lambda array: np.lib.stride_tricks.as_strided(array, shape=(1,), strides=(1,)),
    "broadcast": lambda array: np.broadcast_to(array[:1], (3, 1)),
    "nothing left": lambda array: array[:0],
}


@pytest.fixture
def segment() -> Any:
    with Segment.create("a", 4 * PAGE) as made:
        made.array[:] = np.arange(4 * PAGE) % 251
        yield made


def test_the_lease_is_a_plain_array_over_the_bytes_of_its_slot(segment: Segment) -> None:
    keeper = LeaseKeeper()
    array = keeper.lease(segment.array, PAGE, 100, KEY)
    assert type(array) is np.ndarray
    assert array.tolist() == segment.array[PAGE : PAGE + 100].tolist()
    array[0] = 250
    assert segment.array[PAGE] == 250
    assert keeper.held(3) == keeper.held() == 1
    assert keeper.held(4) == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(sorted(DERIVE))), max_size=8), st.randoms())
def test_views_of_views_keep_the_slot_until_the_last_of_them_dies_in_any_order(
    steps: list[tuple[int, str]], order: random.Random
) -> None:
    with Segment.create("a", PAGE) as segment:
        keeper = LeaseKeeper()
        arrays = [keeper.lease(segment.array, 0, 400, KEY)]
        for source, how in steps:
            array = arrays[source % len(arrays)]
            # The others would be copied on the way, and a copy holds no slot.
            if array.ndim == 1 and array.size >= 8 and array.dtype == np.uint8 and array.flags.c_contiguous:
                arrays.append(DERIVE[how](array))
            del array
        order.shuffle(arrays)
        while arrays:
            assert keeper.drain() == []
            assert keeper.held(3) == 1
            arrays.pop()
        assert keeper.drain() == [KEY]
        assert keeper.held(3) == 0
        assert keeper.drain() == []


@pytest.mark.parametrize("how", sorted(DERIVE))
def test_each_way_to_view_an_array_keeps_the_slot(segment: Segment, how: str) -> None:
    keeper = LeaseKeeper()
    derived = DERIVE[how](keeper.lease(segment.array, 0, 400, KEY))
    assert keeper.drain() == []
    again = derived[:1]
    del derived
    assert keeper.drain() == []
    del again
    assert keeper.drain() == [KEY]


def test_torch_tensors_over_an_array_keep_the_slot(segment: Segment) -> None:
    torch = pytest.importorskip("torch")
    keeper = LeaseKeeper()
    tensor = torch.from_numpy(keeper.lease(segment.array, 0, 64, KEY).view(np.int64).reshape(2, 4))[1]
    expected = segment.array[32:64].copy().view(np.int64).tolist()
    assert keeper.drain() == []
    back = tensor.numpy()
    del tensor
    assert keeper.drain() == []
    assert back.tolist() == expected
    del back
    assert keeper.drain() == [KEY]


def test_a_cycle_that_holds_an_array_gives_the_slot_back_when_it_is_collected(segment: Segment) -> None:
    keeper = LeaseKeeper()
    cycle: dict[str, Any] = {"batch": keeper.lease(segment.array, 0, 8, KEY)}
    cycle["self"] = cycle
    del cycle
    gc.collect()
    assert keeper.drain() == [KEY]


def test_many_slots_come_back_exactly_once_each_in_the_order_of_their_end(segment: Segment) -> None:
    keeper = LeaseKeeper()
    keys = [(lane, 0, index) for lane in range(4) for index in range(25)]
    arrays = {key: keeper.lease(segment.array, 8 * number, 8, key) for number, key in enumerate(keys)}
    order = random.Random(0).sample(keys, len(keys))
    for key in order:
        del arrays[key]
    assert keeper.drain() == order
    assert keeper.held() == 0


def test_case_C9_arrays_stay_readable_when_keeper_segment_and_all_else_are_gone() -> None:
    segment = Segment.create("a", PAGE)
    segment.array[:] = 42
    keeper = LeaseKeeper()
    array = keeper.lease(segment.array, 100, 50, KEY)[10:]
    segment.close()
    del keeper, segment
    gc.collect()
    assert array.tolist() == [42] * 40


def test_case_C11_ten_thousand_arrays_hold_no_descriptor(segment: Segment) -> None:
    gc.collect()  # what earlier tests left to it
    before = len(os.listdir("/proc/self/fd"))
    keeper = LeaseKeeper()
    arrays = [keeper.lease(segment.array, 0, 8, (0, 0, index)) for index in range(10_000)]
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer where another test's are closed only now
    assert keeper.held() == len(arrays)


def test_a_read_only_lease_and_its_views_cannot_be_written(segment: Segment) -> None:
    read_only = segment.array.view()
    read_only.flags.writeable = False
    array = LeaseKeeper().lease(read_only, 0, 8, KEY)
    for view in (array, array[2:], array.view(np.int32), array.reshape(2, 4)):
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    assert segment.array.flags.writeable


def test_pickling_copies_into_a_plain_array_that_holds_nothing(segment: Segment) -> None:
    keeper = LeaseKeeper()
    array = keeper.lease(segment.array, 0, 8, KEY)
    copy = pickle.loads(pickle.dumps(array))
    expected = array.tolist()
    del array
    assert keeper.drain() == [KEY]
    assert type(copy) is np.ndarray
    assert copy.tolist() == expected


def test_the_owner_itself_is_never_handed_out(segment: Segment) -> None:
    array = LeaseKeeper().lease(segment.array, 0, 8, KEY)
    for each in (array, array[1:], array.reshape(2, 4), array.copy()):
        assert not isinstance(each, SlotLease)


def test_a_slot_handed_out_twice_or_outside_the_segment_is_an_error(segment: Segment) -> None:
    keeper = LeaseKeeper()
    array = keeper.lease(segment.array, 0, 8, KEY)
    with pytest.raises(ProtocolError, match="again"):
        keeper.lease(segment.array, 0, 8, KEY)
    for offset, nbytes in ((-1, 4), (4 * PAGE - 3, 4), (0, -1)):
        with pytest.raises(ProtocolError, match="outside"):
            keeper.lease(segment.array, offset, nbytes, (0, 0, 0))
    assert keeper.held() == 1
    del array
    assert keeper.lease(segment.array, 0, 8, KEY).size == 8


def test_the_copies_in_a_forked_child_return_nothing(segment: Segment) -> None:
    keeper = LeaseKeeper()
    early = keeper.lease(segment.array, 0, 8, (0, 0, 0))
    array = keeper.lease(segment.array, 8, 8, KEY)
    del early  # Noted before the fork, and not drained yet: it is the parent's to give back.
    child = os.fork()
    if not child:
        del array
        os._exit(len(keeper.drain()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert keeper.drain() == [(0, 0, 0)]
    del array
    assert keeper.drain() == [KEY]
