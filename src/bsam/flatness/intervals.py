"""Confidence intervals for means of a few samples, and the formatting of numbers with errors."""

from __future__ import annotations

import math

import numpy as np


def t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution for a probability of at least 0.5.

    The distribution function is a finite sum for integer degrees of freedom (Abramowitz, Stegun, 26.7.3 and 26.7.4).
    """
    odd = freedom % 2
    i = np.arange(1, (freedom - odd) // 2)
    coefficients = np.cumprod(np.concatenate([[1.0], i / (i + 0.5) if odd else (i - 0.5) / i]))
    powers = np.arange(len(coefficients))

    def within(angle: float) -> float:
        """Return the probability of ``|t| < sqrt(freedom) * tan(angle)``."""
        total = math.sin(angle) * float(np.sum(coefficients * math.cos(angle) ** (2 * powers)))
        if not odd:
            return total
        return 2 / math.pi * (angle + (total * math.cos(angle) if freedom > 1 else 0.0))

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < 2 * probability - 1 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def plus_minus(value: float, error: float) -> str:
    """Format a number and its error, with two digits for the error; "unknown" if the error is not finite."""
    if not math.isfinite(error):
        return f"{value:.6g} ± unknown"
    if not (math.isfinite(value) and error > 1e-6 * abs(value)):
        return f"{value:.6g} ± {error:.1g}"  # one digit is enough for a rounding error
    power = int(f"{max(abs(value), error):e}".partition("e")[2])
    if not -4 < power < 6:
        scale = 10.0**power
        return f"({plus_minus(value / scale, error / scale)})e{power:+03d}"
    places = 1 - int(f"{error:.1e}".partition("e")[2])  # decimal places up to the error's second digit
    return " ± ".join(f"{round(number, places) + 0.0:.{max(places, 0)}f}" for number in (value, error))
