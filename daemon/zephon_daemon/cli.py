"""The command `zephon`: its arguments, exit codes and one-line errors. What it does lives in the modules it calls.

Exit codes: 0 done, 1 the check failed, 2 usage, 3 cannot start, 130 interrupted. `ZEPHON_DEBUG=1` shows tracebacks.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from zephon import __version__
from zephon.errors import ZephonError
from zephon.extras import how_to_install
from zephon.words import many

DONE, FAILED, USAGE, CANNOT_START, INTERRUPTED = 0, 1, 2, 3, 130

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code (argparse raises SystemExit with 2)."""
    given = list(sys.argv[1:] if argv is None else argv)
    debug = os.environ.get("ZEPHON_DEBUG", "") not in ("", "0")
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr
    )
    warnings.showwarning = _show_warning
    parser = _parser()
    arguments, unknown = parser.parse_known_args(_before_command(given))
    if unknown:
        hint = ". The command of launch stands behind `--`" if arguments.name == "launch" and "--" not in given else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    arguments.command = given[given.index("--") + 1 :] if "--" in given else []
    try:
        return int(arguments.run(parser, arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    except ZephonError as error:
        if debug:
            raise
        print(f"zephon {arguments.name}: {' '.join(str(error).split())}", file=sys.stderr)
        return CANNOT_START
    except ModuleNotFoundError as error:
        if debug or error.name is None or error.name.startswith("zephon"):
            raise
        package = error.name.partition(".")[0]
        print(f"zephon {arguments.name}: needs the package {package!r}: {how_to_install(package)}", file=sys.stderr)
        return CANNOT_START
    except BrokenPipeError:  # a reader such as `head` has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return DONE


def size(text: str) -> int:
    """Bytes of "512M", "4G", "1.5GiB" or a plain number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; 512M and 4G are")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def default_socket(recipe: str) -> str:
    """The control socket of a daemon that was given none: a name made from the recipe's path."""
    from zephon.recipe import split_name
    from zephon.transport.endpoints import control_path

    path = os.path.abspath(os.path.expanduser(split_name(recipe)[0]))
    stem = re.sub(r"[^A-Za-z0-9_-]", "-", Path(path).stem)[:40]
    return control_path(f"d-{stem}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zephon", description="A deterministic, elastic data loader service.")
    parser.add_argument("--version", action="version", version=f"zephon {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Any, text: str, **settings: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False, **settings)
        command.set_defaults(run=run, name=name)
        return command

    daemon = add("daemon", _daemon, "the node daemon alone, for a supervisor such as systemd")
    _daemon_options(daemon)
    daemon.add_argument("--socket", metavar="PATH", help="control socket (default: made from the recipe's path)")
    daemon.add_argument("--parent", type=int, metavar="PID", help=argparse.SUPPRESS)
    launched = add("launch", _launch, "a daemon, and a command beside it: zephon launch RECIPE [options] -- COMMAND")
    launched.usage = "zephon launch RECIPE [options] -- COMMAND …"
    _daemon_options(launched)
    progress = add("progress", _progress, "how far a running daemon is, and what limits it")
    progress.add_argument("--socket", metavar="PATH")
    progress.add_argument("--json", action="store_true")
    progress.add_argument("--watch", action="store_true", help="again and again, until the daemon has ended")
    explain = add("explain", _explain, "the plan: stages, lanes, and what each rank gets")
    explain.add_argument("recipe", metavar="RECIPE")
    explain.add_argument("--dp", type=_positive, metavar="N", help="for this number of groups")
    verify = add("verify", _verify, "runs the recipe under each number of groups and compares every global step")
    verify.add_argument("recipe", metavar="RECIPE")
    verify.add_argument("--dp", type=_degrees, default=[8, 4, 2, 1], metavar="8,4,2,1")
    verify.add_argument("--steps", type=_positive, metavar="N")
    index = add("index", _index, "builds the indexes of data ahead of a run")
    index.add_argument("paths", nargs="+", metavar="PATH")
    checkpoint = add("checkpoint", _checkpoint, "what a checkpoint says")
    checkpoint.add_argument("file", metavar="FILE")
    text = "trains a tiny model on 4 ranks, resumes on 2 and on 1, and compares every global step"
    demo = add("demo", _demo, text, add_help=False, prefix_chars="\0")  # options too are left to the demo's own parser
    demo.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    inspect = add("inspect", _inspect, "the samples and the text of a past or future global step")
    inspect.add_argument("recipe", metavar="RECIPE")
    inspect.add_argument("--step", type=_positive, required=True, metavar="N", help="from 1, within its epoch")
    inspect.add_argument("--epoch", type=int, metavar="E", help="default: the checkpoint's, or 0")
    inspect.add_argument("--checkpoint", metavar="FILE", help="of the run: its settings, and a place to start from")
    return parser


def _daemon_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="recipe.py or recipe.toml, or recipe.py:name")
    parser.add_argument("--workers", type=_positive, metavar="N", help="worker processes (default: cores allowed)")
    text = "engine processes that the ranks' lanes are dealt to (default: one for every 16 workers)"
    parser.add_argument("--engines", type=_engines, metavar="N", help=text)
    text = "bound on rings and caches, such as 4G (default: half of what is free)"
    parser.add_argument("--memory", type=size, metavar="SIZE", help=text)
    text = "a worker, or the engine, that shows no progress for so long is reported (default: 20; 0: never)"
    parser.add_argument("--stall-seconds", type=_seconds, metavar="S", help=text)
    text = "and is ended after so long, and its work done again (default: ten times as many; 0: never)"
    parser.add_argument("--stall-end-seconds", type=_seconds, metavar="S", help=text)
    for name in ("--metrics-port", "--coordinator"):
        parser.add_argument(name, help=argparse.SUPPRESS)


def _before_command(given: list[str]) -> list[str]:
    return given[: given.index("--")] if "--" in given else given


def _refuse_unavailable(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    for name in ("metrics_port", "coordinator"):
        if getattr(arguments, name) is not None:
            _unavailable(parser, "--" + name.replace("_", "-"))


def _unavailable(parser: argparse.ArgumentParser, what: str) -> NoReturn:
    parser.error(f"{what} is not available yet")


def _daemon(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from setproctitle import setproctitle

    from zephon.cores import allowed_cores
    from zephon.engines import automatic_engines
    from zephon.transport.endpoints import control_path
    from zephon_daemon.daemon import Settings, serve
    from zephon_daemon.watchdog import Patience

    _refuse_unavailable(parser, arguments)
    setproctitle(f"zephon daemon {arguments.recipe}")
    socket = control_path(arguments.socket) if arguments.socket else default_socket(arguments.recipe)
    cores = allowed_cores().count
    workers = arguments.workers or cores
    patience = Patience.of(arguments.stall_seconds, arguments.stall_end_seconds)
    engines = arguments.engines or automatic_engines(workers, cores)
    return serve(
        Settings(arguments.recipe, socket, workers, arguments.memory, arguments.parent, engines, patience=patience)
    )


def _launch(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from zephon_daemon.launch import launch

    _refuse_unavailable(parser, arguments)
    if not arguments.command:
        parser.error("launch needs a command after `--`: zephon launch RECIPE -- torchrun …")
    options = [
        *(["--workers", str(arguments.workers)] if arguments.workers else []),
        *(["--engines", str(arguments.engines)] if arguments.engines else []),
        *(["--memory", str(arguments.memory)] if arguments.memory else []),
        *(["--stall-seconds", str(arguments.stall_seconds)] if arguments.stall_seconds is not None else []),
        *(["--stall-end-seconds", str(arguments.stall_end_seconds)] if arguments.stall_end_seconds is not None else []),
    ]
    return launch(arguments.recipe, options, arguments.command)


def _progress(_: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from zephon_daemon.progress import show, watch

    if arguments.watch:
        watch(arguments.socket, arguments.json, sys.stdout)
    else:
        print(show(arguments.socket, arguments.json))
    return DONE


def _explain(_: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from zephon.recipe import load_recipe

    recipe = load_recipe(arguments.recipe)
    print(recipe.pipeline().explain(dp_degree=arguments.dp))
    if len(recipe.names) > 1:
        print(f"other pipelines of this recipe: {', '.join(recipe.names[1:])}")
    return DONE


def _verify(_: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    steps = {} if arguments.steps is None else {"steps": arguments.steps}
    return int(import_module("zephon.verify").main(arguments.recipe, dp=arguments.dp, **steps) or DONE)


def _index(_: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from zephon.datasets import Dataset

    for path in arguments.paths:
        dataset = Dataset.from_path(Path(path).name or path, path)
        print(f"{path}: {many(dataset.total, 'row')} in {many(dataset.shard_count, 'shard')}")
    return DONE


def _checkpoint(_: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from zephon.checkpoints import load_checkpoint
    from zephon.frontiers import parse_checkpoint

    checkpoint = parse_checkpoint(load_checkpoint(arguments.file))
    records = [frontier.records for frontier in checkpoint.lanes.values()]
    lanes, missing = checkpoint.canonical_replicas, checkpoint.missing
    state = f"partial: lanes {missing} are missing" if missing else "complete"
    print(f"epoch {checkpoint.epoch}, {many(lanes, 'lane')}, {state}")
    earlier = f"; {checkpoint.past} a lane in earlier epochs" if checkpoint.past else ""
    print(f"delivered: {many(sum(records), 'record')}, {min(records)} to {max(records)} a lane{earlier}")
    if bad := sum(frontier.skipped for frontier in checkpoint.lanes.values()):
        print(f"left out up to these windows: {many(bad, 'bad record')}")
    for dataset in checkpoint.identity.get("datasets") or []:
        if isinstance(dataset, dict):
            rows, shards = many(dataset.get("rows", 0), "row"), many(dataset.get("shards", 0), "shard")
            print(f"  dataset {dataset.get('name')}: {rows} in {shards}")
    plain = {k: v for k, v in checkpoint.identity.items() if isinstance(v, (str, int, float, bool)) or k == "mixture"}
    print("  " + ", ".join(f"{name} {value}" for name, value in sorted(plain.items())))
    print("  lane      chunk     offset    records  skipped")
    for lane, at in sorted(checkpoint.lanes.items()):
        print(f"  {lane:>4} {at.chunk:>10} {at.offset:>10} {at.records:>10} {at.skipped:>8}")
    return DONE


def _demo(_: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    return int(import_module("zephon_daemon.demo").main(arguments.rest) or DONE)


def _inspect(_: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from zephon.checkpoints import load_checkpoint
    from zephon.frontiers import complete_checkpoint
    from zephon.inspection import described, left_out, step_of
    from zephon.recipe import load_recipe

    checkpoint = complete_checkpoint(load_checkpoint(arguments.checkpoint)) if arguments.checkpoint else None
    plan = load_recipe(arguments.recipe).pipeline().plan(checkpoint=checkpoint)
    epoch = arguments.epoch if arguments.epoch is not None else checkpoint.epoch if checkpoint else 0
    found = step_of(plan, arguments.step, epoch, checkpoint)
    for line in (*described(plan, arguments.step, epoch, found.batches), *left_out(found)):
        print(line)
    return DONE


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1 is expected")
    return int(text)


def _engines(text: str) -> int | None:
    if text != "auto" and (not text.isdecimal() or int(text) < 1):
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1 is expected, or auto")
    return None if text == "auto" else int(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text.strip()):
        raise argparse.ArgumentTypeError(f"{text!r}: seconds from 0 are expected, such as 20 or 0.5")
    return float(text)


def _degrees(text: str) -> list[int]:
    return [_positive(each.strip()) for each in text.split(",")]


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"zephon: warning: {' '.join(str(message).split())}", file=sys.stderr)
