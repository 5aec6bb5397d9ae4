"""Models by name from the Hugging Face hub: safetensors and JSON only, no code, no pickle."""

from __future__ import annotations

import re
from pathlib import Path

from subten.core import CheckpointError

_PATTERNS = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_repository_name(name: str) -> bool:
    """Whether `name` has the form owner/name of a hub repository."""
    return _REPOSITORY.fullmatch(name) is not None and ".." not in name


def download(name: str) -> Path:
    """Folder of the repository `name`, downloaded if it is not in the hub's cache already.

    Raises CheckpointError, in one line, where it cannot be had.
    """
    try:
        # Optional, and half a second to import: only who names a hub model pays for it.
        import huggingface_hub
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ImportError as error:
        raise CheckpointError(
            f"model: got {name!r}, a hub name, but huggingface_hub is not installed; "
            "run: pip install huggingface_hub, or give a folder or a .gguf file"
        ) from error
    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=list(_PATTERNS), ignore_patterns=["*/*"]
        )
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"model: got {name!r}: the hub cannot be reached and its cache has no copy; "
            "connect once, or give a folder or a .gguf file"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"model: got {name!r}: the hub refused it: {reason[0]}; check the name, or log in "
            "with `hf auth login` if it is private"
        ) from error
    return Path(folder)
