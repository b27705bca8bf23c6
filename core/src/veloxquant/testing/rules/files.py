"""Real files, real processes, on a tiny random model of mlx-lm."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from typing import Literal

import attrs
import mlx.core as mx
import numpy as np

import veloxquant.store as store
from veloxquant.attention import unroute
from veloxquant.build import make_prompt_cache
from veloxquant.config import config_to_dict
from veloxquant.config import parse_config
from veloxquant.errors import ConfigError
from veloxquant.safefile import FILE_FORMAT
from veloxquant.safefile import read_file
from veloxquant.safefile import write_file
from veloxquant.testing.driver import require_equal
from veloxquant.testing.failures import RuleFailure
from veloxquant.testing.failures import refusing
from veloxquant.testing.failures import require
from veloxquant.testing.rules.applies import installed
from veloxquant.testing.rules.applies import once
from veloxquant.testing.rules.applies import when
from veloxquant.testing.subject import Subject

_VOCAB = 64
_STEPS = 20


def _model(head_dim: int) -> Any:
    from veloxquant.testing.toys import tiny_llama

    return tiny_llama(head_dim=head_dim, vocab=_VOCAB)


def _tokens(count: int) -> mx.array:
    return mx.random.randint(0, _VOCAB, (1, count), key=mx.random.key(4)).astype(mx.uint32)


def _prompt(model: Any, caches: list[Any], count: int) -> None:
    """Feed a prompt as mlx-lm does: all but the last token, and that."""
    tokens = _tokens(count)
    for part in (tokens[:, :-1], tokens[:, -1:]):
        mx.eval(model(part, cache=caches), [cache.state for cache in caches])


def _go_on(model: Any, caches: list[Any]) -> np.ndarray[Any, Any]:
    """Greedy steps from a fixed token; returns their logits ``[steps, vocab]``."""
    token, found = mx.array([[1]]), []
    for _ in range(_STEPS):
        logits = model(token, cache=caches)[:, -1]
        token = mx.argmax(logits, axis=-1, keepdims=True)
        found.append(np.array(logits[0]))
    return np.stack(found)


@contextlib.contextmanager
def _saved(subject: Subject) -> Iterator[tuple[Any, list[Any], Path]]:
    """A model, used caches for it, and the file that they were saved in; the model is routed inside."""
    model = _model(subject.shape.key_dim)
    with tempfile.TemporaryDirectory() as folder:
        try:
            caches = _caches(subject, model)
            _prompt(model, caches, subject.tokens)
            path = Path(folder) / "cache.safetensors"
            store.save_prompt_cache(path, caches, {"note": "kept"})
            yield model, caches, path
        finally:
            unroute(model)


def _caches(subject: Subject, model: Any) -> list[Any]:
    return make_prompt_cache(
        model, subject.method.name, subject.config, true_queries=subject.mode == "routed", registry=subject.registry
    )


def check_file_round_trip(subject: Subject) -> None:
    """Saved in a file and loaded again, used or empty, the caches of a model go on bit for bit."""
    with _saved(subject) as (model, caches, path):
        loaded = store.load_prompt_cache(
            path, model, method=subject.method.name, config=subject.config, registry=subject.registry
        )
        _as_saved(subject, loaded, caches)
        require_equal(_go_on(model, loaded), _go_on(model, caches), "logits after loading, against not having saved")
        empty = path.with_name("empty.safetensors")
        store.save_prompt_cache(empty, _caches(subject, model))
        first, second = store.load_prompt_cache(empty, model, registry=subject.registry), _caches(subject, model)
        for one in (first, second):
            _prompt(model, one, 50)
        require_equal(_go_on(model, first), _go_on(model, second), "logits of empty caches after loading")


def _as_saved(subject: Subject, loaded: list[Any], caches: list[Any]) -> None:
    for index, (one, other) in enumerate(zip(loaded, caches, strict=True)):
        require(type(one) is type(other), f"layer {index} came back as a {type(one).__name__}")
        found, expected = (one.offset, one.rows, one.config), (other.offset, other.rows, other.config)
        require(found == expected, f"layer {index} came back with offset, rows and config {found}, not {expected}")


def resume(head_dim: str, *paths: str) -> None:
    """What the new process of ``check_file_in_new_process`` does: load each file, go on, save the logits."""
    for path in paths:
        model = _model(int(head_dim))
        np.save(f"{path}.npy", _go_on(model, store.load_prompt_cache(path, model)))


@when(installed, once)
def check_file_in_new_process(subject: Subject) -> None:
    """Loaded in a new process, the caches of a model go on bit for bit, in every query mode."""
    with contextlib.ExitStack() as stack:
        saved = {mode: stack.enter_context(_saved(subject.in_mode(mode))) for mode in subject.modes}
        paths = [str(path) for _, _, path in saved.values()]
        code = f"import sys; from {__name__} import resume; resume(*sys.argv[1:])"
        words = [sys.executable, "-c", code, str(subject.shape.key_dim), *paths]
        run = subprocess.run(words, capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuleFailure(f"the new process could not go on: {(run.stderr.strip().splitlines() or ['?'])[-1]}")
        for mode, (model, caches, path) in saved.items():
            require_equal(np.load(f"{path}.npy"), _go_on(model, caches), f"logits in a new process, {mode} mode")


def _others(config: Any, method: str) -> Iterator[tuple[str, Any]]:
    """Configs that differ in one option, as far as such can be made up."""
    plain, hints = config_to_dict(config), typing.get_type_hints(type(config))
    for field in attrs.fields(type(config)):
        for value in _variations(plain[field.name], hints[field.name]):
            try:
                changed = parse_config(type(config), {**plain, field.name: value}, method=method)
            except ConfigError:
                continue
            if getattr(changed, field.name) != getattr(config, field.name):
                yield field.name, changed
                break


def _variations(value: Any, hint: Any) -> list[Any]:
    if typing.get_origin(hint) is Literal:
        return [choice for choice in typing.get_args(hint) if choice != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1, value + 2, 2 * value, value // 2]
    return [value * 1.5, value / 2] if isinstance(value, float) else []


def check_other_config_refused(subject: Subject) -> None:
    """A file made under other options is refused when the caller says which options it expects."""
    with _saved(subject) as (model, _, path):
        for option, changed in _others(subject.config, subject.method.name):
            with refusing(f"a file made with {subject.config}, where another {option} is expected ({changed}),"):
                store.load_prompt_cache(
                    path, model, method=subject.method.name, config=changed, registry=subject.registry
                )


def check_other_model_refused(subject: Subject) -> None:
    """A file of a model with other head dims or another number of layers is refused."""
    from veloxquant.testing.toys import tiny_llama

    dim = subject.shape.key_dim
    others = {"head dim": {"head_dim": dim // 2}, "number of layers": {"layers": 3}, "KV heads": {"kv_heads": 1}}
    with _saved(subject) as (_, _, path):
        for what, sizes in others.items():
            other = tiny_llama(**{"head_dim": dim, "vocab": _VOCAB, **sizes})
            with refusing(f"a file of a model with another {what}"):
                store.load_prompt_cache(path, other, registry=subject.registry)


@when(once)
def check_damaged_file_refused(subject: Subject) -> None:
    """A file that is cut off, altered in one byte, or of a newer format is refused."""
    with _saved(subject) as (model, _, path):
        whole = path.read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little")
        damaged = path.with_name("damaged.safetensors")
        for place in (20, header // 2, header - 40, header + 40, len(whole) - 1):
            damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with refusing(f"a file whose byte {place} of {len(whole)} was changed"):
                store.load_prompt_cache(damaged, model, registry=subject.registry)
        damaged.write_bytes(whole[: len(whole) // 2])
        with refusing("a file that was cut off"):
            store.load_prompt_cache(damaged, model, registry=subject.registry)
        file = read_file(path)
        write_file(damaged, {**file.description, "format": FILE_FORMAT + 1}, file.arrays)
        with refusing("a file of a newer format"):
            store.load_prompt_cache(damaged, model, registry=subject.registry)
