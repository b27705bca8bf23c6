"""mlx-lm's server with compressed caches: ``veloxquant serve``.

mlx-lm's server is driven, not copied. What is ours are subclasses of its parts: a model provider that lets the model
make compressed caches, a prompt cache that keeps what rewinds would lose, a request handler that also tells figures;
and a store that keeps prompt caches in files.
"""

from __future__ import annotations

__all__ = ["ServeOptions", "serve"]

from veloxquant.serve.run import ServeOptions
from veloxquant.serve.run import serve
