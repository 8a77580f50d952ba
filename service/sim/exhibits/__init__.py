"""The published tables beside ours: each module computes or simulates one question and says how far apart
the answers are, and why. Nothing here is drawn or written; `service.sim.page` does that from plain data."""
