"""Recorded runs: JSON Lines, one line that describes a run and one a result, written as soon as it is measured.

A file may hold several runs, one after another. A run that was stopped leaves whole lines, but perhaps for the last.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import uuid
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO
from typing import Any

import attrs

from veloxquant.bench.environment import environment
from veloxquant.bench.race import LeftOut
from veloxquant.errors import FileFormatError
from veloxquant.errors import VeloxQuantError

__all__ = ["KINDS", "Result", "Run", "Writer", "new_run", "read_runs", "text_hash"]

FORMAT = 1
KINDS = ("quality", "needle", "speed", "prefill", "generation", "memory")
"""What a result may be of."""
LEFT_OUT = "left out"
"""What the line of an arm that could not be measured says it is."""


@attrs.frozen(kw_only=True)
class Result:
    """One arm's figures.

    Args:
        kind: One of ``KINDS``.
        arm: Name of the arm.
        method: Name of the method, or what serves in its place (``plain``, ``QuantizedKVCache`` and so on).
        role: ``method``, ``reference`` or ``peer``.
        config: All options, as plain values.
        figures: What was measured, as plain values. Pictures are drawn from ``mean_kl`` and ``after_prompt`` of
            ``quality``, from ``length`` and ``seconds`` (the median of a step) of ``speed``, and from ``length`` and
            ``bytes_held`` of ``memory``.
    """

    kind: str = attrs.field(validator=attrs.validators.in_(KINDS))
    arm: str = attrs.field(validator=attrs.validators.instance_of(str))
    method: str = attrs.field(validator=attrs.validators.instance_of(str))
    role: str = attrs.field(default="method", validator=attrs.validators.in_(("method", "reference", "peer")))
    config: dict[str, Any] = attrs.field(factory=dict, validator=attrs.validators.instance_of(dict))
    figures: dict[str, Any] = attrs.field(factory=dict, validator=attrs.validators.instance_of(dict))


@attrs.define(kw_only=True)
class Run:
    """One run of a benchmark.

    Args:
        command: Name of the command, for example ``quality``.
        model: Name of the model.
        dtype: Dtype of keys and values.
        text: SHA-256 of the text, or None when none was used.
        arguments: What the run was asked for.
        id: A name that no other run has.
        time: When it began, UTC.
        environment: What ``environment()`` gave there.
        results: What was measured.
        left_out: Arms that could not be measured, and why.
    """

    command: str
    model: str | None = None
    dtype: str | None = None
    text: str | None = None
    arguments: dict[str, Any] = attrs.field(factory=dict)
    id: str
    time: str
    environment: dict[str, Any]
    results: list[Result] = attrs.field(factory=list)
    left_out: list[LeftOut] = attrs.field(factory=list)

    def of_kind(self, kind: str) -> list[Result]:
        """The results of one kind, in the order in which they were measured."""
        return [result for result in self.results if result.kind == kind]

    def header(self) -> dict[str, Any]:
        """The line that describes the run."""
        fields = attrs.asdict(self, filter=attrs.filters.exclude("results", "left_out"))
        return {"kind": "run", "format": FORMAT, **fields}

    def lines(self) -> list[dict[str, Any]]:
        """The lines of a file that holds this run."""
        results = [{"run": self.id, **attrs.asdict(result)} for result in self.results]
        return [self.header(), *results, *(_left_out_line(self, one) for one in self.left_out)]

    def to_dict(self) -> dict[str, Any]:
        """The whole run as plain values for JSON."""
        results, left_out = ([attrs.asdict(one) for one in part] for part in (self.results, self.left_out))
        return {**self.header(), "results": results, "left_out": left_out}


def _left_out_line(run: Run, one: LeftOut) -> dict[str, Any]:
    return {"run": run.id, "kind": LEFT_OUT, **attrs.asdict(one)}


def new_run(command: str, **fields: Any) -> Run:
    """A run that begins now, here.

    Args:
        command: Name of the command.
        fields: ``model``, ``dtype``, ``text`` and ``arguments``, see ``Run``.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Run(command=command, id=uuid.uuid4().hex[:12], time=now, environment=environment(), **fields)


