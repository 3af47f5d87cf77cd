"""The examples of docs/examples, run as their page says."""
from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.running import python, zephon
from zephon.recipe import load_recipe

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
Batches = set[tuple[int, int, str]]


def trained(folder: Path, recipe: str, ranks: int, *arguments: str) -> Batches:
    """(global step, lane, digest) of all that the ranks of one launch were given."""
    run = [sys.executable, "ranks.py", str(ranks), "train.py", *arguments]
    with zephon(folder, "launch", recipe, "--workers", "1", "--", *run, cwd=folder) as launched:
        assert launched.end() == 0, launched.errors
        lines = [line.split() for line in launched.output.splitlines()]
    assert [(line[0], line[2], line[6]) for line in lines] == [("step", "lane", "tokens")] * len(lines)
    return {(int(line[1]), int(line[3]), line[4]) for line in lines}


def uninterrupted(folder: Path, steps: int) -> Batches:
    """The same of a run in this process, as one group."""
    pipeline = load_recipe(str(folder / "recipe.py")).pipeline()
    found: Batches = set()
    step = 1
    for batch in pipeline:
        found.add((step, batch.lane, batch.digest))
        step += batch.ends_round
        if step > steps:
            break
    pipeline.close()
    return found


def test_the_example_gives_every_global_step_the_same_batches_on_4_ranks_and_resumed_on_2(runtime_folder: Path) -> None:
    folder = runtime_folder / "examples"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("data", "saved", "__pycache__"))
    with python(folder, "import runpy; runpy.run_path('make_data.py', run_name='__main__')", cwd=folder) as making:
        assert making.end() == 0, making.errors
    recipes = [load_recipe(str(folder / name)).pipeline() for name in ("recipe.py", "recipe.toml")]
    assert recipes[0].plan().identity == recipes[1].plan().identity
    before = trained(folder, "recipe.py", 4, "--until", "3", "--save", "saved")
    after = trained(folder, "recipe.toml", 2, "--until", "6", "--resume", "saved")
    assert {step for step, _, _ in before} == {1, 2, 3}
    assert {step for step, _, _ in after} == {4, 5, 6}
    assert before | after == uninterrupted(folder, 6)
    assert len(before | after) == 6 * 8


def test_the_example_of_custom_code_is_checked_and_the_same_on_any_number_of_groups(runtime_folder: Path) -> None:
    folder = runtime_folder / "examples"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("data", "saved", "__pycache__"))
    with python(folder, "import runpy; runpy.run_path('make_data.py', run_name='__main__')", cwd=folder) as making:
        assert making.end() == 0, making.errors
    code = "import runpy; runpy.run_path('custom_code.py', run_name='__main__')"
    with python(folder, code, cwd=folder) as checking:
        assert checking.end() == 0, checking.errors
    assert "nothing was found" in checking.output
    assert "[mask]" in checking.output
    with zephon(folder, "verify", "custom_code.py", "--dp", "4,2,1", "--steps", "6", cwd=folder) as verifying:
        assert verifying.end() == 0, verifying.errors
    assert "every global step is the same" in verifying.output


def test_the_example_of_a_curriculum_tells_its_tenths_and_is_the_same_on_any_number_of_groups(
    runtime_folder: Path,
) -> None:
    folder = runtime_folder / "examples"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("data", "saved", "__pycache__"))
    with python(folder, "import runpy; runpy.run_path('make_data.py', run_name='__main__')", cwd=folder) as making:
        assert making.end() == 0, making.errors
    with python(folder, "import runpy; runpy.run_path('curriculum.py', run_name='__main__')", cwd=folder) as telling:
        assert telling.end() == 0, telling.errors
    assert "tokens a sample" in telling.output
    tenths = [line.split() for line in telling.output.splitlines() if line.startswith("tenth")]
    counts = [(int(line[3].strip(",")), int(line[5])) for line in tenths]
    assert [sum(column) for column in zip(*counts, strict=True)] == [600, 200]
    assert counts[0][1] < 10
    assert counts[0][0] > 70
    with zephon(folder, "verify", "curriculum.py", "--dp", "4,2,1", "--steps", "6", cwd=folder) as verifying:
        assert verifying.end() == 0, verifying.errors
    assert "every global step is the same" in verifying.output


def test_the_example_of_packing_keeps_datasets_apart_and_the_mixture_and_is_the_same_on_any_number_of_groups(
    runtime_folder: Path,
) -> None:
    folder = runtime_folder / "examples"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("data", "saved", "__pycache__"))
    with python(folder, "import runpy; runpy.run_path('make_data.py', run_name='__main__')", cwd=folder) as making:
        assert making.end() == 0, making.errors
    with python(folder, "import runpy; runpy.run_path('packing.py', run_name='__main__')", cwd=folder) as telling:
        assert telling.end() == 0, telling.errors
    lines = [line.split() for line in telling.output.splitlines()]
    full = {line[0].strip(":"): float(line[3].strip("%")) for line in lines if "sequences," in line}
    assert set(full) == {"wrap", "best_fit_wrap", "best_fit", "first_fit"}
    assert all(share > 97 for share in full.values())
    code = [line[4:] for line in lines if line[:2] == ["code", "in"]]
    assert len(code) == 2
    assert {count for lane in code for count in lane[:-1]} <= {"3", "4", "5"}
    with zephon(folder, "verify", "packing.py", "--dp", "2,1", "--steps", "4", cwd=folder) as verifying:
        assert verifying.end() == 0, verifying.errors
    assert "every global step is the same" in verifying.output
