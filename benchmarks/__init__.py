"""Speed, measured and printed, never asserted in a timed test. `python -m benchmarks` runs them all."""
