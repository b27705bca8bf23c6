"""What cannot be served is refused in one sentence, before a model is loaded where that is possible."""

import socket

import pytest

from veloxquant.cli import main

WORDS = ["serve", "--model", "sample", "--method", "snapkv"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["serve", "--model", "sample", "--method", "snapkw"], "did you mean 'snapkv'"),
        (["serve", "--model", "nowhere", "--method", "snapkv"], "there is no model folder 'nowhere'"),
        ([*WORDS, "--set", "budgte=3"], "did you mean 'budget'"),
        ([*WORDS, "--prot", "1"], "there is no option '--prot'; did you mean '--port'"),
        ([*WORDS, "--cache-dri", "x"], "there is no option '--cache-dri'; did you mean '--cache-dir'"),
        ([*WORDS, "--max-tokens", "many"], "argument --max-tokens: invalid int value: 'many'"),
        ([*WORDS, "--kv-bits", "4"], "leave --kv-bits out"),
        ([*WORDS, "--proxy", "--draft-model", "x"], "leave --draft-model out, or --proxy"),
        ([*WORDS, "--draft-model", "x", "--cache-dir", "y"], "leave it or --draft-model out"),
        ([*WORDS, "--cache-bytes", "lots"], "--cache-bytes takes a size such as 500M or 4G, not 'lots'"),
        ([*WORDS, "--port", "70000"], "choose another --port or --host"),
        ([*WORDS, "--host", "no.such.host.invalid"], "choose another --port or --host"),
        ([*WORDS, "--cache-dir", "/dev/null/x"], "name another --cache-dir"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(words, reason, capsys):
    assert main(words) == 2
    errors = capsys.readouterr().err.splitlines()
    assert reason in errors[-1]
    assert errors[-1].startswith("error: ")
    assert not any("Traceback" in line for line in errors)


def test_a_port_in_use_is_refused(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main([*WORDS, "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_a_folder_that_others_can_read_is_refused(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("something else")
    tmp_path.chmod(0o755)
    assert main([*WORDS, "--port", "0", "--cache-dir", str(tmp_path)]) == 2
    assert f"chmod 700 {tmp_path}" in capsys.readouterr().err


def test_a_folder_in_use_is_refused(tmp_path, capsys):
    from veloxquant.serve.folder import CacheFolder

    folder = CacheFolder(tmp_path / "caches")
    assert main([*WORDS, "--port", "0", "--cache-dir", str(tmp_path / "caches")]) == 2
    assert "another server keeps its prompt caches" in capsys.readouterr().err
    folder.close()


def test_a_model_that_cannot_be_loaded_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    assert main(["serve", "--model", str(tmp_path), "--method", "snapkv", "--port", "0"]) == 2
    errors = capsys.readouterr().err
    assert "the model cannot be loaded: " in errors
    assert "Traceback" not in errors


def test_help_names_our_options_and_where_the_others_are(capsys):
    assert main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    for word in ("--method", "--cache-dir", "--cache-bytes", "mlx_lm"):
        assert word in shown
