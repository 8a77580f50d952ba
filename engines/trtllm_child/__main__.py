"""`python -m engines.trtllm_child`; see `main`.

Processes that TensorRT-LLM starts for its own (mpi4py's, multiprocessing's) import this module again under
another name, and must not become children.
"""

from __future__ import annotations

import sys

from engines.trtllm_child.main import main

if __name__ == "__main__":
    sys.exit(main())
