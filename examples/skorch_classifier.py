"""A classifier of skorch trained with BSAM: callbacks clip and schedule, and a grid search chooses the radius.

Run: python examples/skorch_classifier.py        (needs pip install -c constraints.txt '.[train,integrations]')
"""

import torch
from sklearn.model_selection import GridSearchCV
from skorch.callbacks import GradientNormClipping, LRScheduler
from torch import nn

import bsam
from bsam.integrations.skorch import SharpnessAwareClassifier
from bsam.lab.data import digits


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def main():
    torch.manual_seed(0)
    (x, y), (test_x, test_y) = ((part.x.numpy(), part.y.numpy()) for part in (digits().train, digits().test))
    clip, schedule = GradientNormClipping(1.0), LRScheduler("CosineAnnealingLR", T_max=4)
    net = SharpnessAwareClassifier(network, criterion=nn.CrossEntropyLoss, optimizer=bsam.BSAM)
    net.set_params(lr=0.1, optimizer__momentum=0.9, batch_size=32, max_epochs=4, verbose=0, callbacks=[clip, schedule])
    search = GridSearchCV(net, {"optimizer__rho_max": [0.0, 0.05]}, cv=2).fit(x, y)
    print(f"{search.best_params_}, test accuracy {search.score(test_x, test_y):.3f}")
    return search


if __name__ == "__main__":
    main()
