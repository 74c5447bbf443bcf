"""`headrace bench`: latency, throughput, start-up, and a load generator for any server."""
