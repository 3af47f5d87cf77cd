"""A digest of what a user's function does, for the run's identity.

It covers the function's syntax tree (without positions, docstrings and annotations) and every value the tree can reach
by name: closure cells, defaults, and the module globals it reads. Functions and classes of the user's own code are
followed; the standard library, installed packages and modules are known by name, so that an upgrade of numpy does not
refuse a checkpoint. Values count by what they hold, never by `hash()`, `id` or pickled bytes, so the digest is the same
in every process, and stays when a function moves inside its file; another constant, operator or closed-over value
changes it.

Where there is no source (`exec`, an old `python -c`) the code object's own constants and bytecode stand in, which do
depend on the version of Python.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import linecache
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_WITHOUT_MEANING = {"type_comment", "kind", "annotation", "returns", "ctx", "type_ignores", "type_params"}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_STDLIB = tuple(sysconfig.get_paths()[kind] + os.sep for kind in ("stdlib", "platstdlib"))
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_BY_NAME = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    np.ufunc,
)
_VALUES = {tuple, frozenset, np.ndarray}  # whether two equal ones are one object says nothing


def digest_of(value: Any) -> str:
    """32 hex digits for a function, or for anything else a function may close over."""
    walk = _Walk()
    walk.value(value)
    return walk.hash.hexdigest()


class _Walk:
    """Feeds one value and all that it reaches into a hash, each object once."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # what `_seen` names by id must not be freed

    def atom(self, tag: str, data: str | bytes = b"") -> None:
        raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
        self.hash.update(f"{tag}:{len(raw)}:".encode())
        self.hash.update(raw)

    def value(self, value: Any) -> None:
        kind = type(value)
        if value is None or value is Ellipsis or value is NotImplemented or kind in (bool, int):
            self.atom(kind.__name__, str(value))
        elif kind is float:
            self.atom("float", value.hex())
        elif kind is complex:
            self.atom("complex", f"{value.real.hex()} {value.imag.hex()}")
        elif kind is str or kind is bytes:
            self.atom(kind.__name__, value)
        elif isinstance(value, types.ModuleType):
            self.atom("module", value.__name__)
        elif isinstance(value, np.generic):
            self.atom(f"numpy {value.dtype.str}", value.tobytes())
        elif kind in _VALUES or not self._met(value):
            self._composite(value)

    def _met(self, value: Any) -> bool:
        number = self._seen.get(id(value))
        if number is not None:
            self.atom("again", str(number))
            return True
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        return False

    def _composite(self, value: Any) -> None:
        kind = type(value)
        if kind is list or kind is tuple:
            self.atom(kind.__name__, str(len(value)))
            for item in value:
                self.value(item)
        elif kind is dict:
            self.atom("dict", str(len(value)))
            for key, item in value.items():
                self.value(key)
                self.value(item)
        elif kind is set or kind is frozenset:
            self.atom(kind.__name__, " ".join(sorted(digest_of(item) for item in value)))
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self.atom(f"array {value.dtype.descr} {value.shape}", np.ascontiguousarray(value).tobytes())
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.atom("method")
            self.value(value.__func__)
            self.value(value.__self__)
        elif isinstance(value, functools.partial):
            self.atom("partial")
            self.value(value.func)
            self.value(value.args)
            self.value(value.keywords)
        elif isinstance(value, (staticmethod, classmethod)) or hasattr(value, "cache_parameters"):
            self.atom(kind.__name__)
            self.value(value.__wrapped__)
        elif isinstance(value, property):
            self.atom("property")
            for part in (value.fget, value.fset, value.fdel):
                self.value(part)
        elif isinstance(value, _BY_NAME):
            self._by_name(value)
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif isinstance(value, type):
            self._class(value)
        else:
            self._object(value)

    def _by_name(self, value: Any) -> None:
        owner = getattr(value, "__self__", getattr(value, "__objclass__", None))
        self.atom("builtin", f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}")
        if owner is not None and not isinstance(owner, types.ModuleType):
            self.value(owner)

    def _object(self, value: Any) -> None:
        """Its class and its state, as pickling would take it apart, unless it says itself what it is known by."""
        known_by = getattr(type(value), "__zephon_identity__", None)
        if known_by is not None:
            self.atom("named", known_by(value))
            return
        try:
            parts = value.__reduce_ex__(2)
        except Exception:
            parts = None
        if isinstance(parts, str):
            self.atom("global", f"{getattr(value, '__module__', '')}.{parts}")
        elif parts is not None:
            self.atom("object")
            for part in parts:
                self.value(list(part) if isinstance(part, Iterator) else part)
        else:
            self.atom("opaque", _pickled(value))
            self.value(type(value))

    def _function(self, fn: types.FunctionType) -> None:
        if _is_installed(fn.__code__.co_filename, fn.__module__):
            self.atom("library", f"{fn.__module__}.{fn.__qualname__}")
        else:
            self.atom("function")
            node = _node_of(fn)
            if node is None:
                self._code(fn.__code__)
            else:
                self._tree(node, outermost=True)
        self._environment(fn)

    def _environment(self, fn: types.FunctionType) -> None:
        """The values that a function reaches: globals by name, defaults, closure cells."""
        if not _is_installed(fn.__code__.co_filename, fn.__module__):
            reached: set[tuple[str, ...]] = set()
            _reads(fn.__code__, fn.__globals__, reached)
            for path in sorted(reached):
                self.atom("global", ".".join(path))
                self.value(functools.reduce(getattr, path[1:], fn.__globals__[path[0]]))
            self.value(fn.__defaults__)
            self.value(fn.__kwdefaults__)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
            self.atom("cell", name)
            try:
                content = cell.cell_contents
            except ValueError:
                self.atom("unset")
            else:
                self.value(content)

    def _class(self, cls: type) -> None:
        if _is_installed(getattr(sys.modules.get(cls.__module__), "__file__", None), cls.__module__):
            self.atom("library", f"{cls.__module__}.{cls.__qualname__}")
            return
        self.atom("class")
        node = _class_node(cls)
        if node is None:
            self.atom("name", cls.__qualname__)
        else:
            self._tree(node, outermost=True)
        for base in cls.__bases__:
            self.value(base)
        for name in sorted(vars(cls)):
            member = vars(cls)[name]
            for fn in _functions_in(member):
                if node is None:
                    self.value(fn)
                elif _source_of(fn):
                    self._environment(fn)
            if not name.startswith("__") and isinstance(member, (int, float, str, bytes, tuple)):
                self.atom("member", name)
                self.value(member)

    def _tree(self, node: ast.AST, outermost: bool = False) -> None:
        self.atom("node", type(node).__name__)
        if isinstance(node, ast.Constant):
            self.value(node.value)
            return
        for name, part in ast.iter_fields(node):
            if part is None or part == [] or name in _WITHOUT_MEANING:
                continue
            if outermost and name in ("name", "decorator_list"):
                continue
            self.atom("field", name)
            if name == "body" and isinstance(node, _DEFINITIONS) and _is_docstring(part[0]):
                part = part[1:]
            for item in part if isinstance(part, list) else [part]:
                if isinstance(item, ast.AST):
                    self._tree(item)
                else:
                    self.value(item)

    def _code(self, code: types.CodeType) -> None:
        self.atom("code", code.co_code)
        for part in (code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, code.co_kwonlyargcount):
            self.value(part)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self.value(constant)


