"""What one arm holds and needs for a moment, measured in a process that does nothing else.

``python -m veloxquant.bench.memory_arm REQUEST`` prints figures as JSON; ``veloxquant.bench.memory`` starts it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import sys
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

from veloxquant.attention import is_routed
from veloxquant.attention import unroute
from veloxquant.bench.arms import Arm
from veloxquant.bench.held import held
from veloxquant.bench.layer_work import Shape
from veloxquant.bench.layer_work import blocks
from veloxquant.bench.layer_work import read_block
from veloxquant.bench.layer_work import settle
from veloxquant.bench.layer_work import store
from veloxquant.bench.line_up import Wanted
from veloxquant.bench.line_up import line_up_layer
from veloxquant.bench.line_up import line_up_model
from veloxquant.bench.quality import prefill_step
from veloxquant.timing import arrays_within

__all__ = ["Request", "layer_figures", "measure", "model_figures"]


@attrs.frozen(kw_only=True)
class Request:
    """What to measure, as plain values: it travels to another process.

    Args:
        arm: Name of the arm among those that the words give.
        wanted: The words.
        length: Tokens of the prompt.
        tokens: Tokens after it.
        step: Prompt tokens of a block.
        shape: The shape of the layer; used where there is no model.
        model: Name of a model, or None.
        prompt: Tokens of the prompt and those after it, where there is a model.
    """

    arm: str
    wanted: dict[str, Any]
    length: int
    tokens: int
    step: int = 2048
    shape: dict[str, Any] = attrs.field(factory=dict)
    model: str | None = None
    prompt: list[int] | None = None


class _Meter:
    """Peak memory of MLX and of the process above what was there when it was made."""

    def __init__(self) -> None:
        mx.clear_cache()
        _give_back()
        self._base = mx.get_active_memory()
        _forget_process_peak()
        self._process = _process_memory()[0]
        self.peak = 0

    @contextlib.contextmanager
    def watch(self, inputs: Sequence[mx.array] = ()) -> Iterator[None]:
        """Take the peak of what happens inside; arrays that are there in any case do not count."""
        mx.reset_peak_memory()
        yield
        given = sum(array.nbytes for array in inputs)
        self.peak = max(self.peak, max(mx.get_peak_memory(), mx.get_active_memory()) - self._base - given)

    def take(self) -> int:
        """The peak since it was last taken."""
        found, self.peak = self.peak, 0
        return found

    def process(self) -> dict[str, int | None]:
        """Peak resident memory of the process, above the base where the system can tell, and in all."""
        peak = _process_memory()[1]
        above = None if peak is None or self._process is None else max(0, peak - self._process)
        return {"rss_bytes": above, "rss_peak_bytes": peak}


def layer_figures(arm: Arm, shape: Shape, length: int, tokens: int, step: int) -> dict[str, Any]:
    """Measure the cache of one layer on random rows.

    Args:
        arm: The arm.
        shape: The shape of the layer.
        length: Rows of the prompt, whose attention is not computed.
        tokens: Decode steps after it, whose attention is.
        step: Rows of a block.
    """
    mx.eval(shape.rows(1, 0))  # what the first use of the back end allocates is nobody's
    meter = _Meter()
    cache = arm.make_layer(shape.layer())
    for rows in blocks(shape, length, step):
        with meter.watch(rows):
            read_block(cache, rows, shape.scale)
    after_prompt, prompt_peak = held(cache), meter.take()
    for number in range(tokens):
        rows = shape.rows(1, 10**6 + number)
        with meter.watch(rows):
            mx.eval(store(cache, rows, shape.scale))
            settle(cache)
    return _figures(meter, cache, after_prompt, prompt_peak)


def model_figures(arm: Arm, model: Any, prompt: Sequence[int], length: int, step: int) -> dict[str, Any]:
    """Measure all caches of a model.

    Args:
        arm: The arm.
        model: An mlx-lm model, whose weights do not count.
        prompt: Tokens of the prompt and those that are fed after it, one by one.
        length: How many of them are the prompt.
        step: Prompt tokens of a chunk.
    """
    mx.eval(model.parameters())
    meter = _Meter()
    caches = arm.make(model)
    tokens = mx.array(list(prompt))[None]
    ends = [*range(0, length - 1, prefill_step(length - 1, step)), length - 1, length]
    for start, stop in itertools.pairwise(ends):
        with meter.watch():
            logits = model(tokens[:, start:stop], cache=caches)
            mx.eval(arrays_within(caches), *([logits] if stop == length else []))
            del logits
        mx.clear_cache()
    after_prompt, prompt_peak = held(caches), meter.take()
    for place in range(length, len(prompt)):
        with meter.watch():
            mx.eval(model(tokens[:, place : place + 1], cache=caches), arrays_within(caches))
    found = _figures(meter, caches, after_prompt, prompt_peak)
    while is_routed(model):
        unroute(model)
    return found


def _figures(meter: _Meter, caches: Any, after_prompt: Any, prompt_peak: int) -> dict[str, Any]:
    at_end, decode_peak = held(caches), meter.take()
    decode = decode_peak or at_end.total
    return {
        "bytes_held": at_end.total,
        "after_prompt": after_prompt.to_dict(),
        "at_end": at_end.to_dict(),
        "peak_bytes": max(prompt_peak, decode),
        "prompt_peak_bytes": prompt_peak,
        "decode_peak_bytes": decode,
        "prompt_transient_bytes": max(0, prompt_peak - after_prompt.total),
        "decode_transient_bytes": max(0, decode - at_end.total),
        **meter.process(),
    }


def measure(request: Request) -> dict[str, Any]:
    """Measure what was asked for, in this process.

    Raises:
        VeloxQuantError: An arm cannot be used.
    """
    wanted = Wanted(**request.wanted)
    if request.model is None:
        shape = Shape(**request.shape)
        arms, _ = line_up_layer(wanted, shape, request.length)
        return layer_figures(_named(arms, request.arm), shape, request.length, request.tokens, request.step)
    from veloxquant.cli.model_files import load_model

    model, _tokenizer = load_model(request.model)
    arms, _ = line_up_model(wanted, model, request.length)
    return model_figures(_named(arms, request.arm), model, request.prompt or [], request.length, request.step)


def _named(arms: Sequence[Arm], name: str) -> Arm:
    return next(arm for arm in arms if arm.name == name)


def _process_memory() -> tuple[int | None, int | None]:
    """Resident memory now and at its peak; None where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        pass
    else:
        found = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)
                 if name in ("VmRSS", "VmHWM")}  # fmt: skip
        return found.get("VmRSS"), found.get("VmHWM")
    try:
        import resource
    except ImportError:
        return None, None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None, peak if sys.platform == "darwin" else peak * 1024


def _give_back() -> None:
    """Hand freed memory back to the system, or what is allocated next would seem to take none."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _forget_process_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _main() -> None:
    request = Request(**json.loads(sys.stdin.read()))
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer: dict[str, Any] = {"figures": measure(request)}
        except Exception as error:  # whatever befalls an arm is said by the process that started this one
            from veloxquant.bench.race import reason_of

            answer = {"error": reason_of(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
