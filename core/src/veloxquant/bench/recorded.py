"""Recorded quality, and whether a method has fallen behind it: ``python -m veloxquant.bench.recorded FILE``.

A small JSON file names a text, some arms, and what they once cost on the sample model. Where sums are rounded
otherwise, a near tie of two rows or two codes falls the other way. Between MLX on a CPU with OpenBLAS and MLX on an
H200, mean KL of 256 tokens moved by less than half a percent for methods that keep rows as they came, and by up to two
percent over packed rows. The limits are five times that; what is beyond them is a fault, and fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from veloxquant.bench.arms import Arm
from veloxquant.bench.arms import method_arm
from veloxquant.bench.quality_run import QualityPlan
from veloxquant.bench.quality_run import measure_quality
from veloxquant.bench.records import Run
from veloxquant.bench.records import Writer
from veloxquant.bench.records import new_run
from veloxquant.errors import FileFormatError
from veloxquant.errors import VeloxQuantError

__all__ = ["KL_SHARE", "KL_STEP", "Recorded", "fallen_behind", "main", "read_recorded", "record", "rows"]

KL_SHARE = 0.1
"""Share by which a mean KL may exceed the recorded one: five times what another back end moved it by."""

KL_STEP = 2e-4
"""What it may exceed it by in any case, in nats: what rounding alone costs, and a little more."""

TOP1_STEP = 0.03
"""What a top-1 agreement may fall by: three of a hundred tokens."""

NEEDLES = 1
"""Passkeys that may be missed of those that were found: one that hung on a hair."""


@attrs.frozen(kw_only=True)
class Recorded:
    """What the file holds.

    Args:
        task: Arguments of ``QualityPlan``, and ``start``: tokens of the sample text to pass over.
        arms: Method, config and figures of every arm, by its name.
        environment: Where the figures were measured.
    """

    task: dict[str, Any]
    arms: dict[str, dict[str, Any]]
    environment: dict[str, Any] = attrs.field(factory=dict)

    @property
    def plan(self) -> QualityPlan:
        """What to measure; references are left out, they do not change."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.task.items()
        }
        fields.pop("start", None)
        return QualityPlan(**fields, references=False)

    def make_arms(self, registry: Any = None) -> list[Arm]:
        """The arms, made with the methods that are installed."""
        return [
            method_arm(arm["method"], arm["config"], name=name, registry=registry) for name, arm in self.arms.items()
        ]


