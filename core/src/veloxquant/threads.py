"""What the back ends of MLX let threads do."""

from __future__ import annotations

from veloxquant.devices import on_cuda

__all__ = ["threads_compute"]


def threads_compute() -> bool:
    """Whether several threads of a process may compute at once, or one read arrays while another computes.

    Not on CUDA: there MLX records what a thread computes into a graph, another thread that waits for the device breaks
    the recording, and MLX ends the process ("operation failed due to a previous error during capture", seen with mlx
    0.32.4 and its own operations alone).
    """
    return not on_cuda()
