"""Names of what only the processes of a fleet have; see `names` for the rest and for how names are made.

Requests and passes are booked by the scheduler of a shard under the names of one process. What front ends and
workers count of the same requests has names of its own, or every sum over a fleet would count them twice. A
name that is of an instance may be told by two processes (KV blocks, incidents): of those take the max.
"""

from __future__ import annotations

from service.telemetry.names import ITL, TTFT, Metric, MetricKind

WANTED, REAL = "wanted", "real"

_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

# --- front ends -------------------------------------------------------------------------------------------

CALLS = Metric("plaserve_calls_total", _C, "Calls of clients that ended, by gRPC status.", ("method", "code"))
CALLS_IN_FLIGHT = Metric("plaserve_calls_in_flight", _G, "Calls of clients that have not ended.", ("method",))
CLIENT_TTFT = Metric(
    "plaserve_client_ttft_seconds",
    _H,
    "Arrival of a call to its first token at the front end, in seconds; tries that were lost are in it.",
    ("lane",),
    TTFT.buckets,
)
CLIENT_ITL = Metric(
    "plaserve_client_itl_seconds",
    _H,
    "Gap between two tokens of a request at the front end, in seconds; workers send several at a time.",
    ("lane",),
    ITL.buckets,
)
SENT_AGAIN = Metric(
    "plaserve_requests_sent_again_total",
    _C,
    "Requests sent to another scheduler: theirs was lost before a token came, or its shard refused them.",
)
SCHEDULER_LINK = Metric(
    "plaserve_scheduler_link_up", _G, "1 while the front end has the active scheduler.", ("shard",)
)
TOKEN_LINK = Metric(
    "plaserve_token_link_up",
    _G,
    "1 while the front end hears tokens from the worker.",
    ("instance_id",),
)

# --- workers ----------------------------------------------------------------------------------------------

WORKER_PASSES = Metric("plaserve_worker_passes_total", _C, "Passes that the engine ended.", ("kind",))
WORKER_FAILED = Metric("plaserve_worker_passes_failed_total", _C, "Passes that failed in the engine.")
WORKER_TOKENS = Metric(
    "plaserve_worker_tokens_total", _C, "Tokens that passes computed in the engine.", ("kind",)
)
WORKER_ENGINE = Metric("plaserve_worker_engine_seconds_total", _C, "Seconds in passes.", ("kind",))
WORKER_LINK = Metric("plaserve_worker_link_up", _G, "1 while a scheduler has its stream to the worker.")
WORKER_EPOCH = Metric("plaserve_worker_link_epoch", _G, "Epoch of the scheduler that is obeyed; 0: none yet.")
WORKER_STREAMS = Metric(
    "plaserve_worker_link_streams_total", _C, "Streams that schedulers began; all but the takeovers go on."
)
WORKER_TAKEOVERS = Metric("plaserve_worker_takeovers_total", _C, "Streams that ended all that was before.")
STREAM_BACKLOG = Metric(
    "plaserve_stream_backlog_tokens", _G, "Tokens that front ends have not acknowledged, over all of them."
)
FRONT_ENDS_CUT = Metric("plaserve_front_ends_cut_total", _C, "Front ends that were cut off as too slow.")
WORKER_ROLE = Metric("plaserve_worker_role", _G, "1 for the role that the worker has.", ("role",))

# --- controllers ------------------------------------------------------------------------------------------

PRESSURE = Metric(
    "plaserve_pool_pressure",
    _G,
    "Pressure of a pool (p90 over its instances); absent until it was looked at twice.",
    ("shard", "role"),
)
POOL_SIZE = Metric(
    "plaserve_pool_instances",
    _G,
    "Workers of a pool: by the role that is wanted, and by the one that they report.",
    ("shard", "role", "which"),
)
MOVES = Metric(
    "plaserve_controller_moves_total",
    _C,
    "Moves of role or shard that this controller wrote, by why.",
    ("reason",),
)
LEADS = Metric("plaserve_controller_leads", _G, "1 while this controller leads.")
MEMBERSHIP_AGE = Metric(
    "plaserve_membership_age_seconds",
    _G,
    "Age of what this process knows of the fleet, in seconds; 0 while membership is there.",
)

FLEET_METRICS = tuple(v for v in list(globals().values()) if isinstance(v, Metric) and v not in (ITL, TTFT))

# --- spans ------------------------------------------------------------------------------------------------

SPAN_FRONT_END = "frontend"  # a call at a front end; SERVER kind, child of the caller's span
SPAN_EXECUTE = "execute"  # a prefill pass on a worker, once for each traced request in it; child of `request`
FLEET_SPANS = (SPAN_FRONT_END, SPAN_EXECUTE)
EVENT_SENT_AGAIN = "sent again"  # on `frontend`
TRIES = "plaserve.tries"  # on `frontend`: schedulers that it was sent to
