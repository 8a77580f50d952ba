"""A worker process for the tests: prints its address, serves until it is killed or its parent is gone."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from link_rig import a_worker

from service.runtime.worker import TimedRunner


async def main(name: str, time_scale: float) -> None:
    async with a_worker(name, runner=lambda model: TimedRunner(model, time_scale)) as worker:
        sys.stdout.write(worker.address + "\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
