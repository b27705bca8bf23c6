"""What figures depend on besides the code: versions, back end, BLAS and machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from veloxquant.devices import on_cpu
from veloxquant.registry import default_registry

__all__ = ["back_end", "blas", "environment", "machine", "versions"]

_CORE = ("veloxquant", "mlx", "mlx-lm")
# Parts of the file names of libraries, and what they are.
_LIBRARIES = (("openblas", "OpenBLAS"), ("mkl_", "MKL"), ("libblis", "BLIS"), ("libatlas", "ATLAS"))


def environment() -> dict[str, Any]:
    """All of it, as plain values for a record."""
    return {"versions": versions(), "back_end": back_end(), "blas": blas(), "machine": machine()}


def versions() -> dict[str, str]:
    """Versions of Python, of the libraries, and of every distribution that brings a method."""
    entries = default_registry().entries()
    names = dict.fromkeys([*_CORE, *(entry.distribution for entry in entries)])
    found = {name: version for name in names if (version := _version(name)) is not None}
    return {"python": platform.python_version(), **found}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def back_end() -> str:
    """``cpu``, ``metal`` or ``cuda``."""
    if on_cpu():
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def blas() -> str:
    """The library that does matrix products, and what speed or precision depend on besides.

    On Linux a preloaded OpenBLAS takes the place of what mlx's CPU wheel brings, which is several times slower. On CUDA
    MLX rounds what goes into products of fp32 to 10 bits unless MLX_ENABLE_TF32=0 is set.
    """
    if back_end() == "cuda":
        return f"cuBLAS, TF32 {'off' if os.environ.get('MLX_ENABLE_TF32') == '0' else 'on'}"
    if sys.platform == "darwin":
        return "Accelerate"
    try:
        loaded = Path("/proc/self/maps").read_text()
    except OSError:
        return "unknown"
    names = {Path(line.split()[-1]).name.lower() for line in loaded.splitlines() if "/" in line}
    for part, library in _LIBRARIES:
        # The wheel of numpy and the like bring an OpenBLAS of their own under another name, which mlx does not use.
        if any(part in name and "scipy" not in name and "64_" not in name for name in names):
            threads = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
            return f"{library}, {threads} thread(s)" if threads else library
    return "as mlx's wheel brings it"


def machine() -> dict[str, Any]:
    """Processor, cores that may be used, memory and system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"cpu": _cpu(), "cores": cores, "memory_bytes": _memory(), "system": platform.platform(terse=True)}
    if back_end() != "cpu":
        info = mx.device_info()
        found["gpu"] = str(info.get("device_name") or info.get("architecture") or "unknown")
    return found


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
