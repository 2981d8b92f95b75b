"""Dataclasses as JSON and back, driven by the types of their fields. Pure.

An object of a :class:`Coded` class is a JSON object with the names of its fields, an object of a
:class:`Listed` class a list of their values. The keys of a mapping are text; a mapping with objects
as keys is a list of pairs. Sets are sorted. Values are converted to the types of their fields; a
missing field has its default. KeyError, TypeError or ValueError mean a foreign value.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


class Coded:
    """Base of dataclasses that are JSON objects."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        written: dict[str, Any] = write(self)
        return written

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the object of a JSON form; inverse of :meth:`to_dict`."""
        return read(cls, values)


class Listed:
    """Base of dataclasses that are JSON lists."""

    def to_list(self) -> list[Any]:
        """Return the JSON form."""
        written: list[Any] = write(self)
        return written

    @classmethod
    def from_list(cls, values: Any) -> Self:
        """Return the object of a JSON form; inverse of :meth:`to_list`."""
        return read(cls, values)


def write(found: Any) -> Any:
    """Return the JSON form of an object of a dataclass."""
    kind: Any = type(found)
    return _form(kind).write(found)


def read(kind: type[T], values: Any) -> T:
    """Return the object of this dataclass with the values of a JSON form."""
    found: T = _form(cast(Any, kind)).read(values)
    return found


class _Form(NamedTuple):
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


@functools.cache
def _form(kind: Any) -> _Form:
    """Return the form of a dataclass."""
    hints = get_type_hints(kind)
    entries = [
        # A field is needed if both defaults are MISSING.
        (entry.name, _form_of(hints[entry.name]), entry.default is entry.default_factory)
        for entry in dataclasses.fields(kind)
    ]
    if issubclass(kind, Listed):
        return _Form(
            lambda found: [form.write(getattr(found, name)) for name, form, _ in entries],
            lambda values: kind(
                *(form.read(v) for (_, form, _), v in zip(entries, values, strict=True))
            ),
        )
    return _Form(
        lambda found: {name: form.write(getattr(found, name)) for name, form, _ in entries},
        lambda values: kind(
            **{
                name: form.read(values[name])
                for name, form, is_needed in entries
                if is_needed or name in values
            }
        ),
    )


@functools.cache
def _form_of(kind: Any) -> _Form:
    """Return the form of a field's type."""
    origin, args = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        own: Any = kind
        if issubclass(own, Listed):
            return _Form(own.to_list, own.from_list)
        return _Form(own.to_dict, own.from_dict) if hasattr(own, "to_dict") else _form(own)
    if origin in (Union, types.UnionType):
        some = _form_of(next(arg for arg in args if arg is not types.NoneType))
        return _Form(
            lambda found: None if found is None else some.write(found),
            lambda value: None if value is None else some.read(value),
        )
    if origin is tuple:
        item = _form_of(args[0])
        return _Form(lambda found: [*map(item.write, found)], lambda v: tuple(map(item.read, v)))
    if origin is frozenset:
        item = _form_of(args[0])
        return _Form(
            lambda found: [*map(item.write, sorted(found))], lambda v: frozenset(map(item.read, v))
        )
    if origin is not None and issubclass(origin, Mapping):
        return _form_of_mapping(*map(_form_of, args), is_of_pairs=dataclasses.is_dataclass(args[0]))
    if kind is Path:
        return _Form(str, Path)
    if kind is Any:
        return _Form(lambda found: found, lambda value: value)
    return _Form(lambda found: found, kind)


def _form_of_mapping(key: _Form, value: _Form, *, is_of_pairs: bool) -> _Form:
    if is_of_pairs:
        return _Form(
            lambda found: [[key.write(k), value.write(v)] for k, v in found.items()],
            lambda pairs: {key.read(k): value.read(v) for k, v in pairs},
        )
    return _Form(
        lambda found: {str(k): value.write(v) for k, v in found.items()},
        lambda values: {key.read(k): value.read(v) for k, v in _items(values)},
    )


def _items(values: Any) -> Iterable[tuple[Any, Any]]:
    if not isinstance(values, Mapping):
        raise TypeError(f"a JSON object, not {type(values).__name__}")
    return values.items()
