"""``veloxquant bench speed``: what a decode step and a prompt cost, against the plain cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING
from typing import Annotated
from typing import Any

import attrs
import typer

from veloxquant.cli.bench_inputs import ArmWords
from veloxquant.cli.bench_inputs import MethodNames
from veloxquant.cli.bench_inputs import Output
from veloxquant.cli.bench_inputs import Peer
from veloxquant.cli.bench_inputs import Settings
from veloxquant.cli.bench_inputs import positive
from veloxquant.cli.bench_inputs import read_text
from veloxquant.cli.bench_inputs import rows_dtype
from veloxquant.cli.bench_inputs import split_names
from veloxquant.cli.bench_layer_inputs import Dtype
from veloxquant.cli.bench_layer_inputs import HeadDim
from veloxquant.cli.bench_layer_inputs import KVHeads
from veloxquant.cli.bench_layer_inputs import QueryHeads
from veloxquant.cli.bench_layer_inputs import load_with_text
from veloxquant.cli.bench_layer_inputs import read_lengths
from veloxquant.cli.bench_layer_inputs import read_shape
from veloxquant.cli.output import Json
from veloxquant.cli.output import only_json
from veloxquant.cli.output import write_json
from veloxquant.errors import INTERRUPTED
from veloxquant.errors import VeloxQuantError

if TYPE_CHECKING:
    from veloxquant.bench.arm_options import Skipped
    from veloxquant.bench.arms import Arm
    from veloxquant.bench.line_up import Wanted
    from veloxquant.bench.race import LeftOut
    from veloxquant.bench.speed import SpeedPlan
    from veloxquant.bench.speed_blas import Measured

__all__ = ["speed"]


@attrs.frozen(kw_only=True)
class _Request:
    """What the user asked for, checked as far as it can be without a model."""

    wanted: Wanted
    plan: SpeedPlan
    model: str | None
    prompt_tokens: int
    text: str | None
    blas: str
    output: str | None
    arguments: dict[str, Any]

    def words(self) -> list[str]:
        """The command line of a process that measures the same."""
        shape = self.plan.shape
        options: dict[str, Any] = {
            "--lengths": ",".join(map(str, self.plan.lengths)),
            "--query-heads": shape.query_heads,
            "--kv-heads": shape.kv_heads,
            "--head-dim": shape.head_dim,
            "--dtype": shape.dtype,
            "--steps": self.plan.steps,
            "--prefill-rows": self.plan.prefill_rows,
            "--prefill-step": self.plan.step,
            "--prompt-tokens": self.prompt_tokens,
            "--model": self.model,
            "--text": self.text,
            "--output": self.output,
        }
        given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        return ["bench", "speed", *given, *self.wanted.words()]


def speed(
    lengths: Annotated[
        str, typer.Option(metavar="N,N", help="Rows before the steps that are timed; '' for none.")
    ] = "4096,32768",
    query_heads: QueryHeads = 32,
    kv_heads: KVHeads = 8,
    head_dim: HeadDim = 128,
    dtype: Dtype = "float32",
    steps: Annotated[int, typer.Option(help="Steps of each arm that count.")] = 30,
    prefill_rows: Annotated[int, typer.Option(help="Rows of the prompt's block that is timed; 0 for none.")] = 1024,
    prefill_step: Annotated[int, typer.Option(help="Prompt rows put into a cache at a time.")] = 2048,
    model: Annotated[
        str | None, typer.Option(help="Also decode on a model: a folder, org/name on the hub, or 'sample'.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="With --model: tokens of the prompt.")] = 4096,
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="With --model: text of the prompt; by default the sample text.")
    ] = None,
    methods: MethodNames = None,
    settings: Settings = None,
    arm: ArmWords = None,
    peer: Peer = None,
    blas: Annotated[
        str, typer.Option(help="On a Linux CPU in float32: own (what mlx brings), openblas, or both.")
    ] = "both",
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure time: a decode step (update and attention) of one layer, a prompt, and decoding on a model."""
    from veloxquant.bench.line_up import Wanted
    from veloxquant.bench.speed import SpeedPlan

    shape = read_shape(query_heads, kv_heads, head_dim, dtype)
    plan = SpeedPlan(
        lengths=read_lengths(lengths),
        shape=shape,
        steps=positive("--steps", steps),
        prefill_rows=positive("--prefill-rows", prefill_rows, 2) if prefill_rows else 0,
        step=positive("--prefill-step", prefill_step),
    )
    wanted = Wanted(methods=split_names(methods), settings=settings or [], arms=arm or [], peer=peer)
    request = _Request(
        wanted=wanted,
        plan=plan,
        model=model,
        prompt_tokens=positive("--prompt-tokens", prompt_tokens, 2),
        text=text,
        blas=blas,
        output=output,
        arguments={
            "lengths": list(plan.lengths),
            "shape": str(shape) if plan.lengths or plan.prefill_rows else None,
            "steps": steps,
            "prefill_rows": prefill_rows,
            "prefill_step": prefill_step,
            "prompt_tokens": prompt_tokens if model else None,
            **{name: value for name, value in attrs.asdict(wanted).items() if name != "settings"},
            "set": settings or [],
        },
    )
    with only_json(as_json):
        found, note = _measure(request)
    _show(found, note, as_json=as_json)
    if not all(one.whole for one in found) or not found:
        raise typer.Exit(INTERRUPTED)


