"""Signal handlers that raise, or close the loader, at any line: nothing is lost, repeated, left over or stuck."""

from __future__ import annotations

import gc
import itertools
import linecache
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

import pytest

from tests.unit.client.peer import Peer, ids
from zephon.errors import ZephonError
from zephon.transport import protocol as p
from zephon_client.control import Control
from zephon_client.run import Run
from zephon_client.undisturbed import Undisturbed

Make = Callable[..., Peer]
Join = Callable[..., Any]
Strike = Callable[[], object]


class Timeout(BaseException):
    """What a timeout's handler raises, which no code on the way takes for an error of its own."""


def ctrl_c() -> None:
    """A Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


def alarm() -> None:
    """A timeout, as a notebook or a watchdog sets one."""
    signal.raise_signal(signal.SIGALRM)


def at_once() -> None:
    """What no piece of code is safe from: an exception of another thread, or one for want of memory."""
    raise Timeout


def fail(*_: object) -> None:
    raise Timeout


LEFT: dict[Strike, tuple[str, ...]] = {
    ctrl_c: (),
    alarm: (),
    at_once: ("undisturbed",),
}
"""The modules that an interrupt does not strike in."""

NEVER_AT = ("with ", "try:", "signal.pthread_sigmask")
"""Where `at_once` would skip the end of a `with` that has begun, or what is finally done: no signal strikes there."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Ctrl-C as Python handles it, and a SIGALRM that raises; after the test they are what they were in it."""
    before = {signal.SIGINT: signal.default_int_handler, signal.SIGALRM: fail}
    outside = {number: signal.signal(number, handler) for number, handler in before.items()}
    yield
    left = {number: signal.signal(number, handler) for number, handler in outside.items()}
    assert left == before


@contextmanager
def struck(line: int, strike: Strike, event: str = "line", leave: tuple[str, ...] = ()) -> Iterator[list[int]]:
    """Strikes at the `line`-th line of zephon's code from here on, outside of modules named `leave`.

    Yields a list with how many lines are still to come; at or below zero it has struck.
    """
    left = [line]

    def trace(frame: FrameType, at: str, _: Any) -> Any:
        name, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("zephon", "zephon_client") or module.endswith(leave):
            return None
        if "__del__" in (frame.f_code.co_name, frame.f_back.f_code.co_name if frame.f_back else ""):
            return None  # Python drops what is raised there
        frame.f_trace_opcodes = event == "opcode"
        text = linecache.getline(name, frame.f_lineno or 0).strip()
        # No signal is looked at between the assignment that notes a batch as handed over and the return after it.
        if at == event and text != "return batch" and not (strike is at_once and text.startswith(NEVER_AT)):
            left[0] -= 1
            if left[0] == 0:
                strike()
        return trace

    sys.settrace(trace)
    try:
        yield left
    finally:
        sys.settrace(None)


def records(loader: Any) -> dict[int, int]:
    return {int(lane): entry["records"] for lane, entry in loader.state_dict()["lanes"].items()}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def numbers_until_untouched(step: int) -> Iterator[tuple[int, list[bool]]]:
    """1, 1 + step, ... until a caller has appended False (not struck) ten times in a row: longer than any call."""
    struck_: list[bool] = []
    for number in itertools.count(1, step):
        yield number, struck_
        if len(struck_) >= 10 and not any(struck_[-10:]):
            return


@pytest.mark.parametrize(
    ("strike", "event", "step"),
    [(ctrl_c, "line", 1), (ctrl_c, "opcode", 11), (alarm, "line", 3)],
)
def test_an_interrupt_anywhere_loses_and_repeats_nothing(
    make_peer: Make, join: Join, amount: Callable[[int, int], int], strike: Strike, event: str, step: int
) -> None:
    loader = join(make_peer(lanes=2, microbatch=2))
    batches = iter(loader)
    got: dict[int, list[int]] = {0: [], 1: []}
    interrupted = 0
    for number, struck_ in numbers_until_untouched(amount(step, 1)):
        try:
            with struck(number, strike, event) as left:
                batch = next(batches)
        except (KeyboardInterrupt, Timeout):
            interrupted += 1
            struck_.append(True)
            continue
        got[batch.lane] += batch["id"].tolist()
        del batch
        struck_.append(left[0] <= 0)
    assert interrupted > 30
    assert got == {lane: ids(lane, 0, len(each)) for lane, each in got.items()}
    assert records(loader) == {lane: len(each) for lane, each in got.items()}


@pytest.mark.parametrize(("strike", "step"), [(ctrl_c, 13), (alarm, 41)])
def test_an_interrupt_anywhere_in_coming_back_is_only_a_pause(
    make_peer: Make, join: Join, amount: Callable[[int, int], int], strike: Strike, step: int
) -> None:
    peer = make_peer(lanes=1, microbatch=2, slots=2)
    loader = join(peer)
    got: list[int] = []
    interrupted = 0
    for number, struck_ in numbers_until_untouched(amount(step, 1)):
        peer.cut(loader._connection.welcome.client)
        connections = len(peer.heard(p.Begin))
        struck_.append(False)
        while len(peer.heard(p.Begin)) == connections:
            try:
                with nullcontext() if struck_[-1] else struck(number, strike):
                    batch = next(loader)
            except (KeyboardInterrupt, Timeout):
                interrupted += 1
                struck_[-1] = True
                continue
            got += batch["id"].tolist()
            del batch
    assert interrupted > 10
    assert got == ids(0, 0, len(got))


