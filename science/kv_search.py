"""Which protection of a low-bit cache is worth its bits: keys and values apart, then together.

    python science/kv_search.py TEXT CALIBRATION_TEXT [--window 1024] [--windows 1] [SCHEME ...]

Reads TEXT with the dense demo model in float32 under each scheme (all of them by default, see
`schemes`) and prints bits, perplexity and KL divergence from exact rows. CALIBRATION_TEXT, another
text, gives the mean keys and the transforms. A window of 1,024 takes about 10 s a scheme on one
core.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from subten.bench.kv_lab import Scheme, all_encoded, evaluate_schemes
from subten.bench.kv_schemes import (
    KeyCoder,
    RowCoder,
    alone,
    byte_norm,
    codec_scheme,
    comparison_schemes,
    ladder,
    lloyd_max_rows,
    protected,
    shaped_rows,
)
from subten.bench.report import text_table
from subten.calibration.keys import (
    KeyStatistics,
    KeyTransform,
    balanced_transform,
    key_statistics,
    shaped_transform,
)
from subten.weights.load import load_model
from subten.weights.upcycled import find_demo_gguf

CALIBRATION_WINDOW, CALIBRATION_WINDOWS = 2048, 6


def schemes(statistics: KeyStatistics, head_dim: int) -> list[Scheme]:
    """Every row of the table."""
    norm_bits = 16 / head_dim
    balanced, shaped = balanced_transform(statistics), shaped_transform(statistics)

    def rows(bits: int) -> tuple[RowCoder, float]:
        return partial(lloyd_max_rows, bits=bits), bits + norm_bits

    def key_rows(bits: int) -> tuple[KeyCoder, float]:
        coder, true_bits = rows(bits)
        return alone(coder), true_bits

    def shaped_keys(bits: int) -> tuple[KeyCoder, float]:
        return partial(shaped_rows, bits=bits), bits + norm_bits

    def exact_rows(x_D: torch.Tensor) -> torch.Tensor:
        return x_D

    exact = (exact_rows, 16.0)
    exact_keys = (alone(exact_rows), 16.0)

    def keys_only(
        name: str, key: tuple[KeyCoder, float], transform: KeyTransform | None, window: int = 0
    ) -> Scheme:
        return protected(
            name,
            keys=[key],
            values=[exact],
            tiers=all_encoded,
            statistics=statistics,
            transform=transform,
            sinks=4,
            window=window,
        )

    def values_only(name: str, bits: int, window: int = 0, sinks: int = 4) -> Scheme:
        return protected(
            name,
            keys=[exact_keys],
            values=[rows(bits)],
            tiers=all_encoded,
            statistics=statistics,
            sinks=sinks,
            window=window,
        )

    def both(
        name: str, keys: list[int], values: list[int], steps: list[tuple[int | None, int, int]]
    ) -> Scheme:
        return protected(
            name,
            keys=[shaped_keys(bits) for bits in keys],
            values=[rows(bits) for bits in values],
            tiers=ladder(steps),
            statistics=statistics,
            transform=shaped,
            sinks=4,
            window=64,
        )

    found = [codec_scheme(name, head_dim) for name in ("fp8", "int8", "int4", "int2")]
    found += comparison_schemes(head_dim)
    for bits in (2, 3, 4):
        found += [
            keys_only(f"K{bits} Hadamard", key_rows(bits), None),
            keys_only(f"K{bits} balanced", key_rows(bits), balanced),
            keys_only(f"K{bits} shaped", shaped_keys(bits), shaped),
            keys_only(f"K{bits} shaped, window 64", shaped_keys(bits), shaped, window=64),
            values_only(f"V{bits}", bits),
            values_only(f"V{bits}, window 64", bits, window=64),
            values_only(f"V{bits}, no sinks", bits, sinks=0),
        ]
    found += [
        both("K4 V4/V3", [4], [4, 3], [(6, 1, 1), (None, 1, 2)]),
        protected(
            "K3 V4/V2, byte norms",
            keys=[(partial(shaped_rows, bits=3, norm=byte_norm), 3 + norm_bits / 2)],
            values=[
                (partial(lloyd_max_rows, bits=bits, norm=byte_norm), bits + norm_bits / 2)
                for bits in (4, 2)
            ],
            tiers=ladder([(12, 1, 1), (None, 1, 2)]),
            statistics=statistics,
            transform=shaped,
            sinks=4,
            window=32,
        ),
        both("K3 V2", [3], [2], [(None, 1, 1)]),
        both("K3/K2 V2", [3, 2], [2], [(72, 1, 1), (None, 2, 1)]),
        both("K2 V2", [2], [2], [(None, 1, 1)]),
    ]
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("calibration_text", type=Path)
    parser.add_argument("schemes", nargs="*")
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
    ids = []
    wanted = (args.windows * args.window, CALIBRATION_WINDOWS * CALIBRATION_WINDOW)
    for path, count in zip((args.text, args.calibration_text), wanted, strict=True):
        ids.append(loaded.tokenizer.encode(path.read_text(encoding="utf-8")[: 8 * count])[:count])
    size = CALIBRATION_WINDOW
    parts = [ids[1][i : i + size] for i in range(0, len(ids[1]), size)]
    table = schemes(key_statistics(loaded.model, parts), loaded.model.config.head_dim)
    chosen = [scheme for scheme in table if not args.schemes or scheme.name in args.schemes]
    rows = evaluate_schemes(
        loaded.model,
        ids[0],
        chosen,
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
