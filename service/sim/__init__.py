"""The virtual-time driver of the core: the kernel that runs the scheduler against simulated engines.

May import core, policies and engines; never the asyncio runtime, whose twin it is.
"""
