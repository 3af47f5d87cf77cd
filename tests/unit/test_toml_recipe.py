"""Recipes in TOML: the same pipeline as in Python, and a line for everything that is wrong."""
from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from tests.corpora import COUNT, byte_tokenizer
from zephon.errors import RecipeError
from zephon.recipe import load_recipe
from zephon.toml_recipe import NEED_CODE, step_names
from zephon.work import TokenEstimation

TOML = """\
# a comment

[[sources]]
name = "web"
path = "web"
weight = 0.7

[[sources]]
name = "code"
path = "code/*.jsonl"
fmt = "jsonl"
weight = 0.3

[work_source]
seed = 3
chunk_size = 4
shuffle_block_size = "global"

[decode_text]

[[shuffle]]
buffer_size = 8

[tokenize]
tokenizer_id = "tokenizer.json"
field = "text"
special_tokens = "eos"

[pack_flat]
max_length = 33
algorithm = "best_fit"
num_bins = 4

[[shuffle]]
buffer_size = 4
seed = 7

[batch]
microbatch_size = 2
drop_last = false

[options]
canonical_replicas = 4
flush_every_k_chunks = 2

[[pipelines.held_out.sources]]
name = "web"
path = "web"

[pipelines.held_out.batch]
microbatch_size = 5
drop_last = false
[pipelines.held_out.options]
canonical_replicas = 4
"""
PYTHON = """
from pathlib import Path
from zephon import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource
HERE = Path(__file__).parent
data = [Dataset.from_path("web", HERE / "web"), Dataset.from_path("code", HERE / "code", fmt="jsonl")]
mixture = MixtureSpec({"web": 0.7, "code": 0.3})
pipeline = (
    Pipeline(StaticMixtureWorkSource(data, mixture, seed=3, chunk_size=4, shuffle_block_size="global"))
    .decode_text()
    .shuffle(8)
    .tokenize(tokenizer_id=HERE / "tokenizer.json", field="text", special_tokens="eos")
    .pack_flat(33, algorithm="best_fit", num_bins=4)
    .shuffle(4, seed=7)
    .batch(2, drop_last=False)
    .options(canonical_replicas=4, flush_every_k_chunks=2)
)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("toml")
    COUNT(40, 2, made / "web")
    COUNT(30, 1, made / "code")
    byte_tokenizer(made / "tokenizer.json")
    (made / "recipe.toml").write_text(TOML)
    (made / "recipe.py").write_text(PYTHON)
    return made


def load(folder: Path, text: str):
    (folder / "changed.toml").write_text(text)
    return load_recipe(str(folder / "changed.toml"))


def test_a_pipeline_has_the_same_identity_in_toml_and_in_python_and_either_resumes_the_other(folder: Path) -> None:
    here, there = (load_recipe(str(folder / name)).pipeline() for name in ("recipe.toml", "recipe.py"))
    assert here.plan().identity == there.plan().identity
    assert [operator.name for operator in here.operators] == [
        "decode_text", "shuffle", "tokenize", "pack_flat", "shuffle",
    ]  # fmt: skip
    whole = [batch.digest for batch in there]
    assert len(whole) > 8
    there.close()
    first = iter(there)
    head = [next(first).digest for _ in range(5)]
    state = json.loads(json.dumps(there.checkpoint()))
    assert head + [batch.digest for batch in here.restore(state)] == whole
    assert [batch.digest for batch in there.restore(state)] == whole[5:]


def test_further_pipelines_are_found_by_name(folder: Path) -> None:
    recipe = load_recipe(str(folder / "recipe.toml"))
    assert recipe.names == ["pipeline", "held_out"]
    assert recipe.pipeline("held_out").data.microbatch_size == 5
    assert recipe.pipeline("held_out").data.drop_last is False
    named = load_recipe(str(folder / "recipe.toml") + ":held_out")
    assert named.pipeline().data.microbatch_size == 5
    with pytest.raises(RecipeError, match="Did you mean 'held_out'"):
        recipe.pipeline("heldout")
    with pytest.raises(RecipeError, match=r"it defines .*recipe.toml:pipeline\. Write its tables as \[pipelines.dev"):
        load_recipe(str(folder / "recipe.toml") + ":dev")


def test_weights_may_be_left_out_or_be_given_as_the_mixture_argument(folder: Path) -> None:
    bare = "\n".join(line for line in TOML.splitlines() if not line.startswith("weight"))
    assert load(folder, bare).pipeline().plan().identity["mixture"] is None
    given = bare.replace("seed = 3\n", "seed = 3\nmixture = { web = 0.7, code = 0.3 }\n", 1)
    expected = load_recipe(str(folder / "recipe.py")).pipeline().plan().identity
    assert load(folder, given).pipeline().plan().identity == expected


def test_weights_that_mean_tokens_are_a_table(folder: Path) -> None:
    text = TOML.replace("seed = 3\n", "seed = 3\ntoken_estimation = { primer = { web = 20, code = 40 } }\n", 1)
    assert load(folder, text).pipeline().source.token_estimation == TokenEstimation(primer={"web": 20, "code": 40})
    text = text.replace("{ primer = { web = 20, code = 40 } }", "{}")
    assert load(folder, text).pipeline().source.token_estimation == TokenEstimation()


def test_arrays_of_inline_tables_and_other_line_ends_say_the_same(folder: Path) -> None:
    text = TOML.replace("\n", "\r\n").replace("[decode_text]\r\n", "")
    text = "decode_text = {}\r\n" + text
    made = load(folder, text).pipeline()
    assert made.plan().identity == load_recipe(str(folder / "recipe.py")).pipeline().plan().identity


def test_relative_paths_start_at_the_file_and_others_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "web")
    monkeypatch.setenv("HOME", str(folder))
    assert load_recipe("../recipe.toml").pipeline().source.datasets[0].location == str(folder / "web")
    other = TOML.replace('path = "web"', f'path = "{folder / "web"}"').replace("code/*", "~/code/*")
    assert load(folder, other).pipeline().source.datasets[1].location == str(folder / "code" / "*.jsonl")


def at(line: str, text: str = TOML) -> int:
    """The number of a line."""
    return text.splitlines().index(line) + 1


MISTAKES = [
    # (what is written, in the place of what, the line that is named, what is said)
    ("field = ", 'field = "text"', None, "Invalid value"),
    ('field = "text"\nfield = "id"', 'field = "text"', +1, "Cannot overwrite a value"),
    ("[tokenise]", "[tokenize]", 0, r"no table is called \[tokenise\]; did you mean \[tokenize\]\?"),
    ("[zzz]", "[decode_text]", 0, r"no table is called \[zzz\]; there are sources, work_source, .*batch"),
    ("[mixture]", "[decode_text]", 0, r"mixture does not stand here: .*`weight` of each of \[\[sources\]\]"),
    ("seed = 3", "# a comment", 0, r"into \[work_source\]"),
    ("runner = 3", "# a comment", 0, r"into \[options\]"),
    ("[[decode_text]]\n[decode_text.x]", "[decode_text]", +1, "has no argument 'x'"),
    ("fetch = 3", "# a comment", 0, "fetch must be a table"),
    ('feild = "text"', 'field = "text"', 0, r"\[tokenize\] has no 'feild'; did you mean 'field'\?"),
    ('algoritm = "wrap"', 'algorithm = "best_fit"', 0, r"pack_flat\(\) has no argument 'algoritm'; did you mean 'alg"),
    ("", 'field = "text"', -2, r"\[tokenize\] lacks 'field'"),
    ("field = 3", 'field = "text"', 0, r"\[tokenize\] field = 3: must be text"),
    ('buffer_size = "8"', "buffer_size = 8", 0, r"\[shuffle\] buffer_size = '8': must be a whole number"),
    ("buffer_size = 0", "buffer_size = 4", 0, r"shuffle: buffer_size=0: must be a whole number from 1"),
    ("microbatch_size = 0", "microbatch_size = 2", 0, "microbatch_size=0: must be a whole number from 1"),
    ("canonical_replicas = 0", "canonical_replicas = 4", 0, "canonical_replicas=0: must be"),
    ("canonical_replica = 4", "canonical_replicas = 4", 0, "did you mean 'canonical_replicas'"),
    ('num_bins = "4"', "num_bins = 4", 0, "num_bins='4': must be|num_bins = '4': must be"),
    ('algorithm = "tetris"', 'algorithm = "best_fit"', 0, "algorithm='tetris': must be one of"),
    ('seed = "x"', "seed = 3", 0, r"\[work_source\] seed = 'x': must be a whole number"),
    ("seeds = 3", "seed = 3", 0, "has no argument 'seeds'; did you mean 'seed'"),
    ("chunk_size = 0", "chunk_size = 4", 0, "chunk_size is 0. Allowed"),
    ('weight = "much"', "weight = 0.7", 0, "weight = 'much': must be a number"),
    ("weight = -1", "weight = 0.3", 0, "'code'"),
    ("", "weight = 0.3", -4, "give a `weight` to each"),
    ("wieght = 0.3", "weight = 0.3", 0, r"\[sources\] has no 'wieght'; did you mean 'weight'"),
    ("token_estimation = true", "# a comment", 0, "token_estimation does not stand here"),
    ("seed = 3\ntoken_estimation = true", "seed = 3", +1, r"\[work_source\] token_estimation = True: must be a table"),
    ("seed = 3\ntoken_estimation = { primer = 0 }", "seed = 3", +1, "primer is 0. Allowed"),
    ("[tokenize]\n[tokenize]", "[tokenize]", +1, r"twice; a step that comes twice has double brackets"),
    ('name = "web"', 'name = "code"', None, r"the names \['web'\] occur more than once"),
    ('path = "nowhere"', 'path = "code/*.jsonl"', 0, "nowhere"),
    ('fmt = "csv"', 'fmt = "jsonl"', 0, "csv"),
    ('tokenizer_id = "none.json"', 'tokenizer_id = "tokenizer.json"', 0, "none.json"),
    ("tokenizer_id = 1979-05-27", 'tokenizer_id = "tokenizer.json"', 0, r"tokenizer_id = .*: must be text"),
    ("[fetch]\n[options]", "[options]", 0, r"fetch\(\) after batch\(\): batch comes last"),
    ("[[batch]]\nmicrobatch_size = 2\n[[batch]]", "[batch]", +2, "comes once, and last"),
    ("[pipelines]\nx = 3", "[decode_text]", +1, "pipelines are tables"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "right", "offset", "said"), MISTAKES, ids=lambda each: str(each)[:30])
def test_a_mistake_names_file_line_and_what_would_be_right(
    folder: Path, wrong: str, right: str, offset: int | None, said: str
) -> None:
    text = TOML if wrong.startswith("[pipelines") is False else TOML[: TOML.index("[[pipelines")]
    assert text.count(f"{right}\n"), right
    with pytest.raises(RecipeError, match=said) as caught:
        load(folder, text.replace(f"{right}\n", f"{wrong}\n", 1))
    assert len(str(caught.value).splitlines()) == 1
    place = str(folder / "changed.toml") + ":"
    assert str(caught.value).startswith(place)
    if offset is not None:
        assert int(str(caught.value)[len(place) :].partition(":")[0]) == at(right, text) + offset


@pytest.mark.parametrize("step", NEED_CODE)
def test_steps_that_need_code_are_refused_with_what_to_do(folder: Path, step: str) -> None:
    with pytest.raises(RecipeError, match=rf"changed.toml:19: \[{step}\] needs a function .*: write it in Python"):
        load(folder, TOML.replace("[decode_text]", f"[{step}]"))


def test_what_is_no_toml_or_no_recipe_at_all_is_said(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"a recipe needs \[\[sources\]\]"):
        load(folder, "")
    with pytest.raises(RecipeError, match=r":2: .*"):
        load(folder, "[batch]\nmicrobatch_size = [1,\n")
    (folder / "latin.toml").write_bytes(b"[batch]\n# caf\xe9\n")
    with pytest.raises(RecipeError, match=":2: not UTF-8"):
        load_recipe(str(folder / "latin.toml"))


def test_ignored_arguments_warn_with_the_line_of_the_recipe(folder: Path) -> None:
    text = TOML.replace('field = "text"\n', 'field = "text"\nplacement = "gpu"\n')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(folder, text)
    assert [(str(warning.message), warning.filename, warning.lineno) for warning in caught] == [
        ("tokenize(): ignored, this design has no such mechanism: placement", str(folder / "changed.toml"),
         at('placement = "gpu"', text))
    ]  # fmt: skip


def test_the_methods_that_add_a_step_are_the_steps() -> None:
    assert {"decode_text", "tokenize", "pack_flat", "shuffle", "batch", "fetch", "prefetch"} <= set(step_names())
    assert not {"options", "plan", "explain", "run", "restore"} & set(step_names())
