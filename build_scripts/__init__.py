"""The engine build pipeline: from published weights to a bundle that this machine can serve.

`spec` says what to build, `plan` (pure) what that takes, `runner` carries it out with `store` keeping the
outputs of steps; `fetch`, `convert`, `verify`, `calibrate` and `manifest` are the steps. `protos` makes
the gRPC stubs. This package may import `engines`, never `service`; engine libraries only inside the step
that needs them.
"""
