"""The models that are served: registry, queues and batches, worker processes, and what is counted of them."""
