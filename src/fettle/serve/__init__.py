"""The serving room: a tuned model behind HTTP, load to put on it, and the best setting under a latency limit.

`curve` and `policy` are the two nouns that everything here shares: what a batch of so many rows costs on this
machine, and how many waiting rows to take next. The server's batcher follows a policy, the simulation predicts
with the same one.
"""
