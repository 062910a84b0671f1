"""Trains models larger than GPU memory and RAM on one machine. `import infinity` loads no torch: names load when used."""

from __future__ import annotations

from importlib import import_module

from infinity.not_offered import missing

__version__ = "0.1.0"

_HOMES = {
    "CheckpointError": "infinity.errors",
    "Config": "infinity.config",
    "ConfigError": "infinity.errors",
    "DataError": "infinity.errors",
    "Diverged": "infinity.errors",
    "DoesNotFit": "infinity.errors",
    "Engine": "infinity.engine",
    "InfinityError": "infinity.errors",
    "ModelError": "infinity.errors",
    "NotOffered": "infinity.errors",
    "OverBudget": "infinity.errors",
    "Placement": "infinity.placement",
    "StepResult": "infinity.engine",
    "StorageError": "infinity.errors",
    "add_config_arguments": "infinity.engine",
    "init_distributed": "infinity.engine",
    "initialize": "infinity.engine",
}
# Parts of the surface that ZeRO's users reach as modules.
_MODULES = {"comm": "infinity.comm", "utils": "infinity.utils", "zero": "infinity.zero"}

__all__ = [*sorted({*_HOMES, *_MODULES}), "__version__"]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(_MODULES[name])
    home = _HOMES.get(name)
    if home is None:
        raise missing("infinity", name)
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
