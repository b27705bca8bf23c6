"""Prompt caches in files: a server that was killed goes on where it was, and serves nothing that is damaged."""

import stat
import threading
import time
from pathlib import Path

import openai
import pytest

pytestmark = [pytest.mark.serving, pytest.mark.slow]

# Its continuation is sure, and is made of the same tokens when it comes back as text.
WEEK = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday, Wednesday,"
NEVER_ENDING = {"0": -100, "2": -100}
SNAPKV = ("--method", "snapkv", "--set", "budget=12", "--set", "window=4")
EXACT = ("--method", "turboquant_rvq", "--set", "recent=0", "--set", "sinks=0")


def written(server, count):
    deadline = time.monotonic() + 60
    while server.stats()["disk"]["written"] < count:
        assert time.monotonic() < deadline, server.stats()
        time.sleep(0.1)


def restarted(start, folder, words, prompts, client_of):
    """Answers of a server that is killed while it generates and writes, and another one in its place."""
    server = start(*words, "--cache-dir", str(folder))
    complete = client_of(server).completions.create
    answers = [complete(model="default_model", prompt=prompt, max_tokens=6) for prompt in prompts]
    written(server, len(prompts))

    def unfinished():
        with pytest.raises(openai.APIConnectionError):
            complete(model="default_model", prompt=f"Unfinished: {WEEK}", max_tokens=500, logit_bias=NEVER_ENDING)

    thread = threading.Thread(target=unfinished)
    thread.start()
    time.sleep(1)
    server.kill()
    thread.join()
    # What a write that was cut off leaves behind.
    whole = next(Path(folder).glob("[0-9a-f]*.safetensors"))
    (folder / f".{whole.name}-abcdef.safetensors").write_bytes(whole.read_bytes()[:1000])
    return answers, start(*words, "--cache-dir", str(folder))


@pytest.mark.parametrize("words", [SNAPKV, EXACT], ids=["snapkv", "turboquant_rvq"])
def test_a_known_prompt_is_not_processed_again(start, client_of, tmp_path, words):
    folder = tmp_path / "caches"
    (before,), server = restarted(start, folder, words, [WEEK], client_of)
    after = client_of(server).completions.create(model="default_model", prompt=WEEK, max_tokens=6)
    stats = server.stats()
    assert stats["tokens"]["prefilled"] == 1
    assert stats["prompt_cache"]["hits"] == {"memory": 0, "disk": 1}
    assert stats["disk"]["set_aside"] == 0
    assert after.usage.prompt_tokens_details.cached_tokens == before.usage.prompt_tokens - 1
    if words is EXACT:
        assert after.choices[0].text == before.choices[0].text
        assert stats["prompt_cache"]["rewinds"] == {"exact": 1, "approximate": 0}
    else:
        assert stats["prompt_cache"]["rewinds"] == {"exact": 0, "approximate": 1}
    # Private, and nothing of the prompt is in a name; nothing is left of the write that was cut off.
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list(folder.glob(".*.safetensors"))
    assert all(len(path.stem) == 64 for path in folder.glob("*.safetensors"))


def test_a_conversation_goes_on_after_a_restart_and_other_options_share_nothing(start, client_of, tmp_path):
    folder = tmp_path / "caches"
    (before,), server = restarted(start, folder, SNAPKV, [WEEK], client_of)
    longer = f"{WEEK} {before.choices[0].text.strip()} Then"
    after = client_of(server).completions.create(model="default_model", prompt=longer, max_tokens=2)
    assert after.usage.prompt_tokens_details.cached_tokens >= before.usage.total_tokens - 2
    assert server.stop() == 0
    other = start("--method", "snapkv", "--set", "budget=10", "--set", "window=4", "--cache-dir", str(folder))
    client_of(other).completions.create(model="default_model", prompt=WEEK, max_tokens=1)
    stats = other.stats()
    assert stats["prompt_cache"]["hits"] == {"memory": 0, "disk": 0}
    assert stats["disk"]["set_aside"] == 0
    assert stats["disk"]["files"] >= 2


def test_a_damaged_file_is_set_aside_and_counted(start, client_of, tmp_path):
    folder = tmp_path / "caches"
    server = start(*SNAPKV, "--cache-dir", str(folder))
    before = client_of(server).completions.create(model="default_model", prompt=WEEK, max_tokens=6)
    written(server, 1)
    assert server.stop() == 0
    (path,) = folder.glob("[0-9a-f]*.safetensors")
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    again = start(*SNAPKV, "--cache-dir", str(folder))
    after = client_of(again).completions.create(model="default_model", prompt=WEEK, max_tokens=6)
    stats = again.stats()
    assert after.choices[0].text == before.choices[0].text
    assert stats["prompt_cache"]["hits"]["disk"] == 0
    assert stats["disk"]["set_aside"] == 1
    assert path.with_name(path.name + ".damaged").read_bytes() == content
    assert "set aside" in again.log()
