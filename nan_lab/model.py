"""The one classifier that the series keeps from the first notebook to the last."""

from torch import nn

from nan_lab.data import CLASSES, PIXELS


def classifier():
    """Return Linear 64-64, ReLU, Linear 64-10 in float32: (B, 64) pixels to (B, 10) logits."""
    return nn.Sequential(nn.Linear(PIXELS, 64), nn.ReLU(), nn.Linear(64, CLASSES))
