"""A process whose time of day is wrong: the clock of its membership, where time of day enters a fleet.

Shifted is `WallClock.time_s` and nothing else, so a jump can be made while the process runs and its monotonic
clock stays right. libfaketime would shift the whole process, but with the monotonic clock left alone Python's
`time.sleep` fails under it (0.9.10: EINVAL).
"""

from __future__ import annotations

import time
from pathlib import Path

from service.fleet.clock import WallClock


def shift(file: str) -> None:
    """From now on the time of day is off by the seconds that stand in `file`, whatever they are then."""
    path = Path(file)

    def time_s(clock: WallClock) -> float:
        return time.time() + float(path.read_text(encoding="ascii") or 0.0)

    setattr(WallClock, "time_s", time_s)  # noqa: B010 - a method is replaced
