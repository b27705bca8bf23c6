"""What MLX computes on."""

from __future__ import annotations

import mlx.core as mx

__all__ = ["on_cpu", "on_cuda"]


def on_cpu() -> bool:
    """Whether MLX's default device is the CPU."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def on_cuda() -> bool:
    """Whether MLX's default device is a CUDA GPU."""
    return mx.default_device().type == mx.DeviceType.gpu and mx.cuda.is_available()
