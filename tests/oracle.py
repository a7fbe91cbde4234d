"""An independent float64 implementation of the update rules, one matrix at a time, in NumPy."""

import numpy as np

PUBLISHED_POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Five steps, safety 2e-2: the numbers that the modded-nanogpt speedrun publishes."""


def polynomial_polar(x, coefficients, margin):
    """Apply each polynomial to the singular values of the normalised matrix: no matrix iteration at all."""
    x = np.asarray(x, dtype=np.float64)
    norm = np.linalg.norm(x) * (1 + margin)
    if norm == 0:
        return np.zeros_like(x)
    u, s, vh = np.linalg.svd(x / norm, full_matrices=False)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vh


# Least second moment: below it an update's entry is noise, which nothing should blow up.
NEURON_EPS = 1e-10


def agreement(update, weight, cautious):
    """Return a mask of the weights that decay: all, those whose sign is the update's, or strictly so, without zeros."""
    if cautious == "strict":
        return update * weight > 0
    return (update * weight >= 0) if cautious else 1.0


class MuonMatrix:
    """Muon on one matrix, step by step."""

    def __init__(self, weight, *, transposed=False, neuron=False):
        self.w = np.array(weight, dtype=np.float64)
        self.m = np.zeros_like(self.w)
        self.transposed = transposed
        self.v = None
        self.neuron = neuron

    def step(self, grad, *, lr, mu=0.95, nesterov=True, wd=0.0, cautious=False, beta=0.95, scale=None, decay_scale=1.0):
        g = np.asarray(grad, dtype=np.float64)
        self.m += (1 - mu) * (g - self.m)
        u = (1 - mu) * g + mu * self.m if nesterov else self.m
        if self.transposed:
            u = u.T
        u = polynomial_polar(u, PUBLISHED_POLAR_EXPRESS, 0.02)
        rows, columns = u.shape
        if self.neuron:
            axis = 1 if rows >= columns else 0
            mean = np.mean(u**2, axis=axis, keepdims=True)
            self.v = mean * (1 - beta) if self.v is None else self.v + (1 - beta) * (mean - self.v)
            scaled = u / np.sqrt(np.maximum(self.v, NEURON_EPS))
            u = scaled * (np.linalg.norm(u) / np.linalg.norm(scaled))
        factor = np.sqrt(max(1.0, rows / columns)) if scale is None else scale
        if self.transposed:
            u = u.T
        mask = agreement(u, self.w, cautious)
        self.w = self.w - lr * wd * decay_scale * mask * self.w - lr * factor * u
        return self.w


class AdaMuonMatrix:
    """AdaMuon on one matrix, step by step: arXiv 2507.11005, algorithm 1, whose momentum is a sum of gradients."""

    def __init__(self, weight):
        self.w = np.array(weight, dtype=np.float64)
        self.m = np.zeros_like(self.w)
        self.v = np.zeros_like(self.w)

    def step(self, grad, *, lr, mu=0.95, wd=0.0, beta=0.95, eps=1e-8):
        self.m = mu * self.m + np.asarray(grad, dtype=np.float64)
        o = polynomial_polar(np.sign(self.m), PUBLISHED_POLAR_EXPRESS, 0.02)
        self.v = beta * self.v + (1 - beta) * o * o
        normalized = o / (np.sqrt(self.v) + eps)
        gamma = 0.2 * np.sqrt(o.size) / np.linalg.norm(normalized)
        self.w = self.w - lr * (gamma * normalized + wd * self.w)
        return self.w


class AdamWTensor:
    """AdamW on one tensor, step by step."""

    def __init__(self, weight):
        self.w = np.array(weight, dtype=np.float64)
        self.m = np.zeros_like(self.w)
        self.v = np.zeros_like(self.w)
        self.t = 0

    def step(self, grad, *, lr, betas, eps, wd=0.0, cautious=False):
        g = np.asarray(grad, dtype=np.float64)
        self.t += 1
        self.m = betas[0] * self.m + (1 - betas[0]) * g
        self.v = betas[1] * self.v + (1 - betas[1]) * g * g
        update = (self.m / (1 - betas[0] ** self.t)) / (np.sqrt(self.v / (1 - betas[1] ** self.t)) + eps)
        mask = agreement(update, self.w, cautious)
        self.w = self.w - lr * wd * mask * self.w - lr * update
        return self.w


def rounded_to_24_bits(values):
    """Return float32 values whose lowest 8 bits are zero, the nearest ones, to even of two; a NaN stays a NaN."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    sign, magnitude = bits & 0x80000000, bits & 0x7FFFFFFF
    # Floats of one sign are ordered as their patterns, also from subnormal to normal, and from the largest to infinity.
    rounded = (np.rint(magnitude / 256.0) * 256).astype(np.uint32)
    rounded = np.where(magnitude > 0x7F800000, 0x7FC00000, sign | rounded)
    return rounded.astype(np.uint32).view(np.float32)
