"""Segments are reserved, sealed, nameless, and outlive whatever happens to their maker."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from zephon.errors import MemoryLimit, ProtocolError
from zephon.transport.channels import Channel
from zephon.transport.headroom import MIB, MemoryHeadroom
from zephon.transport.segments import PAGE, Segment, round_to_pages

ROOT = Path(__file__).parents[3]


def open_descriptors() -> int:
    gc.collect()  # what earlier tests left to it
    return len(os.listdir("/proc/self/fd"))


def peer_process(code: str, fd: int) -> subprocess.Popen[bytes]:
    """Runs `code` with `channel`, the other end of the connection `fd`."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from zephon.transport.channels import Channel\n"
    start += f"channel = Channel.from_fd({fd})\n"
    return subprocess.Popen([sys.executable, "-c", start + code], pass_fds=[fd], stdin=subprocess.PIPE)


def test_sizes_are_rounded_up_to_pages() -> None:
    assert [round_to_pages(size) for size in (1, PAGE, PAGE + 1)] == [PAGE, PAGE, 2 * PAGE]
    with Segment.create("a", 1) as segment:
        assert segment.size == len(segment.array) == PAGE
        assert not segment.array.any()


def test_every_page_is_reserved_when_the_segment_is_made() -> None:
    with Segment.create("a", 3 * PAGE) as segment:
        assert os.fstat(segment.fileno()).st_blocks * 512 == 3 * PAGE


def test_two_mappings_see_the_same_bytes() -> None:
    with Segment.create("a", PAGE) as mine, Segment.attach(os.dup(mine.fileno())) as other:
        mine.array[:4] = [1, 2, 3, 4]
        assert other.array[:4].tolist() == [1, 2, 3, 4]
        other.array[0] = 9
        assert mine.array[0] == 9


def test_a_read_only_mapping_cannot_be_written() -> None:
    with Segment.create("a", PAGE) as mine, Segment.attach(os.dup(mine.fileno()), writable=False) as other:
        view = other.array[:]
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        with pytest.raises(ValueError):
            view.flags.writeable = True


def test_nobody_can_shrink_or_grow_a_segment() -> None:
    with Segment.create("a", 2 * PAGE) as segment:
        for size in (PAGE, 3 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fileno(), size)


def test_memory_that_could_be_cut_short_under_us_is_refused_and_its_descriptor_closed() -> None:
    for fd in (os.memfd_create("x", os.MFD_ALLOW_SEALING), os.open("/dev/null", os.O_RDWR)):
        if fd > 0 and stat.S_ISREG(os.fstat(fd).st_mode):
            os.ftruncate(fd, PAGE)
        with pytest.raises(ProtocolError):
            Segment.attach(fd)
        with pytest.raises(OSError) as closed:
            os.fstat(fd)
        assert closed.value.errno == errno.EBADF


def test_case_C2_only_this_user_may_open_a_segment() -> None:
    with Segment.create("a", PAGE) as segment:
        assert stat.S_IMODE(os.fstat(segment.fileno()).st_mode) == 0o600


def test_case_C6_a_segment_that_does_not_fit_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text(f"MemAvailable: {64 * 1024} kB\n")
    limit = MemoryHeadroom(keep=0, proc=tmp_path, cgroups=tmp_path, setting="prefetch_batches")
    before = open_descriptors()
    with pytest.raises(MemoryLimit, match="prefetch_batches") as refused:
        Segment.create("lane 3", 64 * MIB + 1, limit=limit)
    assert str(64 * MIB + PAGE) in str(refused.value)
    assert str(64 * MIB) in str(refused.value)
    assert "lane 3" in str(refused.value)
    assert open_descriptors() == before
    Segment.create("lane 3", MIB, limit=limit).close()


def test_descriptors_are_back_to_the_start_after_close() -> None:
    before = open_descriptors()
    mine = Segment.create("a", PAGE)
    other = Segment.attach(os.dup(mine.fileno()))
    own = 0 if sys.version_info >= (3, 13) else 1
    assert open_descriptors() == before + 1 + 2 * own
    for segment in (mine, other, mine):
        segment.close()
    assert open_descriptors() == before


def test_a_forgotten_segment_gives_its_descriptors_back() -> None:
    before = open_descriptors()
    Segment.create("a", PAGE)
    assert open_descriptors() == before


def test_a_closed_segment_says_so() -> None:
    segment = Segment.create("lane 3", PAGE)
    segment.close()
    assert segment.closed
    with pytest.raises(ValueError, match="lane 3"):
        segment.array
    with pytest.raises(ValueError, match="lane 3"):
        segment.fileno()


def test_an_attached_segment_keeps_its_descriptor_only_on_request() -> None:
    with (
        Segment.create("a", PAGE) as mine,
        Segment.attach(os.dup(mine.fileno()), keep=True) as other,
        Segment.attach(os.dup(other.fileno())) as third,
    ):
        third.array[0] = 5
        assert mine.array[0] == 5
        with pytest.raises(ValueError, match="keep=True"):
            third.fileno()


def test_views_stay_readable_after_close_and_memory_goes_with_the_last_one() -> None:
    segment = Segment.create("zephon-test-lifetime", PAGE)
    view = segment.array[10:20]
    view[:] = np.arange(10)
    segment.close()
    del segment
    assert view.tolist() == list(range(10))
    assert "zephon-test-lifetime" in Path("/proc/self/maps").read_text()
    del view
    assert "zephon-test-lifetime" not in Path("/proc/self/maps").read_text()


def test_an_old_kernel_without_populate_gets_the_pages_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldMapping(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", OldMapping)
    with Segment.create("a", 2 * PAGE) as segment:
        assert isinstance(segment._mapping, OldMapping)
        assert not segment.array.any()


def test_case_C1_nothing_has_a_name_and_an_array_survives_the_death_of_the_segments_maker(no_leaks: None) -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    maker = peer_process(
        "from zephon.transport.segments import Segment\n"
        "segment = Segment.create('a', 1 << 20)\n"
        "segment.array[:] = 7\n"
        "channel.send(b'here', [segment.fileno()])\n"
        "sys.stdin.read()\n",
        right.fileno(),
    )
    right.close()
    left.settimeout(30)
    _, fds, _, _ = socket.recv_fds(left, 100, 1)
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    segment = Segment.attach(fds[0])
    view = segment.array[:]
    segment.close()
    assert (view == 7).all()
    left.close()


def test_a_peer_that_sends_something_else_than_a_segment_is_refused() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine, other = Channel(left), Channel(right)
    read_end, write_end = os.pipe()
    mine.send(b"segment", [read_end])
    ((_, (fd,)),) = other.receive()
    with pytest.raises(ProtocolError):
        Segment.attach(fd)
    for each in (read_end, write_end):
        os.close(each)
    mine.close()
    other.close()
