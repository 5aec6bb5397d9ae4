"""Which protection of a low-bit cache is worth its bits: keys and values apart.

    python science/kv_search.py TEXT [--window 1024] [--windows 1] [--calibration TEXT] [SCHEME ...]

Reads TEXT with the dense demo model in float32 with keys alone, or values alone, encoded (all
schemes by default, see `schemes`) and prints bits, perplexity and KL divergence from exact rows.
Whole schemes, ours and others', are in `subten eval kv --scheme`. A window of 1,024 takes about
20 s a scheme on one core.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from subten.bench.kv_lab import EXACT_BITS, Scheme, all_encoded, evaluate_schemes
from subten.bench.kv_ours import BASE, COLD, FINE, KeyBasis, shaped, value_versions
from subten.bench.report import text_table
from subten.calibration.keys_at_load import KeyCalibration, calibrate_keys, shipped_text
from subten.calibration.rows import LayerRows
from subten.codecs.mixed import MixedFormat
from subten.codecs.rotation import hadamard
from subten.codecs.shaped import WIDTHS
from subten.core import PAGE_SIZE
from subten.weights.load import load_model
from subten.weights.upcycled import find_demo_gguf

SINKS = 4


def schemes(calibration: KeyCalibration, head_dim: int) -> list[Scheme]:
    """Every row of the table."""
    fmt, elements = MixedFormat(head_dim=head_dim), PAGE_SIZE * head_dim / 8
    bases = {
        "Hadamard": KeyBasis(),
        "stripped": KeyBasis(calibration=calibration, is_turned=False),
        "shaped": KeyBasis(calibration=calibration),
    }
    found = []
    for width in WIDTHS:
        for name, basis in bases.items():
            bits = fmt.k_bytes(width) / elements
            found.append(_keys(f"K{width} {name}", width, basis, bits=bits))
        shaped_bits = fmt.k_bytes(width) / elements
        name = f"K{width} shaped, window 32"
        found.append(_keys(name, width, bases["shaped"], bits=shaped_bits, window=32))
    sizes = {FINE: fmt.base_bytes + fmt.fine_bytes, BASE: fmt.base_bytes, COLD: fmt.cold_bytes}
    for name, kind in (("V4", FINE), ("V2", BASE), ("V1.5", COLD)):
        bits = sizes[kind] / elements
        found.append(_values(name, kind, bits=bits))
        found.append(_values(f"{name}, window 32", kind, bits=bits, window=32))
        found.append(_values(f"{name}, no sinks", kind, bits=bits, sinks=0))
    return found


def _keys(name: str, width: int, basis: KeyBasis, *, bits: float, window: int = 0) -> Scheme:
    def encode(rows: LayerRows) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        stored_GTD, shift_GTD, inverse_DD = basis.turned(rows)
        coded_GTD = shaped(stored_GTD, width, basis.feedback(rows.layer))
        return [rows.key_GTD, coded_GTD @ inverse_DD + shift_GTD], [rows.value_GTD] * 2

    return Scheme(
        name=name,
        ours=True,
        encode=encode,
        key_bits=(EXACT_BITS, bits),
        value_bits=(EXACT_BITS, EXACT_BITS),
        tiers=all_encoded,
        sinks=SINKS,
        key_window=window,
        is_beside=True,
    )


def _values(name: str, kind: int, *, bits: float, window: int = 0, sinks: int = SINKS) -> Scheme:
    def encode(rows: LayerRows) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        rotation_DD = hadamard(rows.value_GTD.shape[-1], rows.value_GTD.device)
        coded_GTD = value_versions(rows.value_GTD @ rotation_DD, [kind])[1] @ rotation_DD.mT
        return [rows.key_GTD] * 2, [rows.value_GTD, coded_GTD]

    return Scheme(
        name=name,
        ours=True,
        encode=encode,
        key_bits=(EXACT_BITS, EXACT_BITS),
        value_bits=(EXACT_BITS, bits),
        tiers=all_encoded,
        sinks=sinks,
        value_window=window,
        is_beside=True,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("schemes", nargs="*")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=1)
    args = parser.parse_args()
    loaded = load_model(
        str(find_demo_gguf()),
        device=torch.device("cpu"),
        dtype="float32",
        backend="torch",
        kv_cache_dtype="bf16",
    )
    assert loaded.tokenizer is not None
    text = args.calibration.read_text(encoding="utf-8") if args.calibration else shipped_text()
    calibration = calibrate_keys(loaded.model, loaded.tokenizer.encode(text), folder=None)
    count = args.windows * args.window
    # A token has fewer than 8 characters in the mean.
    ids = loaded.tokenizer.encode(args.text.read_text(encoding="utf-8")[: 8 * count])[:count]
    table = schemes(calibration, loaded.config.head_dim)
    rows = evaluate_schemes(
        loaded.model,
        ids,
        [scheme for scheme in table if not args.schemes or scheme.name in args.schemes],
        window=args.window,
        progress=lambda share: print(f"\r{share:4.0%}", end="", file=sys.stderr, flush=True),
    )
    header = ("scheme", "bits", "bits mean", "ppl %", "KLD", "KLD p99.9", "top-1")
    cells = [
        (
            row.scheme,
            f"{row.true_bits:.3f}",
            f"{row.true_bits_mean:.3f}",
            f"{100 * (row.ppl_ratio - 1):+.2f}",
            f"{row.kld_mean:.4f}",
            f"{row.kld_p999:.2f}",
            f"{row.top1_agreement:.4f}",
        )
        for row in rows
    ]
    print(text_table(header, cells))


if __name__ == "__main__":
    main()
