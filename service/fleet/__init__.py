"""What makes several processes one fleet: membership (memory | etcd), elections, links between processes.

May import runtime, policies, core and engines' plain data. The data path never waits for membership.
"""

CONTROLLER_LISTEN = "127.0.0.1:8083"  # where `plaserve fleet` looks for a controller
