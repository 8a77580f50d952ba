"""Engines over an executor: it takes whole requests, forms its own batches, answers with tokens.

TensorRT-LLM's executor, its PyTorch backend and a Triton server that hosts either are executors. `types` says
what goes in and out, `engine` makes an `engines.base.Engine` of any link to one. Standard library and
`engines.types` only: the child process that holds an executor imports this too.
"""
