"""The serving system: a pure scheduling core and the two drivers, surfaces and tools around it.

Layers, upper may import lower: cli > wiring > rpc, bench > runtime, sim > policies > core > engines.types,
engines.cost_model, engines.profiles, engines.blocks. `core` is pure: time comes in as `now_s`, decisions go
out as commands.
"""
