"""The gRPC surface: validation, text, streaming, errors, health, reflection.

May import the runtime's contract and core types; the only package besides bench that knows the protos.
"""
