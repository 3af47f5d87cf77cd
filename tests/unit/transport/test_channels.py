"""Channels keep order and boundaries, never block, never leak a descriptor, and notice the death of a peer."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.errors import DaemonUnavailable, ProtocolError, SettingError
from zephon.transport.channels import MAX_DESCRIPTOR, MAX_FDS, Channel, Listener, answers, connect, listen, pair

ROOT = Path(__file__).parents[3]


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    left, right = pair()
    yield left, right
    left.close()
    right.close()


@pytest.fixture(autouse=True)
def descriptors_come_back() -> Iterator[None]:
    gc.collect()  # what earlier tests left to it
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer where another test's are closed only now


def wait_readable(channel: Channel | Listener) -> None:
    ready, _, _ = select.select([channel], [], [], 30)
    assert ready, "nothing arrived"


def accepted(listener: Listener) -> Channel:
    wait_readable(listener)
    channel = listener.accept()
    assert channel is not None
    return channel


def run(code: str) -> subprocess.Popen[bytes]:
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from zephon.transport import channels\n"
    return subprocess.Popen([sys.executable, "-c", start + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@given(st.lists(st.binary(min_size=1, max_size=2000), max_size=20))
def test_messages_arrive_whole_and_in_order(payloads: list[bytes]) -> None:
    left, right = pair()
    for payload in payloads:
        assert left.send(payload)
    assert [payload for payload, _ in right.receive()] == payloads
    left.close()
    right.close()


def test_a_reader_that_does_not_read_never_blocks_the_writer_and_loses_nothing(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    payloads = [number.to_bytes(4, "big") * 5000 for number in range(200)]
    for payload in payloads:
        left.send(payload)
    assert left.wants_write
    assert left.waiting < len(payloads)
    got: list[bytes] = []
    while len(got) < len(payloads):
        got += [payload for payload, _ in right.receive()]
        left.flush()
    assert got == payloads
    assert left.waiting == 0


def test_the_largest_message_passes_and_a_larger_one_is_refused(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    left.send(b"x" * MAX_DESCRIPTOR)
    assert right.receive() == [(b"x" * MAX_DESCRIPTOR, [])]
    with pytest.raises(ProtocolError, match="too large"):
        left.send(b"x" * (MAX_DESCRIPTOR + 1))
    with pytest.raises(ProtocolError, match="empty"):
        left.send(b"")
    with pytest.raises(ProtocolError, match="too large"):
        left.send(b"x", [0] * (MAX_FDS + 1))


def test_receive_is_bounded_and_the_rest_waits(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    for number in range(5):
        left.send(bytes([number + 1]))
    assert [payload for payload, _ in right.receive(limit=3)] == [b"\x01", b"\x02", b"\x03"]
    assert [payload for payload, _ in right.receive(limit=3)] == [b"\x04", b"\x05"]
    assert right.receive() == []
    assert not right.closed


def test_descriptors_arrive_with_their_message_close_on_exec_and_the_senders_stay_open(
    ends: tuple[Channel, Channel],
) -> None:
    left, right = ends
    reader, writer = os.pipe()
    left.send(b"none")
    left.send(b"both", [reader, writer])
    (first, none), (second, fds) = right.receive()
    assert (first, none, second, len(fds)) == (b"none", [], b"both", 2)
    assert not any(os.get_inheritable(fd) for fd in fds)
    os.write(fds[1], b"!")
    assert os.read(reader, 1) == b"!"
    for fd in (reader, writer, *fds):
        os.close(fd)


def test_descriptors_of_a_message_that_had_to_wait_may_be_closed_by_the_sender(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    while not left.wants_write:
        left.send(b"x" * MAX_DESCRIPTOR)
    reader, writer = os.pipe()
    left.send(b"pipe", [writer])
    os.close(writer)
    messages: list[tuple[bytes, list[int]]] = []
    while not messages or messages[-1][0] != b"pipe":
        messages += right.receive()
        left.flush()
    (fd,) = messages[-1][1]
    os.write(fd, b"!")
    os.close(fd)
    assert os.read(reader, 2) == b"!"
    os.close(reader)


def test_descriptors_that_were_never_sent_are_closed_with_the_channel(ends: tuple[Channel, Channel]) -> None:
    left, _ = ends
    while not left.wants_write:
        left.send(b"x" * MAX_DESCRIPTOR)
    reader, writer = os.pipe()
    left.send(b"pipe", [writer])
    os.close(writer)
    left.close()
    assert os.read(reader, 1) == b""  # The last writing end is gone.
    os.close(reader)


def test_a_message_cut_short_closes_the_channel_and_all_that_came_with_it() -> None:
    raw, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(other)
    reader, writer = os.pipe()
    socket.send_fds(raw, [b"fine"], [writer])
    raw.send(b"x" * (MAX_DESCRIPTOR + 1))
    with pytest.raises(ProtocolError, match="cut short"):
        channel.receive()
    assert channel.closed
    os.close(writer)
    assert os.read(reader, 1) == b""
    os.close(reader)
    raw.close()


def test_more_descriptors_than_allowed_are_an_error_that_leaks_none() -> None:
    raw, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(other)
    socket.send_fds(raw, [b"many"], [raw.fileno()] * (MAX_FDS + 3))
    with pytest.raises(ProtocolError, match="file descriptors"):
        channel.receive()
    raw.close()


def test_what_a_peer_sent_before_it_closed_is_still_received(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    left.send(b"unread by the left")
    right.send(b"last words")
    right.send(b"really")
    right.close()  # With a message unread: the kernel reports a reset.
    assert [payload for payload, _ in left.receive()] == [b"last words", b"really"]
    assert left.closed
    assert left.receive() == []
    assert not left.send(b"too late")


def test_sending_to_a_peer_that_is_gone_closes_and_still_receives_its_last_message(
    ends: tuple[Channel, Channel],
) -> None:
    left, right = ends
    right.send(b"last words")
    right.close()
    assert not left.send(b"too late")
    assert left.closed
    assert not left.wants_write
    assert [payload for payload, _ in left.receive()] == [b"last words"]


def test_a_killed_peer_closes_the_channel(no_leaks: None, runtime_folder: Path) -> None:
    listener = listen(str(runtime_folder / "a.sock"))
    process = run(f"c = channels.connect({listener.path!r}, 30); c.send(b'hello'); sys.stdin.read()")
    channel = accepted(listener)
    wait_readable(channel)
    assert channel.receive() == [(b"hello", [])]
    assert channel.peer().pid == process.pid
    assert channel.peer().uid == os.getuid()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_readable(channel)
    assert channel.receive() == []
    assert channel.closed
    channel.close()
    listener.close()


def test_case_C2_the_socket_is_reachable_by_its_user_alone_whatever_the_umask(runtime_folder: Path) -> None:
    before = os.umask(0)
    try:
        listener = listen(str(runtime_folder / "a.sock"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(listener.path).st_mode) == 0o600
    listener.close()
    assert not os.path.exists(listener.path)


def test_a_live_server_is_not_replaced(runtime_folder: Path) -> None:
    path = str(runtime_folder / "a.sock")
    first = listen(path)
    with pytest.raises(SettingError, match="live process"):
        listen(path)
    client = connect(path, 1)
    accepted(first).close()  # The question whether it lives.
    server = accepted(first)
    client.send(b"hello")
    wait_readable(server)
    assert server.receive() == [(b"hello", [])]
    for each in (client, server, first):
        each.close()


def test_the_socket_of_a_killed_server_is_replaced(no_leaks: None, runtime_folder: Path) -> None:
    path = str(runtime_folder / "a.sock")
    process = run(f"s = channels.listen({path!r}); print('ready', flush=True); sys.stdin.read()")
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert answers(path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not answers(path)
    assert os.path.exists(path)
    listener = listen(path)
    client = connect(path, 1)
    server = accepted(listener)
    for each in (client, server, listener):
        each.close()


def test_of_servers_that_start_at_once_on_a_dead_socket_exactly_one_serves(
    no_leaks: None, runtime_folder: Path
) -> None:
    path = str(runtime_folder / "a.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(path)
    code = (
        "from zephon.errors import SettingError\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        f"try: s = channels.listen({path!r})\n"
        "except SettingError: s = None\n"
        "print('lost' if s is None else 'won', flush=True); sys.stdin.readline()\n"
        "if s is not None: s.close()\n"
    )
    starters = [run(code) for _ in range(4)]
    assert [next(iter(starter.stdout or ())) for starter in starters] == [b"ready\n"] * 4
    for starter in starters:
        assert starter.stdin is not None
        starter.stdin.write(b"go\n")
        starter.stdin.flush()
    outcomes = [next(iter(starter.stdout or ())) for starter in starters]
    assert sorted(outcomes) == [b"lost\n"] * 3 + [b"won\n"]
    assert answers(path)
    for starter in starters:
        starter.communicate(b"end\n")


def test_a_file_that_is_no_socket_is_left_alone(runtime_folder: Path) -> None:
    path = runtime_folder / "precious"
    path.write_text("data")
    with pytest.raises(SettingError, match="no socket"):
        listen(str(path))
    assert path.read_text() == "data"


def test_closing_a_server_leaves_the_socket_of_its_successor(runtime_folder: Path) -> None:
    path = str(runtime_folder / "a.sock")
    old = listen(path)
    os.unlink(path)
    new = listen(path)
    old.close()
    assert answers(path)
    new.close()


def test_connecting_to_nobody_says_which_socket_and_what_to_do(runtime_folder: Path) -> None:
    path = str(runtime_folder / "a.sock")
    with pytest.raises(DaemonUnavailable, match=r"a\.sock.*ZEPHON_SOCKET"):
        connect(path, 0)


def test_connect_waits_for_a_server_that_is_still_starting(no_leaks: None, runtime_folder: Path) -> None:
    path = str(runtime_folder / "a.sock")
    process = run(f"s = channels.listen({path!r}); sys.stdin.read(); s.close()")
    connect(path, 30).close()
    process.communicate()


def test_a_path_too_long_for_a_socket_is_a_clear_error() -> None:
    for attempt in (lambda path: connect(path, 0), listen):
        with pytest.raises(SettingError, match="108 bytes"):
            attempt("/" + "x" * 107)
