"""Decode speed of ``veloxquant serve`` against mlx-lm's own server, several requests at once, in one run.

Every arm is a server process on the sample model. A prompt is processed once per arm; then all arms take turns
answering it as often at once as ``--parallel`` says, from their prompt caches. Counted are the tokens between the
moment when all answers have begun and the moment when the first of them ends.
"""

import argparse
import functools
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import server_process

ARMS = {
    "snapkv": (),
    "rocketkv": (),
    "turboquant_rvq": (),
    "a2ats": ("--set", "allow_uncalibrated=true"),
}


def prompt_of(tokens):
    import mlx_lm

    from veloxquant.testing.sample import sample_model_path
    from veloxquant.testing.sample import sample_tokens

    tokenizer = mlx_lm.load(str(sample_model_path()), lazy=True)[1]
    return tokenizer.decode(sample_tokens(tokenizer, tokens))


def stream(server, prompt, count, times):
    body = {"prompt": prompt, "max_tokens": count, "stream": True, "logit_bias": {"0": -100, "2": -100}}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())


def speed(server, prompt, count, parallel):
    """Tokens per second of all answers together, while all are being generated."""
    times = [[] for _ in range(parallel)]
    threads = [threading.Thread(target=stream, args=(server, prompt, count, own)) for own in times]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begin, end = max(own[0] for own in times), min(own[-1] for own in times)
    return sum(begin < moment <= end for own in times for moment in own) / (end - begin)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=500, help="length of the prompt")
    parser.add_argument("--count", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", default=",".join(ARMS))
    parser.add_argument("--stored", action="store_true", help="weights of 4 and 8 bits, as the model's folder has them")
    options = parser.parse_args()
    prompt = prompt_of(options.tokens)
    with tempfile.TemporaryDirectory() as folder:
        start = functools.partial(server_process.start, stored=options.stored)
        servers = {"plain": start(Path(folder) / "plain.log", plain=True)}
        for name in options.methods.split(","):
            servers[name] = start(Path(folder) / f"{name}.log", "--method", name, *ARMS[name])
        try:
            figures = measure(servers, prompt, options)
        finally:
            for server in servers.values():
                server.process.kill()
    plain = figures["plain"]
    print(f"{options.parallel} at once, {options.tokens} tokens of prompt, tokens/s (median of {options.rounds})")
    for name, values in figures.items():
        ratios = [value / other for value, other in zip(values, plain, strict=True)]
        print(f"{name:16} {statistics.median(values):7.2f}  {statistics.median(ratios):5.2f} x plain")


def measure(servers, prompt, options):
    # The prompts of all arms at once: only what comes after them is timed.
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(lambda server: speed(server.wait(), prompt, 2, 1), servers.values()))
    for server in servers.values():
        speed(server, prompt, 4, options.parallel)
    figures = {name: [] for name in servers}
    for _ in range(options.rounds):
        for name, server in servers.items():
            figures[name].append(speed(server, prompt, options.count, options.parallel))
    return figures


if __name__ == "__main__":
    main()
