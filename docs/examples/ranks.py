"""Starts ranks as torchrun would, for where there is no torch: `ranks.py NUMBER SCRIPT [ARGUMENT …]`."""
from __future__ import annotations

import os
import subprocess
import sys


def main() -> int:
    number, script = int(sys.argv[1]), sys.argv[2:]
    ranks = [
        subprocess.Popen([sys.executable, *script], env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(number)})
        for rank in range(number)
    ]
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
