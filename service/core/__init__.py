"""The pure scheduling core: events and `now_s` in, commands out.

Nothing here reads a clock, sleeps, logs, draws random numbers, opens a socket or imports asyncio, grpc or
torch. It may import `engines.types`, `engines.cost_model`, `engines.profiles` and `engines.blocks`.
"""
