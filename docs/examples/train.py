"""One rank. It trains nothing, but does with the loader what a training loop does, and prints what it was given.

Every batch is a line: global step, lane, digest, and how many tokens were learnt from it.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from zephon import load_checkpoint, save_checkpoint
from zephon_client import connect

RANK = int(os.environ.get("RANK", "0"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=int, required=True, help="the last global step")
    parser.add_argument("--save", type=Path, help="the folder for the state after that step")
    parser.add_argument("--resume", type=Path, help="a folder that was saved")
    arguments = parser.parse_args()

    step = 0
    with connect(output="numpy") as loader:  # WORLD_SIZE and RANK say which part is this rank's
        if arguments.resume:
            step = json.loads((arguments.resume / "trainer.json").read_text())["step"]
            loader.load_state_dict(load_checkpoint(arguments.resume / "loader.json"))
        for batch in loader:
            arrays = batch.to_training(return_labels=True, return_num_valid_tokens=True)
            # Here a trainer would run the model on arrays["input_ids"] and arrays["labels"].
            learnt = arrays["num_valid_tokens"]
            # One write a line, so that lines of several ranks never mix.
            sys.stdout.write(f"step {step + 1} lane {batch.lane} {batch.digest} {learnt} tokens\n")
            sys.stdout.flush()
            if not batch.ends_round:
                continue
            step += 1  # and step the optimizer: this rank has had one batch from each of its lanes
            if step == arguments.until:
                break
        if arguments.save and RANK == 0:
            arguments.save.mkdir(parents=True, exist_ok=True)
            save_checkpoint(arguments.save / "loader.json", loader.state_dict())
            (arguments.save / "trainer.json").write_text(json.dumps({"step": step}))


if __name__ == "__main__":
    main()
