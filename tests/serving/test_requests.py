"""Requests of every kind to one server, through the client that its users have.

Prompts are short: the BLAS that mlx brings processes some twenty tokens a second.
"""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

pytestmark = [pytest.mark.serving, pytest.mark.slow]

CAPITALS = {
    "France": "Paris",
    "Greece": "Athens",
    "Japan": "Tokyo",
    "Austria": "Vienna",
    "Cuba": "Havana",
    "Egypt": "Cairo",
    "Russia": "Moscow",
    "China": "Beijing",
}
NEVER_ENDING = {"0": -100, "2": -100}
METHODS = {
    "snapkv": ("--set", "budget=12", "--set", "window=4"),
    "turboquant_rvq": (),
}


def question(country, filler=0):
    return "Well, " * filler + f"the capital of {country} is"


@pytest.fixture(scope="module", params=METHODS)
def server(request, start):
    return start("--method", request.param, *METHODS[request.param], "--prompt-cache-size", "40")


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def test_parallel_requests_get_their_own_answers(server, ask):
    questions = {country: question(country, max(0, place - 3)) for place, country in enumerate(CAPITALS)}
    with ThreadPoolExecutor(8) as pool:
        together = dict(zip(questions, pool.map(lambda text: ask(server, text), questions.values()), strict=True))
    for country, answer in together.items():
        assert CAPITALS[country] in answer, f"{country}: {answer}"
        others = [name for name in CAPITALS.values() if name != CAPITALS[country]]
        assert not any(name in answer for name in others), f"{country}: {answer}"
    # Two of them, the longest one too: with the BLAS that mlx brings all would take long.
    for country in list(CAPITALS)[3::4]:
        assert ask(server, questions[country], seed=1) == together[country]


def test_streamed_and_whole_answers_are_the_same_text(server, client_of):
    chunks = client_of(server).chat.completions.create(
        model="default_model",
        messages=MESSAGES,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts, usage = [], None
    for chunk in chunks:
        parts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    whole = client_of(server).chat.completions.create(model="default_model", messages=MESSAGES, max_tokens=8)
    assert "".join(parts) == whole.choices[0].message.content
    assert usage.completion_tokens == whole.usage.completion_tokens > 1


def test_a_repeated_prompt_is_found(server, client_of):
    prompt = "In a village by the sea there lived an old fisherman who had a boat, three nets and a"
    before = server.stats()
    first, second = (
        client_of(server).completions.create(model="default_model", prompt=prompt, max_tokens=6) for _ in range(2)
    )
    after = server.stats()
    assert second.choices[0].text == first.choices[0].text
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1
    assert after["prompt_cache"]["hits"]["memory"] == before["prompt_cache"]["hits"]["memory"] + 1
    assert after["prompt_cache"]["rewinds"]["approximate"] == 0
    prefilled = after["tokens"]["prefilled"] - before["tokens"]["prefilled"]
    assert prefilled == first.usage.prompt_tokens + 1


def test_a_growing_conversation_goes_on_from_its_cache(server, client_of):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "My name is Ada."}]
    seen = 0
    for follow in ("What is my name?", "Thank you."):
        answer = client_of(server).chat.completions.create(model="default_model", messages=messages, max_tokens=6)
        if seen:
            # All but the new message: an answer that was cut off ends with other tokens than the template puts.
            assert answer.usage.prompt_tokens_details.cached_tokens >= seen - 2
        seen = answer.usage.total_tokens
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": follow},
        ]
    assert server.stats()["prompt_cache"]["rewinds"]["approximate"] == 0


def test_a_prompt_one_token_shorter_than_a_stored_one(server, client_of):
    """The stored cache is exactly the prompt, and still there must be a token to feed."""
    complete = client_of(server).completions.create
    for prompt in ("One two three four five six", "One two three four five"):
        assert complete(model="default_model", prompt=prompt, max_tokens=3).usage.completion_tokens == 3


