"""Independent float64 steps of the rules of the field, one matrix at a time, in NumPy.

Written from the formulas of the papers and pull requests, in their variables: Muown keeps v and its gradient, not the
weight's; EMA-Nesterov keeps the point x, and the weights are looked at ahead of it. Decay, `nesterov` and the scale of
updates are Muon's, as in `oracle.py`.
"""

import math

import numpy as np
from oracle import NEURON_EPS, PUBLISHED_POLAR_EXPRESS, agreement, polynomial_polar


def polar_factor(u):
    """Return the polar factor of a direction; rows and columns of zeros stay zeros, without the noise of an SVD."""
    o = polynomial_polar(u, PUBLISHED_POLAR_EXPRESS, 0.02)
    o[~u.any(axis=1)] = 0
    o[:, ~u.any(axis=0)] = 0
    return o


def row_norms(x):
    return np.sqrt((x * x).sum(axis=1, keepdims=True))


def divided(x, norms):
    """Return x / norms, and zeros where norms are zero."""
    return np.divide(x, norms, out=np.zeros_like(x), where=np.broadcast_to(norms, x.shape) > 0)


class RuleMatrix:
    """Muon, whose parts the rules replace."""

    def __init__(self, weight):
        self.w = np.array(weight, dtype=np.float64)
        self.m = np.zeros_like(self.w)

    def direction(self, g, mu, nesterov):
        self.m = mu * self.m + (1 - mu) * g
        return (1 - mu) * g + mu * self.m if nesterov else self.m

    def orthogonal(self, u):
        return polar_factor(u)

    def scale(self):
        m, n = self.w.shape
        return math.sqrt(max(1.0, m / n))

    def moved(self, w, o, lr, wd, multiplier, cautious):
        """Return the weights after decay and a step."""
        return w - lr * wd * agreement(o, w, cautious) * w - lr * multiplier * self.scale() * o

    def step(self, grad, *, lr, mu=0.95, nesterov=True, wd=0.0, multiplier=1.0, cautious=False):
        o = self.orthogonal(self.direction(np.asarray(grad, dtype=np.float64), mu, nesterov))
        self.w = self.moved(self.w, o, lr, wd, multiplier, cautious)
        return self.w


class MuonEqMatrix(RuleMatrix):
    """arXiv 2603.28254: D_r u, D_r u D_c or u D_c with the inverse norms of rows and columns."""

    of = "rows"

    def orthogonal(self, u):
        rows, columns = row_norms(u), row_norms(u.T).T
        if self.of != "columns":
            u = divided(u, rows)
        if self.of != "rows":
            u = divided(u, columns)
        return polar_factor(u)


class MuonPlusMatrix(RuleMatrix):
    """arXiv 2602.21545: columns, then rows of the polar factor get norm one; here then the orthogonal matrix' norm."""

    to = "columns_rows"

    def orthogonal(self, u):
        o = polar_factor(u)
        if "columns" in self.to:
            o = divided(o, row_norms(o.T).T)
        if "rows" in self.to:
            o = divided(o, row_norms(o))
        return divided(o * math.sqrt(min(o.shape)), np.linalg.norm(o, keepdims=True))


class NanochatMatrix(RuleMatrix):
    """nanochat 92d63d4: rows of mean norm, the polar step, the Frobenius norm, then the variance of neurons."""

    def __init__(self, weight):
        super().__init__(weight)
        self.v = 0.0

    def orthogonal(self, u):
        o = polar_factor(divided(u, row_norms(u)))
        rows, columns = o.shape
        o = divided(o * math.sqrt(min(rows, columns)), np.linalg.norm(o, keepdims=True))
        axis = 1 if rows >= columns else 0
        self.v = self.v + (1 - 0.95) * ((o**2).mean(axis=axis, keepdims=True) - self.v)
        scaled = o / np.sqrt(np.maximum(self.v, NEURON_EPS))
        return divided(scaled * np.linalg.norm(o), np.linalg.norm(scaled, keepdims=True))


class MuownMatrix(RuleMatrix):
    """arXiv 2605.10797: w_i = a_i v_i / |v_i|, Adam on a, Muon on v."""

    LEAST = 1e-12

    def __init__(self, weight):
        super().__init__(weight)
        self.v = self.w.copy()
        self.a = np.maximum(row_norms(self.w), self.LEAST)
        self.mean, self.square, self.t = np.zeros_like(self.a), np.zeros_like(self.a), 0

    def scale(self):
        return 0.2 * math.sqrt(max(self.w.shape))

    def step(self, grad, *, lr, mu=0.95, nesterov=True, wd=0.0, multiplier=1.0, cautious=False):
        assert not cautious
        g = np.asarray(grad, dtype=np.float64)
        c = np.maximum(row_norms(self.v), self.LEAST)
        e = self.v / c
        of_a = (g * e).sum(axis=1, keepdims=True)
        of_v = self.a / c * (g - of_a * e)
        o = polar_factor(self.direction(of_v, mu, nesterov))
        self.v = self.v - lr * multiplier * self.scale() * o
        self.t += 1
        self.mean = 0.9 * self.mean + 0.1 * of_a
        self.square = 0.95 * self.square + 0.05 * of_a**2
        adam = self.mean / (1 - 0.9**self.t) / (np.sqrt(self.square / (1 - 0.95**self.t)) + 1e-8)
        self.a = (self.a - lr * adam) * (1 - lr * wd)
        self.w = self.a * self.v / np.maximum(row_norms(self.v), self.LEAST)
        return self.w


