"""What caches hold, from the arrays themselves: keys, values and the rest, of caches of every kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
from mlx_lm.models.cache import KVCache

from veloxquant.cache import LayerCache
from veloxquant.reports import report
from veloxquant.timing import arrays_within

__all__ = ["ROWS_READ", "Held", "held"]

ROWS_READ = "rows_read"
"""Name of the detail by which a method says how many rows per KV head a decode step reads."""


@attrs.frozen(kw_only=True)
class Held:
    """Bytes of the caches of a model, or of one layer.

    Args:
        keys: Of whatever represents keys.
        values: Of whatever represents values.
        auxiliary: Of all else that the caches alone hold.
        static: Of arrays shared by caches, such as codebooks; counted once and not part of ``total``.
        plain: What plain caches would hold for the tokens seen, without spare capacity; 0 when not known.
        rows_read: Rows per KV head that a decode step reads, the mean over layers, where the method says so; else the
            rows held.
    """

    keys: int
    values: int
    auxiliary: int
    static: int = 0
    plain: int = 0
    rows_read: float = 0.0

    @property
    def total(self) -> int:
        """Bytes that the caches alone hold."""
        return self.keys + self.values + self.auxiliary

    @property
    def share(self) -> float | None:
        """Total over plain, or None when the plain bytes are not known."""
        return self.total / self.plain if self.plain else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        names = ("keys", "values", "auxiliary", "total", "static", "plain")
        return {f"bytes_{name}": getattr(self, name) for name in names} | {
            "share": self.share,
            ROWS_READ: self.rows_read,
        }


def held(caches: Any) -> Held:
    """Add up the bytes of caches: ours, mlx-lm's, the references of the bench, or those of another library.

    Args:
        caches: A list of caches, or one.
    """
    parts = [_one(cache) for cache in (caches if isinstance(caches, Iterable) else [caches])]
    sums = {name: sum(getattr(part, name) for part in parts) for name in ("keys", "values", "auxiliary", "plain")}
    used = [part.rows_read for part in parts if part.total]
    return Held(
        **sums,
        static=max((part.static for part in parts), default=0),
        rows_read=sum(used) / len(used) if used else 0.0,
    )


def _one(cache: Any) -> Held:
    own = getattr(cache, "held", None)
    if callable(own):
        count: Held = own()
        return count
    if not isinstance(cache, LayerCache):
        return _foreign(cache)
    [layer] = report(cache).layers
    details = layer.details
    return Held(
        **{name: details[name] for name in ("keys", "values", "auxiliary")},
        static=layer.bytes_static,
        plain=layer.bytes_plain,
        rows_read=float(details.get(ROWS_READ, layer.tokens_kept)),
    )


def _foreign(cache: Any) -> Held:
    """A cache of mlx-lm or another library: arrays under ``keys`` and ``values``, and whatever else it can reach.

    Codes that stand under other names count as auxiliary.
    """
    keys, values = (_bytes(getattr(cache, name, None)) for name in ("keys", "values"))
    everything = sum(array.nbytes for array in arrays_within(cache))
    offset = getattr(cache, "offset", 0)
    seen = offset if isinstance(offset, int) else 0
    return Held(
        keys=keys,
        values=values,
        auxiliary=max(0, everything - keys - values),
        plain=_plain(cache, seen),
        rows_read=float(seen),
    )


def _bytes(tree: Any) -> int:
    return sum(array.nbytes for array in arrays_within(tree))


def _plain(cache: Any, seen: int) -> int:
    """Bytes of the rows seen, where mlx-lm's plain cache holds them as they came; other libraries do not show them."""
    if type(cache) is not KVCache or not seen:
        return 0
    keys: Any = cache.keys
    values: Any = cache.values
    return int((keys.nbytes + values.nbytes) * seen // keys.shape[2])
