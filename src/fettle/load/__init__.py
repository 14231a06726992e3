"""Load on a server: when requests are due, the client that sends them, and what a run showed."""
