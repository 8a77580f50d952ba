"""`python -m engines.trtllm_child`; see `main`."""

from __future__ import annotations

import sys

from engines.trtllm_child.main import main

sys.exit(main())
