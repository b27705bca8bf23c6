"""The options of mlx-lm's server are read by mlx-lm's parser, and what it refuses is said in a sentence."""

import argparse
import io
import json
import logging
import os
import sys

import pytest
from huggingface_hub.errors import CacheNotFound
from mlx_lm import server

from veloxquant.cli.serve import _bytes
from veloxquant.errors import VeloxQuantError
from veloxquant.serve.http import Handler
from veloxquant.serve.options import parse_server_options
from veloxquant.serve.options import rebound


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def test_what_is_given_and_what_is_not():
    parsed = parse_server_options(["--model", "m", "--port", "1234", "--prompt-cache-bytes", "2GB"])
    assert (parsed.model, parsed.port, parsed.host) == ("m", 1234, "127.0.0.1")
    assert parsed.prompt_cache_bytes == 2 * 10**9
    assert parsed.kv_bits is None


def test_nothing_stays_rebound():
    before = (server.run, server.ModelProvider, sys.argv, argparse.ArgumentParser.error)
    parse_server_options(["--model", "m"])
    with pytest.raises(VeloxQuantError):
        parse_server_options(["--no-such-option"])
    assert (server.run, server.ModelProvider, sys.argv, argparse.ArgumentParser.error) == before


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--prot", "1"], "there is no option '--prot'; did you mean '--port'"),
        (["--ours-to=1"], "there is no option '--ours-to'; did you mean '--ours-too'"),
        (["--port", "x"], "argument --port: invalid int value: 'x'"),
        (["stray"], "there is no option 'stray'"),
    ],
)
def test_refusals(words, reason):
    with pytest.raises(VeloxQuantError) as refusal:
        parse_server_options(["--model", "m", *words], own_options=["--ours-too"])
    assert str(refusal.value).startswith(reason)


def test_rebinding_ends_with_an_error():
    owner, seen = argparse.Namespace(name=1), []

    def fail():
        with rebound(owner, name=2):
            seen.append(owner.name)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (seen, owner.name) == ([2], 1)


@pytest.mark.parametrize(
    ("text", "size"), [("5", 5), ("500M", 500 * 10**6), ("1.5G", 1_500_000_000), ("2gb", 2 * 10**9), ("7k", 7000)]
)
def test_sizes(text, size):
    assert _bytes("--cache-bytes", text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1", "0", "G", "inf", "nan", "1X"])
def test_sizes_that_are_none(text):
    with pytest.raises(VeloxQuantError, match="takes a size such as"):
        _bytes("--cache-bytes", text)


@pytest.mark.parametrize("name", ["org/name", "."])
def test_the_model_is_listed_where_nothing_was_ever_downloaded(name, monkeypatch):
    def fail(self):
        raise CacheNotFound("no folder", "nowhere")

    monkeypatch.setattr(server.APIHandler, "handle_models_request", fail)
    handler = Handler.__new__(Handler)
    handler.created, handler.wfile = 7, io.BytesIO()
    handler.response_generator = argparse.Namespace(cli_args=argparse.Namespace(model=name))
    handler.handle_models_request()
    known = {"id": os.getcwd() if name == "." else name, "object": "model", "created": 7}
    assert json.loads(handler.wfile.getvalue()) == {"object": "list", "data": [known]}
