"""The recorded quality of all methods, and that a broken codec would be noticed."""

import contextlib
import importlib
import tomllib
from pathlib import Path

import attrs
import pytest

from veloxquant.bench.quality_run import measure_quality
from veloxquant.bench.recorded import Recorded
from veloxquant.bench.recorded import fallen_behind
from veloxquant.bench.recorded import read_recorded
from veloxquant.bench.recorded import record
from veloxquant.bench.records import Writer
from veloxquant.bench.records import new_run
from veloxquant.testing.toys import tiny_llama

ROOT = Path(__file__).parent.parent
FILE = Path(__file__).with_name("recorded_quality.json")
TEXT = [(place * place + 3 * place) % 61 for place in range(200)]


def test_every_method_is_recorded_with_options_that_it_takes():
    recorded = read_recorded(FILE)
    methods = {
        name
        for path in ROOT.glob("plugins/*/pyproject.toml")
        for name in tomllib.loads(path.read_text())["project"]["entry-points"]["veloxquant.methods"]
    }
    assert {arm["method"] for arm in recorded.arms.values()} == methods
    assert [arm.name for arm in recorded.make_arms()] == list(recorded.arms)
    assert all("figures" in arm for arm in recorded.arms.values())


@contextlib.contextmanager
def unseen(label, total):
    yield lambda amount: None


def sharp():
    """A toy whose predictions hang on its attention; random weights alone attend to all rows alike."""
    model = tiny_llama(head_dim=64)
    for layer in model.layers:
        layer.self_attn.q_proj.weight *= 6
        layer.self_attn.o_proj.weight *= 4
    model.model.norm.weight *= 6
    return model


def measured(recorded):
    with Writer(new_run("quality")) as writer:
        measure_quality(sharp(), None, TEXT, recorded.make_arms(), recorded.plan, writer, unseen)
    return writer.run


@pytest.mark.parametrize("arm", ["turboquant_rvq bits=2", "rocketkv rows of 4-bit rows"])
def test_a_codec_whose_scale_is_off_by_a_tenth_falls_behind(monkeypatch, arm):
    task = {"prompt_tokens": 150, "tokens": 40, "needle_lengths": []}
    found = read_recorded(FILE).arms[arm]
    options = found["config"] if found["method"] == "rocketkv" else {**found["config"], "sinks": 0, "recent": 0}
    recorded = Recorded(task=task, arms={arm: {"method": found["method"], "config": options}})
    recorded = record(recorded, measured(recorded))
    assert fallen_behind(recorded, measured(recorded)) == []
    kind = importlib.import_module("veloxquant_turboquant_rvq.quantizer").Quantizer
    right = kind.encode

    def wrong(self, rows):
        codes, scales = right(self, rows)
        return codes, scales * 1.1

    monkeypatch.setattr(kind, "encode", wrong)
    said = fallen_behind(recorded, measured(recorded))
    assert any("mean KL" in sentence for sentence in said), said


def test_the_file_says_where_it_was_measured():
    recorded = read_recorded(FILE)
    assert {"versions", "blas", "machine", "back_end"} <= recorded.environment.keys()
    assert attrs.asdict(recorded)["task"]["tokens"] >= 64