def test_a_client_that_disconnects_frees_its_place(server, ask):
    before = server.stats()["requests"]["abandoned"]
    body = json.dumps({"prompt": "One, two,", "max_tokens": 2000, "stream": True, "logit_bias": NEVER_ENDING}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        received = b""
        while received.count(b"data:") < 2:
            received += connection.recv(4096)
    until(lambda: server.stats()["requests"]["abandoned"] == before + 1)
    until(lambda: server.stats()["running"]["sequences"] == 0)
    assert server.stats()["requests"]["running"] == 0
    assert "Paris" in ask(server, question("France"))


def test_a_prompt_beyond_the_context_is_refused(server, client_of, ask):
    with pytest.raises(openai.BadRequestError) as refusal:
        client_of(server).completions.create(model="default_model", prompt="word " * 9000, max_tokens=1)
    assert refusal.value.body == "the prompt has 9001 tokens and the model takes 8192; shorten it"
    assert "Paris" in ask(server, question("France"))


@pytest.mark.parametrize(
    "body",
    [
        b"{not json",
        b'["a", "list"]',
        {"messages": "no list", "max_tokens": 1},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": -1},
        {"max_tokens": 4},
    ],
    ids=["broken", "list", "messages", "count", "no messages"],
)
def test_malformed_requests_are_refused_with_a_reason(server, ask, body):
    status, text = server.post("/v1/chat/completions", body)
    assert status == 400
    assert json.loads(text)["error"]
    assert server.get("/health") == {"status": "ok"}


def test_an_empty_prompt_is_refused(server, ask):
    assert server.post("/v1/completions", {"prompt": "", "max_tokens": 1}) == (
        400,
        '{"error": "the prompt has no tokens"}',
    )
    assert "Paris" in ask(server, question("France"))


def test_stats_say_what_is_active_and_held(server):
    stats = server.stats()
    assert stats["method"] in METHODS
    assert stats["batched"] is True
    # A codec in blocks of its own needs no queries, and says so.
    assert stats["query_mode"] in ("routed", "none")
    assert stats["requests"]["running"] == 0
    held = stats["prompt_cache"]
    assert stats["caches"]["bytes_held"] == held["bytes_held"] > 0
    assert held["entries"] <= held["max_entries"] == 40
    assert "full size" in held["checkpoints"]["note"]
    assert stats["disk"] is None


def test_the_log_says_what_is_served(server):
    line = next(line for line in server.log().splitlines() if "veloxquant serves" in line)
    assert server.stats()["method"] in line
    assert "queries" in line
    assert f"http://127.0.0.1:{server.port}" in line


@pytest.mark.parametrize(
    "words", [("rocketkv",), ("a2ats", "--set", "allow_uncalibrated=true")], ids=["rocketkv", "a2ats"]
)
def test_other_methods_serve_and_tell(start, client_of, words):
    """Two at once, and figures in the middle: what a method holds may have to be computed to be told."""
    server = start("--method", *words)
    with ThreadPoolExecutor(2) as pool:
        answers = [
            pool.submit(
                client_of(server).completions.create,
                model="default_model",
                prompt=prompt,
                max_tokens=12,
                logit_bias=NEVER_ENDING,
            )
            for prompt in ("One, two, three, four,", "Monday, Tuesday,")
        ]
        until(lambda: server.stats()["running"]["bytes_held"] > 0)
    assert all(answer.result().usage.completion_tokens == 12 for answer in answers)
    stats = server.stats()
    assert stats["running"]["sequences"] == 0
    assert stats["prompt_cache"]["bytes_held"] > 0


def test_memory_returns(start, ask):
    server = start("--method", "snapkv", "--set", "budget=9", "--set", "window=4", "--prompt-cache-size", "4")
    resident = []
    for number in range(10):
        ask(server, f"Number {number}, {number * 37}", count=3)
        resident.append(server.resident_bytes())
    stats = server.stats()
    assert stats["running"]["bytes_held"] == 0
    assert stats["prompt_cache"]["entries"] <= 4
    assert stats["caches"]["bytes_held"] == stats["prompt_cache"]["bytes_held"] < 30_000_000
    assert resident[-1] - resident[4] < 100_000_000
