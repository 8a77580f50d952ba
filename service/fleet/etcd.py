"""Membership in etcd: a `Store` over etcd's v3 API (3.4 or newer), by the generated stubs of aetcd.

aetcd's own client has one endpoint, no TLS, no way to see whole revisions on a watch, and a watch that was
compacted hangs in it; so only its stubs are used, over channels of ours:

- One channel for each endpoint, for good. A call that fails moves on to the next endpoint.
- Every call has a deadline. What etcd can't answer now is MembershipUnavailable, also when it answers that it
  has no leader or no space. A refusal that will not pass is MembershipRefused.
- A watch asks for progress every second; a stream that stays silent is given up. So a stopped etcd, or a
  network that swallows packets, is noticed without waiting for TCP.
- Streams ask etcd to end them when the member they reach has no leader: it would stay silent about changes.
- After a restore from a backup the cluster has another id or an older revision: everything is read afresh.
  Epochs may then repeat; give a restored fleet a new name, or restart its workers and front ends.
- etcd counts leases in whole seconds, and at least 1.5 of its election timeouts (2 s by default).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from aetcd import rpc

from service.fleet.clock import Clock
from service.fleet.membership import MembershipRefused, MembershipUnavailable
from service.fleet.store import (
    Aspect,
    Batch,
    Committed,
    Compacted,
    Condition,
    Delete,
    Entry,
    LeaseGone,
    Put,
)
from service.fleet.stored import MembershipTimes, StoreMembership

_MESSAGE_BYTES_MAX = 64 << 20  # a fleet read at once: 1,000 members with 16 kB of facts are 16 MB
_REFUSALS = frozenset(
    {
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
_OLD_TOKEN = ("invalid auth token", "revision of auth store is old")


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """PEM files. ca None: the system's roots. key and cert: of a client certificate. name: expected instead
    of the endpoint's host."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        def read(path: Path | None) -> bytes | None:
            return None if path is None else path.read_bytes()

        return grpc.ssl_channel_credentials(read(self.ca), read(self.key), read(self.cert))


@dataclass(frozen=True, slots=True)
class EtcdOptions:
    """endpoints: host:port each. username empty: no authentication. call_timeout_s: of each call.

    silence_s: a watch that says nothing for so long is given up; progress is asked for three times in it.
    alive_s: how often a connection is asked whether it still reaches anybody; one that does not answer within
    `silence_s` is replaced, or after a cut every call would wait until TCP sends again, which takes up to as
    long as the cut. etcd counts being asked more often than every 5 s as abuse.
    """

    endpoints: tuple[str, ...] = ("127.0.0.1:2379",)
    tls: EtcdTls | None = None
    username: str = ""
    password: str = ""
    call_timeout_s: float = 2.0
    silence_s: float = 3.0
    alive_s: float = 6.0

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError("endpoints must name at least one host:port")


def etcd_membership(
    options: EtcdOptions,
    *,
    fleet: str = "default",
    root: str = "/plaserve",
    times: MembershipTimes | None = None,
    clock: Clock | None = None,
) -> StoreMembership:
    """A membership in etcd, not yet opened."""
    return StoreMembership(EtcdStore(options), fleet=fleet, root=root, times=times, clock=clock)


class _Endpoint:
    """A channel and the stubs on it."""

    def __init__(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None,
        name: str,
        alive_s: float,
        silence_s: float,
    ) -> None:
        self.target = target
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 500),
            ("grpc.max_reconnect_backoff_ms", 2000),  # grpc's own goes up to two minutes
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.keepalive_time_ms", round(1000 * alive_s)),
            ("grpc.keepalive_timeout_ms", round(1000 * silence_s)),
            ("grpc.http2.ping_timeout_ms", round(1000 * silence_s)),  # of its pings for bandwidth: 60 s
            ("grpc.http2.max_pings_without_data", 0),  # a quiet fleet says nothing for long
        ]
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(target, options=options)
        else:
            if name:
                options.append(("grpc.ssl_target_name_override", name))
            self.channel = grpc.aio.secure_channel(target, credentials, options=options)
        self.kv = rpc.KVStub(self.channel)
        self.lease = rpc.LeaseStub(self.channel)
        self.watch = rpc.WatchStub(self.channel)
        self.auth = rpc.AuthStub(self.channel)


