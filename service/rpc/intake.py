"""From checked wishes to a request that the scheduler takes: tokens, block hashes, deadline.

Tokenising and hashing run in a small thread pool, off the event loop, behind a bounded queue; a request that
would wait there beyond the bound is refused like any other overload.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from google.rpc import code_pb2

from engines.blocks import chain_hashes
from engines.types import Capabilities, EngineRequest
from service.core.types import Outcome, Request
from service.rpc.convert import Wishes
from service.rpc.errors import InvalidField, RequestError
from service.rpc.text import ChatError, TextCodec
from service.settings import LimitSettings


class Intake:
    def __init__(self, codec: TextCodec, capabilities: Capabilities, limits: LimitSettings) -> None:
        self._codec = codec
        self._capabilities = capabilities
        self._limits = limits
        self._threads = ThreadPoolExecutor(limits.tokenizer_threads, thread_name_prefix="tokenizer")
        self._waiting = 0

    async def prepare(
        self, wishes: Wishes, arrival_s: float, deadline_s: float | None
    ) -> tuple[Request, EngineRequest]:
        """Raises RequestError."""
        if self._waiting >= self._limits.tokenizer_queue_max:
            message = f"{self._waiting} requests wait to be tokenised; try again later"
            raise RequestError(
                code_pb2.RESOURCE_EXHAUSTED, message, Outcome.REJECTED_CAPACITY.value, retry_s=1.0
            )
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            token_ids, hashes = await loop.run_in_executor(self._threads, self._tokens, wishes)
        finally:
            self._waiting -= 1
        request = Request(
            request_id=wishes.request_id,
            prompt_tokens=len(token_ids),
            max_new_tokens=wishes.max_new_tokens,
            arrival_s=arrival_s,
            block_hashes=hashes,
            ttft_target_s=wishes.ttft_target_s,
            deadline_s=deadline_s,
            deadline_free=wishes.deadline_free,
            priority=wishes.priority,
            tenant=wishes.tenant,
            session=wishes.session,
        )
        engine_request = EngineRequest(
            wishes.request_id, token_ids, wishes.max_new_tokens, wishes.sampling, retain=bool(wishes.session)
        )
        return request, engine_request

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _tokens(self, wishes: Wishes) -> tuple[tuple[int, ...], tuple[int, ...]]:
        field = "prompt.tokens.ids"
        if wishes.token_ids is not None:
            token_ids = wishes.token_ids
            if max(token_ids) >= self._codec.vocab_size:
                raise InvalidField(
                    field, f"has id {max(token_ids)}; ids must be below {self._codec.vocab_size}"
                )
        elif wishes.messages is not None:
            field = "prompt.chat.messages"
            try:
                token_ids = tuple(self._codec.encode_chat(wishes.messages))
            except ChatError as error:
                raise InvalidField(field, f"do not fit the chat template: {error}") from error
        else:
            field = "prompt.text"
            token_ids = tuple(self._codec.encode(wishes.text or ""))
        if not token_ids:
            raise InvalidField(field, "has no tokens; send some text")
        tokens_max = self._capabilities.context_tokens_max
        if len(token_ids) + wishes.max_new_tokens > tokens_max:
            raise InvalidField(
                field,
                f"is {len(token_ids)} tokens long and {wishes.max_new_tokens} are to be generated; the "
                f"context is {tokens_max}: shorten the prompt or ask for fewer",
            )
        return token_ids, chain_hashes(token_ids, self._capabilities.block_tokens)
