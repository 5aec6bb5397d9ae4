"""Checkpoints: Hugging Face folders, GGUF files and hub names, loaded into a model."""

from __future__ import annotations

from subten.weights.load import LoadedModel as LoadedModel
from subten.weights.load import load_model as load_model
