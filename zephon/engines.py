"""How many engines a daemon has. An engine is one thread that puts outcomes in order, packs and writes batches; the
lanes of a group are in one engine, so more engines than groups have nothing to do.

It is an execution setting: where a lane is produced shows nowhere in the data.
"""

from __future__ import annotations

from zephon.errors import SettingError
from zephon.words import many

MOST_ENGINES = 64
WORKERS_AN_ENGINE = 16
"""One engine keeps so many workers busy where they have more to do for a token than it has."""


def automatic_engines(workers: int, cores: int) -> int:
    """The number unless the user says one: one, and another for every `WORKERS_AN_ENGINE` workers more that the cores
    allowed can run at once.
    """
    return max(1, min(MOST_ENGINES, min(workers, cores) // WORKERS_AN_ENGINE))


def check_engines(engines: int, workers: int) -> None:
    """Refuses numbers that make no sense: SettingError."""
    most = min(workers, MOST_ENGINES)
    if not 1 <= engines <= most:
        raise SettingError(
            f"engines={engines}: must be in 1..{most}, since each engine needs a worker of its own (workers={workers})"
        )


def described_engines(workers: int, cores: int, groups: int) -> str:
    """The automatic number, for people."""
    engines = automatic_engines(workers, cores)
    if engines == 1:
        return "1 engine (--engines; more from 32 workers on)"
    used = f", of which {many(groups, 'group uses', 'groups use')} {min(groups, engines)}" if groups < engines else ""
    return f"{many(engines, 'engine')} (--engines; one for every {WORKERS_AN_ENGINE} workers){used}"
