"""A trainer has threads and tokenizers of its own, takes states often or never, and needs all ranks at the end."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.corpora import byte_tokenizer
from tests.running import Daemon, Ledger, Ranks, counting, plan_of, python, write_recipe
from zephon.recipe import load_recipe
from zephon.transport.channels import Channel
from zephon.words import many
from zephon_client import connect
from zephon_daemon.progress import text

BUSY = """
import logging, os, sys, threading
import numpy as np
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
assert len(tokenizer.encode_batch(["some text, " * 50] * 100)) == 100
try:
    import torch
    torch.set_num_threads(2)
    (torch.ones(600, 600) @ torch.ones(600, 600)).sum().item()
except ImportError:
    np.ones((600, 600)) @ np.ones((600, 600))
stopping = threading.Event()
def talk():
    while not stopping.wait(0.02):
        logging.getLogger("busy").info("at work")
logging.basicConfig(level=logging.INFO, stream=open(os.devnull, "w"))
for _ in range(20):
    threading.Thread(target=talk, daemon=True).start()
from zephon.recipe import load_recipe
from zephon_client import connect
from tests.running import Daemon

for start in range(int(sys.argv[2])):
    pipeline = load_recipe(sys.argv[1] + "/recipe.py").pipeline().options(runner="process", max_workers=2)
    print("embedded", len(next(iter(pipeline))), flush=True)
    pipeline.close()
    with Daemon(sys.argv[1] + "/recipe.py") as daemon, connect(daemon.socket, dp_degree=1, dp_group_id=0) as loader:
        print("daemon", len(next(loader)), flush=True)
    assert not daemon.errors, daemon.errors
stopping.set()
"""

TOKENIZED = """
source = StaticMixtureWorkSource([Dataset.from_path("count", HERE / "count")], mixture=None, seed=5)
pipeline = Pipeline(source).map_transform(lambda row: {"text": f"{row['id']} " * 20})
pipeline.tokenize(tokenizer_id=str(HERE / "tokenizer.json"), field="text", special_tokens="eos")
pipeline.pack_flat(33, algorithm="wrap").batch(4).options(canonical_replicas=2)
"""


def test_case_D6_a_trainer_with_threads_and_parallel_tokenizers_gets_its_first_batch_every_time_and_no_warning(
    runtime_folder: Path, amount: Callable[[int, int], int]
) -> None:
    counting(runtime_folder, 600, 2, lanes=2, batch=4)
    byte_tokenizer(runtime_folder / "tokenizer.json")
    write_recipe(runtime_folder, TOKENIZED)
    times = amount(1, 50)
    environment = {"TOKENIZERS_PARALLELISM": None, "RAYON_NUM_THREADS": None, "OMP_NUM_THREADS": None}
    with python(runtime_folder, BUSY, str(runtime_folder), str(times), environment=environment) as trainer:
        for _ in range(times):
            assert [trainer.line(), trainer.line()] == ["embedded 4", "daemon 4"]
        assert trainer.end() == 0
        assert trainer.errors == ""


def test_case_I1_states_that_nobody_asks_for_cost_nothing_and_those_asked_for_reach_no_other_process(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch, amount: Callable[[int, int], int]
) -> None:
    """No lane can be held up by a state: taking one sends nothing, and its size has nothing to do with what is held."""
    batches = amount(200, 600)
    more = f".shuffle({amount(2_000, 20_000)})"
    rows, options = amount(5_000, 40_000), "flush_every_k_chunks=16"
    recipe = counting(runtime_folder, rows, 2, lanes=2, batch=8, more=more, options=options)
    ledger = Ledger(plan_of(recipe))
    sent: Counter[str] = Counter()
    before = Channel.send

    def counted(channel: Channel, payload: bytes, fds: Any = ()) -> bool:
        sent["messages"] += 1
        return before(channel, payload, fds)

    monkeypatch.setattr(Channel, "send", counted)
    sizes = []
    with Daemon(recipe) as daemon, connect(daemon.socket, dp_degree=1, dp_group_id=0, output="numpy") as loader:
        for number, batch in zip(range(batches), loader):
            ledger.enter(0, batch)
            if number >= batches // 2 and batch.ends_round:
                at = sent["messages"]
                asked = loader._connection.control._number
                sizes.append(len(json.dumps(loader.state_dict())))
                loader.state_dict()
                sent["by states"] += sent["messages"] - at
                sent["asked"] += loader._connection.control._number - asked
    assert len(sizes) == batches // 4
    assert sent["asked"] == 0
    assert max(sizes) < 8192
    assert sent["by states"] <= len(sizes), "slots go back, as they would have later; nothing else is sent"


ENDS = """
def of(rows, lanes, drop_last, packed=False):
    data = Dataset.from_dict("d", {"0": InMemoryShard([{"id": i, "input_ids": np.arange(i + 1)} for i in range(rows)])})
    pipeline = Pipeline(StaticMixtureWorkSource([data], None, seed=3, chunk_size=2))
    if packed:
        pipeline.pack_flat(64, algorithm="first_fit")
    return pipeline.batch(1, drop_last=drop_last).options(canonical_replicas=lanes)
