"""How long a transfer will take, as a distribution: log-normal rates from recent throughputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

RECENT = 8
"""Throughputs that count; a link of a minute ago says little about now."""

PRIOR_SPREAD = 0.5
"""Standard deviation of a chunk's log rate before there is more than one: a factor of 1.65."""


@dataclass(frozen=True)
class RateEstimate:
    """The rates of the chunks to come: log-normal, independent, around an uncertain mean.

    Attributes
    ----------
    log_mean
        Mean of the natural logarithm of a chunk's rate in bytes per second.
    log_spread
        Standard deviation of that logarithm from chunk to chunk.
    count
        Throughputs behind it; the mean itself is uncertain by ``log_spread / sqrt(count)``.
    """

    log_mean: float
    log_spread: float
    count: int

    @classmethod
    def from_throughputs(
        cls, throughputs_bytes_per_s: Sequence[float], *, prior_spread: float = PRIOR_SPREAD
    ) -> RateEstimate:
        """Estimate from measured throughputs, oldest first.

        The prior spread counts as one more observation of the variance, so that two equal
        throughputs do not make a certainty. It does not depend on the rates: a link that is twice
        as fast throughout gives the same spread and half the times.

        Raises
        ------
        ValueError
            There is no throughput, or one is not positive.
        """
        recent = throughputs_bytes_per_s[-RECENT:]
        if not recent or min(recent) <= 0:
            raise ValueError(f"expected positive throughputs, at least one; got {list(recent)}")
        logs = [math.log(rate) for rate in recent]
        mean = math.fsum(logs) / len(logs)
        squares = math.fsum((value - mean) ** 2 for value in logs)
        # The sample variance of n values has n - 1 degrees of freedom; the prior adds one.
        return cls(mean, math.sqrt((prior_spread**2 + squares) / len(logs)), len(logs))

    def median_s(self, total_bytes: float) -> float:
        """Seconds that a transfer takes as likely more as less.

        The mean would be larger, by far where little is known, because it counts every link that
        might have almost stopped.
        """
        return total_bytes * math.exp(-self.log_mean)

    def late_probability(self, sizes_bytes: Sequence[float], budget_s: float) -> float:
        """Probability that transfers, one after the other, take longer than ``budget_s``.

        The sum of log-normal times is taken as log-normal with the same mean and variance (Fenton
        1960). The chunks' own spread averages out over many chunks, the mean's uncertainty is
        common to all and does not.
        """
        total = float(sum(sizes_bytes))
        if total == 0:
            return 0.0
        if budget_s <= 0:
            return 1.0
        common = math.expm1(self.log_spread**2 / self.count)
        own = math.expm1(self.log_spread**2 * (1 + 1 / self.count)) - common
        concentration = sum(size**2 for size in sizes_bytes) / total**2
        variance = math.log1p(common + own * concentration)
        mean_s = self.median_s(total) * math.exp(self.log_spread**2 * (1 + 1 / self.count) / 2)
        if variance == 0:
            return float(mean_s > budget_s)
        log_mean = math.log(mean_s) - variance / 2
        return math.erfc((math.log(budget_s) - log_mean) / math.sqrt(2 * variance)) / 2
