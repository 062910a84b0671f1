"""Which windows a step reads: a function of (seed, step, micro-batch) alone, so resuming needs the step only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infinity.data.corpus import Corpus


@dataclass(frozen=True, slots=True)
class RandomWindows:
    """Draws sequences that start at independent uniform positions."""

    corpus: Corpus
    seed: int
    seq_len: int
    micro_batch_size: int

    def tokens(self, step: int, micro_batch: int) -> NDArray[np.uint8]:
        """Return uint8 [micro_batch_size, seq_len + 1]; the last column is the target of the one before it."""
        length = self.seq_len + 1
        bits = np.random.Philox(key=[self.seed, 0], counter=[0, 0, micro_batch, step])  # its stream is fixed by NEP 19
        starts = bits.random_raw(self.micro_batch_size) % np.uint64(self.corpus.num_bytes - length + 1)
        return np.stack([self.corpus.read(int(start), length) for start in starts])


@dataclass(frozen=True, slots=True)
class EvenWindows:
    """Spreads a fixed number of batches evenly over the corpus: the same ones at every evaluation."""

    corpus: Corpus
    seq_len: int
    micro_batch_size: int
    num_batches: int

    def tokens(self, batch: int) -> NDArray[np.uint8]:
        """Return uint8 [micro_batch_size, seq_len + 1] of batch 0 .. num_batches - 1."""
        length = self.seq_len + 1
        num_windows = self.num_batches * self.micro_batch_size
        span = self.corpus.num_bytes - length
        first = batch * self.micro_batch_size
        starts = [span * (first + row) // max(1, num_windows - 1) for row in range(self.micro_batch_size)]
        return np.stack([self.corpus.read(start, length) for start in starts])
