"""Benchmarks: the same work by a bare loop, by torch's DataLoader and by Zephon, in turn, as ratios.

`python -m tests.benchmarks [--quick] [--repeats N] [--json FILE] [names...]` runs them and prints one table. A single
absolute time says little on a shared machine; what is compared is taken side by side in one run.
"""
