# SPDX-License-Identifier: Apache-2.0
"""Every example in every docstring of the package runs.

With torch and the public names of its module in scope and nothing else, so that an example shows
what a reader has to import.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import paged_kv

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

PACKAGE = Path(__file__).parents[2] / "python/paged_kv"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def python_examples() -> Iterator[Any]:
    """The docstrings with examples of the Python sources, which need no import to be found."""
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE.parent).with_suffix("")
        module = ".".join(relative.parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, DOCUMENTED):
                continue
            doc = ast.get_docstring(node)
            if doc and ">>>" in doc:
                name = f"{module}:{getattr(node, 'name', 'module')}"
                yield pytest.param(module, name, doc, id=name)


def binding_examples() -> Iterator[Any]:
    """The docstrings with examples of the C++ bindings."""
    core = importlib.import_module("paged_kv._core")
    pending: list[tuple[str, Any]] = [("_core", core)]
    while pending:
        name, item = pending.pop()
        doc = inspect.getdoc(item)
        if doc and ">>>" in doc:
            yield pytest.param("paged_kv._core", name, doc, id=name)
        if inspect.ismodule(item) or inspect.isclass(item):
            pending += [(f"{name}.{k}", v) for k, v in vars(item).items() if not k.startswith("_")]


def public_names(module: ModuleType) -> list[str]:
    # The binding has no __all__: what has no underscore in front is public.
    return list(getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")]))


@pytest.mark.parametrize(("module", "name", "doc"), [*python_examples(), *binding_examples()])
def test_example_runs(module, name, doc, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    imported = importlib.import_module(module)
    scope = {"torch": torch} | {n: getattr(imported, n) for n in public_names(imported)}
    example = doctest.DocTestParser().get_doctest(doc, scope, name, module, 0)
    assert example.examples, f"{name}: '>>>' without an example in it"
    report = io.StringIO()
    result = doctest.DocTestRunner(optionflags=OPTIONS).run(example, out=report.write)
    assert result.failed == 0, report.getvalue()


def test_every_op_and_public_function_of_attention_has_an_example():
    for module in ("ops", "attention"):
        imported = importlib.import_module(f"paged_kv.{module}")
        for name in imported.__all__:
            item = getattr(imported, name)
            assert not callable(item) or ">>>" in inspect.getdoc(item), name


def test_sources_that_are_read_are_those_that_run():
    assert paged_kv.__file__ is not None
    assert {p.id for p in python_examples()}, "no example found: wrong folder?"
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE)
        installed = Path(paged_kv.__file__).parent / relative
        assert installed.read_bytes() == path.read_bytes(), f"{relative}: another version installed"
