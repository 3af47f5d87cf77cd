"""Workloads A, B and others: tokens a second of the bare loops, of torch's DataLoader and of Zephon, taken in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.benchmarks.contest import Compared, Timing, environment, in_turn, module, players, tokens_a_second
from tests.benchmarks.corpus import Corpus
from tests.benchmarks.report import Row, Scale
from tests.benchmarks.zephon_runs import Recipe, daemon

FLOOR, TORCH, ONE, FOUR = "bare loop", "torch DataLoader", "Zephon, one rank", "Zephon, four ranks"


def text(corpus: Corpus, scale: Scale) -> list[Row]:
    """A: Parquet text, tokenise, pack to 2049, batches of 8."""

    def floor(library: str, processes: int) -> Callable[[], float]:
        shared = ("floors", "text", corpus.text, corpus.tokenizer, library)
        return _contestant([module(*shared, part, processes) for part in range(processes)], scale.timing)

    compared = in_turn(
        {
            FLOOR: floor("fastokens", 2),
            ONE: zephon("text", corpus, 1, scale.timing),
            FOUR: zephon("text", corpus, 4, scale.timing),
            "bare loop, one process": floor("fastokens", 1),
            "bare loop, tokenizers": floor("tokenizers", 1),
            TORCH: _contestant([module("torch_loader", "text", corpus.text, corpus.tokenizer)], scale.timing),
        },
        scale.rounds,
    )
    return _rows("A", compared, "bare two-process loop", against_torch=40.0)


def ids(corpus: Corpus, scale: Scale) -> list[Row]:
    """B: the same tokens in Parquet lists, pack to 2049, batches of 8."""
    compared = in_turn(
        {
            FLOOR: _contestant([module("floors", "ids", corpus.ids)], scale.timing),
            ONE: zephon("ids", corpus, 1, scale.timing),
            FOUR: zephon("ids", corpus, 4, scale.timing),
            TORCH: _contestant([module("torch_loader", "ids", corpus.ids)], scale.timing),
        },
        scale.rounds,
    )
    return _rows("B", compared, "bare one-process loop", against_torch=4.0)


def mixed(corpus: Corpus, scale: Scale) -> list[Row]:
    """C: a mixture of Parquet and JSON lines, tokenise, best fit to 2049, shuffle, batches of 8."""
    shared = ("floors", "mixed", corpus.text, corpus.tokenizer, "fastokens")
    parts = [module(*shared, part, 2, corpus.lines) for part in range(2)]
    contestants = {FLOOR: _contestant(parts, scale.timing), ONE: zephon("mixed", corpus, 1, scale.timing)}
    return [_row("C", "one rank to the bare two-process loop", in_turn(contestants, scale.rounds), ONE, FLOOR, 0.5)]


def lengths(corpus: Corpus, scale: Scale) -> list[Row]:
    """B with documents of a tenth of the length, and ten times as long."""
    rows = []
    for workload, folder in (("short", corpus.short), ("long", corpus.long)):
        floor = _contestant([module("floors", "ids", folder)], scale.timing)
        compared = in_turn({FLOOR: floor, ONE: zephon(workload, corpus, 1, scale.timing)}, scale.rounds)
        name = f"{workload} documents, one rank to the bare one-process loop"
        rows.append(_row("B", name, compared, ONE, FLOOR, None))
    return rows


def zephon(workload: str, corpus: Corpus, ranks: int, timing: Timing) -> Callable[[], float]:
    """A contestant: a daemon of its own, at default settings, and so many ranks."""

    def run() -> float:
        with daemon(Recipe(workload), corpus) as node, node.ranks(ranks) as those:
            for rank in those:
                rank.hear()
                rank.tell(["deliver"])
            return tokens_a_second(those, timing)

    return run


def _contestant(commands: Sequence[Sequence[str]], timing: Timing) -> Callable[[], float]:
    def run() -> float:
        with players(commands, environment()) as those:
            return tokens_a_second(those, timing)

    return run


def _rows(workload: str, compared: Compared, floor: str, against_torch: float) -> list[Row]:
    rows = [
        _row(workload, f"one rank to the {floor}", compared, ONE, FLOOR, 0.5),
        _row(workload, "one rank to torch DataLoader, 2 workers", compared, ONE, TORCH, against_torch),
        _row(workload, "four ranks to one", compared, FOUR, ONE, 0.9),
    ]
    others = [name for name in compared.rates if name not in (FLOOR, TORCH, ONE, FOUR)]
    return rows + [Row(f"{workload}: {name}", compared.median(name) / 1e6, "M tokens/s", None) for name in others]


def _row(workload: str, name: str, compared: Compared, of: str, base: str, target: float | None) -> Row:
    ratio, low, high = compared.ratio(of, base)
    mine, theirs = compared.median(of) / 1e6, compared.median(base) / 1e6
    detail = f"{low:.2f} to {high:.2f}; {mine:.2f} and {theirs:.2f} M tokens/s"
    return Row(f"{workload}: {name}", ratio, "×", target, at_least=True, detail=detail)
