"""Serving through a Triton server that hosts the same TensorRT-LLM engines.

The server runs the executor; this side is an `ExecutorEngine` over a `TritonLink`. What differs from the
adapter that owns its executor:

- No events of the prefix cache and no iteration statistics come over the wire. What is cached is therefore
  what our own calls left there, until a response says that less was found (`kv_cache_reused_blocks`): that is
  how evictions are learnt. Leaked blocks, and how a pass was split into iterations, are not known.
- A pass is as many streams as it has calls. The server's queue delay makes it likely, not certain, that they
  reach the executor together.
- KV of a context-only call that nobody pulls can't be given up: the backend forgets the request's id with its
  last response (read in a source near 1.x), so a stop request no longer reaches it. Pool and time limits of
  the server must allow for that.
- In that source the backend moves KV over MPI, so both sides of a hand-over are models of one server in
  orchestrator mode, reached by two links [not verified].
- Nothing is known of other clients of the same model: give it to this service alone.
"""

from __future__ import annotations

from engines.executor.engine import ExecutorEngine
from engines.executor.types import ExecutorRole, ExecutorSettings
from engines.profiles import Profiles
from engines.triton_link import TritonLink
from engines.triton_options import TritonOptions
from engines.trtllm_profiles import stock_profiles
from engines.types import Capabilities, Chunking, DecodeMode, Layout, Padding


def open_engine(
    options: TritonOptions, settings: ExecutorSettings | None = None, profiles: Profiles | None = None
) -> ExecutorEngine:
    """Connect, check the server and return a running engine; the caller closes it.

    profiles: T-classes of the engine there; None: those of a stock build with several profiles. Raises
    LinkLost when the server does not come up in time, BackendUnavailable naming what does not fit.
    """
    engine = ExecutorEngine(
        TritonLink(options),
        capabilities(options),
        profiles or stock_profiles(options.pass_tokens_max),
        settings,
        options.role,
        fingerprint=options.fingerprint,
    )
    try:
        engine.start()
    except BaseException:
        engine.close()
        raise
    return engine


def capabilities(options: TritonOptions) -> Capabilities:
    """Of any TensorRT-LLM executor: packed, never padded, parts by block reuse, decode beside prefill."""
    prefill_only = options.role is ExecutorRole.CONTEXT
    return Capabilities(
        layout=Layout.PACKED,
        padding=Padding.NOTHING,
        chunking=Chunking.PREFIX_REUSE,
        merges_lanes=True,
        decode=DecodeMode.NONE if prefill_only else DecodeMode.BESIDE,
        requests_max=options.requests_max,
        context_tokens_max=options.context_tokens_max,
        block_tokens=options.block_tokens,
        kv_blocks_total=options.kv_blocks,
    )
