"""Settings of all tests, and the real bundle for those that need it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A deadline is a claim about the speed of the machine, and this suite makes none.
# By default each run draws new examples. `ci` draws the same ones for the same code, so that a failure is one
# of the change and comes again.
settings.register_profile("plaserve", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "plaserve"))

BUNDLES = Path(__file__).parents[1] / "bundles"
_BUILD_TIMEOUT_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test asks first for the bundle waits for its build."""
    for item in items:
        if item.get_closest_marker("cpu_engine"):
            item.add_marker(pytest.mark.timeout(_BUILD_TIMEOUT_S))


@pytest.fixture(scope="session")
def bundle_dir() -> Path:
    """A bundle of the real model that is valid on this machine; kept between runs, quickly calibrated if new.

    Skips where the weights can't be downloaded or the engine's library is not installed. Anything else that
    keeps the bundle from being built is a failure.
    """
    pytest.importorskip("openvino")
    from build_scripts.runner import ensure_bundle
    from build_scripts.spec import FetchError

    try:
        return ensure_bundle(BUNDLES, quick=True)
    except FetchError as error:
        pytest.skip(f"no bundle of the real model: {error}")
