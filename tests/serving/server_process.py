"""A server in a process of its own, for the tests and the benchmark in this folder."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import attrs

from veloxquant.testing.sample import sample_model_path

START_SECONDS = 120
STOP_SECONDS = 20
"""The server gives itself eight, and the machine may be busy."""
PLAIN = """
import sys
from mlx_lm import server
from veloxquant.testing.sample import convert_sample_model, sample_model_path

class Provider(server.ModelProvider):
    def _load(self, *paths):
        super()._load(*paths)
        self.model = convert_sample_model(self.model)

server.ModelProvider = Provider
sys.argv = ["mlx_lm.server", "--model", str(sample_model_path()), *sys.argv[1:]]
server.main()
"""
OURS = "import sys, veloxquant_command; sys.exit(veloxquant_command.main())"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@attrs.define(eq=False)
class ServerProcess:
    """A running server: the process, its port, and where its log goes."""

    process: subprocess.Popen
    port: int
    log_path: str

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def log(self):
        with open(self.log_path) as file:
            return file.read()

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return json.load(response)

    def stats(self):
        return self.get("/veloxquant/stats")

    def post(self, path, body):
        """Status and text of the answer; the body may be bytes that are no JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def resident_bytes(self):
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def wait(self):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log()}")
            try:
                self.get("/health")
            except OSError:
                time.sleep(0.2)
            else:
                return self
        self.kill()
        raise RuntimeError(f"the server did not come up:\n{self.log()}")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        """Ask it to end, as an init system does; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


def start(log_path, *words, plain=False, stored=False):
    """Start ``veloxquant serve`` (or mlx-lm's own server) on the sample model; ``wait`` returns when it listens.

    Its weights are dense fp32, which is fastest on a CPU, or with ``stored`` as the folder has them: 4 and 8 bits.
    """
    port = free_port()
    command = ["-c", PLAIN] if plain else ["-c", OURS, "serve", "--model", "sample"]
    if stored:
        command = ["-m", "mlx_lm.server"] if plain else ["-c", OURS, "serve"]
        command += ["--model", str(sample_model_path())]
    with open(log_path, "w") as log:
        process = subprocess.Popen(
            [sys.executable, *command, "--port", str(port), *words], stdout=log, stderr=subprocess.STDOUT
        )
    return ServerProcess(process, port, str(log_path))
