"""Train the job and switch checksums on and off in turn, in one process and on the same files; report every step's time."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import infinity_mlp
from mlp_job import fixed_batch

from infinity.engine import build
from infinity.store.checksums import PartChecksums, open_checksums
from infinity.store.store import Store


def remember_stores() -> list[Store]:
    """Return a list that every store which is opened from now on joins."""
    stores: list[Store] = []
    real = build.open_store

    def open_and_remember(**options: Any) -> Store:
        stores.append(real(**options))
        return stores[-1]

    build.open_store = open_and_remember
    return stores


def switch(store: Store, on: bool) -> None:
    """Let everything on NVMe be checked from its next write on, or not at all. Nothing may be in flight."""
    for cell in store._swapped():
        cell._sums = PartChecksums(store._checking if on else None, {})


def main() -> None:
    """Run `--pairs` pairs of phases, the order alternating, and print the times as one line of JSON."""
    parser = infinity_mlp.job_options(__doc__)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="measured in each phase, after one that is not")
    arguments = parser.parse_args()

    stores = remember_stores()
    rows, target = fixed_batch()
    phases: list[dict[str, object]] = []
    with infinity_mlp.open_job(arguments) as engine:
        for pair in range(arguments.pairs):
            for on in (True, False) if pair % 2 == 0 else (False, True):
                engine.synchronize()
                switch(stores[0], on)
                seconds, cpu_seconds = [], []
                for _ in range(1 + arguments.steps):  # after the first one every checksum is known
                    begin, cpu_begin = time.perf_counter(), time.process_time()
                    engine.train_batch([(rows, target)])
                    seconds.append(time.perf_counter() - begin)
                    cpu_seconds.append(time.process_time() - cpu_begin)
                phases.append({"pair": pair, "on": on, "step_seconds": seconds[1:], "cpu_seconds": cpu_seconds[1:]})
                print(f"pair {pair + 1}, {'on' if on else 'off'}: {seconds[1:]}", file=sys.stderr, flush=True)
        counters = engine.recorder.counters()
        engine.synchronize()
    print(json.dumps({"kernel": open_checksums().name, "phases": phases, "counters": counters}), flush=True)


if __name__ == "__main__":
    main()
