"""The thread that generates: mlx-lm's, watched, and started with a check."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from mlx_lm import server

from veloxquant.errors import VeloxQuantError
from veloxquant.serve.figures import Held
from veloxquant.serve.figures import RequestCounts
from veloxquant.serve.figures import measure
from veloxquant.serve.options import rebound
from veloxquant.serve.prompts import PromptCache
from veloxquant.serve.provider import CompressedModelProvider

__all__ = ["CompressedGenerator"]

MEASURE_SECONDS = 2.0
"""How long figures are waited for."""
STOP_SECONDS = 3.0
"""How long a step, or a request served alone, is waited for at the end: with a long prompt it may take minutes."""


class CompressedGenerator(server.ResponseGenerator):  # type: ignore[misc]
    """mlx-lm's response generator; loads the model at once and refuses prompts that would end its thread.

    Args:
        provider: The model provider.
        prompts: The prompt cache.
    """

    _stop: bool

    def __init__(self, provider: CompressedModelProvider, prompts: PromptCache) -> None:
        self.provider = provider
        self.prompts = prompts
        self.counts = RequestCounts()
        self._started = threading.Event()
        self._refusal: Exception | None = None
        self._batch: Callable[[], Any] = lambda: None
        self._held = measure(prompts, None)
        self._asking = threading.Lock()
        self._measure_wanted, self._measured = threading.Event(), threading.Event()
        super().__init__(provider, prompts)

    def wait_until_loaded(self) -> None:
        """Wait for the model.

        Raises:
            VeloxQuantError: It cannot be loaded or served.
        """
        self._started.wait()
        if isinstance(self._refusal, VeloxQuantError):
            raise self._refusal
        if self._refusal is not None:
            lines = str(self._refusal).strip().splitlines() or ["no reason given"]
            raise VeloxQuantError(f"the model cannot be loaded: {type(self._refusal).__name__}: {lines[0]}")

    def held(self) -> Held:
        """What caches hold, measured by the thread that generates; the last figures when it is long busy."""
        with self._asking:
            self._measured.clear()
            self._measure_wanted.set()
            self._measured.wait(MEASURE_SECONDS)
            return self._held

    def stop_and_join(self, seconds: float = STOP_SECONDS) -> None:
        """Give up the batch and wait for the thread, though not for a long step or a long answer.

        Args:
            seconds: How long it is waited for. A thread that is still busy then goes on until the process ends.
        """
        if self._stop:  # asked a second time
            return
        self._stop = True
        self._generation_thread.join(seconds)
        if self._generation_thread.is_alive():
            logging.warning("stopping in the middle of a step, whose requests are lost")

    def _next_request(self, timeout: float | None = None) -> Any:
        # The generating thread comes by here twice a second at least, unless it serves a request alone.
        if self._measure_wanted.is_set():
            self._measure_wanted.clear()
            self._held = measure(self.prompts, self._batch())
            self._measured.set()
        return super()._next_request(timeout)

    def generate(self, request: Any, generation_args: Any, progress_callback: Any = None) -> tuple[Any, Iterator[Any]]:
        """As in mlx-lm; counts what becomes of the request."""
        self.counts.add(received=1, running=1)
        try:
            context, responses = super().generate(request, generation_args, progress_callback)
        except BaseException:
            self.counts.add(running=-1, failed=1)
            raise
        return context, self._counted(responses)

    def _counted(self, responses: Iterator[Any]) -> Iterator[Any]:
        end = "abandoned"
        try:
            for response in responses:
                self.counts.add(generated_tokens=1)
                yield response
            end = "finished"
        except ConnectionError:  # the client went away while its prompt was processed
            raise
        except Exception:
            end = "failed"
            raise
        finally:
            self.counts.add(running=-1, **{end: 1})

    def _generate(self) -> None:
        # MLX's arrays belong to the thread that makes them, so the model is loaded here and nowhere else.
        try:
            self.provider.load_default()
        except Exception as error:  # whatever is wrong with the user's files
            self._refusal = error
            return
        finally:
            self._started.set()
        with rebound(server, BatchGenerator=self._watched(server.BatchGenerator)):
            super()._generate()
        self.prompts.trim_to(n_sequences=0)

    def _watched(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def make_and_note(*args: Any, **options: Any) -> Any:
            batch = make(*args, **options)
            self._batch = weakref.ref(batch)
            return batch

        return make_and_note

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        result = super()._tokenize(tokenizer, request, args)
        count, limit = len(result[0]), self.provider.context_length
        if count == 0:
            raise VeloxQuantError("the prompt has no tokens")
        if limit is not None and count > limit:
            raise VeloxQuantError(f"the prompt has {count} tokens and the model takes {limit}; shorten it")
        return result
