"""Every method of the workspace, found by its pyproject file, with the options that its tests need."""

import tomllib
from pathlib import Path

import attrs
import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

import veloxquant
from veloxquant.attention import is_routed
from veloxquant.testing.toys import tiny_llama

ROOT = Path(__file__).parent.parent


@attrs.frozen
class MethodUnderTest:
    """A method and two sets of its options: one that compresses short prompts, one that loses nothing."""

    name: str
    small: dict[str, object]
    lossless: dict[str, object] | None

    def caches(self, model, config=None):
        return veloxquant.make_prompt_cache(model, self.name, self.small if config is None else config)

    @property
    def evicts(self):
        return veloxquant.method_info(self.name).evicts


def _methods():
    for path in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())
        options = project["tool"]["veloxquant"]
        for name in project["project"]["entry-points"]["veloxquant.methods"]:
            yield MethodUnderTest(name, options["small"], options.get("lossless"))


@pytest.fixture(params=list(_methods()), ids=lambda method: method.name)
def method(request):
    return request.param


@pytest.fixture(scope="session")
def model():
    return tiny_llama(kv_heads=2, query_heads=4, layers=2, head_dim=32, vocab=64)


@pytest.fixture(scope="session")
def prompts():
    """Prompts of different lengths, in random tokens."""
    return [mx.random.randint(0, 64, (n,), key=mx.random.key(n)).tolist() for n in (3, 70, 150, 41, 200, 97)]


@pytest.fixture(scope="session")
def generate():
    def run(model, prompt, caches, count, step=2048):
        steps = generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=caches, prefill_step_size=step)
        return [token for token, _ in steps]

    return run


@pytest.fixture(autouse=True)
def _nothing_stays_routed(model):
    yield
    while is_routed(model):
        veloxquant.unroute(model)
