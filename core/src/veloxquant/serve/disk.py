"""Prompt caches in files, least recently used ones first to go.

MLX computes arrays on the thread that made them, so everything about arrays happens on the thread that generates;
a thread of its own writes, from arrays that are there already. Where MLX bears no other thread at its arrays, which is
on CUDA, the thread that generates writes too.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from veloxquant.cache import LayerCache
from veloxquant.errors import FileFormatError
from veloxquant.rewind import exact_trim
from veloxquant.safefile import write_file
from veloxquant.serve.folder import CacheFolder
from veloxquant.serve.folder import DiskEntry
from veloxquant.serve.folder import describe_entry
from veloxquant.serve.folder import file_name
from veloxquant.serve.identity import LoadedModel
from veloxquant.store import load_prompt_cache
from veloxquant.store import pack_prompt_cache
from veloxquant.threads import threads_compute

__all__ = ["DiskEntry", "DiskStore"]

MIN_TOKENS = 16
"""Shorter prompts are processed sooner than read."""
MAX_WAITING_BYTES = 1 << 30
"""Bytes of caches that wait to be written; they are held in memory until then."""
CLOSE_SECONDS = 5.0
"""How long files that wait to be written are waited for at the end."""


@attrs.define
class DiskCounts:
    """What became of files: written, read, removed for room, not written, not writable, set aside in this run."""

    written: int = 0
    read: int = 0
    removed: int = 0
    skipped: int = 0
    failed: int = 0
    set_aside: int = 0


@attrs.frozen
class _Job:
    path: Path
    entry: DiskEntry
    description: Mapping[str, Any]
    arrays: Mapping[str, mx.array]


class DiskStore:
    """Prompt caches in the files of one folder.

    Args:
        folder: Where they lie.
        max_bytes: Bytes that all files together may have, those set aside included.
        loaded: Says which model is loaded, or None.

    Raises:
        VeloxQuantError: The folder cannot be used.
    """

    def __init__(self, folder: CacheFolder, max_bytes: int, loaded: Callable[[], LoadedModel | None]) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.counts = DiskCounts()
        self._loaded = loaded
        self._lock = threading.RLock()
        before = len(folder.files_set_aside())
        # In the order of use, the most recent last.
        self._entries = {entry.path.name: entry for entry in folder.scan()}
        self.counts.set_aside = len(folder.files_set_aside()) - before
        self._make_room(0)
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        # Names and sizes of what is waiting or being written.
        self._writing: dict[str, int] = {}
        self._writer = threading.Thread(target=self._write_all, name="prompt-cache-writer", daemon=True)
        self._writer.start()

    # -------------------------------------------------- the thread that generates

    def entries(self, key: Any) -> list[DiskEntry]:
        """The files that hold caches of the loaded model, if that is the one meant.

        Args:
            key: What mlx-lm's server calls the model by.
        """
        loaded = self._loaded()
        if loaded is None or loaded.key != key:
            return []
        with self._lock:
            return [entry for entry in self._entries.values() if entry.identity == loaded.identity]

    def load(self, key: Any, entry: DiskEntry) -> list[Any] | None:
        """Read and check a file; one that fails is set aside.

        Args:
            key: What mlx-lm's server calls the model by.
            entry: One of ``entries(key)``.

        Returns:
            The caches, or None when the file cannot be used.
        """
        loaded = self._loaded()
        if loaded is None or loaded.key != key:
            return None
        try:
            caches = load_prompt_cache(entry.path, loaded.model, method=loaded.method, config=loaded.config)
            if any(isinstance(cache, LayerCache) and cache.offset != entry.tokens.size for cache in caches):
                raise FileFormatError("it holds another number of tokens than it says")
        except Exception as error:  # whatever a damaged file leads to, it must not end the server
            self._drop_damaged(entry, error)
            return None
        with self._lock:
            self.counts.read += 1
            self._use(entry)
        return caches

    def offer(self, key: Any, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        """Store a cache, unless it is short, known, too large, or the writer is behind.

        It is written in the background, where threads may compute beside each other.

        Args:
            key: What mlx-lm's server calls the model by.
            tokens: The tokens that it has seen.
            caches: The cache, which nobody changes any more.
        """
        try:
            self._offer(key, np.array(tokens, dtype=np.int64), caches)
        except Exception as error:  # a cache that cannot be stored is no reason to end the server
            logging.warning(f"a prompt cache was not stored: {error}")
            self.counts.failed += 1

    def _offer(self, key: Any, tokens: np.ndarray, caches: Sequence[Any]) -> None:
        loaded = self._loaded()
        if loaded is None or loaded.key != key or tokens.size < MIN_TOKENS:
            return
        name = file_name(loaded.identity, tokens)
        with self._lock:
            known = self._entries.get(name)
            if known is not None:
                self._use(known)
            if known is not None or name in self._writing:
                return
        size = sum(int(cache.nbytes) for cache in caches)
        if size > self.max_bytes or size + sum(list(self._writing.values())) > MAX_WAITING_BYTES:
            self.counts.skipped += 1
            return
        trimmable, reach = all(cache.is_trimmable() for cache in caches), exact_trim(caches)
        texts = describe_entry(loaded.identity, tokens, trimmable, reach)
        description, arrays = pack_prompt_cache(caches, texts)
        mx.eval(arrays)
        path = self.folder.path / name
        entry = DiskEntry(path, loaded.identity, tokens, trimmable, reach, sum(a.nbytes for a in arrays.values()))
        self._writing[name] = entry.size
        job = _Job(path, entry, description, arrays)
        if threads_compute():
            self._jobs.put(job)
        else:
            self._do(job)

    def _drop_damaged(self, entry: DiskEntry, error: Exception) -> None:
        with self._lock:
            known = self._entries.pop(entry.path.name, None)
            # A file that is gone or cannot be opened just now is no damaged one.
            if known is not None and not isinstance(error.__cause__, OSError):
                self.folder.set_aside(entry.path, str(error))
                self.counts.set_aside += 1

    # ---------------------------------------------------------------- the writer

    def _write_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(job)
            # Not held until the next one comes: these arrays are large.
            del job

    def _do(self, job: _Job) -> None:
        try:
            self._write(job)
        except Exception as error:
            logging.warning(f"a prompt cache was not stored: {error}")
            self.counts.failed += 1
        self._writing.pop(job.path.name, None)

    def _write(self, job: _Job) -> None:
        with self._lock:
            self._make_room(job.entry.size)
        write_file(job.path, job.description, job.arrays)
        job.entry.size = job.path.stat().st_size
        with self._lock:
            self._entries[job.path.name] = job.entry
            self.counts.written += 1
            self._make_room(0)

    # --------------------------------------------------------------------- space

    def _make_room(self, size: int) -> None:
        """Remove files until ``size`` more bytes fit: those set aside first, then the least recently used."""
        total = size + self._bytes() + self.folder.bytes_set_aside()
        for freed in self.folder.remove_set_aside() if total > self.max_bytes else ():
            total -= freed
            if total <= self.max_bytes:
                return
        while total > self.max_bytes and self._entries:
            entry = self._entries.pop(next(iter(self._entries)))
            total -= entry.size
            entry.path.unlink(missing_ok=True)
            self.counts.removed += 1

    def _bytes(self) -> int:
        return sum(entry.size for entry in self._entries.values())

    def _use(self, entry: DiskEntry) -> None:
        """Note that a file was of use, here and for later runs."""
        self._entries[entry.path.name] = self._entries.pop(entry.path.name, entry)
        try:
            os.utime(entry.path)
        except OSError:
            del self._entries[entry.path.name]

    # ------------------------------------------------------------------ for all

    def figures(self) -> dict[str, Any]:
        """Counts and sizes as plain values."""
        with self._lock:
            return {
                "files": len(self._entries),
                "bytes": self._bytes(),
                "max_bytes": self.max_bytes,
                "waiting": len(self._writing),
                **attrs.asdict(self.counts),
                "files_set_aside": len(self.folder.files_set_aside()),
            }

    def close(self) -> None:
        """Write what waits, if that is done within seconds, and let another server use the folder."""
        self._jobs.put(None)
        self._writer.join(CLOSE_SECONDS)
        if self._writer.is_alive():
            # The folder is left locked: what is half written goes with the process.
            logging.warning(f"{len(self._writing)} prompt caches were not stored: writing them takes too long")
            return
        self.folder.close()
