"""Where data comes from: the names that recipes import from `zephon.io`."""

from zephon.datasets import Dataset, InMemoryShard

__all__ = ["Dataset", "InMemoryShard"]
