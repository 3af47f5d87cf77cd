"""Prints the first packed sequence of a recipe in colour: green what is learnt, grey what is only read."""
from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer

from zephon.recipe import load_recipe

GREEN, GREY, PLAIN = "\033[32m", "\033[90m", "\033[0m"
HERE = Path(__file__).parent


def runs(mask: list[float]) -> list[tuple[int, int]]:
    """Stretches of one value: (first, end)."""
    edges = [0, *(at for at in range(1, len(mask)) if mask[at] != mask[at - 1]), len(mask)]
    return list(pairwise(edges))


def main() -> None:
    tokenizer = Tokenizer.from_file(str(HERE / "data" / "model" / "tokenizer.json"))
    pipeline = load_recipe(str(HERE / "recipe.py")).pipeline()
    batch = next(iter(pipeline))
    length = int(batch["sequence_length"][0])
    ids, mask = batch["input_ids"][0, :length].tolist(), batch["loss_mask"][0, :length].tolist()
    for first, end in runs(mask):
        text = tokenizer.decode(ids[first:end], skip_special_tokens=False)
        print((GREEN if mask[first] else GREY) + text + PLAIN, end="")
    print(f"\n{int(sum(mask))} of {length} tokens are learnt")
    pipeline.close()


if __name__ == "__main__":
    main()
