"""Measurements on a GPU machine: what passes, launches, graphs, mixed passes and shares of the GPU cost.

`measure` is the command and `parts` its list; each part is one CSV. They import torch, numpy, `engines` and
the standard library and nothing else, so that a bare GPU machine runs them from a checkout. `report` fits
and compares what they wrote; it needs scipy and runs anywhere. `drift` compares the installed TensorRT-LLM
with the table that the adapters were written against.
"""