class HyperballMatrix(RuleMatrix):
    """arXiv 2606.16899: r unit(w - lr r unit(u)); a matrix of zeros grows to the norm of PyTorch's initialisation."""

    def __init__(self, weight):
        super().__init__(weight)
        self.radius = np.linalg.norm(self.w)
        self.grows = self.radius == 0
        if self.grows:
            self.radius = math.sqrt(self.w.shape[0] / 3)

    def moved(self, w, o, lr, wd, multiplier, cautious):
        v = w - lr * multiplier * self.radius * divided(o, np.linalg.norm(o, keepdims=True))
        if self.grows and np.linalg.norm(v) < self.radius:
            return v
        self.grows = False
        return self.radius * v / np.linalg.norm(v)


class RadialBrakeMatrix(RuleMatrix):
    """Emerging-Optimizers' radial brake: the change of the norm counts by half if the norm grows."""

    outward, inward = 0.5, 1.0

    def moved(self, w, o, lr, wd, multiplier, cautious):
        v = super().moved(w, o, lr, wd, multiplier, cautious)
        before, after = np.linalg.norm(w), np.linalg.norm(v)
        if before == 0 or after == 0:
            return v
        share = self.outward if after > before else self.inward
        return v / after * (before + share * (after - before))


class RelativeUpdateMatrix(RuleMatrix):
    """Emerging-Optimizers' relative updates: |w| u / |u|."""

    def moved(self, w, o, lr, wd, multiplier, cautious):
        norm = np.linalg.norm(w) or math.sqrt(w.shape[0] / 3)
        return w - lr * wd * w - lr * multiplier * norm * divided(o, np.linalg.norm(o, keepdims=True))


class TwoRateMatrix(RuleMatrix):
    """modded-nanogpt pull request 340: two averages, mixed."""

    fast, slow, share = 0.9, 0.98, 0.4385

    def __init__(self, weight):
        super().__init__(weight)
        self.p, self.q = np.zeros_like(self.w), np.zeros_like(self.w)

    def direction(self, g, mu, nesterov):
        self.p = self.fast * self.p + (1 - self.fast) * g
        self.q = self.slow * self.q + (1 - self.slow) * g
        mixed = self.share * self.p + (1 - self.share) * self.q
        return (1 - mu) * g + mu * mixed if nesterov else mixed


class EMANesterovMatrix(RuleMatrix):
    """arXiv 2605.25395: x' = A(x + c e), e' = d e + (1 - d)(x' - x); w is x + c e, where gradients are taken."""

    rate, ahead = 0.99, 0.3

    def __init__(self, weight):
        super().__init__(weight)
        self.x, self.e = self.w.copy(), np.zeros_like(self.w)

    def moved(self, w, o, lr, wd, multiplier, cautious):
        x = super().moved(self.x + self.ahead * self.e, o, lr, wd, multiplier, cautious)
        self.e = self.rate * self.e + (1 - self.rate) * (x - self.x)
        self.x = x
        return self.x + self.ahead * self.e


class AuroraMatrix(RuleMatrix):
    """tilde-research's Aurora: rows of a tall matrix are scaled until those of its polar factor have equal norms."""

    rounds, power = 2, 0.5

    def orthogonal(self, u):
        if u.shape[0] < u.shape[1]:
            return self.orthogonal(u.T).T
        if u.shape[0] == u.shape[1]:
            return polar_factor(u)
        x = divided(u, row_norms(u))
        for number in range(self.rounds):
            o = polar_factor(x)
            if number < self.rounds - 1:
                x = divided(x * (u.shape[1] / u.shape[0]) ** self.power, (row_norms(o) ** 2) ** self.power)
        return o


ORACLES = {
    "muon": RuleMatrix,
    "muoneq": MuonEqMatrix,
    "muon_plus": MuonPlusMatrix,
    "nanochat": NanochatMatrix,
    "muown": MuownMatrix,
    "hyperball": HyperballMatrix,
    "radial_brake": RadialBrakeMatrix,
    "relative_update": RelativeUpdateMatrix,
    "two_rate": TwoRateMatrix,
    "ema_nesterov": EMANesterovMatrix,
    "aurora": AuroraMatrix,
}
"""The name of a rule -> its oracle."""
