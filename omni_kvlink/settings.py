"""Settings: dataclasses whose fields are checked, once, against the types that they declare.

    @dataclasses.dataclass(frozen=True)
    class Options(Settings):
        quota: Annotated[int, Size(least=1)] = 4 << 30
        insecure: bool = False

`Options(quota=…)` checks values, `Options.read({…})` those of a mapping, such as JSON or YAML, and
its keys, and `Options.parse([…])` texts, such as those of a URL. What does not fit its declared
type raises SchemaError, which names the setting, the value and what is allowed. No value is
converted to another type, but for sizes ("8GB") and numbers (1 for 1.0): a flag given as the text
"false" is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Literal, NoReturn, TypeVar, Union

from omni_kvlink.errors import SchemaError

S = TypeVar("S", bound="Settings")

LARGEST_SIZE = (1 << 63) - 1
"""Bytes that a file, and so any memory of a link, may have at most."""
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGT]?)(i?)B?")
_TEXT_SHOWN = 100
"""Characters of a value in an error."""


def shown(value: object) -> str:
    """A value as an error shows it, of any type and length."""
    try:
        return f"{value!r:.{_TEXT_SHOWN}}"
    except Exception:  # a number of thousands of digits; an object whose __repr__ fails
        return f"<{type(value).__name__}>"


def similar(name: object, names: Iterable[str]) -> str:
    """The text "; did you mean …?" with the known name that is most like this one, or none."""
    text = name if isinstance(name, str) else ""
    matches = difflib.get_close_matches(text, list(names), 1, cutoff=0.65)
    return f"; did you mean {matches[0]}?" if matches else ""


def there_are(name: object, names: Collection[str]) -> str:
    """The text "; there are …" of an error about a name that is not known."""
    meant = similar(name, names)
    return f"{meant} There are {', '.join(names)}" if meant else f"; there are {', '.join(names)}"


def check_names(names: Iterable[object], allowed: Collection[str], prefix: str = "") -> None:
    """Raise SchemaError if one of the names is not known; `at` is what stands before the name."""
    for name in names:
        if not (isinstance(name, str) and name in allowed):
            text = name if isinstance(name, str) else shown(name)
            text = f"{prefix}{text:.{_TEXT_SHOWN}}: no such setting"
            raise SchemaError(f"{text}{there_are(name, allowed)}")


def _range(least: int | None, most: int | str | None) -> str:
    if most is not None:
        return f" from {least} to {most}"
    return "" if least is None else f" from {least} on"


class Rule:
    """A rule for the values of one setting; `allowed` says in words which they are, for errors."""

    allowed: str

    def read(self, value: Any, name: str) -> Any:
        """The value, checked; SchemaError names the setting, the value and what is allowed."""
        return self._read(value, name)

    def parse(self, text: str, name: str) -> Any:
        """Read the text of a URL, an environment variable or a command line, as `read` does."""
        return self._parse(text, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.allowed}>"

    def refuse(self, value: object, name: str) -> NoReturn:
        """Raise SchemaError for this value."""
        raise SchemaError(f"{name}={shown(value)}: wanted {self.allowed}")

    def _read(self, value: Any, name: str) -> Any:
        raise NotImplementedError

    def _parse(self, text: str, name: str) -> Any:
        return self._read(text, name)


class Flag(Rule):
    """True or False; of texts true, false, 1 and 0."""

    allowed = "true or false, a boolean and not a text"

    def _read(self, value: Any, name: str) -> bool:
        return value if type(value) is bool else self.refuse(value, name)

    def _parse(self, text: str, name: str) -> bool:
        flag = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
        if flag is None:
            raise SchemaError(f"{name}={shown(text)}: wanted true, false, 1 or 0")
        return flag


class Integer(Rule):
    """A whole number of a range; a bool is none."""

    def __init__(self, least: int | None = None, most: int | None = None):
        self.least, self.most = least, most
        self.allowed = f"a whole number{_range(least, most)}"

    def _read(self, value: Any, name: str) -> int:
        if isinstance(value, Integral) and not isinstance(value, bool):
            number = int(value)
            above = self.least is None or number >= self.least
            if above and (self.most is None or number <= self.most):
                return number
        return self.refuse(value, name)

    def _parse(self, text: str, name: str) -> int:
        is_number = re.fullmatch("-?[0-9]{1,30}", text)
        return self._read(int(text), name) if is_number else self.refuse(text, name)


class Size(Integer):
    """A number of bytes: a whole number, or a text such as "8GB" (10**9) or "512MiB" (2**20)."""

    def __init__(self, least: int = 0, most: int = LARGEST_SIZE):
        super().__init__(least, most)
        limit = "2**63 - 1" if most == LARGEST_SIZE else most
        text = 'a whole number, or a text such as "8GB" or "16KiB"'
        self.allowed = f"bytes{_range(least, limit)}: {text}"

    def _read(self, value: Any, name: str) -> int:
        if not isinstance(value, str):
            return super()._read(value, name)
        match = _SIZE.fullmatch(value)
        if match is None or (match[3] and not match[2]) or len(match[1]) > 30:
            self.refuse(value, name)
        power = " kMGT".index(match[2].replace("K", "k") or " ")
        integer, _, part = match[1].partition(".")
        unit = 1024**power if match[3] else 1000**power
        nbytes, remainder = divmod(int(integer + part) * unit, 10 ** len(part))
        return self.refuse(value, name) if remainder else super()._read(nbytes, name)

    def _parse(self, text: str, name: str) -> int:
        return self._read(text, name)


class Number(Rule):
    """A number of a range, as a float; neither NaN nor, unless `endless`, infinite."""

    unit, lowest = "a number", -math.inf

    def __init__(
        self, least: float | None = None, *, above: float = -math.inf, endless: bool = False
    ):
        self.least = self.lowest if least is None else least
        self.above, self.endless = above, endless
        bounds = f" from {self.least:g} on" if math.isfinite(self.least) else ""
        if math.isfinite(above):
            bounds = f" above {above:g}"
        no_limit = "; float('inf') for no limit" if endless else ""
        self.allowed = f"{self.unit}{bounds}{no_limit}"

    def _read(self, value: Any, name: str) -> float:
        number = math.nan
        if isinstance(value, Real) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                self.refuse(value, name)
        is_right = math.isfinite(number) or (self.endless and number == math.inf)
        is_right &= number >= self.least and number > self.above
        return number if is_right else self.refuse(value, name)

    def _parse(self, text: str, name: str) -> float:
        is_number = re.fullmatch(r"-?([0-9]+\.?|[0-9]*\.[0-9]+)(e-?[0-9]{1,3})?|inf", text)
        return self._read(float(text), name) if is_number else self.refuse(text, name)


class Seconds(Number):
    """A number of seconds, 0 or more unless told otherwise."""

    unit, lowest = "a number of seconds", 0


class Text(Rule):
    """A text without NUL; `example` is what it may be, `filled` refuses the empty one."""

    noun = "a text"

    def __init__(self, example: str = "", *, filled: bool = False):
        self.filled = filled
        such = f" such as {example!r}" if example else ""
        self.allowed = f"{self.noun}{' that is not empty' if filled else ''}{such}"

    def _read(self, value: Any, name: str) -> str:
        if not isinstance(value, str) or (self.filled and not value):
            self.refuse(value, name)
        try:
            os.fsencode(value).index(0)
        except UnicodeEncodeError:  # half a surrogate pair
            pass
        except ValueError:  # it has no NUL
            return value
        raise SchemaError(f"{name}={shown(value)}: it must be UTF-8 without NUL")


class FilePath(Text):
    """The path of a file or a directory: a text or a `pathlib.Path`; becomes a text."""

    noun = "a path"

    def __init__(self, *, filled: bool = False):
        super().__init__(filled=filled)
        self.allowed += ", as text"

    def _read(self, value: Any, name: str) -> str:
        return super()._read(os.fspath(value) if isinstance(value, os.PathLike) else value, name)


class Choice(Rule):
    """One of several values."""

    def __init__(self, *values: str | int):
        self.values, self.allowed = values, " or ".join(map(repr, values))

    def _read(self, value: Any, name: str) -> Any:
        for choice in self.values:
            if type(value) is type(choice) and value == choice:
                return choice
        meant = similar(value, [choice for choice in self.values if isinstance(choice, str)])
        raise SchemaError(f"{name}={shown(value)}: wanted {self.allowed}{meant}")

    def _parse(self, text: str, name: str) -> Any:
        by_text = {str(choice): choice for choice in self.values}
        return self.read(by_text.get(text, text), name)


class Optional(Rule):
    """None, or what another rule allows."""

    def __init__(self, rule: Rule):
        self.rule, self.allowed = rule, f"{rule.allowed}, or null"

    def _read(self, value: Any, name: str) -> Any:
        return None if value is None else self.rule.read(value, name)

    def _parse(self, text: str, name: str) -> Any:
        return self.rule.parse(text, name)


class ListOf(Rule):
    """A list or a tuple, which becomes a tuple; each element is what `rule` allows."""

    def __init__(self, rule: Rule, *, length: int | None = None):
        self.rule, self.length = rule, length
        self.allowed = f"a list of {length or 'any number of'} elements, each {rule.allowed}"

    def _read(self, value: Any, name: str) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or self.length not in (None, len(value)):
            self.refuse(value, name)
        return tuple(self.rule.read(item, f"{name}[{index}]") for index, item in enumerate(value))


class Texts(ListOf):
    """A list of texts, or one text, which is a list of itself."""

    def __init__(self) -> None:
        super().__init__(Text())

    def _read(self, value: Any, name: str) -> tuple[Any, ...]:
        return super()._read((value,) if isinstance(value, str) else value, name)


class Choices(ListOf):
    """Some of several texts: a list, or one text, which separates them by commas."""

    def __init__(self, *values: str):
        super().__init__(Choice(*values))
        self.allowed = f"some of {', '.join(values)}: a list, or a text with commas"

    def _read(self, value: Any, name: str) -> tuple[Any, ...]:
        return super()._read(value.split(",") if isinstance(value, str) else value, name)


class MapOf(Rule):
    """A mapping of texts to what `rule` allows, which becomes a dict."""

    def __init__(self, rule: Rule):
        self.rule, self.allowed = rule, f"a map from texts to {rule.allowed}"

    def _read(self, value: Any, name: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self.refuse(value, name)
        filled = Text(filled=True)
        return {
            filled.read(key, f"a key of {name}"): self.rule.read(item, f"{name}.{key}")
            for key, item in value.items()
        }


class Json(Rule):
    """A value of JSON, as it is: for what another library or a user's class reads."""

    allowed = "a value of JSON: null, true, false, a finite number, a string, a list or a map"

    def _read(self, value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return MapOf(self).read(value, name)
        if isinstance(value, (list, tuple)):
            return [self.read(item, f"{name}[{index}]") for index, item in enumerate(value)]
        is_number = isinstance(value, float) and math.isfinite(value)
        is_right = value is None or is_number or isinstance(value, (bool, int, str))
        return value if is_right else self.refuse(value, name)


class Instance(Rule):
    """An object of a class, as it is."""

    def __init__(self, kind: type):
        self.kind, self.allowed = kind, f"a {kind.__name__}"

    def _read(self, value: Any, name: str) -> Any:
        return value if isinstance(value, self.kind) else self.refuse(value, name)


class Nested(Rule):
    """Other settings: an object of their class, or a mapping of its fields."""

    def __init__(self, kind: type[Settings]):
        self.kind, self.allowed = kind, f"a map of {', '.join(rules(kind))}"

    def _read(self, value: Any, name: str) -> Any:
        return value if isinstance(value, self.kind) else self.kind.read(value, f"{name}.")


class SomeOf(Nested):
    """A mapping of some fields of other settings; it stays a mapping, of those that were given."""

    def _read(self, value: Any, name: str) -> dict[str, Any]:
        checked = self.kind.read(value, f"{name}.")
        return {key: getattr(checked, key) for key in value}


class Settings:
    """Base of dataclasses of settings; each is checked when an object is made."""

    def __post_init__(self) -> None:
        for name, rule in rules(type(self)).items():
            object.__setattr__(self, name, rule.read(getattr(self, name), name))

    @classmethod
    def read(cls: type[S], values: object, prefix: str = "") -> S:
        """The settings of a mapping; `at` is the prefix of a setting's name in errors.

        Raises:
            SchemaError: it is no mapping, has an unknown key, lacks one that has no default, or a
                value is not what its setting allows.
        """
        field_rules = rules(cls)
        if not isinstance(values, Mapping):
            subject = prefix.rstrip(".: ") or "settings"
            raise SchemaError(
                f"{subject}={shown(values)}: wanted a map of {', '.join(field_rules)}"
            )
        check_names(values, field_rules, prefix)
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # each is a dataclass
            if field.name not in values and _is_needed(field):
                raise SchemaError(
                    f"{prefix}{field.name} is missing: {field_rules[field.name].allowed}"
                )
        try:
            return cls(**values)
        except SchemaError as error:
            raise SchemaError(f"{prefix}{error}") from None

    @classmethod
    def parse(cls, texts: Iterable[tuple[str, str]]) -> dict[str, Any]:
        """The values of settings that were given as texts, by name; errors as `read`."""
        field_rules, values = rules(cls), dict[str, Any]()
        for name, text in texts:
            check_names((name,), field_rules)
            value = field_rules[name].parse(text, name)
            if values.setdefault(name, value) != value:
                raise SchemaError(
                    f"{name}={shown(text)}: it was also given as {shown(values[name])}"
                )
        return values


_rules_by_class: dict[Any, dict[str, Rule]] = {}


def rules(kind: type[Settings]) -> dict[str, Rule]:
    """The rule of each field of a class of settings; TypeError if the type of one has none."""
    if kind not in _rules_by_class:
        hints = typing.get_type_hints(kind, include_extras=True)
        fields = dataclasses.fields(kind)  # type: ignore[arg-type]  # each is a dataclass
        _rules_by_class[kind] = {
            field.name: _rule_of(hints[field.name]) for field in fields if field.init
        }
    return _rules_by_class[kind]


def from_environment(name: str, rule: Rule, default: Any) -> Any:
    """An environment variable, checked; `default` if it is not set, or empty."""
    text = os.environ.get(name, "")
    return rule.parse(text, name) if text else default


_BY_TYPE: dict[Any, Rule] = {bool: Flag(), int: Integer(), float: Number(), str: Text()}


def _rule_of(hint: Any) -> Rule:
    """The rule that a type declares."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        declared = [item for item in inner[1:] if isinstance(item, Rule)]
        return declared[0] if declared else _rule_of(inner[0])
    if hint in _BY_TYPE:
        return _BY_TYPE[hint]
    if origin is Literal:
        return Choice(*inner)
    if origin in (Union, types.UnionType) and type(None) in inner and len(inner) == 2:
        return Optional(_rule_of(next(item for item in inner if item is not type(None))))
    if origin is tuple:
        is_any_length = inner[-1] is Ellipsis
        if is_any_length or len(set(inner)) == 1:
            return ListOf(_rule_of(inner[0]), length=None if is_any_length else len(inner))
    if origin is dict and inner[0] is str:
        return MapOf(_rule_of(inner[1]))
    if isinstance(hint, type) and issubclass(hint, Settings):
        return Nested(hint)
    raise TypeError(f"{hint}: no rule says what a setting of this type may be; use Annotated")


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.init and field.default is missing and field.default_factory is missing
