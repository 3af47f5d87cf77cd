"""The black box: what its writer was at when it ended can be read by somebody else."""

from __future__ import annotations

import os

from zephon.windows import Task
from zephon_daemon.black_box import BlackBox


def test_the_other_side_reads_what_is_in_work_and_nothing_once_it_is_done(no_leaks: None) -> None:
    mine = BlackBox.create()
    its = BlackBox.attach(os.dup(mine.fileno()))
    assert str(its) == ""
    mine.task(Task(1, 3, 512, 1024), "pack_flat, shuffle")
    assert str(its) == "at work on lane 3, epoch 1, its samples 512 to 1023, in pack_flat, shuffle"
    mine.task(Task(1, 4, 0, 8), "pack_flat, shuffle")
    assert "lane 4" in str(its)
    mine.idle()
    assert str(its) == ""
    mine.other("the start of pipeline 'eval'")
    mine.close()
    assert str(its) == "at work on the start of pipeline 'eval'"
    its.close()


def test_a_text_that_is_too_long_is_cut(no_leaks: None) -> None:
    mine = BlackBox.create()
    mine.other("é" * 10_000)
    assert 1000 < len(str(mine)) < 4096
    mine.close()