def _pickled(value: Any) -> bytes:
    try:
        import cloudpickle

        return bytes(cloudpickle.dumps(value, protocol=4))
    except Exception:
        return b""


def _is_docstring(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _is_installed(file: str | None, module: str | None) -> bool:
    """Whether code belongs to the standard library or an installed package rather than to the user. Zephon itself is
    such a package, also where it runs from a clone."""
    if module is not None and module.partition(".")[0] == "zephon":
        return True
    if file is None or file.startswith("<"):
        file = getattr(sys.modules.get(module or ""), "__file__", None)
    if file is None:
        top = (module or "").partition(".")[0]
        return top != "__main__" and (top in sys.builtin_module_names or top in sys.stdlib_module_names)
    return file.startswith(_STDLIB) or any(folder in file for folder in _PACKAGES)


def _reads(code: types.CodeType, names: dict[str, Any], found: set[tuple[str, ...]]) -> None:
    """Adds the globals that `code` reads; of the user's own modules also the attributes read from them."""
    path: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            name = str(step.argval)
            path = (name,) if name in names and not name.startswith("__") else ()
            if path:
                found.add(path)
                path = path if _is_users_module(names[name]) else ()
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and path:
            name = str(step.argval)
            owner = functools.reduce(getattr, path[1:], names[path[0]])
            if hasattr(owner, name) and not name.startswith("__"):
                path = (*path, name)
                found.add(path)
                path = path if _is_users_module(getattr(owner, name)) else ()
            else:
                path = ()
        elif step.opname not in ("CACHE", "EXTENDED_ARG", "NOP"):
            path = ()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _reads(constant, names, found)


def _is_users_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and not _is_installed(None, value.__name__)


def _functions_in(member: Any) -> list[types.FunctionType]:
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    parts = (member.fget, member.fset, member.fdel) if isinstance(member, property) else (member,)
    return [part for part in parts if isinstance(part, types.FunctionType)]


def _source_of(fn: types.FunctionType) -> str:
    """The text of the file that a function was written in, or `""`."""
    lines = linecache.getlines(fn.__code__.co_filename, fn.__globals__)
    file = fn.__globals__.get("__file__")
    if not lines and fn.__code__.co_filename == "<dynamic-code>" and isinstance(file, str):
        lines = linecache.getlines(file)  # a copy by cloudpickle, which leaves the file's name out
    return "".join(lines)


@functools.lru_cache(maxsize=32)
def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


@functools.lru_cache(maxsize=32)
def _functions(source: str) -> list[ast.AST]:
    """All functions and lambdas that a file defines."""
    tree = _parsed(source)
    nodes = () if tree is None else ast.walk(tree)
    return [node for node in nodes if isinstance(node, (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef))]


def _node_of(fn: types.FunctionType) -> ast.AST | None:
    """The definition of a function in its file, or None."""
    code = fn.__code__
    source = _source_of(fn)
    found = [node for node in _functions(source) if _begins(node, code)]
    if len(found) > 1:
        found = _same_code(source, code, len(found))
    return found[0] if found else None


def _begins(node: ast.AST, code: types.CodeType) -> bool:
    if isinstance(node, ast.Lambda):
        return code.co_name == "<lambda>" and node.lineno == code.co_firstlineno
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        return node.name == code.co_name and first == code.co_firstlineno
    return False


def _same_code(source: str, code: types.CodeType, count: int) -> list[ast.AST]:
    """Of several functions that begin on one line, those that compile to `code`.

    Each is given a line number of its own before compiling, by which its code object is found again.
    """
    tree = ast.parse(source)
    found = [node for node in ast.walk(tree) if _begins(node, code)]
    marks = {1_000_000 + number: node for number, node in enumerate(found)}
    for line, node in marks.items():
        if isinstance(node, (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.lineno = node.end_lineno = line
    compiled = {c.co_firstlineno: c for c in _codes(compile(tree, "<source>", "exec", dont_inherit=True))}
    wanted = _shape(code)
    return [node for line, node in marks.items() if line in compiled and _shape(compiled[line]) == wanted]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def _shape(code: types.CodeType) -> tuple[Any, ...]:
    """A code object without its positions."""
    constants = [_shape(c) if isinstance(c, types.CodeType) else (type(c), repr(c)) for c in code.co_consts]
    return (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, tuple(constants))


def _class_node(cls: type) -> ast.ClassDef | None:
    """The last definition of a class by this qualified name in its module's file, or None."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    source: str = "".join(linecache.getlines(file, vars(module))) if file else ""
    tree = _parsed(source) if source else None
    if tree is None:
        return None
    found: list[ast.ClassDef] = []
    _named(tree, "", cls.__qualname__, found.append)
    return found[-1] if found else None


def _named(node: ast.AST, path: str, wanted: str, found: Callable[[ast.ClassDef], None]) -> None:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _DEFINITIONS):
            _named(child, path, wanted, found)
            continue
        name = path + child.name
        if isinstance(child, ast.ClassDef) and name == wanted:
            found(child)
        inner = f"{name}." if isinstance(child, ast.ClassDef) else f"{name}.<locals>."
        if wanted.startswith(inner):
            _named(child, inner, wanted, found)
