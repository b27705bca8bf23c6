"""The hooks of a compression method.

A method is a module, or an object, that implements these functions under their names, each marked with
``veloxquant.hookimpl``. An implementation may leave out arguments that it does not use. What is not marked
optional must be there; an optional capability is declared by implementing its hook and by nothing else.

Shapes: keys ``[B, Hkv, S, Dk]``, values ``[B, Hkv, S, Dv]``, queries ``[B, Hq, S, Dk]``; keys and queries come
rotated. Every hook runs on the prefill or decode path unless it says otherwise, so none of them may read an array
back to Python.
"""

# Empty bodies are the point of this module.
# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

from veloxquant.hooks import hookspec

if TYPE_CHECKING:
    import mlx.core as mx

    from veloxquant.rows import RowStore
    from veloxquant.types import ByteCount
    from veloxquant.types import LayerSpec
    from veloxquant.types import MethodInfo
    from veloxquant.types import Snapshot

__all__ = [
    "veloxquant_account",
    "veloxquant_attend",
    "veloxquant_create",
    "veloxquant_decode",
    "veloxquant_finish_prompt",
    "veloxquant_method",
    "veloxquant_prefill",
    "veloxquant_restore",
    "veloxquant_rows",
    "veloxquant_serialize",
    "veloxquant_step",
    "veloxquant_trim",
    "veloxquant_unread",
]

# -------------------------------------------------------------------------
# What the method is
# -------------------------------------------------------------------------


@hookspec(firstresult=True)
def veloxquant_method() -> MethodInfo:
    """Describe the method.

    Called: once, when the method is first asked for.

    Returns:
        The record that names the method and its config class.

    Must not: need a model, a back end that computes, or a network.
    """


@hookspec(firstresult=True)
def veloxquant_create(config: Any, layer: LayerSpec) -> Any:
    """Make the empty state of one layer.

    Called: when a cache is made, before any keys are known.

    Args:
        config: An instance of the method's config class, already checked.
        layer: What is known of the layer.

    Returns:
        The state, an object that the core passes back and never looks into.

    Must not: use randomness that is not seeded from ``config`` and ``layer.index``, or share arrays that are
    written in place with another state.
    """


# -------------------------------------------------------------------------
# Rows come in, attention goes out
# -------------------------------------------------------------------------


