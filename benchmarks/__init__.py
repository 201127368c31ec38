"""Speed, memory and accuracy of tangents beside its peers: one file a claim. Run with `python -m benchmarks`."""
