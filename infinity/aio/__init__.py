"""Asynchronous reads and writes of (file, offset, address, length); knows neither tensors nor ZeRO."""
