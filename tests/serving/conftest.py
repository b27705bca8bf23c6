"""Servers on the sample model, shared by the tests that do them no harm."""

import importlib.util
import sys
from pathlib import Path

import openai
import pytest

ROOT = Path(__file__).parent


def _load(name):
    # Test folders are no packages, so a plain import would not find a sibling.
    spec = importlib.util.spec_from_file_location(f"serving_{name}", ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_processes = _load("server_process")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Start a server with these words and wait for it; all are ended with the module."""
    folder = tmp_path_factory.mktemp("servers")
    running = []

    def run(*words):
        running.append(_processes.start(folder / f"{len(running)}.log", *words))
        return running[-1].wait()

    yield run
    for server in running:
        server.stop()


@pytest.fixture(scope="session")
def client_of():
    """The official client of a server."""
    return lambda server: openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture(scope="session")
def ask(client_of):
    """Let a server go on with a text, greedily; what it says."""

    def run(server, prompt, count=3, **options):
        answer = client_of(server).completions.create(model="default_model", prompt=prompt, max_tokens=count, **options)
        return answer.choices[0].text

    return run
