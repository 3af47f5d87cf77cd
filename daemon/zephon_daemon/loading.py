"""The engine loads its recipe under the daemon's eye.

A recipe is a user's code, and may index shards by the thousand or download a tokenizer; any of that may hang. So the
engine shows what it does before it begins, and goes on showing that an index comes along. What shows nothing for too
long is reported with its Python stack and ended, as any engine that does not answer.
"""

from __future__ import annotations

import os

import cloudpickle

from zephon.datasets.progress import signs_of_life
from zephon.errors import ZephonError
from zephon.recipe import Recipe, load_recipe
from zephon.transport.channels import MAX_DESCRIPTOR, Channel
from zephon.transport.messages import encode
from zephon.transport.protocol import EngineLoads, RunRefused
from zephon_daemon.black_box import BlackBox
from zephon_daemon.stacks import offer_stack


def load(daemon: Channel, path: str, box: BlackBox) -> Recipe | None:
    """The recipe; None if it cannot be loaded, which the daemon has been told with the reason."""
    daemon.send(encode(EngineLoads()), (box.fileno(), offer_stack(), os.pidfd_open(os.getpid())))
    signs_of_life().append(box.beat)
    box.other("loading the recipe")
    try:
        recipe = load_recipe(path)
    except ZephonError as error:
        daemon.send(encode(RunRefused(-1, type(error).__name__, str(error)), limit=MAX_DESCRIPTOR))
        daemon.flush()
        return None
    finally:
        box.idle()
    module = getattr(recipe, "module", None)
    if module is not None:
        cloudpickle.register_pickle_by_value(module)
    return recipe
