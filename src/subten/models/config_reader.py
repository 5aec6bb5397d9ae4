"""Typed reading of a config.json: every key is checked, an error names key, value and remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from subten.core import CheckpointError

MAX_INTEGER = 2**31 - 1


class ConfigReader:
    """A JSON object with its source, for one-line errors; a key with value null counts as absent.

    `read_keys` collects what was asked for, so that a caller can say what it did not look at.
    """

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self.prefix = prefix
        self.read_keys: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is present and not null."""
        self.read_keys.add(key)
        return self.values.get(key) is not None

    def error(self, key: str, value: Any, allowed: str) -> CheckpointError:
        """The error for a value that cannot be."""
        return CheckpointError(f"{self.source}: {self.prefix}{key}: got {value!r}; {allowed}")

    def raw(self, key: str, allowed: str) -> Any:
        """A required value of any type."""
        if not self.has(key):
            raise CheckpointError(f"{self.source}: {self.prefix}{key}: missing; {allowed}")
        return self.values[key]

    def integer(self, key: str, *, low: int = 1, high: int = MAX_INTEGER) -> int:
        """A required integer from `low` to `high`."""
        allowed = f"allowed: an integer from {low} to {high}"
        value = self.raw(key, allowed)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(key, value, allowed)
        return value

    def number(self, key: str, *, above: float = 0.0) -> float:
        """A required finite number greater than `above`."""
        allowed = f"allowed: a finite number above {above:g}"
        return self._number(key, self.raw(key, allowed), above, allowed)

    def numbers(self, key: str, *, length: int) -> tuple[float, ...]:
        """A required list of `length` positive numbers."""
        allowed = f"allowed: a list of {length} numbers above 0"
        value = self.raw(key, allowed)
        if not isinstance(value, list) or len(value) != length:
            raise self.error(key, value if not isinstance(value, list) else len(value), allowed)
        return tuple(self._number(key, entry, 0.0, allowed) for entry in value)

    def boolean(self, key: str, *, default: bool) -> bool:
        """True or false; `default` where the key is absent."""
        value = self.values[key] if self.has(key) else default
        if not isinstance(value, bool):
            raise self.error(key, value, "allowed: true or false")
        return value

    def section(self, key: str) -> ConfigReader | None:
        """A nested object, or None where it is absent."""
        if not self.has(key):
            return None
        value = self.values[key]
        if not isinstance(value, Mapping):
            raise self.error(key, value, "allowed: an object, or null")
        return ConfigReader(value, self.source, f"{self.prefix}{key}.")

    def spelling(self, *keys: str) -> str:
        """Which of several spellings of one key is present; they may not disagree."""
        present = [key for key in keys if self.has(key)]
        for other in present[1:]:
            if self.values[other] != self.values[present[0]]:
                raise self.error(
                    other,
                    self.values[other],
                    f"contradicts {self.prefix}{present[0]} = {self.values[present[0]]!r}",
                )
        return present[0] if present else keys[0]

    def require(self, key: str, allowed_value: Any, because: str) -> None:
        """Refuse a key that is present with another value than the one that this model runs."""
        if self.has(key) and self.values[key] != allowed_value:
            raise self.error(key, self.values[key], f"allowed: {allowed_value!r} ({because})")

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """An optional token id or list of token ids, each below `vocab_size`."""
        if not self.has(key):
            return ()
        value = self.values[key]
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not is_id or not 0 <= token_id < vocab_size:
                raise self.error(key, value, f"allowed: token ids from 0 to {vocab_size - 1}")
        return tuple(ids)

    def _number(self, key: str, value: Any, above: float, allowed: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= above:
            raise self.error(key, value, allowed)
        return float(value)
