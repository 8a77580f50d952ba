"""A tensorrt_llm of two hundred lines for child processes that misbehave: `write(directory)` makes it.

What it does is chosen by variables of the environment: STUB_VERSION, and STUB_VICE, one of the names in
VICES. Its executor answers a call with the numbers 100, 101 ... at once; everything else about it is made up.
"""

from __future__ import annotations

from pathlib import Path

VICES = (
    "die_at_start",  # prints and exits with code 7
    "slow_start",  # takes a minute
    "fewer_blocks",  # the pool has ten blocks less than asked
    "other_blocks",  # blocks of 8 tokens
    "segfault_on_cancel",
    "hang",  # answers the first request, then nothing, and holds the response thread
    "garbage",  # writes what is no message to the parent's socket
    "hang_at_end",  # shutdown never comes back
    "refuse",  # refuses requests of more than 100 tokens
    "grandchild",  # leaves a process of its own behind
    "escaped_grandchild",  # one that has left its group, holds its output and prints a little later
    "flood",  # prints 4 MB for each enqueue
    "no_stats",
    "fork_and_die",  # of the second request: a fork of it lives on and holds the socket
)

_PACKAGE = """
import os
__version__ = os.environ.get("STUB_VERSION", "1.2.1")
vice = os.environ.get("STUB_VICE", "")
print("stub of TensorRT-LLM", __version__, vice, flush=True)
if vice == "die_at_start":
    import sys
    print("[TensorRT-LLM][ERROR] out of luck", file=sys.stderr, flush=True)
    os._exit(7)
if vice == "slow_start":
    import time
    time.sleep(60)
if vice == "escaped_grandchild":
    import subprocess, sys
    later = "import time; time.sleep(2.3); print('late')"
    subprocess.Popen([sys.executable, "-c", later], start_new_session=True)
if vice == "grandchild":
    import subprocess, sys
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    print("left behind", left.pid, flush=True)
"""

