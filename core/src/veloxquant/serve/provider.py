"""The model of the server, whose ``make_cache`` gives compressed caches."""

from __future__ import annotations

import argparse
import contextlib
import logging
from typing import Any

import attrs
from mlx_lm import server
from mlx_lm.models.cache import can_trim_prompt_cache
from mlx_lm.models.cache import make_prompt_cache

from veloxquant.build import use
from veloxquant.errors import UnsupportedModelError
from veloxquant.method import Method
from veloxquant.reports import report
from veloxquant.serve.identity import model_identity

__all__ = ["CompressedModelProvider", "Compression"]


@attrs.frozen(kw_only=True)
class Compression:
    """What the caches of every request are to be.

    Args:
        method: The method.
        config: Its options, an instance of its config class.
        true_queries: Whether the model's queries are brought to the caches.
    """

    method: Method
    config: Any
    true_queries: bool = True


class CompressedModelProvider(server.ModelProvider):  # type: ignore[misc]
    """mlx-lm's provider, which loads models when requests name them, with compressed caches for each.

    Args:
        options: Options of mlx-lm's server.
        compression: The method and its options.
        sample: Folder of the sample model, whose weights are loaded as the project measures with them, or None.
    """

    model: Any

    def __init__(self, options: argparse.Namespace, compression: Compression, sample: str | None = None) -> None:
        self.compression = compression
        self.query_mode: str | None = None
        """Query mode of the loaded model's caches."""
        self.identity: str | None = None
        """What a stored cache must have been made with to be of use to the loaded model."""
        self.context_length: int | None = None
        """Positions that the loaded model was made for, or None where it does not say."""
        self._sample = sample
        self._uses = contextlib.ExitStack()
        super().__init__(options)
        if sample is not None:
            self._model_map["sample"] = sample

    def reset(self) -> None:
        """Forget the model, and give its ``make_cache`` and attention back."""
        self._uses.close()
        self.query_mode = self.identity = self.context_length = None
        super().reset()

    def _load(self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None) -> None:
        super()._load(model_path, adapter_path, draft_model_path)
        try:
            self._compress(model_path)
        except BaseException:
            # Otherwise the next request would find the model loaded, with plain caches.
            self.reset()
            raise

    def _compress(self, model_path: str) -> None:
        if self._sample is not None and model_path == self._sample:
            from veloxquant.testing.sample import convert_sample_model

            self.model = convert_sample_model(self.model)
        chosen = self.compression
        self._uses.enter_context(use(self.model, chosen.method.name, chosen.config, true_queries=chosen.true_queries))
        caches = make_prompt_cache(self.model)
        if self.draft_model is not None and not can_trim_prompt_cache(caches):
            raise UnsupportedModelError(
                "a draft model needs caches that can be rewound, and those of this model and method cannot be; "
                "leave --draft-model out"
            )
        self.is_batchable = self.draft_model is None and all(hasattr(cache, "merge") for cache in caches)
        self.query_mode = report(caches).query_mode
        self.context_length = _context_length(self.model)
        self.identity = model_identity(self.model, self.tokenizer, chosen.method, chosen.config, self.query_mode)
        logging.info(
            f"{model_path}: {chosen.method.name} caches, queries {self.query_mode}, "
            f"{'batched' if self.is_batchable else 'one request at a time'}"
        )


def _context_length(model: Any) -> int | None:
    for owner in (model, getattr(model, "language_model", None)):
        length = getattr(getattr(owner, "args", None), "max_position_embeddings", None)
        if isinstance(length, int) and length > 0:
            return length
    return None
