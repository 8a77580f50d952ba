import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# No law here is about speed, and a shared machine stalls: examples have no deadline.
settings.register_profile("core", deadline=None)
settings.load_profile("core")
