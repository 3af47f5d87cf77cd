"""How one Python process of ours starts another: the same interpreter, the same zephon, and nothing of the caller.

`python -m` would put the working folder first on the path, where a user's `random.py` or `tokenizers/` shadows the real
one, and would load the module under a second name; so a line of code names the function instead. Whether zephon is
installed, editable or only on a test's path, the child finds the one that this process uses.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module


def command(target: str, *arguments: str) -> list[str]:
    """The command line that calls `target`, "module:function" without arguments, with `arguments` as `sys.argv[1:]`."""
    module, _, function = target.partition(":")
    code = (
        "import sys\n"
        "if sys.path[:1] == ['']: del sys.path[0]\n"
        f"sys.path[:0] = [f for f in {_folders()!r} if f not in sys.path]\n"
        f"from {module} import {function} as main\n"
        "sys.exit(main())"
    )
    return [sys.executable, "-c", code, *arguments]


def _folders() -> list[str]:
    """Where this process has zephon and its daemon from."""
    folders = []
    for name in ("zephon", "zephon_daemon"):
        file = import_module(name).__file__
        assert file is not None
        folders.append(os.path.dirname(os.path.dirname(os.path.abspath(file))))
    return list(dict.fromkeys(folders))
