"""A process that schedules looks for garbage seldom, and what was loaded before is not looked at."""

from __future__ import annotations

import gc

from service.garbage import YOUNG_OBJECTS, collect_seldom


def test_it_looks_seldom_and_past_what_is_loaded() -> None:
    before = gc.get_threshold()
    try:
        collect_seldom()
        assert gc.get_threshold()[0] == YOUNG_OBJECTS
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