def _show(found: list[Measured], note: str | None, *, as_json: bool) -> None:
    if as_json:
        write_json(
            {
                "runs": [one.run.to_dict() for one in found],
                "skipped": _together(one.skipped for one in found),
                "left_out": _together([attrs.asdict(failed) for failed in one.run.left_out] for one in found),
                "note": note,
            }
        )
        return
    from veloxquant.cli.bench_speed_table import show_speed

    show_speed(found, note)


def _together(parts: Iterable[list[dict[str, str]]]) -> list[dict[str, str]]:
    """Each once: another process may have said the same."""
    return [dict(one) for one in dict.fromkeys(tuple(part.items()) for parts_ in parts for part in parts_)]


def _measure(request: _Request) -> tuple[list[Measured], str | None]:
    """What was measured, once for each BLAS, and what is to be said about these."""
    from veloxquant.bench.speed_blas import has
    from veloxquant.bench.speed_blas import measure_in_child
    from veloxquant.bench.speed_blas import which
    from veloxquant.cli.model_files import check_model

    plan = request.plan
    if not (plan.lengths or plan.prefill_rows or request.model):
        raise VeloxQuantError("there is nothing to measure; give --lengths, --prefill-rows or --model")
    kinds, note = which(request.blas, plan.shape.dtype)
    if len(kinds) > 1 and request.text == "-":
        raise VeloxQuantError("standard input cannot be read once for each BLAS; give --text FILE, or --blas")
    if request.model is not None:
        check_model(request.model)
    found: list[Measured] = []
    for kind in kinds:
        one = _measure_here(request) if kind is None or has(kind) else measure_in_child(request.words(), kind)
        if one is not None:
            found.append(one)
        if one is None or not one.whole:
            break
    return found, note


def _measure_here(request: _Request) -> Measured:
    from veloxquant.bench.line_up import line_up_layer
    from veloxquant.bench.line_up import line_up_model
    from veloxquant.bench.records import Writer
    from veloxquant.bench.records import new_run
    from veloxquant.bench.records import text_hash
    from veloxquant.bench.speed import measure_speed
    from veloxquant.bench.speed_blas import Measured
    from veloxquant.bench.speed_model import measure_generation
    from veloxquant.cli.bench_progress import bench_progress
    from veloxquant.testing.sample import sample_text

    plan = request.plan
    lengths = [length for length in (*plan.lengths, plan.prefill_rows) if length]
    layer_arms: dict[int, list[Arm]] = {}
    skipped: list[Skipped] = []
    for length in lengths:
        layer_arms[length], skipped = line_up_layer(request.wanted, plan.shape, length)
    model: Any = None
    model_arms: list[Arm] = []
    prompt: list[int] = []
    dtype, text = plan.shape.dtype, None
    if request.model is not None:
        own = read_text(request.text)
        text = text_hash(sample_text() if own is None else own)
        model, prompt = load_with_text(request.model, own, request.prompt_tokens, "a smaller --prompt-tokens")
        model_arms, also = line_up_model(request.wanted, model, request.prompt_tokens)
        skipped = [*skipped, *(one for one in also if one.method not in {two.method for two in skipped})]
        dtype = dtype if lengths else rows_dtype(model)
    run = new_run("speed", model=request.model, dtype=dtype, text=text, arguments=request.arguments)
    left_out: list[LeftOut] = []
    whole = True
    with Writer(run, request.output) as writer, bench_progress() as progress:
        try:
            if lengths:
                measure_speed(layer_arms, plan, writer, progress.track, left_out)
            if model is not None:
                measure_generation(
                    model,
                    model_arms,
                    prompt,
                    writer,
                    progress.track,
                    steps=plan.steps,
                    step=plan.step,
                    left_out=left_out,
                )
        except KeyboardInterrupt:
            whole = False
        writer.leave_out(left_out)
    return Measured(
        run,
        skipped=[attrs.asdict(one) for one in skipped],
        whole=whole,
    )
