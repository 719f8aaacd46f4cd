"""A JSON object on disk, read with types: a wrong or missing key is an error that names the file and the key.

Knows JSON; knows nothing of what the keys mean. A null counts as absent, as it does for the libraries that write it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.errors import CheckpointError


def read_json(path: Path) -> Any:
    """Parse a file.

    Raises:
        CheckpointError: it is missing, not UTF-8, or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class JsonFile:
    """One JSON object and where it came from."""

    path: Path
    data: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> JsonFile:
        """
        Raises:
            CheckpointError: as `read_json`, or the file holds no object.
        """
        return cls.of(path, read_json(path))

    @classmethod
    def read_if_there(cls, path: Path) -> JsonFile:
        """The same, with an empty object for a file that does not exist."""
        return cls.read(path) if path.exists() else cls(path, {})

    @classmethod
    def of(cls, path: Path, value: Any) -> JsonFile:
        if not isinstance(value, dict):
            raise CheckpointError(f"{path} holds {_kind(value)} where an object is expected")
        return cls(path, value)

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.count(key, default)
        if value < 1:
            raise self.error(f"{key} is {value}, and must be at least 1")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 0."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(f"{key} is {value!r}, and must be a whole number of at least 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{key} is {value!r}, and must be a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} is {value!r}, and must be a string")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} is {value!r}, and must be true or false")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty where the key is absent."""
        value = self.data.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.error(f"{key} is {value!r}, and must be a list of strings")
        return tuple(value)

    def child(self, key: str) -> JsonFile:
        """A nested object; empty where the key is absent."""
        value = self.data.get(key)
        return JsonFile(self.path, {}) if value is None else JsonFile.of(self.path, value)

    def _required(self, key: str, default: Any) -> Any:
        value = self.data.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{key} is missing")
        return value


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", type(None): "null"}.get(type(value), f"a {type(value).__name__}")
