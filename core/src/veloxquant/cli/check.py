"""``veloxquant check NAME``: hold a method against the cache contract, one line a rule."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Annotated

import typer

from veloxquant.cli.complete import complete_method
from veloxquant.cli.complete import complete_setting
from veloxquant.cli.complete import pointing_to_info
from veloxquant.cli.output import Json
from veloxquant.cli.output import only_json
from veloxquant.cli.output import open_stdout
from veloxquant.cli.output import write_json

if TYPE_CHECKING:
    from veloxquant.testing.kit import RuleResult

__all__ = ["check"]


def check(
    name: Annotated[str, typer.Argument(help="A name that 'veloxquant list' shows.", autocompletion=complete_method)],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="An option of the method; repeatable.",
            autocompletion=complete_setting,
        ),
    ] = None,
    dense: Annotated[
        list[str] | None,
        typer.Option(
            "--dense-set",
            metavar="KEY=VALUE",
            help="An option of a config with which it keeps every row as it came; repeatable.",
            autocompletion=complete_setting,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Hold a method against the rules of the cache contract; exit 1 when it breaks one."""
    from veloxquant.testing.kit import rule_names
    from veloxquant.testing.kit import run_rule
    from veloxquant.testing.subject import make_subject

    results = []
    with only_json(as_json):
        with pointing_to_info(name):
            subject = make_subject(name, config=settings or None, dense_config=dense or None)
        for rule in rule_names():
            results.append(run_rule(rule, subject))
            if not as_json:
                _show(results[-1])
    if as_json:
        write_json([{"rule": one.rule, "outcome": one.outcome, "message": one.message} for one in results])
    else:
        _sum_up(name, results)
    if any(one.outcome == "failed" for one in results):
        raise typer.Exit(1)


def _show(result: RuleResult) -> None:
    # One line a rule, whatever line breaks a message has.
    message = " ".join(result.message.split())
    text = f"{result.outcome:<14}  {result.rule}{f': {message}' if message else ''}"
    open_stdout().print(text, soft_wrap=True)


def _sum_up(name: str, results: list[RuleResult]) -> None:
    counts = dict.fromkeys(("passed", "failed", "not applicable"), 0)
    for result in results:
        counts[result.outcome] += 1
    open_stdout().print(f"{name}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}")
