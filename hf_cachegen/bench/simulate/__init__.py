"""Streaming on a simulated clock: the policies that stream real contexts, over made-up links."""

from hf_cachegen.bench.simulate.plot import plot_levels
from hf_cachegen.bench.simulate.presets import LADDERS, SETUPS, Ladder, Level, Setup
from hf_cachegen.bench.simulate.report import (
    POLICIES,
    Row,
    SimulationConfig,
    SimulationReport,
    run_simulation,
)

__all__ = [
    "LADDERS",
    "POLICIES",
    "SETUPS",
    "Ladder",
    "Level",
    "Row",
    "Setup",
    "SimulationConfig",
    "SimulationReport",
    "plot_levels",
    "run_simulation",
]
