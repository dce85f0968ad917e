"""Test which part of BSAM's released code trains with wrong labels: its direction, or the point that it steps from.

The released code (`BSAM(start_from_min=True)`) takes its step from `w - rho_min u`, where `u` is the normalised
gradient and `rho_min` falls with the learning rate. `ShiftedSAM` has that shift, but SAM's direction. Without flags,
this compares the methods on digits with 72 % wrong labels, at radii where SAM and BSAM learn nothing. With flags, it
trains one network like `bsam train`: `--method shifted_sam --set rho=0.05 rho_min=0.05`, and any other flag.

Run: python examples/shifted_start.py        (the digits need pip install -c constraints.txt '.[train]')
"""

import sys

import bsam
from bsam.lab import Machine, cli
from bsam.lab.training import Run, fit


class ShiftedSAM(bsam.BSAM):
    """SAM whose step starts from w - rho_min u; with rho=0, the base optimizer with that shift alone."""

    title = "SAM, shifted"
    passes = 2

    def __init__(self, base, model, *, rho=0.05, rho_min=0.05):
        super().__init__(base, model, rho_max=rho, rho_min=rho_min, passes=2, start_from_min=True)

    def direction(self, L):
        g = L.grad()
        self.start_from(-self.epsilon(g, "rho_min"))
        return L.grad(at=self.epsilon(g, "rho_max"))


bsam.METHODS["shifted_sam"] = ShiftedSAM  # for this process: its runs can be continued and captured like any other
ROWS = {
    "SAM": ("sam", {"rho": 0.4}),
    "SAM, shifted": ("shifted_sam", {"rho": 0.4, "rho_min": 0.2}),
    "BSAM": ("bsam", {"rho_max": 0.15, "rho_min": 0.15}),
    "BSAM, as released": ("bsam", {"rho_max": 0.15, "rho_min": 0.15, "start_from_min": True}),
}


def main(flags=sys.argv[1:] if __name__ == "__main__" else (), epochs=20):
    if flags:
        raise SystemExit(cli.main(["train", *flags]))
    accuracies = {}
    for row, (method, radii) in ROWS.items():
        run = Run.of(method, radii, label_noise=0.8, batch=64, epochs=epochs)  # one in ten of the drawn labels is right
        accuracies[row] = fit(run, machine=Machine("cpu")).score
        print(f"{row:18}  test accuracy {accuracies[row]:.3f}")
    return accuracies


if __name__ == "__main__":
    main()
