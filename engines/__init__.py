"""Whatever runs or describes a forward pass.

`types`, `cost_model`, `profiles` and `blocks` are plain data and arithmetic: the scheduling core builds on
them. `base` is the Engine protocol; every other module is an adapter and imports its heavy library inside.
This package never imports `service` or `build_scripts`.
"""
