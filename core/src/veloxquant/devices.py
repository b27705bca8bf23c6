"""What MLX computes on."""

from __future__ import annotations

import mlx.core as mx

__all__ = ["on_cuda"]


def on_cuda() -> bool:
    """Whether MLX's default device is a CUDA GPU."""
    return mx.default_device().type == mx.DeviceType.gpu and mx.cuda.is_available()
