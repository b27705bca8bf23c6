import json
from collections.abc import Mapping
from typing import Any
from typing import Literal

import attrs
import pytest
from attrs.validators import ge

from veloxquant import ConfigError
from veloxquant.config import config_to_dict
from veloxquant.config import describe_options
from veloxquant.config import parse_config
from veloxquant.config import suggest


@attrs.frozen(kw_only=True)
class Config:
    budget: int | None = attrs.field(default=None, metadata={"help": "rows kept"})
    ratio: float = 4.0
    strict: bool = False
    pooling: Literal["max", "avg"] = "max"
    bits: Literal[2, 4] | None = 4
    name: str = "x"
    storage: str | None = None
    window: int = attrs.field(default=32, validator=ge(1))
    either: int | float = 1
    extra: Mapping[str, Any] | None = None
    sizes: tuple[int, ...] = (1, 2)

    def __attrs_post_init__(self):
        if self.window == 13:
            raise ConfigError("toy: 13 is unlucky")
        if self.window == 14:
            raise ValueError("14 is worse")


@attrs.frozen(kw_only=True)
class Required:
    level: int
    made: list = attrs.field(factory=list)
    derived: int = attrs.field(default=attrs.Factory(lambda self: self.level, takes_self=True))


@attrs.frozen(kw_only=True)
class Empty:
    pass


def parse(given):
    return parse_config(Config, given, method="toy")


# ---------------------------------------------------------------- what is accepted


@pytest.mark.parametrize("given", [None, {}, [], ()])
def test_nothing_gives_the_defaults(given):
    assert parse(given) == Config()


def test_an_instance_is_handed_back_as_it_is():
    config = Config(budget=3)
    assert parse(config) is config


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ("budget=64", "budget", 64),
        ("budget=none", "budget", None),
        ("budget=None", "budget", None),
        ("budget=null", "budget", None),
        (" budget = 64 ", "budget", 64),
        ("ratio=2", "ratio", 2.0),
        ("ratio=2.5", "ratio", 2.5),
        ("ratio=1e1", "ratio", 10.0),
        ("strict=true", "strict", True),
        ("strict=False", "strict", False),
        ("pooling=avg", "pooling", "avg"),
        ("bits=2", "bits", 2),
        ("bits=none", "bits", None),
        ("name=none", "name", "none"),
        ("name=12", "name", "12"),
        ("name=a=b", "name", "a=b"),
        ("storage=none", "storage", None),
        ("storage=turbo", "storage", "turbo"),
        ("either=2", "either", 2),
        ("either=2.5", "either", 2.5),
        ('extra={"a": 1}', "extra", {"a": 1}),
        ("extra.a=1", "extra", {"a": 1}),
        ("extra.a=word", "extra", {"a": "word"}),
        ("sizes=[3, 4]", "sizes", (3, 4)),
    ],
)
def test_a_key_value_text_is_read_by_the_type_of_its_option(given, field, value):
    result = getattr(parse(given), field)
    assert result == value
    assert type(result) is type(value)
    assert parse([given]) == parse(given)


def test_several_texts_in_any_iterable():
    pairs = ["budget=9", "extra.a=1", "extra.b=true", "ratio=3"]
    expected = Config(budget=9, ratio=3.0, extra={"a": 1, "b": True})
    assert parse(pairs) == parse(tuple(pairs)) == parse(pair for pair in pairs) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"budget": 5}, Config(budget=5)),
        ({"ratio": 3}, Config(ratio=3.0)),
        ({"bits": None}, Config(bits=None)),
        ({"sizes": [7]}, Config(sizes=(7,))),
        ({"extra": {"a": {"b": 1}}}, Config(extra={"a": {"b": 1}})),
    ],
)
def test_a_mapping(given, expected):
    assert parse(given) == expected


def test_a_mapping_of_objects_is_a_mapping_of_anything():
    @attrs.frozen(kw_only=True)
    class Loose:
        storage_config: "Mapping[str, object] | None" = None

    for given in ({"storage_config": {"bits": 2, "a": [1]}}, 'storage_config={"bits": 2, "a": [1]}'):
        made = parse_config(Loose, given, method="toy")
        assert made.storage_config == {"bits": 2, "a": [1]}
        assert parse_config(Loose, config_to_dict(made), method="toy") == made


def test_a_whole_number_given_for_a_float_becomes_a_float():
    assert type(parse({"ratio": 3}).ratio) is float


