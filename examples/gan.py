"""A GAN whose generator and discriminator are both trained with SAM.

The closure of the generator also runs the discriminator. Given both modules, the generator's optimizer updates the
batch norm of both once a step, not once a pass, and leaves the gradients of the discriminator as they were.

Run: python examples/gan.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import bsam


def main(steps=300, batch=128):
    torch.manual_seed(0)
    mean, std = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 1.0])  # of the data: two independent normal variables
    generator = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    ones, zeros = torch.ones(batch, 1), torch.zeros(batch, 1)

    def adam(model):
        return torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.999))

    optimizer_g = bsam.SAM(adam(generator), [generator, discriminator], rho=0.02)
    optimizer_d = bsam.SAM(adam(discriminator), discriminator, rho=0.02)

    for _ in range(steps):
        real, fake = mean + std * torch.randn(batch, 2), generator(torch.randn(batch, 4)).detach()

        def scores(fake):  # in one batch with real samples: batch norm would otherwise hide their location
            return discriminator(torch.cat([real, fake])).chunk(2)

        def loss_d():
            return F.binary_cross_entropy_with_logits(torch.cat(scores(fake)), torch.cat([ones, zeros]))

        if optimizer_d.t == 0:
            optimizer_d.check(loss_d)  # reports mistakes that would otherwise be silent; changes nothing
        optimizer_d.step(loss_d)
        before = [p.grad.clone() for p in discriminator.parameters()]
        z = torch.randn(batch, 4)
        optimizer_g.step(lambda: F.binary_cross_entropy_with_logits(scores(generator(z))[1], ones))
        after = [p.grad for p in discriminator.parameters()]
        untouched = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    with torch.no_grad():
        samples = generator.eval()(torch.randn(5000, 4))
    print(f"data:    mean {mean.tolist()}, std {std.tolist()}")
    print("samples: mean [{:.2f}, {:.2f}], std [{:.2f}, {:.2f}]".format(*samples.mean(0), *samples.std(0)))
    print(f"the generator's last step left the discriminator's gradients as they were: {untouched}")
    return samples, untouched, generator, discriminator


if __name__ == "__main__":
    main()
