"""What makes several processes one fleet: membership (memory | etcd), elections, links between processes.

May import runtime, policies, core and engines' plain data. The data path never waits for membership.
"""
