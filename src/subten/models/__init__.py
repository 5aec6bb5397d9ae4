"""Model families: the table from a Hugging Face architecture name to how it is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from subten.config import ModelConfig
from subten.models.config_reader import ConfigReader
from subten.models.family import Family
from subten.models.llama import LLAMA
from subten.models.mixtral import MIXTRAL
from subten.models.qwen3_moe import QWEN3_MOE

logger = logging.getLogger(__name__)

MODELS: Mapping[str, Family] = {
    family.architecture: family for family in (LLAMA, MIXTRAL, QWEN3_MOE)
}
"""Architecture, as config.json writes it, to its family."""


def read_config(values: Mapping[str, Any], *, source: str) -> tuple[Family, ModelConfig]:
    """The family and the checked shape of a config.json; `source` names the file in errors.

    Raises CheckpointError for an unknown architecture and for any key that is missing, unknown or
    contradictory. Code named in the file is never run.
    """
    reader = ConfigReader(values, source)
    allowed = f"allowed: one of {', '.join(MODELS)}"
    names = reader.raw("architectures", allowed)
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or name not in MODELS:
        raise reader.error("architectures", names, allowed)
    family = MODELS[name]
    config = family.read_config(reader)
    unread = sorted(values.keys() - reader.read_keys)
    logger.debug("%s: keys that do not matter here: %s", source, ", ".join(unread))
    return family, config
