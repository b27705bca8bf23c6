"""Directives that read the code, so that what they show cannot get stale.

``method-options NAME``: the options of a method. ``command-help``: the help of every command. ``conformance-rules``:
what the conformance kit demands. ``error-messages``: every error sentence.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import os
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from messages import messages
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parent.parent.parent


class _Generated(SphinxDirective):
    """Shows Markdown that is made when the page is built."""

    def parsed(self, *lines: str) -> list[nodes.Node]:
        box = nodes.container()
        self.state.nested_parse(StringList(list(lines), self.env.docname), self.content_offset, box)
        return box.children

    def section(self, title: str, *children: nodes.Node) -> nodes.section:
        found = nodes.section("", nodes.title(title, title), *children)
        found["names"].append(nodes.fully_normalize_name(title))
        self.state.document.note_implicit_target(found, found)
        return found


class MethodOptions(_Generated):
    """The options of a method, from its config class."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The table."""
        from veloxquant import method_info
        from veloxquant.config import describe_options

        options = describe_options(method_info(self.arguments[0]).config)
        rows = ((f"`{one.name}`", _code(one.type), _code(one.default), _cell(one.help)) for one in options)
        return self.parsed(*_table(("option", "type", "default", "meaning"), rows))


class CommandHelp(_Generated):
    """The help of every command of ``veloxquant``, a section each."""

    def run(self) -> list[nodes.Node]:
        """A section for each command."""
        from veloxquant.cli import app

        return [self._one(command.name or "") for command in app.registered_commands]

    def _one(self, name: str) -> nodes.section:
        from veloxquant.cli import main

        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), _width(100):
            main([name, "--help"])
        lines = (line.rstrip() for line in shown.getvalue().strip().splitlines())
        text = "\n".join(lines)
        return self.section(f"veloxquant {name}", nodes.literal_block(text, text, language="text"))


class ConformanceRules(_Generated):
    """The rules of the conformance kit, by topic, each with the first sentence of its docstring."""

    def run(self) -> list[nodes.Node]:
        """A section for each topic."""
        from veloxquant.testing.rules import RULES

        found: list[nodes.Node] = []
        for module, rules in itertools.groupby(RULES.items(), key=lambda pair: inspect.getmodule(pair[1])):
            title = module.__name__.rpartition(".")[2].capitalize() if module else ""
            about = self.parsed(_cell(inspect.getdoc(module) or ""))
            rows = ((f"`{name}`", _cell(inspect.getdoc(rule) or "")) for name, rule in rules)
            found.append(self.section(title, *about, *self.parsed(*_table(("rule", "what must hold"), rows))))
        return found


class ErrorMessages(_Generated):
    """Every error sentence of the source, by the class of the error."""

    def run(self) -> list[nodes.Node]:
        """A section for each class of errors."""
        found: list[nodes.Node] = []
        for kind, group in itertools.groupby(messages(ROOT), key=lambda message: message.kind):
            items = [nodes.list_item("", nodes.paragraph("", message.text)) for message in group]
            found.append(self.section(kind, nodes.bullet_list("", *items)))
        return found


def _table(headings: tuple[str, ...], rows: Any) -> list[str]:
    return [_row(headings), _row(tuple("---" for _ in headings)), *(_row(row) for row in rows)]


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    first = " ".join(text.split("\n\n")[0].split()).replace("``", "`")
    return first.replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


@contextlib.contextmanager
def _width(columns: int) -> Any:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(columns)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("method-options", MethodOptions)
    app.add_directive("command-help", CommandHelp)
    app.add_directive("conformance-rules", ConformanceRules)
    app.add_directive("error-messages", ErrorMessages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
