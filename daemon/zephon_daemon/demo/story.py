"""What the demo does, in its order, and what it says at the end.

A corpus of text from this Python installation; a tiny model trained under `torchrun` over Zephon's daemon, stopped, and
resumed on fewer ranks, beside a run that was never stopped; the same over the usual loader. Then every global step is
compared. The exit status is 1 if one differs, or if losses differ by more than rounding makes.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from zephon_daemon.demo import report
from zephon_daemon.demo.corpus import make_corpus, train_tokenizer
from zephon_daemon.demo.launches import Step, Training, TrainingFailed, train

DONE, DIFFERS, CANNOT_START, INTERRUPTED = 0, 1, 3, 130

_MARK = ".zephon-demo"
_MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Scale:
    """How much of everything. `ranks` are those of the uninterrupted run, then those of each resumed one."""

    steps: int = 60
    ranks: tuple[int, ...] = (4, 2, 1)
    sizes: dict[str, int] = field(default_factory=lambda: {"code": 15 * _MEGABYTE, "prose": 6 * _MEGABYTE})
    roots: list[Path] | None = None

    @property
    def stop(self) -> int:
        return self.steps // 2


def main(argv: Sequence[str] | None = None) -> int:
    what = "Trains a tiny model on 4 ranks, resumes it on 2 and on 1, and compares every global step."
    parser = argparse.ArgumentParser(prog="zephon demo", description=what)
    parser.add_argument("--out", type=Path, default=Path("zephon-demo"), metavar="FOLDER", help="default: zephon-demo")
    parser.add_argument("--steps", type=int, metavar="N", help="global steps of a whole run (default: 60)")
    parser.add_argument("--quick", action="store_true", help="a small corpus and few steps")
    arguments = parser.parse_args(argv)
    if arguments.steps is not None and arguments.steps < 2:
        parser.error("--steps: at least 2, one before the stop and one after")
    scale = Scale(steps=arguments.steps or 60)
    if arguments.quick:
        scale = Scale(arguments.steps or 12, sizes={"code": 2 * _MEGABYTE, "prose": _MEGABYTE})
    return demo(arguments.out, scale)


def demo(folder: Path, scale: Scale) -> int:
    """The demo in a folder of its own; returns the exit status."""
    missing = [name for name in ("torch", "matplotlib") if find_spec(name) is None]
    if missing:
        _say(f"needs {' and '.join(missing)}, which are not installed: pip install '.[demo]'", error=True)
        return CANNOT_START
    try:
        with _sigterm_as_interrupt():
            _prepare_folder(folder := folder.resolve())
            return _run(folder, scale)
    except KeyboardInterrupt:
        _say("interrupted; all that it started has ended", error=True)
        return INTERRUPTED
    except BrokenPipeError:  # nobody reads what it says
        raise
    except (TrainingFailed, OSError) as error:
        _say(str(error), error=True)
        return CANNOT_START


def _run(folder: Path, scale: Scale) -> int:
    clock = _Progress()
    clock.line("collecting text from this Python installation")
    corpus = make_corpus(folder / "corpus", scale.sizes, scale.roots)
    for name, documents in corpus.documents.items():
        clock.line(f"  {name}: {documents} documents, {corpus.bytes[name] / _MEGABYTE:.1f} MB, in corpus/{name}")
    clock.line("training a byte-level BPE on a part of it")
    train_tokenizer(folder / "corpus", folder / "tokenizer.json")
    shutil.copyfile(Path(__file__).with_name("recipe.py"), folder / "recipe.py")

    zephon = _zephon_curves(folder, scale, clock)
    usual = _usual_curves(folder, scale, clock)
    clock.line("drawing the figure")
    report.draw(folder / "demo.png", zephon, usual, scale.stop)
    return _conclude(folder, scale, clock, zephon, usual)


def _zephon_curves(folder: Path, scale: Scale, clock: _Progress) -> report.Curves:
    """An uninterrupted run; a second one that is stopped half-way; and that one resumed on other numbers of ranks."""
    first = scale.ranks[0]
    saved = folder / "runs" / "zephon-state"
    whole = _train(folder, Training(f"zephon-{first}", "zephon", first, scale.steps), clock)
    stopped = Training(f"zephon-{first}-stopped", "zephon", first, scale.stop, save_at=scale.stop, save=saved)
    begun = _train(folder, stopped, clock)
    return _with_resumed(folder, scale, clock, "zephon", saved, whole, begun)


def _usual_curves(folder: Path, scale: Scale, clock: _Progress) -> report.Curves:
    """The uninterrupted run saves its state half-way and goes on; the others start from that state."""
    first = scale.ranks[0]
    saved = folder / "runs" / "usual-state"
    training = Training(f"usual-{first}", "usual", first, scale.steps, save_at=scale.stop, save=saved)
    whole = _train(folder, training, clock)
    return _with_resumed(folder, scale, clock, "usual", saved, whole, whole[: scale.stop])


def _with_resumed(
    folder: Path, scale: Scale, clock: _Progress, loader: str, saved: Path, whole: list[Step], begun: list[Step]
) -> report.Curves:
    first, *others = scale.ranks
    curves = {f"{first} ranks": whole}
    for ranks in others:
        resumed = Training(f"{loader}-{first}-to-{ranks}", loader, ranks, scale.steps, resume=saved)
        curves[f"{first} → {ranks}"] = begun + _train(folder, resumed, clock)
    return curves


def _train(folder: Path, training: Training, clock: _Progress) -> list[Step]:
    what = "Zephon" if training.loader == "zephon" else "usual loader"
    how = "resumed on" if training.resume else "on"
    ranks = "1 rank" if training.ranks == 1 else f"{training.ranks} ranks"
    end = ", then stopped" if training.save_at == training.last else ""
    clock.line(f"{what} {how} {ranks}, to step {training.last}{end}")
    return train(folder, training, clock.step)


def _conclude(folder: Path, scale: Scale, clock: _Progress, zephon: report.Curves, usual: report.Curves) -> int:
    wrong, parted = report.differing(zephon), report.differing(usual)
    loss = report.largest_loss_difference(zephon)
    text = report.table(zephon, usual, scale.stop)
    (folder / "table.txt").write_text(text + "\n")
    ways = ", ".join(zephon)
    print(f"\nDigests of global steps\n\n{text}\n")
    if wrong:
        print(f"Zephon: {len(wrong)} of {scale.steps} global steps DIFFER, the first at step {wrong[0]} ({ways}).")
    else:
        print(f"Zephon: all {scale.steps} global steps are the same ({ways}); losses differ by at most {loss:.1g}.")
    if loss > report.LOSS_TOLERANCE:
        print(f"Zephon: the losses differ by {loss:.4f}, more than rounding makes ({report.LOSS_TOLERANCE}).")
    if parted:
        apart = report.largest_loss_difference(usual)
        print(
            f"Usual loader: {len(parted)} of {scale.steps} global steps differ, from step {parted[0]} on; "
            f"losses by up to {apart:.2f}."
        )
    print(f"\nThe figure: {folder / 'demo.png'} (the loaders draw other documents, so compare within a panel)")
    print(f"The corpus, the recipe, and steps and logs of each run (runs/): {folder}")
    print(f"Took {clock.seconds:.0f} seconds.")
    return DIFFERS if wrong or loss > report.LOSS_TOLERANCE else DONE


def _prepare_folder(folder: Path) -> None:
    """An empty folder, or what an earlier demo left, which is removed. Nothing else is touched."""
    mark = folder / _MARK
    if folder.exists() and not mark.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} holds something else; name a folder that is new, with --out")
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()
    for name in ("corpus", "runs", "cache"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("tokenizer.json", "recipe.py", "table.txt", "demo.png"):
        (folder / name).unlink(missing_ok=True)
    (folder / "runs").mkdir()


class _Progress:
    """Lines with the seconds since the start; on a terminal each step is shown in place."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._in_place = sys.stdout.isatty()
        self._open = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def line(self, text: str) -> None:
        print(("\n" if self._open else "") + f"[{self.seconds:3.0f} s] {text}", flush=True)
        self._open = False

    def step(self, text: str) -> None:
        """`text` begins with "step N"."""
        if self._in_place:
            print(f"\r\033[K        {text}", end="", flush=True)
            self._open = True
        elif int(text.split()[1]) % 10 == 0:
            print(f"        {text}", flush=True)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does, with all that it started."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(text: str, *, error: bool = False) -> None:
    print(f"zephon demo: {text}", file=sys.stderr if error else sys.stdout, flush=True)
