"""Recorded quality: what has fallen behind is found, what has not is left alone."""

import json
import sys

import attrs
import mlx_lm
import pytest
from core_test_helpers import save_byte_model

from veloxquant.bench.recorded import Recorded
from veloxquant.bench.recorded import fallen_behind
from veloxquant.bench.recorded import main
from veloxquant.bench.recorded import read_recorded
from veloxquant.bench.records import Result
from veloxquant.bench.records import new_run
from veloxquant.errors import FileFormatError
from veloxquant.registry import default_registry
from veloxquant.testing.toys import tiny_llama

TASK = {"start": 7, "prompt_tokens": 60, "tokens": 16, "needle_lengths": [160], "needle_depths": [0.5]}
ARMS = {
    "fine": {"method": "coarse", "config": {"levels": 120}},
    "rough": {"method": "coarse", "config": {"levels": 12}},
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    model = tiny_llama(head_dim=32, vocab=260)
    # Random weights attend to all rows alike; so that predictions hang on the attention:
    for layer in model.layers:
        layer.self_attn.q_proj.weight *= 6
        layer.self_attn.o_proj.weight *= 4
    model.model.norm.weight *= 6
    save_byte_model(path, model)
    return lambda: mlx_lm.load(str(path))[:2]


@pytest.fixture(autouse=True)
def _coarse(toys):
    default_registry.cache_clear()
    default_registry().register(toys.Coarse())
    yield
    default_registry.cache_clear()


@pytest.fixture
def file(tmp_path, load):
    """Recorded figures of the toy codec."""
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps({"task": TASK, "arms": ARMS}))
    assert main([str(path), "--record"], load) == 0
    return path


def test_what_is_recorded_passes(file, load, capsys):
    figures = {name: arm["figures"] for name, arm in json.loads(file.read_text())["arms"].items()}
    assert 0 < figures["fine"]["mean_kl"] < figures["rough"]["mean_kl"]
    assert figures["rough"]["share"] == 0.25
    assert figures["rough"]["needles_found"] == 0
    capsys.readouterr()
    assert main([str(file)], load) == 0
    out = capsys.readouterr().out
    assert "no method has fallen behind" in out
    assert "rough" in out


def test_recording_again_changes_no_figure(file, load):
    before = json.loads(file.read_text())
    assert main([str(file), "--record"], load) == 0
    assert json.loads(file.read_text())["arms"] == before["arms"]
    assert before["task"] == TASK
    assert "mlx" in before["environment"]["versions"]


def test_a_codec_whose_scale_is_off_by_a_tenth_fails(file, load, toys, monkeypatch, capsys):
    codec = sys.modules[toys.Coarse.__module__].CoarseRows
    right = codec.keys_values

    def wrong(self):
        keys, values = right(self)
        return keys * 1.1, values

    monkeypatch.setattr(codec, "keys_values", wrong)
    assert main([str(file)], load) == 1
    assert "FELL BEHIND: fine: mean KL is" in capsys.readouterr().out


def test_a_codec_that_holds_more_fails(file, load, toys, monkeypatch, capsys):
    codec = sys.modules[toys.Coarse.__module__].CoarseRows
    right = codec.account
    monkeypatch.setattr(codec, "account", lambda self: attrs.evolve(right(self), auxiliary=2048))
    assert main([str(file)], load) == 1
    assert "of the plain bytes" in capsys.readouterr().out


def test_arms_that_were_never_recorded_fail(file, load, capsys):
    content = json.loads(file.read_text())
    del content["arms"]["rough"]["figures"]
    file.write_text(json.dumps(content))
    assert main([str(file)], load) == 1
    assert "rough was never recorded" in capsys.readouterr().out


def test_some_arms_can_be_chosen(file, load, capsys):
    content = json.loads(file.read_text())
    for arm in content["arms"].values():
        arm["figures"]["mean_kl"] = 0.0
    file.write_text(json.dumps(content))
    assert main([str(file), "--only", "rough", "--record"], load) == 0
    now = json.loads(file.read_text())["arms"]
    assert now["rough"]["figures"]["mean_kl"] > 0
    assert now["fine"]["figures"]["mean_kl"] == 0
    assert main([str(file), "--only", "rough"], load) == 0
    assert main([str(file), "--only", "smooth"], load) == 2
    assert "no arm's name contains 'smooth' (arms: fine, rough)" in capsys.readouterr().err


def run_of(kl=0.01, top1=0.95, share=0.25, found=3):
    count = {"share": share}
    figures = {"mean_kl": kl, "p95_kl": kl, "top1_agreement": top1, "perplexity": 9.0, "after_prompt": count}
    run = new_run("quality")
    run.results.append(Result(kind="quality", arm="a", method="m", figures=figures))
    run.results += [Result(kind="needle", arm="a", method="m", figures={"found": place < found}) for place in range(3)]
    return run


FIGURES = {
    "mean_kl": 0.01,
    "p95_kl": 0.01,
    "top1_agreement": 0.95,
    "perplexity": 9.0,
    "share": 0.25,
    "needles_found": 3,
}


@pytest.mark.parametrize(
    ("now", "sentence"),
    [
        ({}, None),
        ({"kl": 0.0105, "top1": 0.93, "share": 0.251, "found": 2}, None),  # noise
        ({"kl": 0.005, "top1": 1.0, "share": 0.2}, None),  # better
        ({"kl": 0.0115}, "mean KL is 0.0115, recorded is 0.0100 (at most 0.0112)"),
        ({"kl": float("nan")}, "mean KL is nan"),
        ({"top1": 0.9}, "top-1 agreement is 0.900"),
        ({"share": 0.26}, "it holds 0.2600"),
        ({"found": 1}, "1 passkeys are found, recorded are 3"),
    ],
)
def test_the_limits(now, sentence):
    recorded = Recorded(task=TASK, arms={"a": {"method": "m", "config": {}, "figures": FIGURES}})
    said = fallen_behind(recorded, run_of(**now))
    if sentence is None:
        assert said == []
    else:
        assert len(said) == 1
        assert said[0].startswith("a: ")
        assert sentence in said[0]


def test_an_arm_that_was_not_measured_fails():
    recorded = Recorded(task=TASK, arms={"b": {"method": "m", "config": {}, "figures": FIGURES}})
    assert fallen_behind(recorded, run_of()) == ["b was not measured"]


@pytest.mark.parametrize("text", ["{", "[]", '{"task": {}}', '{"task": {"nonsense": 1}, "arms": {}}',
                                  '{"task": {}, "arms": {"a": {}}}'])  # fmt: skip
def test_files_that_hold_something_else(tmp_path, text, capsys):
    path = tmp_path / "recorded.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match="holds no recorded quality"):
        read_recorded(path)
    assert main([str(path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
