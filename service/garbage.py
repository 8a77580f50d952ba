"""How often a process that schedules looks for cyclic garbage.

By default Python looks through the young objects after every 700 new ones, and through all objects whenever
a quarter more have come. With 10,000 requests queued that takes up to a fifth of the core's time, and the
longest look stops it for some 100 ms (`docs/scale.md`). What a request leaves behind dies by its reference
count, so looking as seldom as here leaves nothing lying about. What was loaded before the start stays, and is
not looked at.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 10_000  # new ones between two looks


def collect_seldom() -> None:
    """For the rest of this process; call it when all is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
