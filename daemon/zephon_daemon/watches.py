"""Connections that one thread waits for at once, each with what is to be done when something arrives on it."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Iterator

from zephon.transport.channels import Channel

Act = Callable[[], None]


class Watches:
    """A selector that also waits for room to write, on those connections that have more to send."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._channels: dict[Channel, int] = {}

    def add(self, channel: Channel, act: Act) -> None:
        self._selector.register(channel, selectors.EVENT_READ, act)
        self._channels[channel] = selectors.EVENT_READ

    def add_descriptor(self, fd: int, act: Act) -> None:
        self._selector.register(fd, selectors.EVENT_READ, act)

    def drop(self, channel: Channel) -> None:
        """No more of that connection, which may not be watched at all."""
        if self._channels.pop(channel, None) is not None:
            self._selector.unregister(channel)

    def wait(self, seconds: float) -> Iterator[Act]:
        """What is to be done, after at most so long."""
        self._update()
        for key, _ in self._selector.select(max(0.0, seconds)):
            yield key.data

    def _update(self) -> None:
        for channel, now in self._channels.items():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.wants_write else 0)
            if wanted != now:
                self._selector.modify(channel, wanted, self._selector.get_key(channel).data)
                self._channels[channel] = wanted
