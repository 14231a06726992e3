"""The search for the best way to serve under a latency limit: calibrate, simulate, prove by load."""