_EXECUTOR = """
import gc, json, os, signal, threading, time
from enum import Enum
from multiprocessing.connection import Connection
from types import SimpleNamespace

VICE = os.environ.get("STUB_VICE", "")


def enum(name, *members):
    return Enum(name, {member: number for number, member in enumerate(members)})


ModelType = enum("ModelType", "DECODER_ONLY")
BatchingType = enum("BatchingType", "STATIC", "INFLIGHT")
CapacitySchedulerPolicy = enum("CapacitySchedulerPolicy", "MAX_UTILIZATION", "GUARANTEED_NO_EVICT")
FinishReason = enum("FinishReason", "NOT_FINISHED", "END_ID", "LENGTH", "TIMED_OUT", "CANCELLED")
RequestType = enum(
    "RequestType",
    "REQUEST_TYPE_CONTEXT_AND_GENERATION", "REQUEST_TYPE_CONTEXT_ONLY", "REQUEST_TYPE_GENERATION_ONLY",
)


class Record(SimpleNamespace):
    pass


class ContextPhaseParams:
    def __init__(self, first_gen_tokens, req_id, opaque_state=None, draft_tokens=None):
        self.first_gen_tokens, self.req_id = first_gen_tokens, req_id
        self.opaque_state, self.draft_tokens = opaque_state, draft_tokens


class KvCacheRetentionConfig(Record):
    class TokenRangeRetentionConfig(Record):
        pass


class ExecutorConfig(Record):
    pass


ExtendedRuntimePerfKnobConfig = SchedulerConfig = KvCacheConfig = Record
SamplingConfig = OutputConfig = Record


class Request(Record):
    def __init__(self, *, input_token_ids, **rest):
        if VICE == "refuse" and len(input_token_ids) > 100:
            raise ValueError("input of %d tokens exceeds maximum 100" % len(input_token_ids))
        super().__init__(input_token_ids=input_token_ids, **rest)


class Response:
    def __init__(self, request_id, result=None, error_msg=None):
        self.request_id, self._result, self._error = request_id, result, error_msg

    def has_error(self):
        return self._error is not None

    @property
    def error_msg(self):
        return self._error

    @property
    def result(self):
        return self._result


class Stats:
    def __init__(self, raw):
        self._raw = raw

    def to_json_str(self):
        return json.dumps(self._raw)


class Manager:
    def __init__(self, blocks):
        self._events = [Record(event_id=0, data=Record(num_blocks_per_cache_level=[blocks, 0]))]

    def get_latest_events(self, timeout_ms=None):
        assert timeout_ms is not None
        events, self._events = self._events, []
        return events


class Executor:
    def __init__(self, model_path, model_type, executor_config):
        pool = executor_config.kv_cache_config
        self._tokens = 8 if VICE == "other_blocks" else int(os.environ.get("STUB_BLOCK_TOKENS", "32"))
        self._blocks = pool.max_tokens // 32 - (10 if VICE == "fewer_blocks" else 0)
        self._manager = Manager(self._blocks)
        self._waiting, self._stats, self._number, self._done = [], [], 0, 0
        self._condition = threading.Condition()
        self._stopped = set()

    def get_kv_cache_event_manager(self):
        return None if VICE == "no_stats" else self._manager

    def enqueue_requests(self, requests):
        if VICE == "fork_and_die" and self._done and os.fork():
            os._exit(9)
        if VICE == "fork_and_die" and self._done:
            time.sleep(300)
        if VICE == "flood":
            print(("x" * 999 + chr(10)) * 4_000, flush=True)
        ids = []
        with self._condition:
            for request in requests:
                self._number += 1
                ids.append(self._number)
                self._waiting.append((self._number, request))
            self._stats.append(Stats({
                "iter": self._number, "iterLatencyMS": 1.5, "numActiveRequests": len(requests),
                "numQueuedRequests": 0,
                "inflightBatchingStats": {
                    "numContextRequests": len(requests), "numGenRequests": 0,
                    "numCtxTokens": sum(len(r.input_token_ids) for r in requests),
                },
                "kvCacheStats": {
                    "maxNumBlocks": self._blocks, "freeNumBlocks": self._blocks, "usedNumBlocks": 0,
                    "tokensPerBlock": self._tokens,
                },
            }))
            self._condition.notify()
        return ids

    def await_responses(self, timeout):
        if VICE == "hang" and self._done:
            time.sleep(3600)
        with self._condition:
            if not self._waiting:
                self._condition.wait(timeout.total_seconds())
            taken, self._waiting = self._waiting, []
        if VICE == "garbage" and taken and self._done:
            next(o for o in gc.get_objects() if isinstance(o, Connection)).send_bytes(b"{half a mess")
        self._done += len(taken)
        found = []
        for number, request in taken:
            for n in range(request.max_tokens):
                last = n + 1 == request.max_tokens
                if not request.streaming and not last:
                    continue
                tokens = [100 + n] if request.streaming else [100 + i for i in range(n + 1)]
                context = request.type is RequestType.REQUEST_TYPE_CONTEXT_ONLY
                params = ContextPhaseParams(tokens, number, b"where") if context else None
                metrics = Record(kv_cache_metrics=Record(num_reused_blocks=1))
                reason = FinishReason.NOT_FINISHED if context else FinishReason.LENGTH
                found.append(Response(number, Record(
                    is_final=last, output_token_ids=[tokens], context_phase_params=params,
                    finish_reasons=[reason], request_perf_metrics=metrics,
                )))
        return found

    def get_latest_iteration_stats(self):
        stats, self._stats = self._stats, []
        return [] if VICE == "no_stats" else stats

    def cancel_request(self, id):
        if VICE == "segfault_on_cancel":
            print("Signal: Segmentation fault", flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)

    def shutdown(self):
        if VICE == "hang_at_end":
            time.sleep(3600)
"""


def write(directory: Path) -> Path:
    """Makes the package in `directory`, which goes on the child's PYTHONPATH."""
    package = directory / "tensorrt_llm"
    bindings = package / "bindings" / "executor"
    bindings.mkdir(parents=True)
    (package / "__init__.py").write_text(_PACKAGE)
    (package / "bindings" / "__init__.py").write_text("")
    (bindings / "__init__.py").write_text(_EXECUTOR)
    return directory