class EtcdStore:
    """A `Store`; used in one event loop. Raises OSError when a certificate can't be read."""

    def __init__(self, options: EtcdOptions) -> None:
        self._options = options
        self._credentials = options.tls.credentials() if options.tls else None
        self._endpoints: list[_Endpoint] = []
        self._index = 0
        self._token = ""
        self._cluster_id = 0

    # --- the store ----------------------------------------------------------------------------------------

    async def read(self, prefix: str) -> tuple[int, Mapping[str, Entry]]:
        request = rpc.RangeRequest(key=prefix.encode(), range_end=_end_of(prefix))
        reply = await self._call(lambda to: to.kv.Range, request)
        self._cluster_id = reply.header.cluster_id
        return reply.header.revision, {kv.key.decode(): _entry(kv) for kv in reply.kvs}

    async def get(self, keys: Sequence[str]) -> Mapping[str, Entry | None]:
        ranges = [rpc.RequestOp(request_range=rpc.RangeRequest(key=key.encode())) for key in keys]
        reply = await self._call(lambda to: to.kv.Txn, rpc.TxnRequest(success=ranges))
        found: dict[str, Entry | None] = dict.fromkeys(keys)
        for key, response in zip(keys, reply.responses, strict=True):
            for kv in response.response_range.kvs:
                found[key] = _entry(kv)
        return found

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Put | Delete]) -> Committed:
        request = rpc.TxnRequest(
            compare=[_compare(condition) for condition in conditions],
            success=[_operation(write) for write in writes],
        )
        reply = await self._call(lambda to: to.kv.Txn, request)
        return Committed(reply.succeeded, reply.header.revision)

    async def grant(self, ttl_s: float) -> tuple[int, float]:
        request = rpc.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_s)))
        reply = await self._call(lambda to: to.lease.LeaseGrant, request)
        return reply.ID, float(reply.TTL)

    async def renew(self, lease_id: int) -> float:
        left_s: float = await self._guarded(lambda to, timeout_s: self._renew(to, lease_id, timeout_s))
        return left_s

    async def _renew(self, to: _Endpoint, lease_id: int, timeout_s: float) -> float:
        call = to.lease.LeaseKeepAlive(timeout=timeout_s, metadata=self._metadata(stream=True))
        try:
            await call.write(rpc.LeaseKeepAliveRequest(ID=lease_id))
            reply = await call.read()
            if reply is grpc.aio.EOF:
                raise MembershipUnavailable(f"etcd at {to.target} ended the renewal: {await call.details()}")
            return float(reply.TTL)
        except asyncio.InvalidStateError:  # the stream ended while it was written to
            raise MembershipUnavailable(f"etcd at {to.target}: {await call.details()}") from None
        finally:
            call.cancel()

    async def revoke(self, lease_id: int) -> None:
        with suppress(LeaseGone):
            await self._call(lambda to: to.lease.LeaseRevoke, rpc.LeaseRevokeRequest(ID=lease_id))

    async def follow(self, prefix: str, after: int) -> AsyncGenerator[Batch, None]:
        to = self._endpoint()
        await self._log_in(to)
        call = to.watch.Watch(metadata=self._metadata(stream=True))
        asking: asyncio.Task[None] | None = None
        try:
            create = rpc.WatchCreateRequest(
                key=prefix.encode(), range_end=_end_of(prefix), start_revision=after + 1
            )
            async with asyncio.timeout(self._options.silence_s):
                await call.write(rpc.WatchRequest(create_request=create))
            asking = asyncio.get_running_loop().create_task(self._ask_progress(call))
            while True:
                async with asyncio.timeout(self._options.silence_s):
                    reply = await call.read()
                if reply is grpc.aio.EOF:
                    raise MembershipUnavailable(f"etcd at {to.target} ended the watch")
                yield self._batch(reply, after)
        except TimeoutError:
            self._next(to)
            raise MembershipUnavailable(f"etcd at {to.target} says nothing") from None
        except asyncio.InvalidStateError:
            self._next(to)
            raise MembershipUnavailable(f"etcd at {to.target} is not there") from None
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, to) from None
        except MembershipUnavailable:
            self._next(to)
            raise
        finally:
            if asking is not None:
                asking.cancel()
            call.cancel()

    async def close(self) -> None:
        endpoints, self._endpoints = self._endpoints, []
        for endpoint in endpoints:
            await endpoint.channel.close()

    # --- watching -----------------------------------------------------------------------------------------

    async def _ask_progress(self, call: Any) -> None:
        """Sign-of-life requests; the reader notices when no answer comes."""
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                await asyncio.sleep(self._options.silence_s / 3.0)
                await call.write(rpc.WatchRequest(progress_request=rpc.WatchProgressRequest()))

    def _batch(self, reply: Any, after: int) -> Batch:
        """Raises Compacted, MembershipUnavailable. A reply holds whole revisions."""
        if reply.compact_revision:
            raise Compacted(f"compacted up to {reply.compact_revision}")
        if reply.canceled:
            if any(text in reply.cancel_reason for text in _OLD_TOKEN):
                self._token = ""
            raise MembershipUnavailable(f"etcd ended the watch: {reply.cancel_reason}")
        if reply.created and (
            reply.header.revision < after or self._cluster_id not in (0, reply.header.cluster_id)
        ):
            raise Compacted("etcd was restored: it is another cluster, or older than what was read")
        changes = tuple(
            (event.kv.key.decode(), None if event.type == event.DELETE else _entry(event.kv))
            for event in reply.events
        )
        # Not the header's revision: while it catches up that is ahead of the events.
        return Batch(max((event.kv.mod_revision for event in reply.events), default=0), changes)

    # --- calls --------------------------------------------------------------------------------------------

    async def _call(self, method: Callable[[_Endpoint], Any], request: Any) -> Any:
        async def send(to: _Endpoint, timeout_s: float) -> Any:
            return await method(to)(request, timeout=timeout_s, metadata=self._metadata())

        return await self._guarded(send)

    async def _guarded(self, send: Callable[[_Endpoint, float], Awaitable[Any]]) -> Any:
        """Send within the deadline; once more with a new token where the old one is out of date."""
        to = self._endpoint()
        for last in (False, True):
            await self._log_in(to)
            try:
                return await send(to, self._options.call_timeout_s)
            except grpc.aio.AioRpcError as error:
                if not last and self._token and any(text in (error.details() or "") for text in _OLD_TOKEN):
                    self._token = ""
                    continue
                raise self._failure(error, to) from None
            except MembershipUnavailable:
                self._next(to)
                raise
        raise AssertionError("unreachable")

    def _endpoint(self) -> _Endpoint:
        if not self._endpoints:
            given = self._options
            name = given.tls.name if given.tls else ""
            self._endpoints = [
                _Endpoint(target, self._credentials, name, given.alive_s, given.silence_s)
                for target in given.endpoints
            ]
        return self._endpoints[self._index % len(self._endpoints)]

    def _next(self, failed: _Endpoint) -> None:
        """Move on, unless another call that failed there has."""
        if self._endpoints and self._endpoint() is failed:
            self._index += 1

    async def _log_in(self, to: _Endpoint) -> None:
        if self._token or not self._options.username:
            return
        request = rpc.AuthenticateRequest(name=self._options.username, password=self._options.password)
        try:
            reply = await to.auth.Authenticate(request, timeout=self._options.call_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, to) from None
        self._token = reply.token

    def _metadata(self, *, stream: bool = False) -> tuple[tuple[str, str], ...]:
        """stream: to be ended by an etcd that is cut off from its cluster, and so hears of no change."""
        leader = (("hasleader", "true"),) if stream else ()
        return (("token", self._token), *leader) if self._token else leader

    def _failure(self, error: grpc.aio.AioRpcError, to: _Endpoint) -> Exception:
        """Our error for gRPC's. Where the endpoint may be at fault, the next call goes to the next one."""
        details = error.details() or ""
        if error.code() is grpc.StatusCode.NOT_FOUND and "lease" in details:
            return LeaseGone()
        text = f"etcd at {to.target}: {error.code().name}: {details}"
        if error.code() in _REFUSALS:
            return MembershipRefused(text)
        self._next(to)
        return MembershipUnavailable(text)


def _end_of(prefix: str) -> bytes:
    """The first key after all that begin with `prefix`, which ends in a slash."""
    raw = prefix.encode()
    return raw[:-1] + bytes([raw[-1] + 1])


def _entry(kv: Any) -> Entry:
    return Entry(kv.value.decode("utf-8", "replace"), kv.create_revision, kv.mod_revision, kv.lease)


def _compare(condition: Condition) -> Any:
    """A missing key has revision 0 in both aspects."""
    if condition.aspect is Aspect.CREATED:
        target, revision = rpc.Compare.CREATE, {"create_revision": condition.revision}
    else:
        target, revision = rpc.Compare.MOD, {"mod_revision": condition.revision}
    return rpc.Compare(result=rpc.Compare.EQUAL, target=target, key=condition.key.encode(), **revision)


def _operation(write: Put | Delete) -> Any:
    if isinstance(write, Put):
        put = rpc.PutRequest(key=write.key.encode(), value=write.value.encode(), lease=write.lease_id)
        return rpc.RequestOp(request_put=put)
    delete = rpc.DeleteRangeRequest(key=write.key.encode(), range_end=write.end.encode())
    return rpc.RequestOp(request_delete_range=delete)