@hookspec(firstresult=True)
def veloxquant_prefill(state: Any, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Store a block of prompt rows.

    Called: for every block while the prompt phase is open; the core decides which blocks these are.

    Args:
        state: State of the layer.
        keys: New keys ``[B, Hkv, S, Dk]``, S >= 1.
        values: New values ``[B, Hkv, S, Dv]``.

    Returns:
        Keys and values of the rows held before this call followed by these rows, in order, in the input dtype.

    Must not: evict or quantize the new rows in what it returns; only what is stored may lose something.
    """


@hookspec(firstresult=True)
def veloxquant_decode(state: Any, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Store rows that come after the prompt.

    Called: with one row a step, or with a short block, which may be trimmed away again (speculative decoding).

    Args:
        state: State of the layer.
        keys: New keys ``[B, Hkv, S, Dk]``, S >= 1.
        values: New values ``[B, Hkv, S, Dv]``.

    Returns:
        As for ``veloxquant_prefill``.

    Must not: drop the rows that it was just given.
    """


@hookspec(firstresult=True)
def veloxquant_attend(
    state: Any,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array | None:
    """Attend with the model's true queries. Optional: implementing it declares the routed query mode.

    Called: right after prefill or decode, when the model's attention is routed.

    Args:
        state: State of the layer, the new rows already stored.
        queries: Queries of the new positions ``[B, Hq, S, Dk]``.
        keys: What prefill or decode returned. Rows left unread here are never computed.
        values: As ``keys``.
        scale: Factor on the logits.
        mask: None, ``"causal"`` (aligned to the last row), or an array that broadcasts to
            ``[B, Hq, S, rows]`` and fits the returned rows.
        sinks: Per-head sink logits ``[Hq]`` of models that have them, or None.

    Returns:
        The attention output ``[B, Hq, S, Dv]`` in the dtype of the queries, or None for dense attention over
        the returned rows.

    Must not: ignore an array mask; raise RoutingError where it cannot be honoured.
    """


@hookspec(firstresult=True)
def veloxquant_step(
    states: Sequence[Any],
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    sinks: mx.array | None,
) -> mx.array | None:
    """Store one row of each of several sequences after their prompts, and attend. Optional, for speed.

    Called: for a batch of sequences in place of ``veloxquant_decode`` and ``veloxquant_attend`` for one after another,
    whose answers this must give: the same states, and the same attention but for the rounding of sums. No rows are
    returned, and what the sequences have in common need be done only once.

    Args:
        states: One state a sequence, of one method, one config and one layer; each has seen as many tokens as it has.
        queries: ``[n, Hq, 1, Dk]``.
        keys: ``[n, Hkv, 1, Dk]``.
        values: ``[n, Hkv, 1, Dv]``.
        scale: Factor on the logits.
        sinks: As for ``veloxquant_attend``.

    Returns:
        The attention outputs ``[n, Hq, 1, Dv]`` in the dtype of the queries, or None to be asked one by one.

    Must not: change a state and then return None.
    """


@hookspec(firstresult=True)
def veloxquant_finish_prompt(state: Any) -> None:
    """Learn that the prompt is complete and has been attended. Optional.

    Called: once per prompt phase, after the attention of its last block (or, for the rest of a prompt that came
    with a speculative draft, after the rejected tokens were trimmed). A long later block opens a new phase.

    Args:
        state: State of the layer. This is the moment to evict.

    Must not: change what has already been returned.
    """


@hookspec(firstresult=True)
def veloxquant_unread(state: Any) -> Sequence[mx.array]:
    """Name the arrays held that a decode step may leave uncomputed. Optional: without it all arrays count.

    Called: after every call. What the model goes on with is made to depend on these arrays, so that they are computed
    with it: left lazy they would hold all that they are made of, and could not be computed in another thread. Without
    this hook those of ``veloxquant_serialize`` are taken, which costs time; after a prompt they are taken in any case.

    Args:
        state: State of the layer.

    Returns:
        Arrays held that a step changes and whose new content its attention (or, without one, what it returned) does
        not read; empty where there are none.

    Must not: change the state, or leave out an array that changes unread.
    """


# -------------------------------------------------------------------------
# Bytes, rewinds, copies
# -------------------------------------------------------------------------


@hookspec(firstresult=True)
def veloxquant_account(state: Any) -> ByteCount:
    """Count the bytes of every array held.

    Called: at any time, also on an empty state. Off the hot path.

    Args:
        state: State of the layer.

    Returns:
        Sums of ``array.nbytes``; all zero for an empty state.

    Must not: compute a figure from shapes that the arrays do not have.
    """


@hookspec(firstresult=True)
def veloxquant_trim(state: Any, count: int) -> int:
    """Forget the last tokens. Optional: implementing it declares the method trimmable.

    Called: with 0 < count <= tokens seen. Off the hot path, so it may read arrays back.

    Args:
        state: State of the layer.
        count: Number of tokens to forget.

    Returns:
        ``count``.

    Must not: leave any trace of the forgotten tokens in rows, positions, summaries or byte figures.
    """


@hookspec(firstresult=True)
def veloxquant_serialize(state: Any) -> Snapshot:
    """Take the whole content of a state.

    Called: for files, and after each prompt chunk by mlx-lm, which evaluates the arrays; must be cheap.

    Args:
        state: State of the layer, possibly empty or in the middle of a prompt.

    Returns:
        Arrays (live rows only) and plain values from which ``veloxquant_restore`` rebuilds an equal state.

    Must not: change the state.
    """


@hookspec(firstresult=True)
def veloxquant_restore(config: Any, layer: LayerSpec, snapshot: Snapshot) -> Any:
    """Rebuild a state from a snapshot.

    Called: when a file is loaded or mlx-lm restores a state, in any process. Off the hot path.

    Args:
        config: The config that the state was made with.
        layer: The layer that it serves.
        snapshot: What ``veloxquant_serialize`` gave.

    Returns:
        A state that goes on exactly as the original would have.

    Must not: keep a reference to a mutable part of the snapshot.
    """


# -------------------------------------------------------------------------
# Rows for other methods
# -------------------------------------------------------------------------


@hookspec(firstresult=True)
def veloxquant_rows(config: Any, layer: LayerSpec) -> RowStore:
    """Make an empty row store that other methods can keep their rows in. Optional, for codecs.

    Called: when a method with ``storage="this method"`` makes the state of a layer.

    Args:
        config: An instance of this method's config class (the other method's ``storage_config``).
        layer: The layer that it serves.

    Returns:
        An object with the protocol ``veloxquant.RowStore``.

    Must not: depend on the method that will use it.
    """
