"""From what users write to a method's frozen config, with errors that say what to do."""

from __future__ import annotations

import difflib
import json
import numbers
import re
import types
import typing
from collections.abc import Iterable
from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Any
from typing import Literal
from typing import TypeVar

import attrs

from veloxquant.errors import ConfigError

if TYPE_CHECKING:
    import cattrs

__all__ = ["Option", "config_to_dict", "describe_options", "parse_config", "suggest"]

C = TypeVar("C")


@attrs.frozen
class Option:
    """One option of a method, for tables and help.

    Args:
        name: Its name.
        type: Its type as text, for example ``int or None``.
        default: Its default as text.
        help: What it does.
        example: A value to show in examples, or None.
        calibrated: Whether it names a file that a calibration of the method writes.
    """

    name: str
    type: str
    default: str
    help: str
    example: str | None = None
    calibrated: bool = False


def parse_config(cls: type[C], config: object = None, *, method: str) -> C:
    """Make the config of a method from whatever the user gave; the input is never changed.

    Args:
        cls: The method's config class.
        config: An instance of it, a mapping, None, one ``key=value`` text or an iterable of them. A dotted key
            (``storage_config.bits=2``) reaches into a mapping.
        method: Name of the method, for messages.

    Returns:
        An instance of ``cls``.

    Raises:
        ConfigError: An option is unknown or its value cannot be used; the message names both.
    """
    if isinstance(config, cls):
        return config
    if config is None:
        given: dict[str, Any] = {}
    elif isinstance(config, Mapping):
        given = dict(config)
    elif isinstance(config, str):
        return parse_config(cls, [config], method=method)
    elif isinstance(config, Iterable) and not attrs.has(type(config)):
        given = _from_pairs(cls, config, method)
    else:
        raise ConfigError(
            f"{method}: the config must be a {cls.__name__}, a mapping or key=value texts, not {type(config).__name__}"
        )
    _refuse_unknown(cls, given, method)
    hints = _types(cls)
    values = {name: _structure(hints[name], value, f"{method}: option {name}") for name, value in given.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(_prefixed(method, str(error))) from error
    except (TypeError, ValueError) as error:
        message = str(error.args[0]) if error.args else str(error)
        raise ConfigError(_prefixed(method, _sentence(message))) from error


def config_to_dict(config: object) -> dict[str, Any]:
    """Turn a config into plain values that JSON can hold and ``parse_config`` reads back."""
    plain: dict[str, Any] = _converter().unstructure(config)
    return plain


def describe_options(cls: type) -> list[Option]:
    """List the options of a config class as texts.

    Args:
        cls: A config class of a method.

    Returns:
        One record per option, in the order of the class.
    """
    hints = _types(cls)
    return [
        Option(
            field.name,
            _type_text(hints[field.name]),
            _default_text(field),
            str(field.metadata.get("help", "")),
            None if (example := field.metadata.get("example")) is None else str(example),
            bool(field.metadata.get("calibrated", False)),
        )
        for field in attrs.fields(cls)
    ]


def suggest(word: str, known: Iterable[str]) -> str:
    """A ``did you mean`` clause for a misspelt word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def _prefixed(method: str, message: str) -> str:
    return message if message.startswith(f"{method}:") else f"{method}: {message}"


# How the validators of attrs put it, and how we do.
_ATTRS_MESSAGES = (
    (re.compile(r"^'(\w+)' must be <class '(\w+)'> \(got (.*) that is a <class '[\w.]+'>\)\.?$"), r"\2"),
    (re.compile(r"^'(\w+)' must be (.+) \(got (.*)\)$"), r"\2"),
    (re.compile(r"^'(\w+)' must be ([<>]=? .+): (.*)$"), r"\2"),
)


def _sentence(message: str) -> str:
    """Turn a message of an attrs validator into one like ours: what the option must be, and what was given."""
    for pattern, wanted in _ATTRS_MESSAGES:
        match = pattern.match(message)
        if match:
            return match.expand(rf"option \1 must be {wanted}, not \3")
    return message


def _types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _refuse_unknown(cls: type, given: Mapping[str, Any], method: str) -> None:
    known = [field.name for field in attrs.fields(cls)]
    for name in given:
        if not isinstance(name, str) or name not in known:
            raise ConfigError(
                f"{method} has no option '{name}'{suggest(str(name), known)} "
                f"(options: {', '.join(known) if known else 'none'})"
            )


def _from_pairs(cls: type, pairs: Iterable[object], method: str) -> dict[str, Any]:
    """Read ``key=value`` texts; the type of the option says how a value is read."""
    known = _types(cls)
    result: dict[str, Any] = {}
    for pair in pairs:
        if not isinstance(pair, str) or "=" not in pair:
            raise ConfigError(f"{method}: write options as key=value, not {pair!r}")
        key, _, text = (part.strip() for part in pair.partition("="))
        name, _, rest = key.partition(".")
        if rest:
            nested = result.setdefault(name, {})
            if not isinstance(nested, dict):
                raise ConfigError(f"{method}: option {name} is given both whole and in parts")
            nested[rest] = _json_or_text(text)
        elif name in result:
            raise ConfigError(f"{method}: option {name} is given twice")
        else:
            result[name] = _read(known.get(name, str), text, f"{method}: option {name}")
    return result


def _read(hint: Any, text: str, what: str) -> Any:
    """Turn the text of a value into the plain value that its type asks for."""
    choices = _choices(hint)
    if type(None) in choices and text.lower() in ("none", "null"):
        return None
    if bool in choices and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        if number in choices:
            try:
                return number(text)
            except ValueError:
                continue
    literals = [
        value for choice in choices if typing.get_origin(choice) is Literal for value in typing.get_args(choice)
    ]
    if str in choices or literals:
        return next((value for value in literals if str(value) == text), text)
    if any(choice in (int, float, bool) for choice in choices):
        raise ConfigError(f"{what} must be {_type_text(hint)}, not '{text}'")
    return _json_or_text(text)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _structure(hint: Any, value: Any, what: str) -> Any:
    """Check a value against the type of its option; whole numbers may stand for floats, nothing else converts."""
    try:
        return _converter().structure(value, hint)
    except Exception as error:
        raise ConfigError(f"{what} must be {_type_text(hint)}, not {value!r}") from error


def _converter() -> cattrs.Converter:
    global _shared
    if _shared is None:
        _shared = _make_converter()
    return _shared


_shared: cattrs.Converter | None = None


def _make_converter() -> cattrs.Converter:
    # Imported at first use: listing methods needs no conversion, and the import costs 50 ms.
    from cattrs.preconf.json import make_converter

    converter = make_converter(forbid_extra_keys=True)

    def exact(kind: type, accepted: tuple[type, ...]) -> None:
        def structure(value: Any, _: Any) -> Any:
            if isinstance(value, bool) is not (kind is bool) or not isinstance(value, accepted):
                raise TypeError(f"expected {kind.__name__}")
            return kind(value)

        converter.register_structure_hook(kind, structure)

    exact(int, (numbers.Integral,))
    exact(float, (numbers.Real,))
    exact(bool, (bool,))
    exact(str, (str,))
    for optional in (int, float, bool, str):
        _allow_none(converter, optional)
    # Mapping[str, object] says the same as Mapping[str, Any].
    converter.register_structure_hook_func(lambda kind: kind is object, lambda value, _: value)
    return converter


def _allow_none(converter: cattrs.Converter, kind: type) -> None:
    converter.register_structure_hook(
        kind | None, lambda value, _: None if value is None else converter.structure(value, kind)
    )


def _choices(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _type_text(hint: Any) -> str:
    def one(choice: Any) -> str:
        if choice is type(None):
            return "None"
        if typing.get_origin(choice) is Literal:
            return " or ".join(repr(value) for value in typing.get_args(choice))
        origin = typing.get_origin(choice) or choice
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return "mapping"
        return getattr(origin, "__name__", str(choice))

    return " or ".join(one(choice) for choice in _choices(hint))


def _default_text(field: attrs.Attribute[Any]) -> str:
    if field.default is attrs.NOTHING:
        return "required"
    factory = getattr(field.default, "factory", None)
    if factory is None:
        return str(field.default)
    return "computed" if getattr(field.default, "takes_self", False) else repr(factory())
