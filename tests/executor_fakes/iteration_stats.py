"""The statistics of one iteration, under the keys of `IterationStats.to_json_str`.

A used block is one that a request holds; blocks that are only cached count as free.
"""

from __future__ import annotations

from typing import Any

from .pool import FakePool


def iteration_stats(
    pool: FakePool,
    *,
    number: int,
    contexts: int,
    context_tokens: int,
    decoding: int,
    active: int,
    queued: int,
    completed: int,
    max_batch_size: int,
    max_num_tokens: int,
) -> dict[str, Any]:
    lookups = pool.reused + pool.missed
    return {
        "iter": number,
        "iterLatencyMS": 1.0,
        "timestamp": f"iteration {number}",
        "newActiveRequestsQueueLatencyMS": 0.0,
        "numNewActiveRequests": contexts,
        "numActiveRequests": active,
        "numQueuedRequests": queued,
        "numCompletedRequests": completed,
        "maxNumActiveRequests": max_batch_size,
        "maxBatchSizeStatic": max_batch_size,
        "maxBatchSizeRuntime": max_batch_size,
        "maxBatchSizeTunerRecommended": 0,
        "maxNumTokensStatic": max_num_tokens,
        "maxNumTokensRuntime": max_num_tokens,
        "maxNumTokensTunerRecommended": 0,
        "gpuMemUsage": 0,
        "cpuMemUsage": 0,
        "pinnedMemUsage": 0,
        "inflightBatchingStats": {
            "numScheduledRequests": contexts + decoding,
            "numContextRequests": contexts,
            "numGenRequests": decoding,
            "numPausedRequests": 0,
            "numCtxTokens": context_tokens,
            "microBatchId": 0,
            "avgNumDecodedTokensPerIter": 1.0 if decoding else 0.0,
        },
        "kvCacheStats": {
            "maxNumBlocks": pool.blocks_total,
            "freeNumBlocks": pool.takeable,
            "usedNumBlocks": pool.held,
            "tokensPerBlock": pool.block_tokens,
            "allocTotalBlocks": pool.allocated + pool.reused,
            "allocNewBlocks": pool.allocated,
            "reusedBlocks": pool.reused,
            "missedBlocks": pool.missed,
            "cacheHitRate": pool.reused / lookups if lookups else 0.0,
        },
    }