def test_what_the_caller_gave_is_not_changed():
    inner = {"a": 1}
    given = {"budget": 5, "extra": inner}
    config = parse(given)
    assert given == {"budget": 5, "extra": {"a": 1}}
    assert given["extra"] is inner
    inner["a"] = 2
    assert config.extra == {"a": 1}


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"budgt": 5}, ["toy", "'budgt'", "did you mean 'budget'?"]),
        ("windw=5", ["'windw'", "did you mean 'window'?"]),
        ({"zzzz": 5}, ["'zzzz'", "budget, ratio"]),
        ({5: 1}, ["'5'"]),
        ("zzzz.a=5", ["'zzzz'"]),
        ({"budget": "many"}, ["toy", "budget", "int or None", "'many'"]),
        ({"budget": "5"}, ["budget", "int or None"]),
        ({"budget": 5.0}, ["budget", "int or None"]),
        ({"budget": True}, ["budget", "int or None", "True"]),
        ({"strict": 1}, ["strict", "bool"]),
        ({"strict": "true"}, ["strict", "bool"]),
        ({"ratio": "2"}, ["ratio", "float"]),
        ({"ratio": True}, ["ratio", "float"]),
        ({"ratio": None}, ["ratio", "float", "None"]),
        ({"name": 3}, ["name", "str"]),
        ({"pooling": "sum"}, ["pooling", "'max' or 'avg'", "'sum'"]),
        ({"bits": 3}, ["bits", "2 or 4", "3"]),
        ({"extra": 3}, ["extra", "mapping", "3"]),
        ("budget=3.5", ["budget", "int or None", "3.5"]),
        ("budget=", ["budget", "int or None"]),
        ("strict=yes", ["strict", "bool", "yes"]),
        ("ratio=fast", ["ratio", "float", "fast"]),
        ("bits=3", ["bits", "2 or 4", "3"]),
        ("budget.a=3", ["budget", "int or None"]),
        ("budget", ["key=value", "'budget'"]),
        ("", ["key=value"]),
        ([5], ["key=value", "5"]),
        (["budget=1", "budget=2"], ["budget", "twice"]),
        ({"window": 0}, ["toy", "window", "1"]),
        ({"window": 14}, ["toy: 14 is worse"]),
        (5, ["toy", "mapping", "int"]),
        (Empty(), ["toy", "Empty"]),
    ],
)
def test_a_bad_config_is_refused_in_one_line_that_names_what_is_wrong(given, words):
    with pytest.raises(ConfigError) as caught:
        parse(given)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert message.startswith("toy")


def test_a_config_error_is_a_value_error():
    with pytest.raises(ValueError, match="budget"):
        parse({"budget": "x"})


def test_an_error_of_the_class_itself_is_not_prefixed_twice():
    with pytest.raises(ConfigError) as caught:
        parse({"window": 13})
    assert str(caught.value) == "toy: 13 is unlucky"


def test_a_missing_required_option_is_named():
    with pytest.raises(ConfigError, match="level"):
        parse_config(Required, None, method="toy")


def test_a_class_without_options_says_so():
    with pytest.raises(ConfigError, match="options: none"):
        parse_config(Empty, {"a": 1}, method="toy")


# ---------------------------------------------------------------- back to plain values, and help


@pytest.mark.parametrize("config", [Config(), Config(budget=2, extra={"a": [1, None]}, sizes=(5,), bits=None)])
def test_a_config_survives_json(config):
    assert parse(json.loads(json.dumps(config_to_dict(config)))) == config


def test_options_are_described_in_order_with_type_default_and_help():
    options = {option.name: option for option in describe_options(Config)}
    assert list(options) == [field.name for field in attrs.fields(Config)]
    assert (options["budget"].type, options["budget"].default) == ("int or None", "None")
    assert options["budget"].help == "rows kept"
    assert options["ratio"].help == ""
    assert (options["pooling"].type, options["pooling"].default) == ("'max' or 'avg'", "max")
    assert options["extra"].type == "mapping or None"
    assert options["bits"].type == "2 or 4 or None"


def test_defaults_that_are_not_plain_values():
    options = {option.name: option.default for option in describe_options(Required)}
    assert options == {"level": "required", "made": "[]", "derived": "computed"}


def test_suggestions_are_close_or_absent():
    assert "'snapkv'" in suggest("snapvk", ["snapkv", "a2ats"])
    assert suggest("zzz", ["snapkv", "a2ats"]) == ""
