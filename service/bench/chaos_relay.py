"""A TCP relay before a server, to cut, silence or slow one client's connections and not the server."""

from __future__ import annotations

import asyncio


class Relay:
    """Passes bytes to a port of this machine. hold: they wait there, and nobody is told. delay_s: on the way
    there."""

    def __init__(self, to_port: int, host: str = "127.0.0.1", port: int = 0) -> None:
        """port: where it listens; 0: a free one, known once it is open."""
        self.port = port
        self.delay_s = 0.0
        self._to_port = to_port
        self._host = host
        self._open = asyncio.Event()
        self._open.set()
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        return f"{self._host}:{self.port}"

    def hold(self) -> None:
        self._open.clear()

    def swallow(self) -> None:
        """Connections that there are stay open and pass nothing any more; new ones do."""
        self._open.clear()
        self._open = asyncio.Event()
        self._open.set()

    def let_go(self) -> None:
        self._open.set()

    async def open(self) -> None:
        self._listener = await asyncio.start_server(self._accept, self._host, self.port)
        self.port = int(self._listener.sockets[0].getsockname()[1])

    async def cut(self) -> None:
        """Refuse connections and break those that there are."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there}
        for source, sink, delayed in ((reader, there, True), (there_reader, writer, False)):
            task = asyncio.create_task(self._pass_on(source, sink, delayed, self._open))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, delayed: bool, is_open: asyncio.Event
    ) -> None:
        try:
            while data := await source.read(65536):
                if delayed and self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await is_open.wait()
                sink.write(data)
        except ConnectionError:
            pass
        finally:
            sink.close()
            self._writers.discard(sink)
