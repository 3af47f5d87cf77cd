"""Digests of users' functions."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from zephon.function_digest import digest_of

ROOT = Path(__file__).parents[2]
RATE = 3


def digest_in(folder: Path, source: str, name: str = "fn") -> str:
    """The digest of `name` in a module of this source, loaded as a fresh file."""
    path = folder / f"m{len(list(folder.iterdir()))}.py"
    path.write_text(textwrap.dedent(source))
    spec = importlib.util.spec_from_file_location("recipe_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["recipe_module"] = module
    try:
        spec.loader.exec_module(module)
        return digest_of(getattr(module, name))
    finally:
        del sys.modules["recipe_module"]


BASE = """
def fn(p):
    return {"id": p["id"] + 1}
"""
SAME = {
    "moved": "import os\nX = 1\n\n\n" + BASE,
    "commented": BASE.replace("def fn", "# a comment\ndef fn").replace("return", "# why\n    return"),
    "documented": BASE.replace("(p):\n", '(p):\n    """Adds one."""\n'),
    "annotated": BASE.replace("(p)", "(p: dict) -> dict"),
    "laid out": 'def fn(p):\n    return {\n        "id": (p["id"]\n               + 1),\n    }\n',
}
OTHER = {
    "constant": BASE.replace("1", "2"),
    "type of constant": BASE.replace("1", "1.0"),
    "operator": BASE.replace("+", "-"),
    "key": BASE.replace('{"id"', '{"no"'),
    "statement": BASE.replace("return", "p.pop('x', None)\n    return"),
    "default": BASE.replace("(p)", "(p, k=1)"),
}


@pytest.mark.parametrize("change", SAME)
def test_where_and_how_a_function_is_written_does_not_matter(change: str, tmp_path: Path) -> None:
    assert digest_in(tmp_path, SAME[change]) == digest_in(tmp_path, BASE)


@pytest.mark.parametrize("change", OTHER)
def test_what_a_function_does_matters(change: str, tmp_path: Path) -> None:
    assert digest_in(tmp_path, OTHER[change]) != digest_in(tmp_path, BASE)


TIMES = """
import functools
def times(k):
    def decorated(f):
        @functools.wraps(f)
        def g(p): return f(p) * k
        return g
    return decorated
"""
CHAIN = """
class P(list):
    def map(s, f):
        s.append(f)
        return s
