"""The wire contract: plaserve/v1/*.proto and the stubs generated from them by `make protos`."""
