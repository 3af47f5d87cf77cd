"""`python -m tests.benchmarks [--quick] [--repeats N] [--json FILE] [names...]`"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks import costs, engines, operators, recovery, shares, stages, throughput
from tests.benchmarks.contest import Timing
from tests.benchmarks.corpus import FULL, QUICK, Corpus, corpus
from tests.benchmarks.processes import busy_cores
from tests.benchmarks.report import Row, Scale, table

FIGURES = Path("benchmarks.json")

BENCHMARKS: dict[str, Callable[[Corpus, Scale], list[Row]]] = {
    "a": throughput.text,
    "b": throughput.ids,
    "c": throughput.mixed,
    "lengths": throughput.lengths,
    "operators": operators.speed,
    "fill": operators.fill,
    "cpu": shares.cpu,
    "engines": engines.engines,
    "stages": stages.stages,
    "memory": costs.memory,
    "next": costs.next_batch,
    "import": costs.imported,
    "wait": costs.waiting,
    "state": costs.state,
    "resume": costs.resume,
    "start": costs.start,
    "idle": costs.idle,
    "worker": costs.worker,
    "deaths": recovery.deaths,
}


def main() -> int:
    arguments = _arguments()
    if arguments.quick:
        made, scale = corpus(QUICK), Scale(rounds=1, timing=Timing(0.2, 0.5), factor=0.04)
    else:
        made, scale = corpus(FULL), Scale(rounds=arguments.repeats, timing=Timing(2.0, 4.0), factor=1.0)
    mean = made.tokens // made.documents
    print(f"{made.documents} documents, {made.tokens / 1e6:.1f} M tokens, {mean} a document, of {made.vocabulary}")
    others = busy_cores(1.0)
    print(f"{os.cpu_count()} cores, of which others use {others:.1f}; Python {platform.python_version()}", flush=True)
    if others > 0.2:
        print("Others are at work: what needs every core comes out too low, one-process loops do not.")
    rows: list[Row] = []
    for name in arguments.names or BENCHMARKS:
        print(f"{name}: {(BENCHMARKS[name].__doc__ or '').strip().splitlines()[0]}", file=sys.stderr, flush=True)
        rows += BENCHMARKS[name](made, scale)
        arguments.json.write_text(json.dumps([row.as_json() for row in rows], indent=1))
    print(table(rows))
    print(f"also in {arguments.json}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Benchmarks, as ratios.")
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a smoke run on little data: figures mean nothing")
    parser.add_argument("--repeats", type=int, default=3, help="rounds in which contestants take turns")
    parser.add_argument("--json", type=Path, metavar="FILE", default=FIGURES, help="where the rows go as well")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
