"""What the user asked for: strict, typed, DeepSpeed's JSON keys accepted, every value with its source. Torch-free."""

from infinity.config.batch import BatchSizes, resolve_batch
from infinity.config.config import Config
from infinity.config.layers import Layer, file_layer, flag_layer, set_layer
from infinity.config.resolve import SourcedValue

__all__ = ["BatchSizes", "Config", "Layer", "SourcedValue", "file_layer", "flag_layer", "resolve_batch", "set_layer"]
