"""``veloxquant serve``: mlx-lm's OpenAI-compatible server with compressed caches."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from veloxquant.cli.generate import checked_config
from veloxquant.cli.model_files import SAMPLE
from veloxquant.cli.model_files import check_model
from veloxquant.errors import INTERRUPTED
from veloxquant.errors import VeloxQuantError

__all__ = ["PASS_ON", "serve"]

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings of the command: options that are not ours are for mlx-lm's server."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Model folder, org/name on the Hugging Face hub, or 'sample'.")],
    method: Annotated[str, typer.Option(help="Compression method; 'veloxquant list' shows them.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the method; repeatable.")
    ] = None,
    proxy: Annotated[
        bool, typer.Option("--proxy", help="Let keys stand in for queries; requests are served one at a time.")
    ] = False,
    cache_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Keep prompt caches in files, for the next start.")
    ] = None,
    cache_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of these files together, 500M or 4G.")] = "4G",
    no_checkpoints: Annotated[
        bool,
        typer.Option("--no-checkpoints", help="Do not keep prompts full size, as they are before an eviction."),
    ] = False,
) -> None:
    """Serve a model over HTTP with compressed caches; options of mlx_lm.server pass through (--host, --port, ...)."""
    from veloxquant.registry import default_registry

    config = checked_config(method, settings or [], proxy)
    size = _bytes("--cache-bytes", cache_bytes)
    check_model(model)
    from veloxquant.serve import ServeOptions
    from veloxquant.serve import serve as run
    from veloxquant.serve.provider import Compression

    sample = _sample_folder() if model == SAMPLE else None
    options = ServeOptions(
        compression=Compression(method=default_registry().get(method), config=config, true_queries=not proxy),
        sample=sample,
        cache_dir=cache_dir,
        cache_bytes=size,
        checkpoints=not no_checkpoints,
        own_options=[name for option in context.command.params for name in option.opts],
    )
    code = 0
    try:
        run(["--model", sample or model, *context.args], options)
    except KeyboardInterrupt:  # before it served, or a second time
        print("\ninterrupted", file=sys.stderr)
        code = INTERRUPTED
    # All is written and closed. MLX's threads now and then abort a process that is taken down while they exist, and a
    # step over a long prompt, or a model that is loading, would keep it alive for minutes.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _sample_folder() -> str:
    from veloxquant.testing.sample import sample_model_path

    return str(sample_model_path())


def _bytes(option: str, text: str) -> int:
    number, unit = text.strip().upper().removesuffix("B"), ""
    if number[-1:] in _UNITS:
        number, unit = number[:-1], number[-1:]
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise VeloxQuantError(f"{option} takes a size such as 500M or 4G, not '{text}'")
    return size
