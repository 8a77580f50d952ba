"""Load generators and comparisons against running services.

Everything here speaks to a service as a client does, over gRPC: prompts, arrivals, measurement, statistics
and reports, and the processes of a comparison. May import `engines` and the generated stubs; knows nothing
of the inside of the service, but that `parity` holds a service against the simulator (`service.sim`).
"""
