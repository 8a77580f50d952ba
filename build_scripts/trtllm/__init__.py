"""The TensorRT-LLM build pipeline: from a checkpoint to a bundle of prebuilt engines, on a GPU machine.

`spec` says what to build, `recipe` which exact arguments that means, `plan` (pure) which steps, sizes and
times, `runner` carries it out. `inside` alone runs in TensorRT-LLM's own environment: standard library,
this project's plain data and tensorrt_llm; everything else never imports it.
"""
