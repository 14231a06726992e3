"""What gathers evidence: each collector a plain function that runs a few calls and returns plain data."""
