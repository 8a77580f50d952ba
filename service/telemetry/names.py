"""Every metric, span and attribute name, with unit and meaning. Nothing is named at the call site.

Metrics follow Prometheus: base units, the unit last, counters end in `_total`. Labels are bounded: lanes,
kinds, reasons, outcomes, T-classes and instances; a tenant or session is never one.

Span attributes are those of the OpenTelemetry GenAI semantic conventions where there is one for the thing,
and `plaserve.*` else. The GenAI names are spelled out here because their Python constants live in a module
that is marked incubating and moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family. `buckets`: upper edges of a histogram, in the unit of the name."""

    name: str
    kind: MetricKind
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


NO_LANE = "none"  # lane label of requests refused at the door, before they had a lane
OVER = "over"  # t_class label of a pass larger than the largest T-class
MET, MISSED = "met", "missed"
COMPUTED, REUSED = "computed", "reused"
AS_PLANNED, MERGED, SPLIT = "as_planned", "merged", "split"
HELD, CACHED, FREE = "held", "cached", "free"

# Edges at the targets of the defaults: 5 ms sigma, 8 ms W_max, 20 ms T_max, 150 ms chunks, 0.25 s ITL bound,
# 0.4 s short target.
_WAIT_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 60.0)
_PASS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.4, 0.8, 1.6, 3.2)
_SLACK_S = (-1.0, -0.1, -0.01, 0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0, 5.0)
_RATIO = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)

_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

# --- counted where it happens -----------------------------------------------------------------------------

TTFT = Metric("plaserve_ttft_seconds", _H, "Arrival to first token, in seconds.", ("lane",), _WAIT_S)
QUEUE_WAIT = Metric(
    "plaserve_queue_wait_seconds",
    _H,
    "Arrival (before tokenising) to the start of the first pass, in seconds; or to the end of the request, "
    "if no pass came.",
    ("lane",),
    _WAIT_S,
)
ITL = Metric("plaserve_itl_seconds", _H, "Gap between two tokens of a request, in seconds.", (), _PASS_S)
TARGETS = Metric(
    "plaserve_ttft_targets_total",
    _C,
    "Requests with a TTFT target, by whether it was met. Refused, failed and expired ones missed it; those "
    "that the client cancelled before a token came are left out.",
    ("lane", "result"),
)
PROMPT_TOKENS = Metric(
    "plaserve_prompt_tokens_total",
    _C,
    "Prompt tokens by source: computed in a pass (L), or reused from the prefix cache (H).",
    ("source",),
)
DECODE_TOKENS = Metric("plaserve_decode_tokens_total", _C, "Tokens after the first of a request.")
PASS_TIME = Metric(
    "plaserve_pass_seconds", _H, "Time of a pass in the engine, in seconds.", ("kind",), _PASS_S
)
PASS_RATIO = Metric(
    "plaserve_pass_time_ratio",
    _H,
    "Measured over predicted time of a pass: 1 where the cost model is right, above it for slow passes.",
    ("kind",),
    _RATIO,
)
PASS_TOKENS = Metric("plaserve_pass_tokens_total", _C, "New tokens that passes computed (T).", ("kind",))
PADDING = Metric(
    "plaserve_padding_tokens_total", _C, "Tokens that passes ran beyond those: padding.", ("kind",)
)
T_CLASS_HITS = Metric(
    "plaserve_t_class_hits_total", _C, "Prefill passes by the T-class that they ran in.", ("t_class",)
)
BATCH_FIDELITY = Metric(
    "plaserve_batch_fidelity_total",
    _C,
    "Prefill passes of engines that form their own batches, by what their statistics say: as planned, merged "
    "with other tokens (harmless), or split over iterations. Passes without statistics are not in it.",
    ("verdict",),
)
DISPATCHES = Metric(
    "plaserve_dispatches_total", _C, "Passes sent to an instance, by the reason why then.", ("kind", "reason")
)
SLACK = Metric(
    "plaserve_dispatch_slack_seconds",
    _H,
    "Tightest slack in a prefill pass at dispatch, in seconds; below 0: a target that can't be met any more.",
    (),
    _SLACK_S,
)
PASSES_LOST = Metric(
    "plaserve_passes_lost_total",
    _C,
    "Passes sent that never finished: revoked, failed, instance lost.",
    ("reason",),
)

# --- read from the service at scrape time -----------------------------------------------------------------

