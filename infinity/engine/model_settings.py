"""Settings of transformers' models that training by units cannot use: key-value caches, and recomputation of their own."""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn


def settle_model(model: nn.Module, resources: ExitStack) -> tuple[str, ...]:
    """Turn off what would leave a unit behind its back, or run it once more; return what was done, in sentences.

    The settings are restored when the resources are closed. Other models have none of them.
    """
    notes = []
    configs = {id(config): config for part in model.modules() if (config := getattr(part, "config", None)) is not None}
    caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    if caching:
        notes.append("use_cache was turned off in the model's configuration: training keeps no key-value cache.")
    recomputing = [part for part in model.modules() if vars(part).get("gradient_checkpointing") is True]
    if recomputing:
        notes.append("Gradient checkpointing of the model was turned off: units are recomputed by infinity where needed.")
    for owner, setting in [(config, "use_cache") for config in caching] + [
        (p, "gradient_checkpointing") for p in recomputing
    ]:
        setattr(owner, setting, False)
        resources.callback(setattr, owner, setting, True)
    return tuple(notes)
