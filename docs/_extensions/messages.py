"""Every error sentence of the source, with an ellipsis where a value is put in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["GAP", "Message", "messages"]

GAP = "…"
# Not for users: rules of the kit fail with findings about a method, and these classes are Python's own affairs.
_LEFT_OUT = {"AttributeError", "AssertionError", "TypeError", "RuleFailure", "ImportError"}


class Message(NamedTuple):
    """One sentence.

    Args:
        kind: Class of the error.
        text: The sentence.
        place: File and line, from the root of the checkout.
    """

    kind: str
    text: str
    place: str


def messages(root: Path) -> list[Message]:
    """All sentences that are raised in the distributions of a checkout, in the order of their texts."""
    files = [*root.glob("core/src/**/*.py"), *root.glob("plugins/*/src/**/*.py")]
    found = [message for path in sorted(files) for message in _of(path, root)]
    return sorted(set(found), key=lambda message: (message.kind, message.text.lstrip(GAP + " :'")))


def _of(path: Path, root: Path) -> Iterator[Message]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
            continue
        kind = ast.unparse(node.exc.func).rpartition(".")[2]
        text = " ".join(_text(node.exc.args[0]).split())
        if kind.endswith("Error") and kind not in _LEFT_OUT and text.strip(f"{GAP}:; "):
            yield Message(kind, text, f"{path.relative_to(root).as_posix()}:{node.lineno}")


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return GAP
