"""Datasets: an ordered set of shards of one format under a name, and reading rows of them by pointer.

`shards` finds files, `shard_index` and `line_index` count them, `jsonl`, `parquet` and `memory` read them, `fetch`
reads pointers of several datasets at once. Each file says what it guarantees.
"""

from zephon.datasets.dataset import Dataset
from zephon.datasets.memory import InMemoryShard

__all__ = ["Dataset", "InMemoryShard"]
