"""Rules that move instances between the pools, side by side under one policy, on load that moves. May import
what `service.sim` may."""
