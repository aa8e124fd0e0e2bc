"""Attention in boxes: its bounds and its adjoint."""

import math
from dataclasses import dataclass

import numpy as np

from specguard.checker.attention.norms import AttentionNorms, kronecker, unstack
from specguard.checker.enclosure import Array, Box, eigenvalue_above, norm_above, outward, spectral_norm_above
from specguard.checker.node import Remainder

FORMED = 512
_SECOND = math.sqrt(6) / 18


@dataclass(frozen=True)
class Attention(AttentionNorms):
    """Attention at the tokens X of one image."""

    affine = False

    # Bounds -----------------------------------------------------------------------------------------------------

    def propagate(self, radius: float, method: str) -> float:
        match method:
            case "naive":
                first = outward((1.0 if self.w.skip else 0.0) + (self.w.vo * self.norm_p).sum())
                return float(outward(first * radius + self._second_part(radius, self.xi)))
            case "specformer":
                return self._specformer(radius)
            case "lofast":
                return self._lofast(radius)
            case "local":
                best = min(self._lofast(radius), self._t1(radius))
                return best if self.derivative_norm is None else min(best, self._t2(radius))
        raise ValueError(f"unknown method {method!r}")

    def _lofast(self, radius: float) -> float:
        return float(outward(self.zeta * radius + self._second_part(radius, self.mu_uncentered)))

    def _second_part(self, radius: float, mu: Array) -> float:
        values = outward(self.norm_xvo + radius * self.w.vo)
        return float(outward((self.w.mix.size * self._upper_logit_change(radius, mu) * values).sum()))

    def _upper_logit_change(self, radius: float, mu: Array) -> Array:
        """A bound on the change of the logits."""
        return np.asarray(outward(self.w.most_tau * radius * (mu + radius * self.w.B)))

    def _specformer(self, radius: float) -> float:
        w, n = self.w, self._n
        norm_x = outward(spectral_norm_above(self.X) + radius)
        query = outward(w.q * norm_x + math.sqrt(n) * norm_above(w.bq, 1))
        slope = outward(w.most_tau * w.k * (w.q * norm_x + query) / 2)
        fixed = 0.0 if w.fixed is None else outward(norm_above(w.fixed, 1) * w.v)
        each = outward(w.mix.size * (n * (n + 1) * (slope * w.v * norm_x + w.v)) + fixed)
        return float(outward(((1.0 if w.skip else 0.0) + w.o * norm_above(Box.exact(each))) * radius))

    def _t1(self, radius: float) -> float:
        lam = self.lam(radius).max(-1)
        each = (
            self.w.mix.size
            * lam
            * self._upper_logit_change(radius, self.mu)
            * outward(self.norm_cv + radius * self.w.v)
        )
        return float(outward(self.zeta * radius + self.w.o * norm_above(Box.exact(each))))

    def _t2(self, radius: float) -> float:
        assert self.derivative_norm is not None
        w, s, lam = self.w, self._upper_logit_change(radius, self.mu), self.lam(radius).max(-1)
        product = self.lam_clean * w.most_tau * radius * radius * w.B * self.norm_cv
        each = outward(w.mix.size * (product + _SECOND * s * s * self.norm_cv + lam * s * radius * w.v))
        return float(outward(self.derivative_norm * radius + w.o * norm_above(Box.exact(each))))

    def lam(self, radius: float) -> Array:
        """A bound on the norm of the softmax Jacobian per head and row, over all logits within reach.

        `min(1/2, pbar, 2 (1 - plow))`: the largest probability of any key, and the smallest of the likeliest.
        """
        return self._lam(radius, self.w.B)

    def _lam(self, radius: float, norm: Array) -> Array:
        heads, n = self.S.shape[:2]
        if n == 1:
            return np.zeros((heads, 1))
        a, b, both = (
            norm_above(self.centered_a, 2),
            norm_above(self.b, 2),
            norm_above(self.centered_a + self.b, 2),
        )
        B = norm[:, None, None]
        s = radius * np.sqrt(a[:, None, :] ** 2 + b[:, :, None] ** 2) + B * radius * radius / 2
        own = radius * both + B[..., 0] * radius * radius
        s = np.where(np.eye(n, dtype=bool), own[:, :, None], s)
        rounding = 2.0**-52 * np.abs(self.S.mid)  # of the two sums below
        s = outward(self.w.most_tau * outward(s) + self.S.rad + rounding)
        high, low = self.S.mid + s, self.S.mid - s
        top = high.max(-1, keepdims=True)
        ups, downs = np.exp(high - top), np.exp(low - top)
        others = np.maximum(downs.sum(-1, keepdims=True) * (1 - 1e-12) - downs * (1 + 1e-12), 0.0)
        probabilities = np.divide(ups, ups + others, out=np.zeros_like(ups), where=ups > 0)
        first = self.S.mid.argmax(-1)[..., None] == np.arange(n)
        likeliest_bound = np.where(first, downs, 0.0).sum(-1) * (1 - 1e-12)
        others_bound = (
            np.where(first, 0.0, ups).sum(-1) * (1 + 1e-12) + 1e-290
        )  # for underflow; `likeliest_bound` is above e^-600
        best = np.minimum(
            outward(probabilities.max(-1)), outward(2 * others_bound / (likeliest_bound + others_bound))
        )
        wide = s.max(-1) >= 300
        return np.minimum(np.where(wide, 0.5, best), 0.5)

    # The adjoint ------------------------------------------------------------------------------------------------

    def vjp(self, g: Box) -> tuple[Box, Remainder]:
        """Backward through P V and the softmax; g has one class per row."""
        w = self.w
        mix = w.mix[:, None, None]
        G = g[:, None] @ w.Wo.T  # other head token head_dim
        M = G @ self.V.T * mix
        K = self.p * (M - (self.p * M).sum(-1, True))
        to_q, to_k = (K @ self.K) * w.tau, (K.T @ self.Q) * w.tau
        adjoint = (to_q @ w.Wq.T + to_k @ w.Wk.T + self.P.T @ G @ w.Wv.T).sum(1)
        if w.skip:
            adjoint = adjoint + g
        return adjoint, self._remainder(G, M, K)

    def _remainder(self, G: Box, M: Box, K: Box) -> Remainder:
        w, mix = self.w, self.w.mix.size
        norm_k = spectral_norm_above(K)
        N = G @ w.Wv.T * w.mix[:, None, None]
        norm_n = np.minimum(spectral_norm_above(N), outward(spectral_norm_above(G) * w.v * mix))
        rows = outward((M.mid + M.rad).max(-1) - (M.mid - M.rad).min(-1))
        centered = outward(_SECOND * norm_above(M - M.mean(-1, True), 3))
        product = outward((w.most_tau * norm_k * w.B).sum(1))
        max_weights = np.minimum(outward(rows / 4), centered)
        form = None
        if self.X.shape[0] * self.X.shape[1] <= FORMED:
            form = np.array([self._form(K[r], N[r], max_weights[r]) for r in range(len(max_weights))])

        def terms(radius: float) -> dict[str, Array]:
            lam, s = self.lam(radius), self._upper_logit_change(radius, self.mu)
            weights = np.minimum(outward(lam * rows / 2), centered)
            curvature, max_lam = weights.max(-1), lam.max(-1)
            found = {
                "product": np.asarray(outward(product * radius * radius)),
                "curvature": np.asarray(outward((curvature * s * s).sum(-1))),
                "values": np.asarray(outward((outward(max_lam * s * radius) * norm_n).sum(-1))),
            }
            if form is None:
                return found
            part = np.divide(weights, max_weights, out=np.zeros_like(weights), where=max_weights > 0)
            part = np.minimum(outward(np.maximum(part, 2 * lam).max((-1, -2))), 1.0)
            beta = w.most_tau * w.B
            fourth = (curvature * beta**2).sum(-1)
            third = 2 * np.sqrt((curvature * (w.most_tau * self.mu) ** 2).sum(-1) * fourth)
            third = third + (max_lam * beta * norm_n).sum(-1)
            whole = part * form + (1 - part) * product + third * radius + fourth * radius * radius
            together = outward(outward(whole) * radius * radius)
            better = together < sum(found.values())
            return {name: np.where(better, 0.0, term) for name, term in found.items()} | {
                "together": np.where(better, together, 0.0)
            }

        return terms

    def _form(self, K: Box, N: Box, weights: Array) -> float:
        """The three remainders of second order for one other class: the largest eigenvalue of their quadratic form.

        Row i of the logits changes by `L_i D`, and `2 |L_i D| |C D N_i| <= alpha |L_i D|^2 + |C D N_i|^2 / alpha`.
        """
        n, d = self.X.shape
        center = Box.exact(np.eye(n)) - Box.exact(1.0) / float(n)
        total = product = Box.exact(np.zeros((n * d, n * d)))
        for head, L in enumerate(unstack(self._logit_operator(self.centered_a, True))):
            a, b = norm_above(self.centered_a[head]), norm_above(self.b[head], 1)
            size, logit_rate = norm_above(N[head], 1), self.w.most_tau * np.sqrt(a * a + b * b)
            alpha = np.where((size > 0) & (logit_rate > 0), size / np.where(logit_rate > 0, logit_rate, 1.0), 1.0)
            alpha = np.clip(alpha, 1e-100, 1e100)
            scale = Box.exact(np.repeat(outward(weights[head] + alpha / 4), n)[:, None])
            total = total + L.T @ (L * scale) * (self.w.tau * self.w.tau)
            values = N[head].T @ (N[head] * Box.exact(outward(0.25 / alpha)[:, None]))
            total = total + kronecker(center, values)
            product = product + kronecker(K[head], self.w.Wq[head] @ self.w.Wk[head].T) * self.w.tau
        both = (total + product, total - product)  # the product may have either sign
        return max(eigenvalue_above((matrix + matrix.T) * 0.5) for matrix in both)
