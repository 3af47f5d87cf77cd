"""What each rank runs: a training loop as one writes it, over either loader. Started by `torchrun`.

The model's gradients are sums over labels, added up over the rank's batches of a global step and then over all ranks,
and divided by the number of labels; so a global step is the same arithmetic on any number of ranks. Nothing in the loop
depends on that number.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as ranks
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from zephon_daemon.demo import usual
from zephon_daemon.demo.model import make_model, set_rate

MODEL_SEED = 7


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    ranks.init_process_group("gloo")
    try:
        with (zephon_loader if arguments.loader == "zephon" else usual_loader)(arguments) as loader:
            train(loader, arguments)
        ranks.barrier()  # nobody hangs up while another still waits for its part of a reduction
    finally:
        ranks.destroy_process_group()


def train(loader: Any, arguments: argparse.Namespace) -> None:
    """From the step that was saved, or the first, to the last; saves model and loader after step `save_at`."""
    model, optimizer = make_model(MODEL_SEED)
    step = load_model(arguments.resume, model, optimizer) if arguments.resume else 0
    rank = ranks.get_rank()
    loss, labels, seen = torch.zeros(()), 0, []
    for batch in loader:
        arrays = training_arrays(batch)
        part = model(arrays["input_ids"], arrays["labels"])
        part.backward()
        loss, labels = loss + part.detach(), labels + int((arrays["labels"] != -100).sum())
        seen += names_of(batch)
        if not batch.ends_round:
            continue
        step += 1
        mean = reduce_gradients(model, loss, labels)
        clip_grad_norm_(model.parameters(), 1.0)
        set_rate(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        digest = step_digest(seen)
        if rank == 0:
            with arguments.out.open("a") as out:
                out.write(json.dumps({"step": step, "loss": mean, "digest": digest}) + "\n")
            print(f"step {step} loss {mean:.3f}", flush=True)
        if step == arguments.save_at:
            save(arguments.save, step, model, optimizer, loader)
        if step == arguments.last:
            break
        loss, labels, seen = torch.zeros(()), 0, []


@contextmanager
def zephon_loader(arguments: argparse.Namespace) -> Iterator[Any]:
    """The daemon's client. Which lanes are this rank's follows from RANK and WORLD_SIZE."""
    import zephon
    import zephon_client

    with zephon_client.connect() as loader:
        if arguments.resume:
            loader.load_state_dict(zephon.load_checkpoint(arguments.resume / "loader.json"))
        yield loader


@contextmanager
def usual_loader(arguments: argparse.Namespace) -> Iterator[Any]:
    loader = usual.UsualLoader(arguments.folder, ranks.get_rank(), ranks.get_world_size())
    if arguments.resume:
        loader.load_state_dict(usual.load(arguments.resume / "loader.json"))
    yield loader


def save(folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    """Rank 0 saves the model. The loader's state, which is the whole run's, is saved by any one rank, here the last,
    without asking the others. Of the usual loader it is rank 0's position."""
    rank, world = ranks.get_rank(), ranks.get_world_size()
    if rank == 0:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, folder / "model.pt")
    if isinstance(loader, usual.UsualLoader):
        if rank == 0:
            usual.save(folder / "loader.json", loader.state_dict())
    elif rank == world - 1:
        import zephon

        zephon.save_checkpoint(folder / "loader.json", loader.state_dict())


def load_model(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    saved = torch.load(folder / "model.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def training_arrays(batch: Any) -> dict[str, Tensor]:
    if isinstance(batch, usual.UsualBatch):
        return batch.to_training()
    arrays: dict[str, Tensor] = batch.to_training(return_labels=True)
    return arrays


def names_of(batch: Any) -> list[str]:
    """What names the batch in the digest of its global step: for Zephon its lane, its place there and its bytes."""
    if isinstance(batch, usual.UsualBatch):
        return batch.names()
    return [f"lane {batch.lane:04d} record {batch.first_record:012d} {batch.digest}"]


def reduce_gradients(model: torch.nn.Module, loss: Tensor, labels: int) -> float:
    """Make the gradients those of the mean over all ranks' labels; returns that mean."""
    gradients = [parameter.grad for parameter in model.parameters()]
    total = torch.cat([parameters_to_vector(gradients), torch.tensor([float(loss), float(labels)])])
    ranks.all_reduce(total)
    total[:-1] /= total[-1].clone()
    for gradient, mean in zip(gradients, total[:-2].split([g.numel() for g in gradients])):
        gradient.copy_(mean.view_as(gradient))
    return float(total[-2])


def step_digest(own: Iterable[str]) -> str:
    """One digest of what all ranks were given for a global step, in the order of the names."""
    parts: list[list[str]] = [[] for _ in range(ranks.get_world_size())]
    ranks.all_gather_object(parts, list(own))
    together = "\n".join(sorted(name for part in parts for name in part))
    return hashlib.blake2b(together.encode(), digest_size=16).hexdigest()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loader", choices=("zephon", "usual"), required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where the corpus and the tokenizer are")
    parser.add_argument("--out", type=Path, required=True, help="gets a line for each global step")
    parser.add_argument("--last", type=int, required=True, help="the last step to train")
    parser.add_argument("--save", type=Path, help="the folder for model and loader state")
    parser.add_argument("--save-at", type=int, help="the step after which to save")
    parser.add_argument("--resume", type=Path, help="a folder that was saved")
    return parser.parse_args()


if __name__ == "__main__":
    main()
