"""The asyncio driver of the core: pump, workers, start and drain.

May import core, policies and engines; knows nothing of gRPC, HTTP or of how a request was spelled.
"""
