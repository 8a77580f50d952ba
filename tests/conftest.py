"""Settings of all tests."""

from hypothesis import settings

# A deadline is a claim about the speed of the machine, and this suite makes none.
settings.register_profile("plaserve", deadline=None)
settings.load_profile("plaserve")
