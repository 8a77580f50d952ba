"""What one worker holds: the pass that runs and at most one staged behind it.

    dispatch         start_next        finish
    ---------> staged ---------> running ---------> (answered)
                  |
                  | revoke (before the start only)
                  v
              (answered)

Every pass enters as staged, also one that an idle worker will start in the same turn, so there is one way
to the engine. Both drivers use this class: the asyncio worker and the virtual-time kernel thus agree on
when a pass can still be revoked. A revoke that comes too late is no error, because the worker may have
started the pass while the command was on its way; anything else out of order is a broken scheduler and
raises.
"""

from __future__ import annotations

from engines.types import Pass


class SlotError(RuntimeError):
    """A command that the worker's state does not allow."""


class WorkerSlot:
    """The passes of one worker; see the module text. Not thread-safe."""

    __slots__ = ("_running", "_staged")

    def __init__(self) -> None:
        self._running: Pass | None = None
        self._staged: Pass | None = None

    @property
    def running(self) -> Pass | None:
        return self._running

    @property
    def staged(self) -> Pass | None:
        """The pass that `start_next` will start; still revocable."""
        return self._staged

    def dispatch(self, pass_: Pass, staged: bool) -> None:
        """Take a pass. `staged=False` claims that the worker is idle.

        With `staged=True` the worker may be idle too: the pass in front may just have finished.
        Raises SlotError when a pass is staged already, or the claim is wrong.
        """
        if self._staged is not None:
            raise SlotError(f"pass {pass_.pass_id}: pass {self._staged.pass_id} is already staged")
        if self._running is not None and not staged:
            raise SlotError(
                f"pass {pass_.pass_id}: pass {self._running.pass_id} is running; dispatch it as staged"
            )
        self._staged = pass_

    def revoke(self, pass_id: int) -> bool:
        """Drop the staged pass of that id; False when it has started or is not known (any more)."""
        if self._staged is None or self._staged.pass_id != pass_id:
            return False
        self._staged = None
        return True

    def start_next(self) -> Pass | None:
        """Begin the staged pass if nothing runs, and return it; None when there is nothing to begin."""
        if self._running is not None or self._staged is None:
            return None
        self._running, self._staged = self._staged, None
        return self._running

    def finish(self) -> Pass:
        """End the running pass, finished or failed, and return it. Raises SlotError when none runs."""
        if self._running is None:
            raise SlotError("finish: no pass is running")
        done, self._running = self._running, None
        return done