def read_recorded(file: str | Path) -> Recorded:
    """Read a file.

    Raises:
        FileFormatError: It cannot be read, or is not such a file.
    """
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        recorded = Recorded(**content)
        _ = recorded.plan
        for arm in recorded.arms.values():
            if not {"method", "config"} <= arm.keys():
                raise ValueError("an arm has no method or no config")
    except OSError as error:
        raise FileFormatError(f"{file} cannot be read: {error.strerror or error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise FileFormatError(f"{file} holds no recorded quality: {error}") from error
    return recorded


def rows(run: Run) -> dict[str, dict[str, Any]]:
    """The figures of a run that are recorded, by arm."""
    found: dict[str, dict[str, Any]] = {}
    for result in run.of_kind("quality"):
        figures = result.figures
        found[result.arm] = {
            "mean_kl": _short(figures["mean_kl"]),
            "p95_kl": _short(figures["p95_kl"]),
            "top1_agreement": _short(figures["top1_agreement"]),
            "perplexity": _short(figures["perplexity"]),
            "share": _short(figures["after_prompt"]["share"]),
        }
    for result in run.of_kind("needle"):
        own = found.setdefault(result.arm, {})
        own["needles_found"] = own.get("needles_found", 0) + int(result.figures["found"])
    return found


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def record(recorded: Recorded, run: Run) -> Recorded:
    """The same arms with the figures of a run."""
    found = rows(run)
    arms = {name: {**arm, "figures": found[name]} for name, arm in recorded.arms.items()}
    return attrs.evolve(recorded, arms=arms, environment=run.environment)


def fallen_behind(recorded: Recorded, run: Run) -> list[str]:
    """What a run is worse in than what was recorded, beyond the noise.

    Args:
        recorded: The recorded figures.
        run: A run of the same arms.

    Returns:
        A sentence for each figure that fell behind, and for each arm that was never recorded; none when all is well.
    """
    found, said = rows(run), []
    for name, arm in recorded.arms.items():
        before, now = arm.get("figures"), found.get(name)
        if before is None:
            said.append(f"{name} was never recorded; record it with 'nox -s quality -- --record'")
        elif now is None:
            said.append(f"{name} was not measured")
        else:
            said += [f"{name}: {sentence}" for sentence in _worse(before, now)]
    return said


def _worse(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    limit = before["mean_kl"] * (1 + KL_SHARE) + KL_STEP
    if not now["mean_kl"] <= limit:
        yield f"mean KL is {now['mean_kl']:.4f}, recorded is {before['mean_kl']:.4f} (at most {limit:.4f})"
    if not now["top1_agreement"] >= before["top1_agreement"] - TOP1_STEP:
        yield f"top-1 agreement is {now['top1_agreement']:.3f}, recorded is {before['top1_agreement']:.3f}"
    if not now["share"] <= before["share"] * 1.01:
        yield f"it holds {now['share']:.4f} of the plain bytes, recorded is {before['share']:.4f}"
    if now.get("needles_found", 0) < before.get("needles_found", 0) - NEEDLES:
        yield f"{now.get('needles_found', 0)} passkeys are found, recorded are {before['needles_found']}"


def main(words: Sequence[str] | None = None, load: Callable[[], tuple[Any, Any]] | None = None) -> int:
    """Measure the arms of a file, print them, and compare or record.

    Args:
        words: The words of the command line.
        load: Loads the model and its tokenizer; by default the sample model.

    Returns:
        The exit code: 1 when a method has fallen behind.
    """
    parser = argparse.ArgumentParser(prog="python -m veloxquant.bench.recorded", description=__doc__)
    parser.add_argument("file", help="JSON file of arms and recorded figures")
    parser.add_argument("--record", action="store_true", help="write the figures of this run into the file")
    parser.add_argument("--only", metavar="WORD", action="append", help="only arms with this in their names")
    parser.add_argument("--output", help="add the run to this file, line by line (JSON Lines)")
    options = parser.parse_args(words)
    try:
        whole = read_recorded(options.file)
        recorded = _chosen(whole, options.only)
        run = _measured(recorded, options.output, load)
        print(_table(recorded, rows(run)))
        if options.record:
            new = record(recorded, run)
            text = json.dumps(attrs.asdict(attrs.evolve(new, arms={**whole.arms, **new.arms})), indent=2)
            Path(options.file).write_text(text + "\n", encoding="utf-8")
            print(f"recorded in {options.file}")
            return 0
        said = fallen_behind(recorded, run)
    except VeloxQuantError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for sentence in said:
        print(f"FELL BEHIND: {sentence}")
    if not said:
        print("no method has fallen behind")
    return 1 if said else 0


def _chosen(recorded: Recorded, words: Sequence[str] | None) -> Recorded:
    arms = {name: arm for name, arm in recorded.arms.items() if not words or any(word in name for word in words)}
    if not arms:
        raise VeloxQuantError(f"no arm's name contains '{', '.join(words or ())}' (arms: {', '.join(recorded.arms)})")
    return attrs.evolve(recorded, arms=arms)


def _measured(recorded: Recorded, output: str | None, load: Callable[[], tuple[Any, Any]] | None) -> Run:
    from veloxquant.testing.sample import load_sample_model
    from veloxquant.testing.sample import sample_text

    model, tokenizer = (load or load_sample_model)()
    tokens = tokenizer.encode(sample_text(), add_special_tokens=False, verbose=False)[recorded.task.get("start", 0) :]
    run = new_run("quality", model="sample", dtype="float32", arguments=recorded.task)
    with Writer(run, output) as writer:
        measure_quality(model, tokenizer, tokens, recorded.make_arms(), recorded.plan, writer, _told)
    return run


@contextlib.contextmanager
def _told(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A line a piece of work: nox shows no bars."""
    print(f"  {label} ({total:,} tokens)", file=sys.stderr, flush=True)
    yield lambda _: None


def _table(recorded: Recorded, found: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':44} {'mean KL':>9} {'recorded':>9} {'top-1':>7} {'held':>7} {'passkeys':>9}"]
    for name, now in found.items():
        before = recorded.arms.get(name, {}).get("figures", {}).get("mean_kl")
        past = "-" if before is None else f"{before:.4f}"
        lines.append(
            f"{name:44} {now['mean_kl']:9.4f} {past:>9} {now['top1_agreement']:7.3f} {now['share']:7.3f} "
            f"{now.get('needles_found', '-'):>9}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
