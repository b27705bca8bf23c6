"""Quality: what compression costs, in groups of arms that hold about as much."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from results_page.intake import stored_verdicts
from results_page.markdown import DASH
from results_page.markdown import span
from results_page.markdown import table
from veloxquant.bench.companions import RECENT
from veloxquant.bench.companions import TOP
from veloxquant.bench.records import Result
from veloxquant.bench.records import Run
from veloxquant.bench.verdicts import Verdict

__all__ = ["GROUPS", "LEGEND", "elsewhere", "identity", "quality"]

GROUPS = (
    (0.7, "Less than 1.4x: 0.7 of the plain bytes or more"),
    (0.35, "About 2x: 0.35 to 0.7 of the plain bytes"),
    (0.18, "About 4x: 0.18 to 0.35 of the plain bytes"),
    (0.0, "About 8x: less than 0.18 of the plain bytes"),
)
"""The least share of plain bytes of each group, and what it is called; the groups of fewer bytes come later."""

LEGEND = """\
A prompt goes through each cache, then the tokens after it one by one, as in generation. *KL* is the divergence of the
plain cache's predictions from the arm's in nats, its mean with the 95 % interval over the tokens of this text, and
its 95th percentile; *top-1* says how often both find the same token likeliest. *Held* is what the arrays of the
caches take as a share of plain rows in the dtype of the run, right after the prompt (by which arms are grouped and
sorted) and at the end, spare capacity included. *Passkeys* are numbers hidden in other prompts that were found again.

