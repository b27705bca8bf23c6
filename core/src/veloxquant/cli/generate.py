"""``veloxquant generate``: generate with a compressed cache and say what it saved and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Annotated
from typing import Any
from typing import TypeVar

import attrs
import typer

from veloxquant.cli.complete import complete_method
from veloxquant.cli.complete import complete_setting
from veloxquant.cli.complete import pointing_to_info
from veloxquant.cli.model_files import SAMPLE
from veloxquant.cli.model_files import check_model
from veloxquant.cli.model_files import load_model
from veloxquant.cli.output import Json
from veloxquant.cli.output import only_json
from veloxquant.cli.output import write_json
from veloxquant.cli.prompts import SAMPLE_TOKENS
from veloxquant.cli.prompts import read_prompt
from veloxquant.cli.prompts import sample_prompt
from veloxquant.cli.prompts import to_tokens
from veloxquant.errors import VeloxQuantError

if TYPE_CHECKING:
    from veloxquant.cli.generation import Generation
    from veloxquant.timing import HookTime

__all__ = ["checked_config", "generate"]

_Number = TypeVar("_Number", int, int | None)


@attrs.frozen(kw_only=True)
class _Request:
    """What to run, all of it checked."""

    model: str
    method: str
    config: Any
    proxy: bool
    prompt: str | None
    sample_tokens: int | None
    chat: bool
    max_tokens: int
    prefill_step: int | None
    compare: bool
    profile: bool
    quiet: bool


def generate(
    method: Annotated[
        str,
        typer.Option(help="Compression method; 'veloxquant list' shows them.", autocompletion=complete_method),
    ],
    model: Annotated[str, typer.Option(help="Model folder, org/name on the Hugging Face hub, or 'sample'.")] = SAMPLE,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="An option of the method; repeatable.",
            autocompletion=complete_setting,
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt; by default a built-in long text.")] = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="File with the prompt; - for standard input.")
    ] = None,
    sample_tokens: Annotated[
        int | None, typer.Option(help=f"Length of the built-in prompt's text (default {SAMPLE_TOKENS}).")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    compare: Annotated[bool, typer.Option("--compare", help="Also run mlx-lm's plain cache.")] = False,
    proxy: Annotated[
        bool, typer.Option("--proxy", help="Let keys stand in for queries; the model is left as it is.")
    ] = False,
    prefill_step: Annotated[
        int | None, typer.Option(help="Prompt tokens processed at a time (default 128 on a CPU, else 2048).")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also time the method's hooks, which slows its run down.")
    ] = False,
    no_chat: Annotated[bool, typer.Option("--no-chat", help="Do not use the model's chat template.")] = False,
    as_json: Json = False,
) -> None:
    """Generate text with a compressed cache, and show what it saved and what it cost."""
    with only_json(as_json):
        request = _Request(
            model=model,
            method=method,
            config=checked_config(method, settings or [], proxy),
            proxy=proxy,
            prompt=read_prompt(prompt, prompt_file, sample_tokens),
            sample_tokens=_positive("--sample-tokens", sample_tokens),
            chat=not no_chat,
            max_tokens=_positive("--max-tokens", max_tokens),
            prefill_step=_positive("--prefill-step", prefill_step),
            compare=compare,
            profile=profile,
            quiet=as_json,
        )
        check_model(model)
        runs = _run_all(request)
    if as_json:
        write_json(_record(request, runs))
    else:
        _show(runs)


def _positive(option: str, value: _Number) -> _Number:
    if value is not None and value < 1:
        raise VeloxQuantError(f"{option} must be at least 1, not {value}")
    return value


def checked_config(method: str, settings: list[str], proxy: bool) -> Any:
    """Check everything that can be wrong with the method and its options, before a model is loaded.

    Args:
        method: Name of the method.
        settings: Its options as ``key=value`` texts.
        proxy: Whether it is to run without true queries.

    Returns:
        The config.

    Raises:
        VeloxQuantError: The method or an option cannot be used.
    """
    from veloxquant.build import complete_layer
    from veloxquant.config import parse_config
    from veloxquant.errors import ConfigError
    from veloxquant.registry import default_registry
    from veloxquant.types import LayerSpec

    registry = default_registry()
    loaded = registry.get(method)
    with pointing_to_info(method):
        config: Any = parse_config(loaded.info.config, settings, method=method)
    if proxy and "queries" in loaded.needs(config):
        raise ConfigError(f"{method} needs the model's true queries; leave --proxy out")
    complete_layer(LayerSpec(), config, registry)
    return config


def _run_all(request: _Request) -> list[Generation]:
    from veloxquant.cli import display
    from veloxquant.cli import generation

    with display.loading(request.model):
        model, tokenizer = load_model(request.model)
        text = sample_prompt(tokenizer, request.sample_tokens) if request.prompt is None else request.prompt
        prompt = to_tokens(tokenizer, text, chat=request.chat)
        generation.warm_up(model, prompt[0])
    step = request.prefill_step or generation.default_step(len(prompt))

    def run(label: str, **method: Any) -> Generation:
        if request.compare and not request.quiet:
            display.show_heading(label)
        start = generation.run_compressed if method else generation.run_plain
        with display.prefill_bar(label) as on_prefill:
            result = start(
                model,
                tokenizer,
                prompt,
                max_tokens=request.max_tokens,
                step=step,
                on_prefill=on_prefill,
                on_text=_nothing if request.quiet else display.write_text,
                **method,
            )
        if not request.quiet:
            display.write_text("\n")
        return result

    chosen = {"method": request.method, "config": request.config, "true_queries": not request.proxy}
    runs = [run(request.method, profile=request.profile, **chosen)]
    if request.compare:
        runs.append(run("plain"))
    return runs


def _nothing(_: str) -> None:
    pass


def _record(request: _Request, runs: list[Generation]) -> dict[str, Any]:
    from veloxquant.cli.generation import agreement
    from veloxquant.config import config_to_dict

    return {
        "model": request.model,
        "method": request.method,
        "options": config_to_dict(request.config),
        "prompt_tokens": runs[0].prompt_tokens,
        "runs": [run.to_dict() for run in runs],
        "agreement": agreement(runs[0].tokens, runs[1].tokens).to_dict() if request.compare else None,
        "profile": _profile(runs[0].profile),
    }


def _profile(rows: Sequence[HookTime] | None) -> dict[str, Any] | None:
    from veloxquant.timing import total_by_hook

    if rows is None:
        return None
    return {"hooks": [row.to_dict() for row in total_by_hook(rows)], "layers": [row.to_dict() for row in rows]}


def _show(runs: list[Generation]) -> None:
    from veloxquant.cli import display
    from veloxquant.cli.generation import agreement

    if len(runs) > 1:
        display.show_agreement(agreement(runs[0].tokens, runs[1].tokens))
    display.show_table(runs)
    if runs[0].profile is not None:
        display.show_profile(runs[0].profile)
