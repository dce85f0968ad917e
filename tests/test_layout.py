"""The sources: two wings, and lines that read at once."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src/bsam"
FILES = sorted(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.py"))
LIBRARY = [name for name in FILES if not name.startswith("lab/")]


def test_the_library_does_not_import_the_laboratory():
    """In a fresh interpreter; integrations, whose frameworks take seconds to import, are left to import-linter."""
    paths = [Path("bsam", name).with_suffix("") for name in LIBRARY if not name.startswith("integrations/")]
    modules = [".".join(path.parts).removesuffix(".__init__") for path in paths if path.stem != "__main__"]
    program = f"import {', '.join(modules)}, sys; print(*[name for name in sys.modules if name.startswith('bsam.lab')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == "\n"
    assert len(modules) > 40


def assigns_three_values(node: ast.AST) -> bool:
    """Whether it is ``a, b, c = x, y, z`` or ``a = b = c = x``; the parts of one value may have three names."""
    if not isinstance(node, ast.Assign):
        return False
    targets = sum(len(t.elts) if isinstance(t, (ast.Tuple, ast.List)) else 1 for t in node.targets)
    return targets > 2 and (isinstance(node.value, (ast.Tuple, ast.List)) or len(node.targets) > 1)


def multiplies_text_by_a_condition(node: ast.AST) -> bool:
    """Whether it is a product such as ``"s" * (n > 1)``; ``"-" * width``, with a number, is not."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    for text, factor in ((node.left, node.right), (node.right, node.left)):
        is_text = isinstance(text, ast.JoinedStr) or (isinstance(text, ast.Constant) and isinstance(text.value, str))
        if is_text and not is_number(factor):
            return True
    return False


def is_number(factor: ast.expr) -> bool:
    """Whether a factor is written as a number: a constant, arithmetic, or a call of len, sum, max, min or int."""
    if isinstance(factor, ast.Constant):
        return type(factor.value) is int
    calls = isinstance(factor, ast.Call) and isinstance(factor.func, ast.Name)
    return isinstance(factor, ast.BinOp) or (calls and factor.func.id in ("len", "sum", "max", "min", "int"))


def lines_with(condition, source: str) -> Iterator[int]:
    return (node.lineno for node in nodes_of(source) if condition(node))


@cache
def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


EXAMPLES = {
    assigns_three_values: [
        ("a, b, c = 1, 2, 3", True), ("a = b = c = 1", True), ("a, b = c = f()", True), ("a, b.c, d = [1, 2, 3]", True),
        ("a, b = 1, 2", False), ("a, b, c = f()", False), ("a, b, c = x", False), ("a, *b = x", False),
    ],
    multiplies_text_by_a_condition: [
        ("'s' * (n > 1)", True), ("f'{n} runs' * self.on", True), ("(n != 1) * 's'", True), ("'/' * x.is_dir()", True),
        ("'-' * 3", False), ("'-' * (a + b)", False), ("'-' * len(x)", False), ("2 * n", False), ("'s' * True", True),
    ],
}  # fmt: skip


@pytest.mark.parametrize("condition", EXAMPLES, ids=lambda condition: condition.__name__)
def test_lines_read_at_once(condition):
    assert [(code, any(lines_with(condition, code))) for code, _ in EXAMPLES[condition]] == EXAMPLES[condition]
    sources = {name: (SOURCES / name).read_text(encoding="utf-8") for name in FILES}
    assert [f"{name}:{line}" for name, text in sources.items() for line in lines_with(condition, text)] == []
