"""Names of cache schemes, and the schemes that they stand for on a model.

- `adaptive-BITS`: the adaptive cache within so many true bits at the end of a window, calibrated;
  `adaptive-BITS-cold` may send values to 1.5 bits. After it, one of its protections may be left
  out: `-plain` no calibration, `-stripped` means alone, `-nosinks`, `-nowindow`; or one more added:
  `-outliers`, 1 % of the channels of keys exact.
- the codecs of this project, every row alike, and the schemes of kv_schemes.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from subten.bench.kv_lab import EXACT, Scheme
from subten.bench.kv_ours import KeyBasis, adaptive, protection_for
from subten.bench.kv_schemes import codec_scheme, comparison_schemes
from subten.calibration.keys_at_load import KeyCalibration
from subten.codecs import CODECS
from subten.config import ModelConfig
from subten.core import ConfigError, refuse
from subten.engine.resolve_adaptive import outlier_count

BUDGETS = ("4.5", "3.3", "2.7", "2.3-cold")
"""Of the bars that this project sets itself."""

PROTECTIONS = ("plain", "stripped", "nosinks", "nowindow", "outliers")
"""What `adaptive-BITS-...` may go without, or have more."""

OUTLIER_PERCENT = 1.0

MAIN = (
    "adaptive-4.5",
    "adaptive-3.3",
    "adaptive-2.7",
    "adaptive-2.3-cold",
    "kivi-4",
    "kivi-2",
    "quanto-4",
    "int4-g32",
)
"""What the bars compare."""

_ADAPTIVE = re.compile(r"adaptive-(?P<bits>\d+(\.\d+)?)(?P<cold>-cold)?(-(?P<changed>[a-z]+))?")


class Menu:
    """The schemes of a model for windows of one length."""

    def __init__(self, config: ModelConfig, *, window: int, calibration: KeyCalibration) -> None:
        self.config = config
        self.window = window
        self.calibration = calibration
        self._others: Mapping[str, Scheme] = {
            scheme.name: scheme for scheme in comparison_schemes(config.head_dim)
        }

    @property
    def names(self) -> list[str]:
        """All that the tables show, the most telling first."""
        plain = [name for name in CODECS if name not in ("fp32", "bf16")]
        ours = [f"adaptive-{budget}" for budget in BUDGETS]
        ours += [f"adaptive-3.3-{changed}" for changed in PROTECTIONS]
        return list(dict.fromkeys([*MAIN, *ours, *plain, *self._others]))

    def pick(self, names: str) -> list[Scheme]:
        """Schemes by `all`, `main` or a list of names with commas; ConfigError for another."""
        lists: Mapping[str, Sequence[str]] = {"all": self.names, "main": MAIN}
        wanted = [name.strip() for name in names.split(",")]
        wanted = [name for entry in wanted for name in lists.get(entry, [entry])]
        return [self.scheme(name) for name in dict.fromkeys(wanted)]

    def scheme(self, name: str) -> Scheme:
        """One scheme; ConfigError for an unknown name, or a budget that cannot be met."""
        if name == EXACT.name:
            return EXACT
        if name in self._others:
            return self._others[name]
        if name in CODECS:
            return codec_scheme(name, self.config.head_dim)
        match = _ADAPTIVE.fullmatch(name)
        changed = match["changed"] if match is not None else None
        if match is None or changed not in (None, *PROTECTIONS):
            others = [f"adaptive-BITS[-cold][-{'|'.join(PROTECTIONS)}]", *CODECS, *self._others]
            raise refuse(ConfigError, "scheme", name, f"all, main, {', '.join(others)}")
        head_dim = self.config.head_dim
        percent = OUTLIER_PERCENT if changed == "outliers" else None
        protection = protection_for(
            float(match["bits"]),
            self.config,
            num_tokens=self.window,
            noise_L=self.calibration.noise_L.tolist(),
            has_cold=match["cold"] is not None,
            num_outliers=outlier_count(percent, head_dim),
        )
        if changed == "nosinks":
            protection = replace(protection, sinks=0)
        elif changed == "nowindow":
            protection = replace(protection, window=0)
        basis = KeyBasis(
            calibration=None if changed == "plain" else self.calibration,
            is_turned=changed != "stripped",
        )
        return adaptive(name, protection, basis, head_dim=head_dim)
