"""``veloxquant bench memory``: bytes held, and what a prompt and a step need for a moment."""

from __future__ import annotations

from collections.abc import Sequence
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
from veloxquant.cli.output import open_stdout
from veloxquant.cli.output import write_json
from veloxquant.errors import INTERRUPTED
from veloxquant.errors import VeloxQuantError

if TYPE_CHECKING:
    from veloxquant.bench.arm_options import Skipped
    from veloxquant.bench.arms import Arm
    from veloxquant.bench.memory import MemoryPlan
    from veloxquant.bench.records import Result
    from veloxquant.bench.records import Run

__all__ = ["memory"]

_LEGEND = (
    "each arm in a process of its own. held: bytes of the caches' arrays at the end, and their share of plain rows. "
    "peak: the most that MLX held at once beyond weights and input. moment: what of it was held neither before nor "
    "after, in the prompt and in decode steps. process: growth of resident memory at its peak, buffers kept for "
    "reuse included."
)

_LAYER_LEGEND = " One layer, without the attention of the prompt."


def memory(
    lengths: Annotated[
        str | None, typer.Option(metavar="N,N", help="Tokens of the prompts; by default 4096, and 32768 on one layer.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens after each prompt, fed one by one.")] = 100,
    model: Annotated[
        str | None, typer.Option(help="A model folder, org/name on the hub, or 'sample'; by default one random layer.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="With --model: the text; by default the sample text.")
    ] = None,
    query_heads: QueryHeads = 32,
    kv_heads: KVHeads = 8,
    head_dim: HeadDim = 128,
    dtype: Dtype = "float32",
    prefill_step: Annotated[int, typer.Option(help="Prompt tokens processed at a time.")] = 2048,
    methods: MethodNames = None,
    settings: Settings = None,
    arm: ArmWords = None,
    peer: Peer = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure memory: bytes held, peak and passing memory, of each arm in a process of its own."""
    from veloxquant.bench.line_up import Wanted
    from veloxquant.bench.memory import MemoryPlan
    from veloxquant.cli.model_files import check_model

    shape = read_shape(query_heads, kv_heads, head_dim, dtype)
    if lengths is None:
        lengths = "4096,32768" if model is None else "4096"
    chosen = read_lengths(lengths)
    if not chosen:
        raise VeloxQuantError("there is nothing to measure; give --lengths, as 4096,32768")
    plan = MemoryPlan(
        lengths=chosen,
        tokens=positive("--tokens", tokens, 0),
        step=positive("--prefill-step", prefill_step),
        wanted=Wanted(methods=split_names(methods), settings=settings or [], arms=arm or [], peer=peer),
        shape=attrs.asdict(shape),
        model=model,
    )
    arguments: dict[str, Any] = {
        "lengths": list(chosen),
        "tokens": tokens,
        "prefill_step": prefill_step,
        "shape": None if model else str(shape),
        **{name: value for name, value in attrs.asdict(plan.wanted).items() if name != "settings"},
        "set": settings or [],
    }
    with only_json(as_json):
        if model is not None:
            check_model(model)
        run, skipped, whole = _measure(plan, text, output, arguments)
    if as_json:
        write_json({**run.to_dict(), "skipped": skipped})
    else:
        _show(run, skipped)
    if not whole:
        raise typer.Exit(INTERRUPTED)


def _measure(
    plan: MemoryPlan, text: str | None, output: str | None, arguments: dict[str, Any]
) -> tuple[Run, list[dict[str, str]], bool]:
    """The run, the methods that were skipped and why, and whether it came to its end."""
    from veloxquant.bench.layer_work import Shape
    from veloxquant.bench.line_up import line_up_layer
    from veloxquant.bench.memory import in_fresh_process
    from veloxquant.bench.memory import measure_memory
    from veloxquant.bench.race import LeftOut
    from veloxquant.bench.records import Writer
    from veloxquant.bench.records import new_run
    from veloxquant.bench.records import text_hash
    from veloxquant.cli.bench_progress import bench_progress
    from veloxquant.testing.sample import sample_text

    hash_, dtype = None, plan.shape["dtype"]
    if plan.model is None:
        lined_up = {length: line_up_layer(plan.wanted, Shape(**plan.shape), length) for length in plan.lengths}
    else:
        own = read_text(text)
        hash_ = text_hash(sample_text() if own is None else own)
        plan, lined_up, dtype = _on_model(plan, own)
    arms = {length: found for length, (found, _) in lined_up.items()}
    skipped = lined_up[plan.lengths[0]][1]
    run = new_run("memory", model=plan.model, dtype=dtype, text=hash_, arguments=arguments)
    left_out: list[LeftOut] = []
    whole = True
    with Writer(run, output) as writer, bench_progress() as progress:
        try:
            measure_memory(arms, plan, writer, progress.track, left_out, in_fresh_process)
        except KeyboardInterrupt:
            whole = False
        writer.leave_out(left_out)
    return run, [attrs.asdict(one) for one in skipped], whole


def _on_model(plan: MemoryPlan, text: str | None) -> tuple[MemoryPlan, dict[int, tuple[list[Arm], list[Skipped]]], str]:
    """The plan with its text, who takes part by length, and the dtype; the model is let go again."""
    from veloxquant.attention import is_routed
    from veloxquant.attention import unroute
    from veloxquant.bench.line_up import line_up_model

    assert plan.model is not None
    needed = max(plan.lengths) + plan.tokens
    model, tokens = load_with_text(plan.model, text, needed, "smaller --lengths or --tokens")
    lined_up = {length: line_up_model(plan.wanted, model, length) for length in plan.lengths}
    dtype = rows_dtype(model)
    while is_routed(model):
        unroute(model)
    return attrs.evolve(plan, text=tokens), lined_up, dtype


# ---------------------------------------------------------------------- table


def _show(run: Run, skipped: Sequence[dict[str, str]]) -> None:
    from veloxquant.cli.bench_quality_table import show_run_heading
    from veloxquant.cli.bench_speed_table import show_remarks
    from veloxquant.cli.bench_speed_table import show_wide

    show_run_heading(run)
    results = run.of_kind("memory")
    lengths = list(dict.fromkeys(result.figures["length"] for result in results))
    for length in lengths:
        own = [result for result in results if result.figures["length"] == length]
        columns = (f"{length:,} + {run.arguments['tokens']}\ntokens, MiB", "held", "share", "peak\nprompt",
                   "peak\ndecode", "moment\nprompt", "moment\ndecode", "process")  # fmt: skip
        legend = _LEGEND + ("" if run.model else _LAYER_LEGEND)
        show_wide(columns, [_row(result) for result in own], legend if length == lengths[-1] else "")
    if not results:
        open_stdout().print("nothing was measured")
    show_remarks(skipped, [run])


def _row(result: Result) -> tuple[str, ...]:
    figures = result.figures
    share = "-" if figures["share"] is None else f"{figures['share']:.3f}"
    names = (
        "prompt_peak_bytes",
        "decode_peak_bytes",
        "prompt_transient_bytes",
        "decode_transient_bytes",
        "rss_bytes",
    )
    return (result.arm, _mib(figures["bytes_held"]), share, *(_mib(figures[name]) for name in names))


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.2f}"