SUBMITTED = Metric(
    "plaserve_requests_submitted_total",
    _C,
    "Requests that reached the scheduler. Equals ended + queued + running in every scrape.",
)
ENDED = Metric("plaserve_requests_ended_total", _C, "Requests that ended, by outcome.", ("outcome",))
QUEUED = Metric("plaserve_requests_queued", _G, "Requests without a pass so far.")
RUNNING = Metric("plaserve_requests_running", _G, "Requests between their first pass and their end.")
LANE_QUEUED = Metric("plaserve_lane_queued_requests", _G, "Requests waiting for a prefill pass.", ("lane",))
LANE_TOKENS = Metric(
    "plaserve_lane_queued_tokens", _G, "Prompt tokens waiting for a prefill pass.", ("lane",)
)
WINDOW = Metric("plaserve_window_seconds", _G, "W: how long the short queue may wait for depth, in seconds.")
DEPTH = Metric("plaserve_depth_tokens", _G, "D: tokens at which a short pass is dispatched.")
BOUNDARY = Metric("plaserve_boundary_tokens", _G, "L_m at no history: where a prefill gets compute-bound.")
KNEE = Metric("plaserve_knee_tokens", _G, "T from which added tokens cost linearly.")
DRAINING = Metric("plaserve_draining", _G, "1 while the service refuses new work to stop.")
INSTANCE_UP = Metric("plaserve_instance_up", _G, "1 while the instance takes passes.", ("instance_id",))
DECODING = Metric("plaserve_instance_decoding_requests", _G, "Requests that decode there.", ("instance_id",))
CORRECTION = Metric(
    "plaserve_cost_correction_ratio",
    _G,
    "By what measured passes multiply the stated cost of the instance, memory and compute side: 1 where the "
    "cost model is right. Far from 1 for long: calibrate anew.",
    ("instance_id", "side"),
)
KV_BLOCKS = Metric(
    "plaserve_kv_blocks",
    _G,
    "KV blocks: held by a request, cached (reusable and evictable) or free.",
    ("instance_id", "state"),
)
INCIDENTS = Metric(
    "plaserve_engine_incidents_total",
    _C,
    "What an engine survived: its executor lost or restarted, statistics or events missing, leaked KV.",
    ("instance_id", "incident"),
)
ROLE_MOVE_PHASE = Metric(
    "plaserve_role_move_phase",
    _G,
    "1 for the phase that this worker's role move is in, where it loads another engine; else 0.",
    ("phase",),
)
ROLE_MOVE_TIME = Metric(
    "plaserve_role_move_seconds_total", _C, "Seconds in the phases of such moves that are over.", ("phase",)
)
ROLE_MOVES = Metric("plaserve_role_moves_total", _C, "Such moves that are over, by how they ended.", ("end",))
LOOP_LAG = Metric(
    "plaserve_event_loop_lag_seconds",
    _G,
    "How long this scrape waited for the event loop, in seconds. Where it gave up (1 s), a scrape lacks the "
    "values that are read from the service.",
)
INFO = Metric("plaserve_service_info", _G, "Always 1; says what is served.", ("model", "backend"))

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
WORKER_METRICS = (ROLE_MOVE_PHASE, ROLE_MOVE_TIME, ROLE_MOVES)  # of a fleet's workers alone

# --- spans ------------------------------------------------------------------------------------------------

SPAN_REQUEST = "request"  # arrival to end; SERVER kind, child of the caller's span
SPAN_QUEUE = "queue"  # arrival to the start of its first pass
SPAN_PREFILL = "prefill"  # start of its first pass to its first token; linked to its passes
SPAN_DECODE = "decode"  # its first token to its end; absent where one token was asked for
SPAN_PASS = "pass"  # start to end of a prefill pass, a trace of its own; linked to its requests
SPANS = (SPAN_REQUEST, SPAN_QUEUE, SPAN_PREFILL, SPAN_DECODE, SPAN_PASS)


class Attribute(StrEnum):
    """Span attributes: name, then unit and meaning."""

    # GenAI semantic conventions, on `request`
    OPERATION = "gen_ai.operation.name"  # text_completion
    PROVIDER = "gen_ai.provider.name"  # plaserve
    MODEL = "gen_ai.request.model"
    MAX_TOKENS = "gen_ai.request.max_tokens"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"  # the whole prompt
    CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"  # H
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    FINISH_REASONS = "gen_ai.response.finish_reasons"  # [stop | length]
    TTFT_S = "gen_ai.response.time_to_first_chunk"  # seconds
    CONVERSATION = "gen_ai.conversation.id"  # the session
    ERROR_TYPE = "error.type"  # the outcome; on `pass`: the reason that it was lost

    # on `request`
    REQUEST_ID = "plaserve.request_id"
    BACKEND = "plaserve.backend"
    LANE = "plaserve.lane"  # short | long
    TENANT = "plaserve.tenant"
    PRIORITY = "plaserve.priority"
    NEW_TOKENS = "plaserve.new_tokens"  # L
    TARGET_S = "plaserve.ttft_target_s"  # seconds from arrival
    TARGET_MET = "plaserve.ttft_target_met"
    OUTCOME = "plaserve.outcome"
    REASON = "plaserve.reason"  # on `request`: of the outcome; on `queue`, `pass`: of the dispatch

    # on `prefill` and `decode`
    PASSES = "plaserve.passes"  # prefill passes of the request
    ITL_S_MAX = "plaserve.itl_s_max"  # longest gap between two tokens, seconds

    # on `pass`
    PASS_ID = "plaserve.pass.id"
    INSTANCE = "plaserve.pass.instance"
    KIND = "plaserve.pass.kind"
    STAGED = "plaserve.pass.staged"  # sent while another one ran
    REQUESTS = "plaserve.pass.requests"  # of which the sampled ones are linked
    TOKENS = "plaserve.pass.tokens"  # T as planned
    COMPUTED_TOKENS = "plaserve.pass.computed_tokens"  # T as it turned out
    EXECUTED_TOKENS = "plaserve.pass.executed_tokens"  # with padding
    PADDING_TOKENS = "plaserve.pass.padding_tokens"
    PREDICTED_S = "plaserve.pass.predicted_s"  # by the cost model
    MEASURED_S = "plaserve.pass.measured_s"  # in the engine
    SLACK_S_MIN = "plaserve.pass.slack_s_min"  # tightest slack at dispatch; absent: no target in the pass
    WINDOW_S = "plaserve.pass.window_s"  # W at dispatch
    DEPTH_TOKENS = "plaserve.pass.depth_tokens"  # D at dispatch
    QUEUED_SHORT_TOKENS = "plaserve.pass.queued_short_tokens"  # at dispatch
    QUEUED_LONG_TOKENS = "plaserve.pass.queued_long_tokens"  # at dispatch
