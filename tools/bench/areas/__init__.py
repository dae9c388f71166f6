"""One module for each area of the benchmarks."""
