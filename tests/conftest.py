"""Settings of the whole suite."""

from __future__ import annotations

import os

# Tiny tensors gain nothing from two threads, and on a busy machine two threads that wait for each other lose a lot.
os.environ.setdefault("OMP_NUM_THREADS", "1")
