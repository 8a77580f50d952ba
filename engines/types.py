"""Plain data that crosses the engine boundary.

A *pass* is one forward: a list of (request, tokens). Prefill passes carry prompt chunks, decode passes one
token a request. The scheduler names how many prompt tokens each request may advance; the engine answers with
the position it really reached, because only the engine knows at that moment which cached blocks still live.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Layout(StrEnum):
    """How an engine lays the tokens of a pass into a tensor."""

    PACKED = "packed"  # one row of T tokens, requests kept apart by a mask or offsets
    RECTANGULAR = "rectangular"  # B rows padded to the longest


class Padding(StrEnum):
    """What an engine pads a pass to."""

    NOTHING = "nothing"
    CLASS = "class"  # the next T-class (and history class) it was built for
    CELL = "cell"  # the next (L, B) cell of the grid


class Chunking(StrEnum):
    """Who splits a long prompt."""

    EXTERNAL = "external"  # the scheduler; every chunk is an item of a pass
    PREFIX_REUSE = "prefix_reuse"  # the scheduler, through block reuse between requests
    INTERNAL = "internal"  # the engine


class DecodeMode(StrEnum):
    """How decode shares an engine with prefill."""

    NONE = "none"  # prefill only; decode happens elsewhere
    ALTERNATES = "alternates"  # decode steps are passes of their own, chosen by the scheduler
    BESIDE = "beside"  # the engine interleaves decode by itself
    MULTIPLEX = "multiplex"  # decode runs at the same time on its own share of the GPU


class PassKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    """Why the engine stopped generating for a request."""

    STOP = "stop"  # an end-of-sequence token
    LENGTH = "length"  # max_new_tokens or the context limit


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do; stated by the adapter, checked by the contract suite."""

    layout: Layout
    padding: Padding
    chunking: Chunking
    merges_lanes: bool  # the engine may put both lanes into one iteration by itself
    decode: DecodeMode
    requests_max: int  # requests in one pass
    context_tokens_max: int  # prompt + generated tokens of one request
    block_tokens: int  # tokens in one KV block
    kv_blocks_total: int
    layer_blocks_max: int = 1  # groups of layers that a prefill pass can be run in, one at a time; 1: whole


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of one request. `temperature == 0` is greedy; `seed` makes the rest repeatable."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    seed: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What an engine needs to know of a request before its first pass.

    `retain` asks the engine to evict this request's blocks last (a session that will come back).
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    retain: bool = False


class PassItem(NamedTuple):
    """One request's part of a pass.

    prefill: `history` prompt tokens are expected to have KV already; at most `new_tokens` more are computed.
    decode: `new_tokens` is 1 and `history` is all that precedes the token.
    """

    request_id: str
    new_tokens: int
    history: int


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward. `pass_id` is unique per scheduler epoch.

    Where an engine can stop between layers, a prefill pass may be one of `layer_blocks` equal groups of
    layers, number `layer_block` from 0: it takes its share of the time, and only the last one moves positions
    on. The requests of a group stay together until then, except for those that end meanwhile.
    """

    pass_id: int
    kind: PassKind
    items: tuple[PassItem, ...]
    layer_block: int = 0
    layer_blocks: int = 1

    @property
    def tokens(self) -> int:
        """T, the new tokens of the pass before padding."""
        return sum(item.new_tokens for item in self.items)

    @property
    def completes(self) -> bool:
        """Whether positions move on at its end: a whole pass, or the last group of layers."""
        return self.layer_block + 1 == self.layer_blocks


@dataclass(frozen=True, slots=True)
class ItemResult:
    """What a pass did for one request.

    position: tokens (prompt and generated) whose KV now exists. Prefill is complete when it equals the
        prompt length; only then is `token` set. It may fall short of what the scheduler asked for when
        cached blocks were evicted meanwhile: the rest is simply scheduled again.
    computed: new tokens really computed in this pass. reused: tokens taken from the prefix cache in it.
    finish: set together with the last token. error: this request failed, the others of the pass did not.
    """

    request_id: str
    position: int
    computed: int
    reused: int = 0
    token: int | None = None
    finish: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Ran:
    """How an engine that forms its own batches ran the prompt tokens of a pass, by its own statistics.

    iterations: in how many; as planned it is 1. tokens, requests: what these held, all told. More than the
    pass is merging, which is harmless since cost follows T; more iterations is splitting, which is not.
    """

    iterations: int
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PassResult:
    """Outcome of one pass; items in the order of the pass. `executed_*` are the sizes after padding.

    On an engine that decodes beside prefill, tokens of other requests follow the items of the pass, and a
    request that got several tokens meanwhile has several items, in order. ran: None where not known.
    """

    pass_id: int
    kind: PassKind
    items: tuple[ItemResult, ...]
    executed_tokens: int
    executed_history: int
    elapsed_s: float
    ran: Ran | None = None


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full blocks that became reusable, as chain hashes (see `engines.blocks.chain_hashes`)."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks evicted from the prefix cache."""

    block_hashes: tuple[int, ...]


KvEvent = BlocksStored | BlocksRemoved


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of an engine, cheap to take. incidents: what it survived, by name, with counts."""

    kv_blocks_total: int
    kv_blocks_free: int  # neither held by a request nor cached
    kv_blocks_cached: int  # reusable, evictable
    requests_live: int
    passes_done: int
    incidents: tuple[tuple[str, int], ...] = ()
