"""What plain ``nox`` looks at of the server: one that starts, answers, tells figures, and finds its files again.

``nox -s serving`` looks at the rest.
"""

import time

import openai
import pytest

PROMPT = "One two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"


def test_a_server_answers_tells_figures_and_goes_on_after_a_restart(start, tmp_path):
    words = ("--method", "snapkv", "--set", "budget=12", "--set", "window=4", "--cache-dir", str(tmp_path / "caches"))
    server = start(*words)
    complete = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0).completions.create
    whole = complete(model="default_model", prompt=PROMPT, max_tokens=4)
    chunks = complete(model="default_model", prompt=PROMPT, max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text != ""
    with pytest.raises(openai.BadRequestError) as refusal:
        complete(model="default_model", prompt="", max_tokens=1)
    assert refusal.value.body == "the prompt has no tokens"
    stats = server.stats()
    assert stats["method"] == "snapkv"
    assert stats["requests"]["finished"] == 2
    assert stats["prompt_cache"]["hits"]["memory"] == 1
    assert stats["caches"]["bytes_held"] > 0
    deadline = time.monotonic() + 60
    while server.stats()["disk"]["written"] == 0:
        assert time.monotonic() < deadline, server.stats()
        time.sleep(0.1)
    assert server.stop() == 0
    again = start(*words)
    complete = openai.OpenAI(base_url=f"{again.url}/v1", api_key="none", max_retries=0).completions.create
    assert complete(model="default_model", prompt=PROMPT, max_tokens=4).usage.completion_tokens == 4
    stats = again.stats()
    assert stats["prompt_cache"]["hits"]["disk"] == 1
    assert stats["tokens"]["prefilled"] == 1
