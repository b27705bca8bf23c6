"""Putting the server together."""

from __future__ import annotations

import argparse
import logging
import signal
import threading
import warnings
from collections.abc import Sequence
from typing import Any
from typing import NoReturn

import attrs
import mlx.core as mx
from mlx_lm import server

from veloxquant.config import config_to_dict
from veloxquant.errors import ConfigError
from veloxquant.errors import VeloxQuantError
from veloxquant.serve.disk import DiskStore
from veloxquant.serve.folder import CacheFolder
from veloxquant.serve.generator import CompressedGenerator
from veloxquant.serve.http import Handler
from veloxquant.serve.http import cannot_listen
from veloxquant.serve.http import make_server_class
from veloxquant.serve.http import refuse_busy_address
from veloxquant.serve.identity import LoadedModel
from veloxquant.serve.options import parse_server_options
from veloxquant.serve.prompts import PromptCache
from veloxquant.serve.provider import CompressedModelProvider
from veloxquant.serve.provider import Compression
from veloxquant.types import QueryMode

__all__ = ["ServeOptions", "serve"]


@attrs.frozen(kw_only=True)
class ServeOptions:
    """What ``veloxquant serve`` was asked for, apart from the options of mlx-lm's server.

    Args:
        compression: The method and its options.
        sample: Folder of the sample model when that is served, or None.
        cache_dir: Folder for prompt caches in files, or None.
        cache_bytes: Bytes that these files may have together.
        checkpoints: Keep prompts of methods that evict as they are before the eviction.
        own_options: Names of the command's own options, for suggestions.
    """

    compression: Compression
    sample: str | None = None
    cache_dir: str | None = None
    cache_bytes: int = 4 << 30
    checkpoints: bool = True
    own_options: Sequence[str] = ()


def serve(words: Sequence[str], options: ServeOptions) -> None:
    """Serve until interrupted.

    Args:
        words: Options of mlx-lm's server.
        options: Ours.

    Raises:
        VeloxQuantError: Something given cannot be used; nothing was started.
    """
    parsed = parse_server_options(words, options.own_options)
    _refuse_conflicts(parsed, options)
    refuse_busy_address(parsed.host, parsed.port)
    provider = CompressedModelProvider(parsed, options.compression, options.sample)
    disk = None
    if options.cache_dir is not None:
        disk = DiskStore(CacheFolder(options.cache_dir), options.cache_bytes, lambda: _loaded(provider))
    try:
        _serve(parsed, provider, disk, options)
    finally:
        if disk is not None:
            disk.close()


def _serve(
    parsed: argparse.Namespace, provider: CompressedModelProvider, disk: DiskStore | None, options: ServeOptions
) -> None:
    limit = parsed.prompt_cache_bytes
    prompts = PromptCache(
        parsed.prompt_cache_size, 1 << 63 if limit is None else limit, disk=disk, checkpoints=options.checkpoints
    )
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)
    generator = CompressedGenerator(provider, prompts)
    try:
        generator.wait_until_loaded()
        if mx.distributed.init().rank() == 0:
            _listen(parsed, generator)
        else:
            generator.join()
    finally:
        generator.stop_and_join()


def _listen(parsed: argparse.Namespace, generator: CompressedGenerator) -> None:
    try:
        with warnings.catch_warnings():
            # Said in the guide, and in one line below.
            warnings.simplefilter("ignore")
            server._run_http_server(
                parsed.host,
                parsed.port,
                generator,
                server_class=make_server_class(lambda url: logging.info(_announcement(generator, url))),
                handler_class=Handler,
            )
    except OSError as error:
        raise cannot_listen(parsed.host, parsed.port, error) from error


def _announcement(generator: CompressedGenerator, url: str) -> str:
    provider = generator.provider
    chosen, disk = provider.compression, generator.prompts.disk
    config = ", ".join(f"{name}={value}" for name, value in config_to_dict(chosen.config).items())
    files = "" if disk is None else f", prompt caches in {disk.folder.path}"
    return (
        f"veloxquant serves {provider.cli_args.model} with {chosen.method.name} ({config}), queries "
        f"{provider.query_mode}, {'batched' if provider.is_batchable else 'one request at a time'}{files}, "
        f"at {url} (for use on a trusted network only)"
    )


def _loaded(provider: CompressedModelProvider) -> LoadedModel | None:
    chosen, identity = provider.compression, provider.identity
    if identity is None:
        return None
    return LoadedModel(provider.model_key, provider.model, identity, chosen.method.name, chosen.config)


def _refuse_conflicts(parsed: argparse.Namespace, options: ServeOptions) -> None:
    chosen = options.compression
    if parsed.kv_bits is not None:
        raise ConfigError(f"{chosen.method.name} compresses the caches already; leave --kv-bits out")
    mode: QueryMode = "routed" if chosen.true_queries and chosen.method.ops.attend is not None else "proxy"
    if parsed.draft_model is not None and not chosen.method.trimmable(mode):
        raise ConfigError(
            f"a draft model needs caches that can be rewound, and those of {chosen.method.name} cannot be in {mode} "
            "mode; leave --draft-model out"
            + (", or --proxy" if not chosen.true_queries and chosen.method.trimmable("routed") else "")
        )
    if options.cache_dir is None:
        return
    if parsed.draft_model is not None:
        raise ConfigError("--cache-dir stores the caches of one model; leave it or --draft-model out")
    if mx.distributed.init().size() > 1:
        raise VeloxQuantError("--cache-dir is for a server in one process; leave it out when several serve together")


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt
