"""YAML → typed structs, strictly: what is unknown, doubled or of the wrong type is refused with file, line and path.

Values of the type `Path` are taken relative to the file's folder, values of the type `HostPort` are parsed. Environment
variables `ISTHMUS__SECTION__KEY=value` override single values. Not a schema: that is the struct that the caller names.
"""

from __future__ import annotations

import difflib
import fcntl
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import yaml

from split.errors import ConfigError
from split.profiles.address import HostPort

ENV_PREFIX: Final = "ISTHMUS__"
FILE_BYTES_MAX: Final = 1 << 20
"""A configuration is written by hand; a larger file is some other file."""

INTEGER_BITS_MAX: Final = 63
"""What JSON carries, in which contracts are told to others, and a sum of sizes."""

T = TypeVar("T")
_Path = tuple[str | int, ...]
_AT: Final = re.compile(r"(?P<what>.*?)(?: - at `(?:key in )?\$(?P<path>[^`]*)`)?", re.DOTALL)
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(.*)`")


def load_yaml(path: Path, kind: type[T], *, env: Mapping[str, str] | None = None) -> T:
    """The file at `path` as a `kind` (a msgspec struct that forbids unknown fields), overridden from `env` where given.

    ConfigError: no such file, no YAML, a key unknown or given twice, a value of the wrong type or refused by the
    struct; each names the file and line (or the variable), the path of the key and what was expected.
    """
    value, origins = _read(path)
    for variable in sorted(env or ()):
        if variable.startswith(ENV_PREFIX):
            _override(value, origins, variable, (env or {})[variable])

    def from_text(wanted: type, given: Any) -> Any:
        if not isinstance(given, str):
            raise TypeError(f"expected text, got {_kind_of(given)}")
        if wanted is HostPort:
            return HostPort(given)
        assert issubclass(wanted, Path), wanted
        if not given or "\0" in given:
            what = "one with a zero byte" if given else "an empty text"
            raise ValueError(f"expected the path of a file or folder, got {what}")
        return path.parent.absolute() / os.path.expanduser(given)

    try:
        return msgspec.convert(value, kind, dec_hook=from_text)
    except msgspec.ValidationError as error:
        raise ConfigError(_sentence(str(error), kind, value, origins)) from error


def require_writable(key: str, folder: Path) -> None:
    """Make the folder that `key` names, if need be; ConfigError when it cannot be made or written by this user."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{key}: {folder} cannot be made ({error.strerror}); choose a folder of this user's"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{key}: {folder} may not be written by user {os.geteuid()}; correct its owner or choose another folder"
        )


def claim(folders: Mapping[str, Path]) -> list[int]:
    """Lock these folders (by the key that names each) for this process alone; the file descriptors that hold the locks
    until they are closed. ConfigError when another process has one of them: two would overwrite each other's files.

    The lock is on the folder itself (flock(2)), so that no file is left behind whatever ends the process. Where the
    file system knows no such locks, nothing is locked.
    """
    held: list[int] = []
    for key, folder in {folder.resolve(): (key, folder) for key, folder in folders.items()}.values():
        held.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        try:
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            for descriptor in held:
                os.close(descriptor)
            raise ConfigError(
                f"{key}: {folder} is in use by another isthmus process; stop that one, or give this one its own folders"
            ) from None
        except OSError:
            continue
    return held


def _read(path: Path) -> tuple[dict[str, Any], dict[_Path, str]]:
    """The file's mapping, and for each path in it where it stands (`FILE:LINE`)."""
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a YAML file that is there") from error
    if len(text) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: has more than {FILE_BYTES_MAX} bytes; expected a YAML file written by hand")
    origins: dict[_Path, str] = {(): f"{path}:1"}
    value = _parse(text, str(path), (), origins)
    if value is None:
        return {}, origins
    if not isinstance(value, dict):
        raise ConfigError(f"{path}:1: expected keys and values, got {_kind_of(value)}")
    return value, origins


def _parse(text: bytes | str, source: str, at: _Path, origins: dict[_Path, str]) -> Any:
    """One YAML document; lines are recorded under `at` as `source:line`."""
    try:
        loader = yaml.CSafeLoader(text)
        try:
            node = loader.get_single_node()
            return None if node is None else _Builder(loader, source, origins).build(node, at)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{source}{line}: is not YAML: {error.problem or error.context}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or number that cannot be
        raise ConfigError(f"{source}: is not YAML: {' '.join(str(error).split())}") from error


class _Builder:
    """Node tree → dicts, lists and scalars, remembering the line of each."""

    def __init__(self, loader: yaml.CSafeLoader, source: str, origins: dict[_Path, str]) -> None:
        self._loader = loader
        self._source = source
        self._origins = origins
        self._seen: set[int] = set()

    def build(self, node: yaml.Node, at: _Path) -> Any:
        origin = f"{self._source}:{node.start_mark.line + 1}"
        self._origins.setdefault(at, origin)
        if isinstance(node, yaml.ScalarNode):
            scalar = self._loader.construct_object(node)
            if isinstance(scalar, int) and scalar.bit_length() > INTEGER_BITS_MAX:
                size = f"{scalar.bit_length()} bits, at most {INTEGER_BITS_MAX} are read"
                raise ConfigError(f"{origin}: {_dotted(at)}is a whole number of {size}")
            return scalar
        if id(node) in self._seen:  # an alias: could be endless or explode
            raise ConfigError(f"{origin}: {_dotted(at)}aliases are not supported; write the values out")
        self._seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*at, index)) for index, item in enumerate(node.value)]
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = f"{self._source}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{line}: {_dotted(at)}a key must be plain text")
            key = str(key_node.value)
            if key in result:
                raise ConfigError(f"{line}: {_dotted((*at, key))}is given twice; keep one")
            self._origins[(*at, key)] = line
            result[key] = self.build(value_node, (*at, key))
        return result


def _override(value: dict[str, Any], origins: dict[_Path, str], variable: str, text: str) -> None:
    """Set the value that `variable` names; its text is YAML: `5`, `null` and `[a, b]` mean what they do in the file."""
    keys = variable.removeprefix(ENV_PREFIX).lower().split("__")
    source = f"environment variable {variable}"
    if not all(keys):
        raise ConfigError(f"{source}: expected {ENV_PREFIX}SECTION__KEY, with no empty part")
    parent = value
    for depth, key in enumerate(keys[:-1], start=1):
        if parent.get(key) is None:
            parent[key] = {}
            origins[tuple(keys[:depth])] = source
        inner = parent[key]
        if not isinstance(inner, dict):
            raise ConfigError(f"{source}: {'.'.join(keys[:depth])} is {_kind_of(inner)}, no section to set a key in")
        parent = inner
    at = tuple(keys)
    for known in [known for known in origins if known[: len(at)] == at]:
        del origins[known]
    lines: dict[_Path, str] = {}
    parent[keys[-1]] = _parse(text, source, at, lines)
    origins |= dict.fromkeys((*lines, at), source)


def _sentence(message: str, kind: type, value: Any, origins: Mapping[_Path, str]) -> str:
    """msgspec's message as `where: path: what`, with the keys that would have been right."""
    match = _AT.fullmatch(message)
    assert match is not None
    what = match["what"]
    at: _Path = tuple(step[1] or int(step[2]) for step in _STEP.finditer(match["path"] or ""))
    if unknown := _UNKNOWN.fullmatch(what):
        known = _known_keys(kind, at)
        close = difflib.get_close_matches(unknown[1], known, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        at = (*at, unknown[1])
        what = f"unknown key; {meant}known here are {', '.join(known)}"
    elif missing := _MISSING.fullmatch(what):
        what = f"the key {missing[1]} is required here and missing"
    elif what.startswith("Invalid enum value"):
        what = f"expected one of {', '.join(map(str, _choices(_info_at(kind, at))))}, got {_value_at(value, at)!r}"
    elif re.fullmatch(r"Expected `[a-z]+` [<>]=? \S+", what):
        what = f"{what}, got {_value_at(value, at)}"
    for theirs, ours in (("`object`", "a section"), ("`array`", "a list"), ("`str`", "text"), ("`null`", "nothing")):
        what = what.replace(theirs, ours)
    what = what.replace("`", "")
    where = at
    while where not in origins:
        where = where[:-1]
    return f"{origins[where]}: {_dotted(at)}{what[:1].lower()}{what[1:]}"