"""
REACHING = {
    "global value": ("K = {}\ndef fn(p): return [K]", "1", "2"),
    "global string": ("K = {}\ndef fn(p): return [K]", "'a'", "'b'"),
    "global list": ("K = [1, {}]\ndef fn(p): return [K]", "1", "2"),
    "default value": ("K = {}\ndef fn(p, k=K): return [k]", "1", "2"),
    "keyword default": ("def fn(p, *, k={}): return [k]", "1", "2"),
    "called function": ("def g(x): return x + {}\ndef fn(p): return [g(1)]", "1", "2"),
    "function called by a called one": ("def h(): return {}\ndef g(): return h()\ndef fn(p): return g()", "1", "2"),
    "inner function": ("K = {}\ndef fn(p):\n    def g(): return K\n    return g()", "1", "2"),
    "comprehension": ("K = {}\ndef fn(p): return [K for x in p]", "1", "2"),
    "closure": ("def make(k):\n    return lambda p: k\nfn = make({})", "1", "2"),
    "class": ("class C:\n    def m(self): return {}\ndef fn(p): return C().m()", "1", "2"),
    "class attribute": ("K = {}\nclass C:\n    k = K\ndef fn(p): return C.k", "1", "2"),
    "base class": ("class B:\n    k = {}\nclass C(B): pass\ndef fn(p): return C.k", "1", "2"),
    "global read by a method": ("K = {}\nclass C:\n    def m(self): return K\ndef fn(p): return C", "1", "2"),
    "array": ("import numpy as np\nK = np.array([1, {}])\ndef fn(p): return K", "1", "2"),
    "array dtype": ("import numpy as np\nK = np.array([1], np.{})\ndef fn(p): return K", "int32", "float32"),
    "pattern": ("import re\nK = re.compile({})\ndef fn(p): return K", "'a'", "'b'"),
    "set": ("K = {{1, {}}}\ndef fn(p): return K", "2", "3"),
    "partial": ("import functools\ndef g(k, p): return p\nfn = functools.partial(g, {})", "1", "2"),
    "partial keyword": ("import functools\ndef g(p, k): return p\nfn = functools.partial(g, k={})", "1", "2"),
    "bound method": ("class C:\n    def __init__(s, k): s.k = k\n    def m(s, p): return p\nfn = C({}).m", "1", "2"),
    "callable": ("class C:\n    def __init__(s, k): s.k = k\n    def __call__(s, p): return p\nfn = C({})", "1", "2"),
    "slots": ("class C:\n    __slots__ = 'k',\n    def __call__(s, p): return s.k\nfn = C()\nfn.k = {}", "1", "2"),
    "decorated": (TIMES + "@times({})\ndef fn(p): return p", "1", "2"),
    "cached": ("import functools\n@functools.lru_cache\ndef g(x): return {}\ndef fn(p): return g(1)", "1", "2"),
    "builtin": ("K = {}\ndef fn(p): return K(p)", "min", "max"),
    "method of a builtin": ("K = {}\ndef fn(p): return K(p)", "str.upper", "str.lower"),
    "bound builtin": ("K = {}.join\ndef fn(p): return K(p)", "'a'", "'b'"),
    "library function": ("from json import {} as K\ndef fn(p): return K(p)", "loads", "dumps"),
    "module": ("import {} as K\ndef fn(p): return K.dumps(p)", "json", "pickle"),
    "dataclass": ("import dataclasses as d\n@d.dataclass\nclass C: k: int\nK = C({})\ndef fn(p): return K", "1", "2"),
    "enum": ("import enum\nclass C(enum.Enum):\n    A = 1\n    B = 2\nK = C.{}\ndef fn(p): return K", "A", "B"),
}  # fmt: skip


@pytest.mark.parametrize("reached", REACHING)
def test_each_value_that_a_function_reaches_matters(reached: str, tmp_path: Path) -> None:
    template, one, two = REACHING[reached]
    first, again, other = (digest_in(tmp_path, template.format(value)) for value in (one, one, two))
    assert first == again
    assert first != other


def test_globals_that_a_function_does_not_read_do_not_matter(tmp_path: Path) -> None:
    template = "K = {}\nimport os\ndef fn(p): return p.K"
    assert digest_in(tmp_path, template.format(1)) == digest_in(tmp_path, template.format(2))


def test_functions_in_the_users_own_modules_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    whole = "import cleaning\ndef fn(p): return cleaning.clean(p)"
    part = "from cleaning import clean\ndef fn(p): return clean(p)"
    found = []
    for constant in (1, 1, 2):
        (tmp_path / "cleaning.py").write_text(f"# {len(found)}\n\ndef clean(x):\n    return x + {constant}\n")
        sys.modules.pop("cleaning", None)
        importlib.invalidate_caches()
        linecache.clearcache()
        found.append((digest_in(tmp_path, whole), digest_in(tmp_path, part)))
    sys.modules.pop("cleaning")
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]
    assert found[0][1] != found[2][1]


def test_lambdas_on_one_line_are_told_apart(tmp_path: Path) -> None:
    source = "fns = [lambda p: p + 1, lambda p: p + 2, lambda p: (lambda q: q * 3)(p), lambda p: p + 1]\n"
    source += "".join(f"f{i} = fns[{i}]\n" for i in range(4))
    found = [digest_in(tmp_path, source, f"f{i}") for i in range(4)]
    assert found[0] == found[3]
    assert len(set(found)) == 3
    assert digest_in(tmp_path, "fn = lambda p: p + 2") == found[1]


def test_a_lambda_in_a_chain_of_calls_is_found(tmp_path: Path) -> None:
    source = CHAIN + "p = P().map(lambda p: p).map(lambda p: {})\nfn = p[1]"
    assert digest_in(tmp_path, source.format(1)) != digest_in(tmp_path, source.format(2))
    laid_out = CHAIN + "p = (P()\n .map(lambda p: p)\n .map(lambda p: {}))\nfn = p[1]"
    assert digest_in(tmp_path, source.format(1)) == digest_in(tmp_path, laid_out.format(1))


def test_functions_without_source_count_by_their_code() -> None:
    def made(text: str) -> Any:
        space: dict[str, Any] = {"K": 1}
        exec(text, space)
        return space["fn"]

    first, again, other = (digest_of(made(f"def fn(p): return p + {n}")) for n in (1, 1, 2))
    assert first == again != other
    assert digest_of(made("fn = lambda p: K")) != digest_of(made("K = 2\nfn = lambda p: K"))


def test_recursion_and_cycles_end() -> None:
    def fact(n: int) -> int:
        return n * fact(n - 1) if n else 1

    loop: list[Any] = [1]
    loop.append(loop)
    assert digest_of(fact) == digest_of(fact)
    assert digest_of(loop) == digest_of(loop)


def test_equal_values_have_one_digest_whether_or_not_they_are_one_object() -> None:
    pair, mixed = (1, "a"), [1, "a"]
    assert digest_of([pair, pair]) == digest_of([(1, "a"), tuple(mixed)])
    array = np.arange(3)
    assert digest_of([array, array]) == digest_of([array, array.copy()])
    assert digest_of(np.arange(6).reshape(2, 3).T) == digest_of(np.arange(6).reshape(2, 3).T.copy())


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, True),
        (1, 1.0),
        ("a", b"a"),
        ([1], (1,)),
        (["ab"], ["a", "b"]),
        ({}, []),
        (0.0, -0.0),
        (None, "None"),
        ({1, 2}, frozenset({1, 2})),
    ],
)
def test_values_that_differ_in_type_or_shape_differ(one: Any, two: Any) -> None:
    assert digest_of(one) != digest_of(two)


def test_values_that_cannot_be_taken_apart_do_not_fail() -> None:
    lock, stream = threading.Lock(), (n for n in range(3))
    assert digest_of(lambda p: lock) == digest_of(lambda p: lock)
    assert isinstance(digest_of(stream), str)


def test_a_function_keeps_its_digest_when_it_travels_by_value() -> None:
    limit = 5
    pattern = re.compile("x+")

    def fn(p: dict[str, Any]) -> dict[str, Any]:
        return {"n": min(limit, RATE), "m": pattern.sub("", p["text"])}

    copied = cloudpickle.loads(cloudpickle.dumps(functools.partial(fn)))
    assert digest_of(copied) == digest_of(functools.partial(fn))


def test_case_A9_digests_are_the_same_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(
        textwrap.dedent("""
        import functools, re, collections
        import numpy as np
        from zephon.function_digest import digest_of

        WORDS = {"alpha", "beta", "gamma", "delta"}
        TABLE = {"a": 1, "b": (2.5, frozenset({"x", "y", "z"}))}
        ARRAY = np.linspace(0, 1, 5)
        Point = collections.namedtuple("Point", "x y")

        class Clean:
            def __init__(self, pattern):
                self.pattern = re.compile(pattern)
            def __call__(self, p):
                return {k: self.pattern.sub("", v) for k, v in p.items() if v in WORDS}

        def outer(scale):
            def fn(p):
                return {"y": helper(p["x"]) * scale + ARRAY.sum(), "t": TABLE, "p": Point(1, 2)}
            return fn

        def helper(x):
            return x if x not in WORDS else np.float32(2)

        for fn in (outer(3), Clean("a+"), functools.partial(helper, 1), lambda p: WORDS):
            print(digest_of(fn))
    """)
    )
    found = set()
    for seed in ("0", "1", "12345", None):
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        environment |= {"PYTHONPATH": str(ROOT)} | ({} if seed is None else {"PYTHONHASHSEED": seed})
        done = subprocess.run(
            [sys.executable, str(tmp_path / "recipe.py")], env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1
    assert len(set(found.pop().split())) == 4
