"""The rank's side of Zephon: connect to the node's daemon, iterate its batches, take checkpoints.

Needs numpy, msgpack and pyzmq. torch is imported when a batch is first touched as torch, and not before.
"""

from zephon_client.connecting import connect

__all__ = ["connect"]
