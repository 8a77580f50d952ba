"""Fakes of TensorRT-LLM's executor: how it behaves (`model`), and the skins that code under test talks to.

`link` is an `ExecutorLink` in this process, `package` writes a fake `tensorrt_llm` for a child process.
Standard library only, since the fake package loads `model`, `pool` and `vices` from this directory in
another interpreter.
"""
