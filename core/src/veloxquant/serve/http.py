"""The HTTP side: mlx-lm's request handler with one more address."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from huggingface_hub.errors import CacheNotFound
from mlx_lm import server

from veloxquant.errors import VeloxQuantError
from veloxquant.serve.figures import collect

__all__ = ["STATS", "Handler", "make_server_class", "refuse_busy_address"]

STATS = "/veloxquant/stats"


class Handler(server.APIHandler):  # type: ignore[misc]
    """mlx-lm's handler, which also tells figures and says that a request of ours to refuse was a bad one."""

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server uses
        """Answer a GET request."""
        if self.path.partition("?")[0] != STATS:
            super().do_GET()
            return
        body = json.dumps(collect(self.response_generator), indent=2).encode()
        self._set_completion_headers(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_models_request(self) -> None:
        """As in mlx-lm, and no less where nothing was ever downloaded."""
        try:
            super().handle_models_request()
        except CacheNotFound:  # the headers are out by then
            name = self.response_generator.cli_args.model
            model = {"id": str(Path(name).resolve()) if Path(name).exists() else name, "object": "model"}
            body = {"object": "list", "data": [{**model, "created": self.created}]}
            self.wfile.write(json.dumps(body).encode())

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        """As in mlx-lm; a client that is gone ends its request and nothing else."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            super().handle_completion(request, stop_words)

    def _set_completion_headers(self, status_code: int = 200) -> None:
        # mlx-lm answers whatever goes wrong before the first token with 404.
        if status_code == 404 and isinstance(sys.exc_info()[1], VeloxQuantError):
            status_code = 400
        super()._set_completion_headers(status_code)


def make_server_class(on_listening: Callable[[str], None]) -> type[ThreadingHTTPServer]:
    """A server class that says when it listens, and where.

    Args:
        on_listening: Gets the address as a URL.
    """

    class Server(ThreadingHTTPServer):
        # Requests that come at once wait here; five, as by default, are too few for a batch.
        request_queue_size = 128

        def server_activate(self) -> None:
            super().server_activate()
            host, port = self.server_address[:2]
            on_listening(f"http://{f'[{host!s}]' if ':' in str(host) else str(host)}:{port}")

        def shutdown(self) -> None:
            # Called on the thread that served until it was interrupted, so there is no loop to wait for.
            self.server_close()

    return Server


def refuse_busy_address(host: str, port: int) -> None:
    """Find out before a model is loaded whether the server will be able to listen.

    Raises:
        VeloxQuantError: It will not.
    """
    if not 0 <= port <= 65535:  # the resolver would take the rest of a division
        raise cannot_listen(host, port, ValueError("there is no such port"))
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise cannot_listen(host, port, error) from error


def cannot_listen(host: str, port: int, error: Exception) -> VeloxQuantError:
    """The refusal for an address that cannot be had."""
    reason = getattr(error, "strerror", None) or str(error)
    return VeloxQuantError(f"cannot listen on {host}:{port}: {reason}; choose another --port or --host")
