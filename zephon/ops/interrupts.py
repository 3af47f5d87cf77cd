"""What a user's function raises, told apart from what reaches this process through it.

A function that raises `SystemExit` or `KeyboardInterrupt` has failed on a record like any other. But a real Ctrl-C, or
a `sys.exit()` in a signal handler of the program that embeds the run, may arrive while such a function runs, and must
end that program.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType


def is_interrupt(error: BaseException) -> bool:
    """Whether an exception belongs to the process, not to the function that it came out of."""
    if isinstance(error, Exception) or threading.current_thread() is not threading.main_thread():
        return False
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        frame: FrameType = trace.tb_frame
        if frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False
