"""Engine core: requests in, token ids out.

Scheduler, KV-cache bookkeeping, step loop, processes and clients.
"""
