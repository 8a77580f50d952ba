"""The fake `tensorrt_llm` and `tensorrt`: classes as `surface.json` records them, over the fake executor.

Runs in a child process, where neither the project's tests nor its engines are importable: standard library
and relative imports only. `entry` hands out what each written module holds.
"""
