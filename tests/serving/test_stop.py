"""A server that is asked to end does so in seconds, whatever it is at."""

import threading
import time

import openai
import pytest

pytestmark = [pytest.mark.serving, pytest.mark.slow]

# With the BLAS that mlx brings, the first takes minutes, in one step; the second would go on for as long.
STEP = {"prompt": "word " * 4000, "max_tokens": 1}
ALONE = {"prompt": "One, two,", "max_tokens": 4000, "seed": 1, "logit_bias": {"0": -100, "2": -100}}


@pytest.mark.parametrize("request_", [STEP, ALONE], ids=["long step", "alone"])
def test_a_busy_server_ends_in_seconds(start, client_of, request_):
    server = start("--method", "snapkv")
    lost = []

    def run():
        with pytest.raises((openai.APIError, openai.APIConnectionError)) as error:
            client_of(server).completions.create(model="default_model", **request_)
        lost.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while server.stats()["requests"]["running"] == 0:
        time.sleep(0.1)
    time.sleep(1)
    if server.stats()["requests"]["running"] == 0:
        pytest.skip("this machine was through with the request within a second")
    assert server.stop() == 0
    thread.join(5)
    assert lost