The second table of a group says whether an arm beats the simplest evictor (the first four and the newest rows, at the
bytes of the arm) and mlx-lm's quantized caches. *Yes*: its mean KL is lower beyond chance (95 %, the same tokens).
*Level*: the difference may be chance. *No*: it is higher. *N/a*: the reference holds fewer bytes and loses more. In
brackets are the reference's bytes over the arm's, the mean of those after the prompt and at the end. *Over top rows*
is the arm's KL over that of the exact best choice of as many rows as it reads at a step; what reads few rows cannot
do much better than 1."""

_WIDTHS = {"float16", "bfloat16"}


@attrs.frozen
class Elsewhere:
    """Shares of bytes that another run measured with rows of 16 bits.

    Args:
        run: That run.
        length: Tokens of its prompt.
        shares: Right after the prompt, by ``identity``.
    """

    run: Run
    length: int
    shares: dict[str, float]

    @property
    def heading(self) -> str:
        """Heading of the column."""
        return f"held, {self.run.dtype}"

    @property
    def about(self) -> str:
        """From where the column is, as a sentence."""
        subject = self.run.model or f"one layer of random rows ({self.run.arguments.get('shape')})"
        return (
            f"*{self.heading[0].upper()}{self.heading[1:]}* comes from another run, `{self.run.id}`: {subject}, right "
            f"after {self.length:,} tokens."
        )


def elsewhere(runs: Sequence[Run], run: Run) -> Elsewhere | None:
    """Shares of the same arms with rows of 16 bits, from runs that measured these: never computed from others.

    Args:
        runs: All runs.
        run: The run beside whose shares they stand. Of several, a memory run is taken before a speed run, one on the
            same model before others, and the nearest length.

    Returns:
        The shares, or None where none were measured, or the run has such rows itself.
    """
    if run.dtype in _WIDTHS:
        return None
    tokens = run.arguments.get("prompt_tokens") or 1
    found: list[tuple[tuple[bool, bool, float], Elsewhere]] = []
    for other in runs:
        kind = "memory" if other.of_kind("memory") else "speed"
        results = other.of_kind(kind) if other.dtype in _WIDTHS else []
        for length in sorted({result.figures["length"] for result in results}):
            shares = _shares([result for result in results if result.figures["length"] == length])
            rank = (kind != "memory", other.model != run.model, abs(math.log(length / tokens)))
            found += [(rank, Elsewhere(other, length, shares))] if shares else []
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _shares(results: Sequence[Result]) -> dict[str, float]:
    """Shares right after the prompt, of results of one length."""
    held = {identity(result): (result, _after_prompt(result)) for result in results}
    plain = next((count for result, count in held.values() if result.arm == "plain"), None)
    return {name: count / plain for name, (_, count) in held.items() if count} if plain else {}


def _after_prompt(result: Result) -> int | None:
    """Bytes held right after the prompt; of the plain cache those of its rows, where the record tells them apart."""
    if result.kind == "speed":
        count: int | None = result.figures.get("bytes_held")
        return count
    part = result.figures.get("after_prompt", {})
    return part.get("bytes_plain" if result.arm == "plain" else "bytes_total") or None


def identity(result: Result) -> str:
    """What is the same for the same method with the same options."""
    return f"{result.method} {sorted(result.config.items())}"


def quality(run: Run, runs: Sequence[Run]) -> list[str]:
    """The part of a quality run, without its heading.

    Args:
        run: The run.
        runs: All runs, where the bytes with 16-bit rows are looked for.
    """
    results = list({result.arm: result for result in run.of_kind("quality")}.values())
    needles = run.of_kind("needle")
    asked = run.arguments
    lines = [_what(asked), "", *_plain_line(results, needles)]
    arms = sorted((one for one in results if _is_arm(one)), key=lambda one: (-_share(one), one.arm))
    other = elsewhere(runs, run)
    lines += [] if other is None else [other.about, ""]
    found = stored_verdicts(run)
    for place, (least, name) in enumerate(GROUPS):
        most = GROUPS[place - 1][0] if place else math.inf
        group = [arm for arm in arms if least <= _share(arm) < most]
        if group:
            lines += [f"**{name}**", "", *_figures(group, needles, run, other)]
            lines += _verdict_table(group, found, results, needles)
    return lines + _told(found)


def _told(found: Sequence[Verdict]) -> list[str]:
    """Who does not beat the simplest evictor, in words: whoever reads tables fast must not miss it."""
    own = [verdict for verdict in found if verdict.kind == RECENT]
    words = {"loses": "", "level": " (level)"}
    names = [f"{verdict.arm}{words[verdict.outcome]}" for verdict in own if verdict.told]
    if not own:
        return []
    if not names:
        return ["Every arm beats the newest rows at its bytes.", ""]
    return [f"These do not beat the newest rows at their bytes: {', '.join(names)}.", ""]


def _what(asked: dict[str, object]) -> str:
    text = f"{asked.get('tokens'):,} tokens after a prompt of {asked.get('prompt_tokens'):,}"
    lengths = asked.get("needle_lengths")
    if isinstance(lengths, list) and lengths:
        text += f"; passkeys in prompts of {' and '.join(f'{length:,}' for length in lengths)} tokens"
    return f"{text}."


def _is_arm(result: Result) -> bool:
    return result.arm != "plain" and result.method not in (RECENT, TOP)


def _share(result: Result) -> float:
    return float(result.figures["after_prompt"]["share"] or math.inf)


def _plain_line(results: Sequence[Result], needles: Sequence[Result]) -> list[str]:
    plain = next((result for result in results if result.arm == "plain"), None)
    if plain is None:
        return []
    found = _passkeys("plain", needles)
    also = "" if found == DASH else f", and it finds {found} passkeys"
    return [f"The plain cache has a perplexity of {plain.figures['perplexity']:.2f}{also}.", ""]


def _figures(group: Sequence[Result], needles: Sequence[Result], run: Run, other: Elsewhere | None) -> list[str]:
    columns = ["arm", f"held, {run.dtype}", "held at end", "KL", "95 %", "p95", "top-1", "perplexity", "passkeys"]
    if other is not None:
        columns.insert(2, other.heading)
    rows = []
    for arm in group:
        figures = arm.figures
        low, high = figures["mean_kl_interval"]
        end = figures["at_end"]["share"]
        cells = [
            arm.arm,
            f"{_share(arm):.3f}",
            DASH if end is None else f"{end:.3f}",
            f"{figures['mean_kl']:.4f}",
            span((max(low, 0), max(high, 0)), 4),
            f"{figures['p95_kl']:.3f}",
            f"{figures['top1_agreement']:.3f}",
            f"{figures['perplexity']:.2f}",
            _passkeys(arm.arm, needles),
        ]
        if other is not None:
            share = other.shares.get(identity(arm))
            cells.insert(2, DASH if share is None else f"{share:.3f}")
        rows.append(cells)
    return table(columns, rows)


def _passkeys(arm: str, needles: Sequence[Result]) -> str:
    own = [needle.figures["found"] for needle in needles if needle.arm == arm]
    return f"{sum(own)}/{len(own)}" if own else DASH


def _verdict_table(
    group: Sequence[Result], found: Sequence[Verdict], results: Sequence[Result], needles: Sequence[Result]
) -> list[str]:
    kinds = list(dict.fromkeys(verdict.kind for verdict in found if verdict.kind not in (RECENT, TOP)))
    columns = ["arm", "beats newest rows", "their KL", "their passkeys", *(f"beats {kind}" for kind in kinds)]
    rows = []
    for arm in group:
        own = {verdict.kind: verdict for verdict in found if verdict.arm == arm.arm}
        if not own:
            continue
        recent, top = own.get(RECENT), own.get(TOP)
        rows.append(
            [
                arm.arm,
                _words(recent),
                DASH if recent is None else f"{recent.reference_kl:.4f}",
                DASH if recent is None else _passkeys(recent.reference, needles),
                *(_words(own.get(kind)) for kind in kinds),
                f"{top.arm_kl / top.reference_kl:.1f} x" if top is not None and top.reference_kl > 0 else DASH,
            ]
        )
    return table([*columns, "over top rows"], rows) if rows else []


def _words(verdict: Verdict | None) -> str:
    return DASH if verdict is None else verdict.words
