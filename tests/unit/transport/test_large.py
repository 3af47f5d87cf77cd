"""Messages of any size between daemon and engine."""

from __future__ import annotations

import gc
import os

import pytest

from zephon.errors import ProtocolError
from zephon.transport.channels import MAX_DESCRIPTOR, close_all, pair
from zephon.transport.large import InMemory, decode_large, send_large
from zephon.transport.messages import encode
from zephon.transport.protocol import Attached, Report, RunStarted


@pytest.mark.parametrize("state", [0, MAX_DESCRIPTOR - 800, MAX_DESCRIPTOR, 3_000_000])
def test_a_run_with_large_states_of_its_work_source_starts_like_any_other(state):
    left, right = pair()
    attached = Attached("{}", 4, [], 2, True, True, False, ["d"], 0, [[0, 0, 0, 0]] * 4, [])
    started = RunStarted(3, attached, "contiguous")
    attached.sources.update(dict.fromkeys(range(4), "s" * (state // 4)))
    gc.collect()  # what earlier tests left to it
    before = set(os.listdir("/proc/self/fd"))
    send_large(left, started)
    ((payload, fds),) = right.receive()
    assert len(payload) <= MAX_DESCRIPTOR
    assert bool(fds) == (state >= MAX_DESCRIPTOR)
    assert decode_large(payload, fds, (RunStarted,)) == started
    close_all(fds)
    assert set(os.listdir("/proc/self/fd")) == before
    left.close()
    right.close()


def test_memory_that_is_missing_short_or_of_another_message_is_refused():
    with pytest.raises(ProtocolError, match="without memory"):
        decode_large(encode(InMemory(10)), [], (RunStarted,))
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(fd, encode(Report(1)))
    for nbytes in (-1, 0, 1, 10, 1 << 40):
        with pytest.raises(ProtocolError):
            decode_large(encode(InMemory(nbytes)), [fd], (Report,))
    with pytest.raises(ProtocolError, match="report"):
        decode_large(encode(InMemory(1000)), [fd], (RunStarted,))
    os.close(fd)