"""
CASES = {
    "ten": "10, 3, True", "ten_all": "10, 3, False", "one": "1, 4, True", "one_all": "1, 4, False",
    "packed": "50, 4, True, True", "packed_all": "50, 4, False, True",
}  # fmt: skip


ROWS = {"ten": 10, "ten_all": 10, "one": 1, "one_all": 1}


@pytest.fixture(scope="module")
def validation() -> Iterator[Daemon]:
    folder = Path(tempfile.mkdtemp(prefix="z", dir="/tmp"))
    head = "import numpy as np\nfrom zephon import InMemoryShard\n"
    made = "".join(f"{name} = of({how})\n" for name, how in CASES.items())
    recipe = write_recipe(folder, head + ENDS + made + "pipeline = ten\n")
    with Daemon(recipe, workers=1) as running:
        yield running.all_started()
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("name", "ranks", "steps", "records", "warned"),
    [
        ("ten", 3, 3, 9, ""),
        ("ten_all", 3, 4, 10, ""),
        ("one", 4, 0, 0, "no full round"),
        ("one_all", 4, 1, 1, ""),
    ],
)
def test_case_K2_few_sequences_end_at_the_same_step_dropped_or_with_empty_batches(
    validation: Daemon, name: str, ranks: int, steps: int, records: int, warned: str
) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Ranks(validation.socket, ranks, pipeline=name) as all_ranks:
            assert all_ranks.rounds() == [steps] * ranks
            report = validation.report()["engine"]
            batches = [batch for each in all_ranks.batches for batch in each]
    assert len(batches) == steps * ranks
    assert sum(map(len, batches)) == records
    assert sum(not len(batch) for batch in batches) == steps * ranks - records
    run = next(run for run in report["runs"] if run["pipeline"] == name)
    assert run["left_out"].get("0", 0) == ROWS[name] - records
    if records < ROWS[name]:
        left = many(ROWS[name] - records, "record")
        assert f"epoch 0 leaves out {left}: the shortest lane ends it" in text({"engine": report})
    if name == "ten":
        explained = load_recipe(validation.recipe).pipeline().explain(dp_degree=3)
        assert "leaving out 1 record of the incomplete last round" in explained
    assert not warned or any(warned in str(each.message) for each in said), [str(each.message) for each in said]


VALIDATE = """
import sys
import torch.distributed as dist
from zephon_client import connect
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meet", rank=int(sys.argv[2]), world_size=4)
for name in ("packed", "packed_all", "one", "one_all"):
    with connect(sys.argv[3], dp_degree=4, dp_group_id=int(sys.argv[2]), pipeline=name, output="numpy") as loader:
        lengths = [len(batch) for batch in loader]
        dist.barrier()
    print(name, len(lengths), sum(lengths), flush=True)
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_case_K2_a_barrier_after_validation_returns_on_every_rank(validation: Daemon, runtime_folder: Path) -> None:
    pytest.importorskip("torch")
    folder, socket = runtime_folder, validation.socket
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    ranks = [python(folder, VALIDATE, str(folder), str(n), socket, environment=one) for n in range(4)]
    with ranks[0], ranks[1], ranks[2], ranks[3]:
        said = [[rank.line(90).split() for _ in range(4)] for rank in ranks]
        assert [rank.end() for rank in ranks] == [0] * 4
    sequences = {}
    for name in ("packed", "packed_all"):
        ledger = Ledger(plan_of(validation.recipe, name))
        sequences[name] = [ledger.total(0, lane) for lane in range(4)]
    for rank, lines in enumerate(said):
        assert [line[0] for line in lines] == ["packed", "packed_all", "one", "one_all"]
        steps = [int(line[1]) for line in lines]
        assert steps == [min(sequences["packed"]), max(sequences["packed_all"]), 0, 1]
        assert int(lines[1][2]) == sequences["packed_all"][rank]
