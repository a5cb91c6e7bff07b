"""Evaluation: real models and text without a hub, shaped links, and the benchmarks."""
