"""``veloxquant bench quality``: what compression costs, against the plain cache and the simplest rivals."""

from __future__ import annotations

from typing import Annotated
from typing import Any

import attrs
import typer

from veloxquant.cli.bench_inputs import DEFAULT_MODEL
from veloxquant.cli.bench_inputs import ArmWords
from veloxquant.cli.bench_inputs import MethodNames
from veloxquant.cli.bench_inputs import ModelName
from veloxquant.cli.bench_inputs import Output
from veloxquant.cli.bench_inputs import Peer
from veloxquant.cli.bench_inputs import Settings
from veloxquant.cli.bench_inputs import numbers
from veloxquant.cli.bench_inputs import positive
from veloxquant.cli.bench_inputs import read_text
from veloxquant.cli.bench_inputs import rows_dtype
from veloxquant.cli.bench_inputs import split_names
from veloxquant.cli.bench_inputs import text_tokens
from veloxquant.cli.output import Json
from veloxquant.cli.output import only_json
from veloxquant.cli.output import write_json
from veloxquant.errors import INTERRUPTED

__all__ = ["quality"]


@attrs.frozen(kw_only=True)
class _Request:
    """What the user asked for, checked as far as it can be without a model."""

    model: str
    text: str | None
    start: int
    methods: list[str] | None
    settings: list[str]
    arms: list[str]
    peer: str | None
    plan: Any
    output: str | None
    arguments: dict[str, Any]


def quality(
    model: ModelName = DEFAULT_MODEL,
    text: Annotated[str | None, typer.Option(metavar="FILE", help="Text; by default the sample text.")] = None,
    start: Annotated[int, typer.Option(help="Tokens of the text to pass over.")] = 0,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the cached prompt.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens after it to compare; 0 for none.")] = 128,
    methods: MethodNames = None,
    settings: Settings = None,
    arm: ArmWords = None,
    needle_lengths: Annotated[
        str, typer.Option(metavar="N,N", help="Lengths of passkey prompts in tokens; '' for none.")
    ] = "1024",
    needle_depths: Annotated[str, typer.Option(metavar="P,P", help="Depths of the passkeys in percent.")] = (
        "10,30,50,70,90"
    ),
    prefill_step: Annotated[int, typer.Option(help="Prompt tokens processed at a time.")] = 2048,
    peer: Peer = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure what compression costs: divergence from the plain cache, perplexity, passkeys found, bytes held."""
    from veloxquant.bench.quality_run import QualityPlan

    arguments: dict[str, Any] = {
        "start": positive("--start", start, 0),
        "prompt_tokens": positive("--prompt-tokens", prompt_tokens, 2),
        "tokens": positive("--tokens", tokens, 0),
        "needle_lengths": list(numbers("--needle-lengths", needle_lengths, 2, 10**7)),
        "needle_depths": list(numbers("--needle-depths", needle_depths, 0, 100)),
        "prefill_step": positive("--prefill-step", prefill_step),
        "methods": split_names(methods),
        "set": settings or [],
        "arm": arm or [],
        "peer": peer,
    }
    plan = QualityPlan(
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        needle_lengths=tuple(arguments["needle_lengths"]),
        needle_depths=tuple(depth / 100 for depth in arguments["needle_depths"]),
        step=prefill_step,
    )
    with only_json(as_json):
        request = _Request(
            model=model,
            text=read_text(text),
            start=start,
            methods=arguments["methods"],
            settings=settings or [],
            arms=arm or [],
            peer=peer,
            plan=plan,
            output=output,
            arguments=arguments,
        )
        run, skipped, whole = _measure(request)
    if as_json:
        from veloxquant.bench.verdicts import verdicts

        found = [verdict.to_dict() for verdict in verdicts(run.results)]
        write_json({**run.to_dict(), "verdicts": found, "skipped": [attrs.asdict(one) for one in skipped]})
    else:
        from veloxquant.cli.bench_quality_table import show_quality

        show_quality(run, skipped)
    if not whole:
        raise typer.Exit(INTERRUPTED)


def _measure(request: _Request) -> tuple[Any, list[Any], bool]:
    """The run, the methods that were skipped, and whether it came to its end."""
    from veloxquant.bench.arm_options import chosen_arms
    from veloxquant.bench.arm_options import split_usable
    from veloxquant.bench.peers import peer_arms
    from veloxquant.bench.quality_run import check_text
    from veloxquant.bench.quality_run import measure_quality
    from veloxquant.bench.records import Writer
    from veloxquant.bench.records import new_run
    from veloxquant.bench.records import text_hash
    from veloxquant.cli.bench_progress import bench_progress
    from veloxquant.cli.display import loading
    from veloxquant.cli.model_files import check_model
    from veloxquant.cli.model_files import load_model
    from veloxquant.testing.sample import sample_text

    chosen = chosen_arms(request.methods, request.settings, request.arms)
    peers = peer_arms(request.peer, request.plan.prompt_tokens) if request.peer is not None else []
    check_model(request.model)
    with loading(request.model):
        model, tokenizer = load_model(request.model)
        tokens = text_tokens(tokenizer, request.text, request.start)
        check_text(request.plan, tokens)
        tolerant = request.methods is None and not (request.arms or request.settings)
        arms, skipped = split_usable(chosen, model, tolerant=tolerant)
        arms += split_usable(peers, model, tolerant=False)[0]
        dtype = rows_dtype(model)
    run = new_run(
        "quality",
        model=request.model,
        dtype=dtype,
        text=text_hash(sample_text() if request.text is None else request.text),
        arguments=request.arguments,
    )
    left_out: list[Any] = []
    with Writer(run, request.output) as writer, bench_progress() as progress:
        try:
            measure_quality(model, tokenizer, tokens, arms, request.plan, writer, progress.track, left_out)
            whole = True
        except KeyboardInterrupt:
            whole = False
        writer.leave_out(left_out)
    return run, skipped, whole
