"""Running a job in one process and in several, which mlx's own launcher starts on this machine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("sharded_run.py")
LONGEST = 1200


def free_ports(count):
    """The first of ``count`` ports in a row that nobody listens on."""
    for first in range(20000 + os.getpid() % 10000, 60000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise RuntimeError("no free ports")


@pytest.fixture(scope="session")
def run_job(tmp_path_factory):
    """Run a job; returns what each process wrote and the folder with their arrays."""

    def run(job, processes):
        folder = tmp_path_factory.mktemp(f"{job['model']}-{processes}")
        (folder / "job.json").write_text(json.dumps(job))
        command = [sys.executable, str(SCRIPT), str(folder / "job.json"), str(folder)]
        if processes > 1:
            port = str(free_ports(processes))
            options = ["--backend", "ring", "-n", str(processes), "--hosts", "127.0.0.1", "--starting-port", port]
            # The program mlx.launch, whatever folder it stands in.
            main = "import sys; from mlx._distributed_utils.launch import main; sys.argv[0] = 'mlx.launch'; main()"
            command = [sys.executable, "-c", main, *options, "--", *command]
        # The launcher hands on what comes from stdin, and would turn in circles at its end: the pipe stays open.
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)
            try:
                code = process.wait(timeout=LONGEST)
            except BaseException:
                process.terminate()
                raise
            finally:
                process.stdin.close()
        results = [folder / f"{rank}.json" for rank in range(processes)]
        assert code == 0, (folder / "log").read_text()
        assert all(path.exists() for path in results), (folder / "log").read_text()
        return [json.loads(path.read_text()) for path in results], folder

    return run