def _known_keys(kind: type, at: _Path) -> list[str]:
    """Names of the fields of the struct found at `at` inside `kind`."""
    info = _struct_in(_info_at(kind, at))
    assert isinstance(info, msgspec.inspect.StructType), info
    return [field.encode_name for field in info.fields]


def _info_at(kind: type, at: _Path) -> msgspec.inspect.Type:
    """The type that the value at `at` inside `kind` must have."""
    info: msgspec.inspect.Type = msgspec.inspect.type_info(kind)
    for step in at:
        info = _struct_in(info)
        if isinstance(info, msgspec.inspect.StructType):
            info = next(field.type for field in info.fields if field.encode_name == step)
        elif isinstance(info, msgspec.inspect.VarTupleType | msgspec.inspect.ListType):
            info = info.item_type
    return info


def _struct_in(info: msgspec.inspect.Type) -> msgspec.inspect.Type:
    """The member of `X | None` that can hold keys."""
    if isinstance(info, msgspec.inspect.UnionType):
        return next(member for member in info.types if not isinstance(member, msgspec.inspect.NoneType))
    return info


def _choices(info: msgspec.inspect.Type) -> list[object]:
    """What a literal may be, and the type beside it where there is one (`int`)."""
    members = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    choices: list[object] = []
    for member in members:
        if isinstance(member, msgspec.inspect.LiteralType):
            choices += member.values
        elif isinstance(member, msgspec.inspect.IntType):
            choices.append("a whole number")
    return choices


def _value_at(value: Any, at: _Path) -> Any:
    for step in at:
        value = value[step]
    return value


def _dotted(at: _Path) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in at)
    return f"{text.removeprefix('.')}: " if text else ""


def _kind_of(value: object) -> str:
    names: dict[type, str] = {dict: "a section", list: "a list", str: "text", type(None): "nothing"}
    return names.get(type(value), type(value).__name__)
