"""JSON values as frozen dataclasses, strictly: every field is there, known, and of its own kind.

What is read from a disk was written by anyone. A field of another kind would pass a dataclass's constructor
and fail far away, or not at all; here it is refused where it stands, by its name. Types are read off the
dataclass itself, so a reader and its format cannot drift apart. It gives up conversions: true is no
number, 1.0 is no integer.
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 300


def shown(value: object) -> str:
    """The value's repr, cut to what fits into a message."""
    return _SHOWN.repr(value)


def decode(kind: type[T], value: object, where: str = "") -> T:
    """`value` as the dataclass `kind`. Raises ValueError: one line that names the field."""
    return _decode(kind, value, where)


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _object(kind, value, where)
    if origin is UnionType:
        return None if value is None and NoneType in inner else _decode(inner[0], value, where)
    if origin is tuple and isinstance(value, list):
        items = cast("list[Any]", value)
        return tuple(_decode(inner[0], x, f"{where}[{i}]") for i, x in enumerate(items))
    if origin is dict and isinstance(value, dict):
        pairs = cast("dict[str, Any]", value)
        return {key: _decode(inner[1], x, f"{where}[{shown(key)}]") for key, x in pairs.items()}
    if _is_of(kind, origin, inner, value):
        return value
    raise ValueError(f"{where} cannot be {shown(value)}")


def _object(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'it'} is no object")
    held = cast("dict[str, Any]", value)
    hints, names = get_type_hints(kind), [field.name for field in fields(kind)]
    if wrong := sorted(set(names) ^ set(held)):
        raise ValueError(f"{where or 'it'} has missing or unknown fields {shown(wrong)}")
    prefix = f"{where}." if where else ""
    return kind(**{name: _decode(hints[name], held[name], prefix + name) for name in names})


def _is_of(kind: Any, origin: Any, inner: tuple[Any, ...], value: object) -> bool:
    if kind in (Any, object):
        return True
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if isinstance(value, bool) or not isinstance(kind, type):
        return kind is bool and isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, kind)