def text_hash(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


class Writer:
    """Keeps the results of a run and writes each to a file as soon as it is there.

    Args:
        run: The run.
        file: Where to write; runs that stand there already stay. None: nowhere.

    Raises:
        VeloxQuantError: The file cannot be written, or holds something else.
    """

    def __init__(self, run: Run, file: str | Path | None = None) -> None:
        self.run = run
        self._stream = None if file is None else _appending(Path(file).expanduser())
        self._write(run.header())

    def add(self, result: Result) -> Result:
        """Take one more result."""
        self._write({"run": self.run.id, **attrs.asdict(result)})
        self.run.results.append(result)
        return result

    def leave_out(self, found: Iterable[LeftOut]) -> None:
        """Note arms that could not be measured."""
        for one in found:
            self._write(_left_out_line(self.run, one))
            self.run.left_out.append(one)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(json.dumps(line, allow_nan=False) + "\n")
            self._stream.flush()
        except OSError as error:
            raise VeloxQuantError(f"cannot write {self._stream.name}: {error.strerror or error}") from error


def _appending(file: Path) -> IO[str]:
    try:
        if file.exists() and file.stat().st_size:
            read_runs(file)
            _drop_cut_line(file)
        return file.open("a", encoding="utf-8")
    except FileFormatError as error:
        raise VeloxQuantError(f"results are not added to {file}, which holds something else: {error}") from error
    except OSError as error:
        raise VeloxQuantError(f"cannot write {file}: {error.strerror or error}") from error


def _drop_cut_line(file: Path) -> None:
    """Drop what a stopped run left of its last line, so that the next line begins on its own."""
    content = file.read_bytes()
    if not content.endswith(b"\n"):
        whole = content.rpartition(b"\n")
        file.write_bytes(whole[0] + whole[1])


def read_runs(file: str | Path) -> list[Run]:
    """Read the runs of a file.

    Args:
        file: A file that ``Writer`` wrote; a last line that was cut off is left out.

    Returns:
        The runs, in the order in which they were made.

    Raises:
        FileFormatError: The file cannot be read, or a line is not what it should be; the message names the line.
    """
    path = Path(file).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileFormatError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} is not a file of benchmark results: byte {error.start} is not text") from error
    lines = text.split("\n")
    cut = lines.pop()  # what follows the last line break: nothing, unless the last line was cut off
    runs: dict[str, Run] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            _take(runs, line, f"line {number} of {path}")
    if cut.strip() and not runs:
        _take(runs, cut, f"line {len(lines) + 1} of {path}")
    if not runs:
        raise FileFormatError(f"{path} holds no benchmark results; name a file that veloxquant bench --output wrote")
    return list(runs.values())


def _take(runs: dict[str, Run], line: str, where: str) -> None:
    """Add what one line holds."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise FileFormatError(f"{where} is not JSON ({error}); take the line out or measure again") from error
    if not isinstance(record, dict) or "kind" not in record:
        raise FileFormatError(f"{where} is no record of a benchmark: it has no kind")
    try:
        if record["kind"] == "run":
            _begin(runs, record, where)
        else:
            run = record.pop("run")
            if run not in runs:
                raise FileFormatError(f"{where} belongs to the run {run!r}, whose own line does not come before it")
            if record["kind"] == LEFT_OUT:
                runs[run].left_out.append(LeftOut(**{name: record[name] for name in ("arm", "where", "reason")}))
            else:
                runs[run].results.append(Result(**record))
    except (TypeError, ValueError, KeyError) as error:
        reason = str(error.args[0]) if error.args else str(error)
        raise FileFormatError(f"{where} is no record of a benchmark: {reason}") from error


def _begin(runs: dict[str, Run], record: dict[str, Any], where: str) -> None:
    fields = {name: value for name, value in record.items() if name not in ("kind", "format")}
    if record.get("format") != FORMAT:
        raise FileFormatError(
            f"{where} has the format {record.get('format')!r}, this veloxquant reads {FORMAT}; measure again"
        )
    if record.get("id") in runs:
        raise FileFormatError(f"{where} begins the run {record['id']!r} a second time; take one of them out")
    run = Run(**fields)
    runs[run.id] = run
