"""The cache of a layer whose attention call brings the true queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any
from typing import NoReturn

import mlx.core as mx

from veloxquant.attention import attention
from veloxquant.cache import LayerCache
from veloxquant.errors import RoutingError

if TYPE_CHECKING:
    from veloxquant.method import Method
    from veloxquant.types import LayerSpec

__all__ = ["RoutedLayerCache"]


class RoutedLayerCache(LayerCache):
    """A layer cache that the model's attention call brings its true queries to."""

    def __init__(self, method: Method, config: Any, layer: LayerSpec, state: Any = None) -> None:
        super().__init__(method, config, layer, state)
        # The core never makes this class for a method without the hook.
        self._attend: Callable[..., mx.array | None] = method.ops.attend  # type: ignore[assignment]
        # Rows whose queries have not come yet.
        self._awaiting = 0
        self._finish_after = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """As in ``LayerCache``; the queries of the rows must have come before the next call.

        Raises:
            RoutingError: The queries of the previous call did not arrive.
        """
        if self._awaiting:
            self.refuse_unattended()
        _, result = self._store(keys, values)
        self._awaiting = keys.shape[2]
        return result

    def refuse_unattended(self) -> NoReturn:
        """Say that queries did not come.

        Raises:
            RoutingError: Always.
        """
        raise RoutingError(
            f"layer {self.layer.index} ({self.method.name}) was to see the model's true queries and did not: call "
            "veloxquant.attention.route(model) (make_prompt_cache and use do), keep the model routed while the "
            "cache is in use, or make the cache with true_queries=False"
        )

    def takes_step(self, keys: mx.array, values: mx.array) -> bool:
        """Whether these rows of several sequences, one of each, are what the next step of this one looks like.

        Args:
            keys: ``[n, Hkv, S, Dk]``.
            values: ``[n, Hkv, S, Dv]``.
        """
        if self._step is None or self._prompt_open or self._awaiting:
            return False
        key_shape, value_shape, *dtypes = self._step
        found = (keys.shape[1:], values.shape[1:], keys.dtype, values.dtype)
        return found == (key_shape[1:], value_shape[1:], *dtypes)

    @property
    def queries_missing(self) -> bool:
        """Whether true queries should have come for the last rows and did not."""
        return self._awaiting > 0

    def trim(self, n: int) -> int:
        """As in ``LayerCache``; rows that a failed forward pass left without queries can be trimmed away."""
        if self._awaiting and n >= self._awaiting:
            # Their block was never attended: it ends no prompt.
            self._block, self._finish_after = 0, False
        trimmed = super().trim(n)
        self._awaiting = max(0, self._awaiting - trimmed)
        return trimmed

    def _prompt_attended(self) -> None:
        self._finish_after = True

    def _session(self) -> dict[str, Any]:
        return {**super()._session(), "awaiting": self._awaiting, "finish_after": self._finish_after}

    def _resume(self, session: dict[str, Any]) -> None:
        super()._resume(session)
        self._awaiting, self._finish_after = int(session["awaiting"]), bool(session["finish_after"])

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend with the true queries of the rows just stored.

        Args:
            queries: ``[B, Hq, S, Dk]``.
            keys: What ``update_and_fetch`` returned.
            values: What ``update_and_fetch`` returned.
            scale: Factor on the logits.
            mask: The model's mask.
            sinks: Sink logits ``[Hq]`` of models that have them.

        Returns:
            ``[B, Hq, S, Dv]`` in the dtype of the queries.
        """
        output = self._attend(self.method_state, queries, keys, values, scale, mask, sinks)
        if output is None:
            output = attention(queries, keys, values, scale, mask, sinks)
        self._awaiting = 0
        in_prompt = self._prompt_open
        if self._finish_after:
            self._finish_after = False
            self._finish_prompt()
        return self._computing_state(output, in_prompt)

    def _reset(self) -> None:
        super()._reset()
        self._awaiting, self._finish_after = 0, False