def test_an_interrupt_while_the_daemon_prepares_to_take_a_rank_back_is_only_a_pause(
    make_peer: Make, join: Join
) -> None:
    peer = make_peer(lanes=1, microbatch=2, slots=1)
    loader = join(peer)
    next(loader)
    peer.answers[p.Attach] = lambda message: []
    peer.cut()

    def interrupt() -> None:
        peer.until(lambda: len(peer.heard(p.Attach)) > 1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            next(loader)
    helper.join()
    del peer.answers[p.Attach]
    before = records(loader)[0]
    assert next(loader)["id"].tolist() == ids(0, before, before + 2)


@pytest.mark.parametrize("during", ["next", "state_dict", "progress"])
@pytest.mark.parametrize("what", ["state_dict", "progress"])
def test_a_handler_may_ask_for_a_state_or_for_progress_while_an_answer_is_awaited(
    make_peer: Make, join: Join, during: str, what: str
) -> None:
    peer = make_peer(lanes=1, microbatch=2)
    loader = join(peer)
    said: list[Any] = []
    request = p.Progress if during == "progress" else p.Attach
    usual = peer._answer

    def strikes(message: Any) -> list[Any]:
        del peer.answers[request]
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return [usual(message)]

    peer.answers[request] = strikes
    before = signal.signal(signal.SIGUSR1, lambda *_: said.append(getattr(loader, what)()))
    try:
        next(loader) if during == "next" else getattr(loader, during)()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(said) == 1
    assert records(loader) == {0: 2 if during == "next" else 0}


def test_what_a_handler_hears_while_the_run_takes_shape_is_heard_by_the_run(
    make_peer: Make, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = make_peer(lanes=1, microbatch=2)
    loader = join(peer)
    peer.until_joined(0)
    peer.send(p.LaneTotal(0, 0, 100, 0))
    peer.do(lambda: None)  # it has been sent
    asked: list[Any] = []

    def strikes(*arguments: Any) -> Run:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGUSR1)
        return Run(*arguments)

    monkeypatch.setattr("zephon_client.loader.Run", strikes)
    before = signal.signal(signal.SIGUSR1, lambda *_: asked.append(loader.state_dict()))
    try:
        next(loader)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(asked) == 1
    assert loader._run.epoch.totals() == [p.LaneTotal(0, 0, 100, 0)]


def test_a_state_whose_loading_was_interrupted_can_be_loaded_again(make_peer: Make, join: Join) -> None:
    for number, struck_ in numbers_until_untouched(40):
        loader = join(make_peer(lanes=1, microbatch=2))
        state = loader.state_dict()  # so that the run has taken shape, and the loader comes anew
        with suppress(KeyboardInterrupt), struck(number, ctrl_c) as left:
            loader.load_state_dict(state)
        struck_.append(left[0] <= 0)
        loader.load_state_dict(state)
        assert next(loader)["id"].tolist() == ids(0, 0, 2)
        loader.close()


# Closing


@pytest.mark.parametrize(("strike", "step"), [(ctrl_c, 11), (alarm, 29), (at_once, 7)])
def test_a_close_that_was_interrupted_anywhere_is_ended_by_another(
    make_peer: Make, join: Join, amount: Callable[[int, int], int], strike: Strike, step: int
) -> None:
    peer = make_peer(lanes=1, microbatch=2)
    loaders: list[Any] = []  # all alive at the end: it is not their death that closes them
    peer.do(lambda: None)  # it has opened its own descriptors
    before, interrupted = descriptors(), 0
    for number, struck_ in numbers_until_untouched(amount(step, 1)):
        loader = join(peer)
        loaders.append(loader)
        next(loader)
        struck_.append(False)
        with suppress(KeyboardInterrupt, Timeout):
            with struck(number, strike, leave=LEFT[strike]) as left:
                loader.close()
            struck_[-1] = left[0] <= 0
            continue
        struck_[-1] = True
        interrupted += 1
        loader.close()
        peer.until(lambda: not peer.guests)
        with pytest.raises(ZephonError, match="is closed"):
            next(loader)
        assert records(loader) == {0: 2}
    assert interrupted > 3
    peer.until(lambda: descriptors() <= before)
    if strike is not at_once:  # which may cut the saying of it, and then the end of the connection says it
        assert len(peer.heard(p.Goodbye)) == len(loaders)


def test_ctrl_c_while_goodbye_is_said_ends_the_program_only_after_it(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2)
    loader = join(peer)
    next(loader)

    def goodbye(message: p.Goodbye) -> list[Any]:
        os.kill(os.getpid(), signal.SIGINT)
        return [peer._answer(message)]

    peer.answers[p.Goodbye] = goodbye
    with pytest.raises(KeyboardInterrupt):
        loader.close()
    peer.until(lambda: not peer.guests)
    loader.close()
    assert len(peer.heard(p.Goodbye)) == 1


def test_a_connection_that_is_garbage_in_a_cycle_ends_by_itself(make_peer: Make) -> None:
    peer = make_peer(lanes=1)
    peer.do(lambda: None)  # it has opened its own descriptors
    before = descriptors()
    control: Any = Control(peer.path, 1.0, Undisturbed())
    control.itself = control
    assert descriptors() > before
    del control
    gc.collect()  # without the sockets closed first this would not come back
    peer.until(lambda: descriptors() <= before)


def test_an_interrupt_anywhere_in_the_end_of_a_connection_arises_when_it_has_ended(make_peer: Make) -> None:
    peer = make_peer(lanes=1)
    interrupted = 0
    for number, struck_ in numbers_until_untouched(4):
        control = Control(peer.path, 1.0, Undisturbed())
        struck_.append(False)
        with suppress(KeyboardInterrupt), struck(number, ctrl_c):
            control.close()
            continue
        struck_[-1] = True
        inside = control._context.closed
        control.close()
        # One at its first lines, before anything is done, is no different from one before it.
        interrupted += inside
        assert inside or number < 10
    assert interrupted > 3


@pytest.mark.parametrize("how", ["a handler", "a finalizer"])
def test_a_handler_or_a_finalizer_may_close_the_loader_at_any_line_of_its_own_thread(
    make_peer: Make, join: Join, amount: Callable[[int, int], int], how: str
) -> None:
    peer = make_peer(lanes=1, microbatch=2)
    ends: set[str] = set()
    for number, struck_ in numbers_until_untouched(amount(23, 1)):
        loader = join(peer)
        closing = [loader.close]
        # One for a signal that handlers are not held back of is as one of a finalizer.
        signal.signal(signal.SIGALRM, lambda *_, closing=closing: closing[0]())
        strike = alarm if how == "a handler" else closing[0]
        got: list[int] = []
        try:
            with struck(number, strike) as left:
                for _ in range(3):
                    got += next(loader)["id"].tolist()
        except ZephonError as error:
            ends.add(str(error).partition(" closed")[0])
        struck_.append(left[0] <= 0)
        loader.close()
        peer.until(lambda: not peer.guests)
        assert got == ids(0, 0, len(got))
        if got:
            assert records(loader) == {0: len(got)}
    signal.signal(signal.SIGALRM, fail)
    assert ends <= {"this Loader is", "this Loader was"}
    assert ends


# Pieces that are not to be disturbed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_waits_for_the_end_of_undisturbed_code_and_then_reaches_its_handler(number: signal.Signals) -> None:
    seen = []

    def handler(*_: object) -> None:
        seen.append("handled")

    before = signal.signal(number, handler)
    try:
        with Undisturbed():
            signal.raise_signal(number)
            seen.append("body")
        assert seen == ["body", "handled"]
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_handlers_that_were_held_back_are_all_called_and_put_back_even_if_they_raise() -> None:
    with pytest.raises((KeyboardInterrupt, Timeout)) as caught, Undisturbed():
        ctrl_c()
        alarm()
    assert {type(caught.value), type(caught.value.__context__)} == {KeyboardInterrupt, Timeout}


def test_a_handler_set_later_is_held_back_from_then_on_and_one_that_was_taken_away_no_more() -> None:
    seen: list[str] = []
    undisturbed = Undisturbed()
    with undisturbed:
        pass
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append("handled"))
    try:
        with undisturbed:
            signal.raise_signal(signal.SIGUSR1)
            seen.append("body")
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        with undisturbed:
            signal.raise_signal(signal.SIGUSR1)
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == ["body", "handled"]


def test_a_piece_inside_of_a_piece_ends_with_it_and_what_is_to_be_done_afterwards_waits_for_both() -> None:
    seen: list[str] = []
    undisturbed = Undisturbed()
    assert not undisturbed.afterwards(lambda: seen.append("never"))
    with pytest.raises(KeyboardInterrupt), undisturbed:
        with undisturbed:
            ctrl_c()
            assert undisturbed.afterwards(lambda: seen.append("afterwards"))
            seen.append("inside")
        seen.append("outside")
    assert seen == ["inside", "outside", "afterwards"]
    with undisturbed:
        pass
    assert len(seen) == 3


def test_undisturbed_code_of_a_handler_that_ran_right_after_such_code_leaves_all_as_it_was() -> None:
    seen: list[str] = []
    undisturbed = Undisturbed()

    def handler(*_: object) -> None:
        with undisturbed:
            ctrl_c()
            seen.append("inside")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(KeyboardInterrupt), undisturbed:
            signal.raise_signal(signal.SIGUSR1)
            seen.append("outside")
        assert seen == ["outside", "inside"]
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)
