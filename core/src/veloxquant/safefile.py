"""Files that are written whole or not at all, and read whole or not at all.

A file is safetensors: arrays, and one metadata entry with JSON. A digest over the whole file is part of it, so a file
that was cut off or altered is refused before anything of it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from typing import BinaryIO
from typing import cast

import attrs
import mlx.core as mx

from veloxquant.errors import FileFormatError
from veloxquant.errors import VeloxQuantError

__all__ = ["FILE_FORMAT", "CacheFile", "peek_description", "read_description", "read_file", "write_file"]

FILE_FORMAT = 1
_KEY = "veloxquant"
_DIGEST = "veloxquant_digest"
_BLANK = "0" * 64
_LENGTH = 8
_TRIES = 20


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

    A new file is readable by its owner only; one that is replaced keeps its mode, and a link keeps pointing to it.

    Args:
        path: Where; an existing file is replaced once the new one is complete.
        description: Values that JSON can hold.
        arrays: Arrays by name.

    Raises:
        VeloxQuantError: The folder is missing, or the file cannot be written.
    """
    target = Path(path).resolve()
    text = json.dumps({"format": FILE_FORMAT, **description})
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-", suffix=".safetensors")
        os.close(handle)
    except OSError as error:
        raise VeloxQuantError(
            f"cannot write {target}: {error.strerror or error}; choose a folder that exists and can be written"
        ) from error
    temporary = Path(name)
    try:
        # An empty file of safetensors is not readable everywhere, so there is always one array.
        mx.save_safetensors(name, {"_": mx.zeros((1,)), **arrays}, {_KEY: text, _DIGEST: _BLANK})
        _seal(temporary)
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        temporary.replace(target)
    except (OSError, RuntimeError) as error:
        reason = str(getattr(error, "strerror", None) or error).rstrip(".")
        raise VeloxQuantError(f"cannot write {target}: {reason}; name a file where there is room") from error
    finally:
        temporary.unlink(missing_ok=True)


def read_file(path: str | os.PathLike[str]) -> CacheFile:
    """Read and check a file.

    Args:
        path: The file.

    Raises:
        FileFormatError: It is missing, no cache file, of a newer format, cut off, or altered.
    """
    source = Path(path)
    # MLX opens the file by its name once more, and another process may have replaced it by then: what it read must
    # carry the digest that was checked.
    for _ in range(_TRIES):
        description, digest = _checked(source)
        try:
            arrays, metadata = cast(
                "tuple[dict[str, mx.array], dict[str, str]]",
                mx.load(str(source), format="safetensors", return_metadata=True),
            )
            # Read now: a lazy array would read a file that may be gone by then.
            mx.eval(arrays)
        except (RuntimeError, ValueError) as error:
            if _checked(source)[1] != digest:
                continue
            raise FileFormatError(f"{source} cannot be read: {error}") from error
        if metadata.get(_DIGEST) == digest:
            arrays.pop("_", None)
            return CacheFile(description, arrays)
    raise FileFormatError(f"{source} is being written all the time by another process; try again when it is quiet")


def read_description(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Check a file and read what it says of itself, without its arrays.

    Args:
        path: The file.

    Raises:
        FileFormatError: As for ``read_file``.
    """
    return _checked(Path(path))[0]


def peek_description(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what a file says of itself from its first bytes, its digest unchecked: for lists of many large files.

    Args:
        path: The file. Check it with ``read_file`` before anything of it is used.

    Raises:
        FileFormatError: It is missing, no cache file, or cut off.
    """
    source = Path(path)
    try:
        with source.open("rb") as file:
            header = json.loads(_header(file))
            begin, size = file.tell(), os.fstat(file.fileno()).st_size
        description: dict[str, Any] = json.loads(header.pop("__metadata__")[_KEY])
        end = max(int(entry["data_offsets"][1]) for entry in header.values())
    except OSError as error:
        raise FileFormatError(f"cannot read {source}: {error.strerror or error}") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise FileFormatError(f"{source} is not a veloxquant cache file, or it was altered") from error
    if begin + end != size:
        raise FileFormatError(f"{source} was cut off after it was written; save the cache again")
    return description


def _checked(source: Path) -> tuple[dict[str, Any], str]:
    """The description and the digest of a file whose digest is right; all read through one handle."""
    try:
        if source.exists() and not source.is_file():
            raise FileFormatError(f"{source} is not a file; name the file that save_prompt_cache wrote")
        with source.open("rb") as file:
            header = _header(file)
            metadata = json.loads(header).get("__metadata__", {})
            stated = metadata[_DIGEST]
            found = _digest(file, _LENGTH + header.index(stated.encode()))
            text = metadata[_KEY]
    except OSError as error:
        raise FileFormatError(f"cannot read {source}: {error.strerror or error}") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
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
    return description, stated


def _header(file: BinaryIO) -> bytes:
    """The JSON header of a safetensors file, which begins behind its length."""
    length = int.from_bytes(file.read(_LENGTH), "little")
    if length > os.fstat(file.fileno()).st_size:
        raise ValueError("the header is longer than the file")
    return file.read(length)


def _digest(file: BinaryIO, blank: int) -> str:
    """SHA-256 of a file with the 64 bytes at ``blank`` read as zeros, where the digest itself stands."""
    digest = hashlib.sha256()
    file.seek(0)
    digest.update(file.read(blank))
    file.seek(len(_BLANK), os.SEEK_CUR)
    digest.update(_BLANK.encode())
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _seal(path: Path) -> None:
    """Put the digest where its blank stands."""
    with path.open("r+b") as file:
        header = _header(file)
        place = _LENGTH + header.index(_BLANK.encode(), header.index(_DIGEST.encode()))
        digest = _digest(file, place)
        file.seek(place)
        file.write(digest.encode())
        file.flush()
        os.fsync(file.fileno())
