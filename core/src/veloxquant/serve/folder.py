"""The folder of a server's prompt caches: whose it is, what lies in it, and what is set aside."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from veloxquant.errors import FileFormatError
from veloxquant.errors import VeloxQuantError
from veloxquant.safefile import peek_description

__all__ = ["SUFFIX", "CacheFolder", "DiskEntry", "describe_entry", "file_name"]

SUFFIX = ".safetensors"
SET_ASIDE = ".damaged"
_LOCK = ".lock"
_PRIVATE = 0o700


@attrs.define(eq=False)
class DiskEntry:
    """A prompt cache in a file.

    Args:
        path: The file.
        identity: What it was made with, see ``model_identity``.
        tokens: The tokens that it has seen, int64.
        trimmable: Whether it can be rewound.
        exact_trim: The most tokens that it forgets without loss.
        size: Bytes of the file.
    """

    path: Path
    identity: str
    tokens: np.ndarray
    trimmable: bool
    exact_trim: int
    size: int


def file_name(identity: str, tokens: np.ndarray) -> str:
    """A name that says nothing of the tokens and is another one for other tokens or another identity."""
    return hashlib.sha256(identity.encode() + tokens.astype("<i8").tobytes()).hexdigest() + SUFFIX


def describe_entry(identity: str, tokens: np.ndarray, trimmable: bool, exact_trim: int) -> dict[str, str]:
    """What a file says of itself, as texts."""
    return {
        "identity": identity,
        "tokens": base64.b64encode(tokens.astype("<i8").tobytes()).decode(),
        "trimmable": str(int(trimmable)),
        "exact_trim": str(exact_trim),
    }


class CacheFolder:
    """A folder that one server uses at a time and that only its owner can read.

    Args:
        path: The folder; made if it does not exist.

    Raises:
        VeloxQuantError: It cannot be used, is open to others, or another server uses it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().resolve()
        try:
            self._make_private()
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise VeloxQuantError(
                f"cannot use {self.path} for prompt caches: {error.strerror or error}; name another --cache-dir"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise VeloxQuantError(
                f"another server keeps its prompt caches in {self.path}; name another --cache-dir"
            ) from None

    def _make_private(self) -> None:
        self.path.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        mode = stat.S_IMODE(self.path.stat().st_mode)
        if mode & 0o077:
            if any(self.path.iterdir()) and not (self.path / _LOCK).exists():
                raise VeloxQuantError(
                    f"{self.path} holds other files and can be read by others; prompts are private, so name an empty "
                    f"--cache-dir, or run: chmod 700 {self.path}"
                )
            self.path.chmod(_PRIVATE)

    def close(self) -> None:
        """Let another server use the folder."""
        os.close(self._lock)

    def scan(self) -> list[DiskEntry]:
        """Find the caches of earlier runs, least recently used first; what is left of broken writes is removed.

        Returns:
            Entries whose files have the right form; the content of a file is checked when it is read.
        """
        for path in self.path.glob(f".*{SUFFIX}"):
            _remove(path)
        found = []
        for path in sorted(self.path.glob(f"*{SUFFIX}"), key=_last_used):
            entry = self._read_entry(path)
            if entry is not None:
                found.append(entry)
        return found

    def _read_entry(self, path: Path) -> DiskEntry | None:
        try:
            entry = _entry(path, peek_description(path)["metadata"])
        except (FileFormatError, KeyError, TypeError, ValueError, AttributeError) as error:
            self.set_aside(path, f"{type(error).__name__}: {error}")
            return None
        return entry

    def set_aside(self, path: Path, reason: str) -> None:
        """Rename a file that failed its checks, so that it is never read again."""
        logging.warning(f"prompt cache file set aside: {path.name}{SET_ASIDE} ({reason})")
        with contextlib.suppress(OSError):
            path.rename(path.with_name(path.name + SET_ASIDE))

    def files_set_aside(self) -> list[Path]:
        """The files that were set aside, oldest first."""
        return sorted(self.path.glob(f"*{SET_ASIDE}"), key=_last_used)

    def remove_set_aside(self) -> Iterator[int]:
        """Remove files that were set aside, oldest first, one at a time; gives the bytes of each."""
        for path in self.files_set_aside():
            size = _size(path)
            _remove(path)
            yield size

    def bytes_set_aside(self) -> int:
        """Bytes of the files that were set aside."""
        return sum(_size(path) for path in self.files_set_aside())


def _entry(path: Path, metadata: dict[str, Any]) -> DiskEntry:
    tokens = np.frombuffer(base64.b64decode(metadata["tokens"], validate=True), dtype="<i8").astype(np.int64)
    if path.name != file_name(metadata["identity"], tokens):
        raise ValueError("its name does not belong to what it says of itself")
    return DiskEntry(
        path=path,
        identity=metadata["identity"],
        tokens=tokens,
        trimmable=metadata["trimmable"] == "1",
        exact_trim=int(metadata["exact_trim"]),
        size=path.stat().st_size,
    )


def _last_used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
