"""How the tasks of a pipeline's stages (the front, and later ones) are executed in an embedded run.

A runner is a pool that tasks are submitted to: `inline` runs each in the caller's thread, `threads` and `process`
some at once; the lane's producer puts the outcomes back in order. The process pool is provided by the daemon's
package, found by its entry point, since nothing in this package starts a process.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import entry_points
from typing import Protocol

from zephon.errors import SettingError
from zephon.extras import needing
from zephon.plan import Plan
from zephon.validation import warnings_at_start
from zephon.windows import AnyTask, Front, Outcome

RUNNERS = ("auto", "process", "threads", "inline")


class Pool(Protocol):
    """Executes tasks of one plan somewhere, each with a future."""

    ahead: int
    """How many tasks to have in work at once."""

    def submit(self, task: AnyTask) -> Future[Outcome]: ...

    def check(self, plan: Plan) -> list[str]:
        """What to warn of before a run: the check of operators that run a user's code, where the pool runs them."""

    def close(self) -> None:
        """End whatever it started."""


class InlinePool:
    """Every task in the caller's thread, when it is submitted."""

    ahead = 1

    def __init__(self, front: Front) -> None:
        front.setup()
        self._front = front

    def submit(self, task: AnyTask) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        try:
            future.set_result(self._front.run(task))
        except Exception as error:  # what a task raises belongs to whoever asks for its outcome
            future.set_exception(error)
        return future

    def check(self, plan: Plan) -> list[str]:
        return warnings_at_start(plan, lambda operator: True)

    def close(self) -> None:
        self._front.teardown()


class ThreadPool:
    """Tasks on threads of this process."""

    def __init__(self, front: Front, workers: int) -> None:
        front.setup()
        self._front, self.ahead = front, workers + 1
        self._own = own = set[int]()
        self._threads = ThreadPoolExecutor(
            workers, thread_name_prefix="zephon-worker", initializer=lambda: own.add(threading.get_ident())
        )

    def submit(self, task: AnyTask) -> Future[Outcome]:
        return self._threads.submit(self._front.run, task)

    def check(self, plan: Plan) -> list[str]:
        return warnings_at_start(plan, lambda operator: True)

    def close(self) -> None:
        if threading.get_ident() in self._own:  # a run that was dropped may be collected in any thread
            threading.Thread(target=self.close, name="zephon-end").start()
            return
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._front.teardown()


def make_pool(name: str, front: Front, workers: int) -> Pool:
    """The pool for a runner of that name in an embedded run; `auto` is `inline`."""
    if name in ("auto", "inline"):
        return InlinePool(front)
    if name == "threads":
        return ThreadPool(front, workers)
    if name == "process":
        found = list(entry_points(group="zephon.runners", name="process"))
        if not found:
            raise SettingError('runner="process" needs the node daemon\'s package, zephon_daemon, to be installed')
        with needing('runner="process"'):
            made = found[0].load()
        return made(front, workers)  # type: ignore[no-any-return]
    raise SettingError(f"runner={name!r}: must be one of {', '.join(RUNNERS)}")
