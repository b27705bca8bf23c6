"""``veloxquant calibrate a2ats`` from words to file, with a toy model in place of a real one."""

import mlx.core as mx
import pytest

import veloxquant
from veloxquant.attention import is_routed
from veloxquant.cli import main
from veloxquant.testing.toys import tiny_llama
from veloxquant_a2ats import command


class Tokenizer:
    """Two tokens a character."""

    def encode(self, words, add_special_tokens, verbose):
        assert not add_special_tokens
        return [token for char in words for token in (ord(char) % 64, ord(char) * 7 % 64)]


@pytest.fixture
def model(monkeypatch):
    toy = tiny_llama(kv_heads=2, query_heads=4, layers=2, head_dim=16)
    monkeypatch.setattr(command, "load_model", lambda name: (toy, Tokenizer()))
    monkeypatch.setattr(command, "check_model", lambda name: None)
    return toy


@pytest.mark.parametrize("mode", ["compress", "retrieve"])
def test_from_words_to_a_file_that_serves(model, mode, tmp_path, capsys):
    text, target = tmp_path / "text.txt", tmp_path / "codebook.safetensors"
    text.write_text("All human beings are born free and equal in dignity and rights. " * 40)
    words = ["calibrate", "a2ats", "--mode", mode, "--text", str(text), "-o", str(target), "--tokens", "4096"]
    assert main([*words, "--codebook-bits", "4", "--seed", "3"]) == 0
    captured = capsys.readouterr()
    assert f"for mode={mode}, 2 layers" in captured.out
    assert "16 centroids" in captured.out
    assert "held-out" in captured.out
    assert "reading text" in captured.err
    assert not is_routed(model)
    options = {"mode": mode, "codebook": str(target), "codebook_bits": 4, "window": 8}
    caches = veloxquant.make_prompt_cache(model, "a2ats", options)
    for tokens in ([[1, 2, 3] * 20], [[4]], [[5]]):
        assert bool(mx.isfinite(model(mx.array(tokens), cache=caches)).all().item())
    veloxquant.unroute(model)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mode", "retreive"], "retreive"),
        (["--beta", "2"], "--beta must be between 0 and 1"),
        (["--tokens", "3"], "--tokens"),
        (["--codebook-bits", "13"], "--codebook-bits"),
        (["--sub-dim", "0"], "--sub-dim"),
        (["--far-position", "-1"], "--far-position"),
        (["--seed", "-1"], "--seed"),
        (["--text", "no-such-file"], "cannot be read"),
        (["--sub-dim", "5"], "does not divide"),
        (["-o", "no-such-folder/file"], "does not exist"),
        (["-o", "."], "is a folder"),
    ],
)
def test_wrong_words_get_one_line_before_anything_is_read(model, words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", "a2ats", "-o", "file", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.splitlines()[-1].startswith("error: ")
    assert not list(tmp_path.iterdir())


def test_the_output_must_be_named(model, capsys):
    assert main(["calibrate", "a2ats"]) == 2
    assert "--output" in capsys.readouterr().err


def test_a_text_that_is_not_utf8(model, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_bytes(b"\xff\xfe\x00")
    assert main(["calibrate", "a2ats", "--text", str(text), "-o", str(tmp_path / "file")]) == 2
    assert "UTF-8" in capsys.readouterr().err
