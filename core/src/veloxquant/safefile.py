"""Files that are written whole or not at all, and read whole or not at all.

A file is safetensors: arrays, and one metadata entry with JSON. A digest over the whole file is part of it, so a file
that was cut off or altered is refused before anything of it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

from veloxquant.errors import FileFormatError
from veloxquant.errors import VeloxQuantError

__all__ = ["FILE_FORMAT", "CacheFile", "read_description", "read_file", "write_file"]

FILE_FORMAT = 1
_KEY = "veloxquant"
_DIGEST = "veloxquant_digest"
_BLANK = "0" * 64


@attrs.frozen
class CacheFile:
    """The content of a file.

    Args:
        description: What the JSON says.
        arrays: The arrays by name.
    """

    description: dict[str, Any]
    arrays: dict[str, mx.array]


def write_file(path: str | os.PathLike[str], description: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> None:
    """Write a file whole or not at all.

    Args:
        path: Where; an existing file is replaced once the new one is complete.
        description: Values that JSON can hold.
        arrays: Arrays by name.

    Raises:
        VeloxQuantError: The folder is missing or cannot be written.
    """
    target = Path(path)
    text = json.dumps({"format": FILE_FORMAT, **description})
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-", suffix=".safetensors")
        os.close(handle)
    except OSError as error:
        raise VeloxQuantError(
            f"cannot write {target}: {error.strerror or error}; choose a folder that exists"
        ) from error
    try:
        # An empty file of safetensors is not readable everywhere, so there is always one array.
        mx.save_safetensors(temporary, {"_": mx.zeros((1,)), **arrays}, {_KEY: text, _DIGEST: _BLANK})
        _seal(Path(temporary))
        os.replace(temporary, target)
    except OSError as error:
        raise VeloxQuantError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def read_file(path: str | os.PathLike[str]) -> CacheFile:
    """Read and check a file.

    Args:
        path: The file.

    Raises:
        FileFormatError: It is missing, no cache file, of a newer format, cut off, or altered.
    """
    source = Path(path)
    description = read_description(source)
    try:
        arrays = mx.load(str(source), format="safetensors")
    except (RuntimeError, ValueError) as error:
        raise FileFormatError(f"{source} cannot be read: {error}") from error
    assert isinstance(arrays, dict)  # safetensors files hold named arrays
    # Read now: a lazy array would read a file that may be gone by then.
    mx.eval(arrays)
    arrays.pop("_", None)
    return CacheFile(description, arrays)


def read_description(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Check a file and read what it says of itself, without its arrays.

    Args:
        path: The file.

    Raises:
        FileFormatError: As for ``read_file``.
    """
    source = Path(path)
    try:
        header, place = _header(source)
        metadata = json.loads(header).get("__metadata__", {})
        stated = metadata[_DIGEST]
        found = _digest(source, place + header.index(stated.encode()))
        text = metadata[_KEY]
    except OSError as error:
        raise FileFormatError(f"cannot read {source}: {error.strerror or error}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise FileFormatError(
            f"{source} is not a veloxquant cache file, or it was cut off or altered; save the cache again"
        ) from error
    if found != stated:
        raise FileFormatError(f"{source} was cut off or altered after it was written; save the cache again")
    description: dict[str, Any] = json.loads(text)
    if description["format"] > FILE_FORMAT:
        raise FileFormatError(
            f"{source} has format {description['format']}, this veloxquant reads up to {FILE_FORMAT}; update veloxquant"
        )
    return description


def _header(path: Path) -> tuple[bytes, int]:
    """The JSON header of a safetensors file and where it begins."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        return file.read(length), 8


def _digest(path: Path, blank: int) -> str:
    """SHA-256 of a file with the 64 bytes at ``blank`` read as zeros, where the digest itself stands."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(blank))
        file.seek(len(_BLANK), os.SEEK_CUR)
        digest.update(_BLANK.encode())
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _seal(path: Path) -> None:
    """Put the digest where its blank stands."""
    header, start = _header(path)
    place = start + header.index(_BLANK.encode(), header.index(_DIGEST.encode()))
    digest = _digest(path, place)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(digest.encode())
        file.flush()
        os.fsync(file.fileno())
