"""What a fake executor does wrong. Everything is off unless a test asks for it.

Each vice is something that was reported of TensorRT-LLM or that its interface allows; the adapters must
survive all of them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

NEVER = -1


@dataclass(frozen=True, slots=True)
class Vices:
    """Counts are 0 and switches False where the executor behaves.

    drained_stats: every other drain of the iteration statistics brings nothing, and what it held is gone.
    dup_first_token: a generation-only answer begins with the token that the context side gave.
    late_transfer: iterations that the KV of a hand-over takes; NEVER: it does not come.
    leak_on_cancel: a cancelled request keeps its blocks for ever.
    crash_on_abort: cancelling a streaming request ends the executor.
    hang: no more iterations after so many; it still takes requests.
    lost_events: every n-th event of the prefix cache is dropped, its id is not given again.
    split: at most so many context requests in an iteration.
    merge: an enqueue waits for a second one, for one step at most.
    evict_between_parts: when a request ends, all that is cached and idle is evicted.
    delay_shared_prefix: a prompt waits while another computes a block that it could reuse.
    counts_cached: tokens that are taken from the cache count against max_num_tokens too. The sources that
        were read do so (microBatchScheduler): without chunked context a prompt of more tokens can't run
        however much of it is cached, with it the prompts behind may wait an iteration.
    error_response: every n-th request is answered with an error.
    end_id_left_out: the end token is not among the output tokens.
    late_perf_metrics: reuse is told with the last response only, not with the first.
    duplicate_final: the last response comes twice, the second time without tokens.
    """

    drained_stats: bool = False
    dup_first_token: bool = False
    late_transfer: int = 0
    leak_on_cancel: bool = False
    crash_on_abort: bool = False
    hang: int = 0
    lost_events: int = 0
    split: int = 0
    merge: bool = False
    evict_between_parts: bool = False
    delay_shared_prefix: bool = False
    counts_cached: bool = False
    error_response: int = 0
    end_id_left_out: bool = False
    late_perf_metrics: bool = False
    duplicate_final: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Vices:
        """Raises ValueError for a vice that does not exist."""
        data = json.loads(text) if text else {}
        unknown = set(data) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"no such vice: {', '.join(sorted(unknown))}")
        return cls(**data)


VIRTUOUS = Vices()
