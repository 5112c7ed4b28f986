"""How far one prompt's damage is from the average: a ridge regression for every block.

For prompt p and block i the target is y = log(D_i(p) / D_i(all)) at a reference bitwidth, clipped;
the features are principal components of what the prefill already computed. One matrix of weights
serves all blocks; lambda is chosen per block by exact leave-one-out. A block whose leave-one-out
R^2 is not positive keeps the multiplier 1. A multiplier scales a block's whole damage curve, so it
leaves the curve's convex hull as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

LAMBDAS = tuple(float(x) for x in np.logspace(-3.0, 2.0, 11))
TARGET_CLIP = 3.0
MULTIPLIER_CLIP = float(np.log(4.0))


def raw_features(
    mean_hidden: ArrayLike, routing_histogram: ArrayLike, prompt_tokens: ArrayLike
) -> FloatArray:
    """[n, D + L E + 1] what describes a prompt: mean states, sqrt of routing shares, log length.

    Args:
        mean_hidden: [n, D] mean router inputs (layers side by side) or a mean hidden state.
        routing_histogram: [n, L, E] (or [n, L E]) shares of routed tokens by layer and expert.
        prompt_tokens: [n] prompt lengths, >= 1.

    Raises:
        ValueError: If the numbers of prompts differ, a share is negative or a length below 1.
    """
    hidden = np.asarray(mean_hidden, dtype=np.float64)
    shares = np.asarray(routing_histogram, dtype=np.float64).reshape(len(hidden), -1)
    lengths = np.asarray(prompt_tokens, dtype=np.float64)
    if lengths.shape != (len(hidden),):
        raise ValueError(f"{len(hidden)} prompts need as many lengths, found {lengths.shape}")
    if shares.size and shares.min() < 0.0:
        raise ValueError(f"routing shares must be >= 0, found {shares.min()}")
    if lengths.size and lengths.min() < 1.0:
        raise ValueError(f"prompt_tokens must be >= 1, found {lengths.min()}")
    return np.column_stack([hidden, np.sqrt(shares), np.log(lengths)])


@dataclass(frozen=True)
class FeatureMap:
    """Standardisation and principal components: raw features -> [n, d] of unit variance."""

    mean: FloatArray
    scale: FloatArray
    components: FloatArray

    def __call__(self, raw: ArrayLike) -> FloatArray:
        """[n, d] features of prompts with raw features [n, R]."""
        x = (np.asarray(raw, dtype=np.float64) - self.mean) / self.scale
        return np.asarray(x @ self.components)


def fit_feature_map(raw: ArrayLike, features: int = 32) -> FeatureMap:
    """Principal components of standardised raw features; constant ones are ignored.

    Args:
        raw: [n, R] raw features of n >= 3 prompts.
        features: At most so many components are kept; never more than the data's rank.

    Raises:
        ValueError: If there are fewer than 3 prompts, or they are all alike.
    """
    x = np.asarray(raw, dtype=np.float64)
    if x.ndim != 2 or len(x) < 3:
        raise ValueError(f"raw features must be [n >= 3, R], found {x.shape}")
    mean = x.mean(axis=0)
    deviation = x.std(axis=0)
    varies = deviation > 1e-12 * np.maximum(1.0, np.abs(mean))
    scale = np.where(varies, deviation, 1.0)
    centred = np.where(varies, (x - mean) / scale, 0.0)
    _, singular, right = np.linalg.svd(centred, full_matrices=False)
    if singular[0] <= 0.0:
        raise ValueError("all prompts have the same features")
    kept = min(features, int((singular > 1e-9 * singular[0]).sum()), len(x) - 1)
    largest = right[np.arange(kept), np.abs(right[:kept]).argmax(axis=1)]
    directions = right[:kept] * np.sign(largest)[:, None]
    components = np.where(varies[:, None], directions.T, 0.0) / (singular[:kept] / np.sqrt(len(x)))
    return FeatureMap(mean, scale, components)


@dataclass(frozen=True)
class PromptHeads:
    """Fitted heads of all blocks.

    Attributes:
        weights: [d, blocks] slopes; 0 for a head that is switched off.
        bias: [blocks].
        ridge: [blocks] chosen lambda.
        leave_one_out_r2: [blocks] 1 - PRESS / sum of squares around the mean.
        is_on: [blocks] whether the head is used.
    """

    weights: FloatArray
    bias: FloatArray
    ridge: FloatArray
    leave_one_out_r2: FloatArray
    is_on: NDArray[np.bool_]

    def log_multipliers(self, features: ArrayLike) -> FloatArray:
        """[n, blocks] clip(phi W + b, +-log 4); exactly 0 where the head is off."""
        raw = np.asarray(features, dtype=np.float64) @ self.weights + self.bias
        return np.where(self.is_on, np.clip(raw, -MULTIPLIER_CLIP, MULTIPLIER_CLIP), 0.0)

    def multipliers(self, features: ArrayLike, remaining_tokens: ArrayLike) -> FloatArray:
        """[blocks] for a batch: exp of the mean log-multiplier, weighted by remaining tokens.

        Args:
            features: [n, d] features of the running prompts.
            remaining_tokens: [n] tokens each has still to produce, >= 0; all 0 counts as equal.

        Raises:
            ValueError: If the numbers differ, or a number of tokens is negative.
        """
        logs = self.log_multipliers(features)
        weight = np.asarray(remaining_tokens, dtype=np.float64)
        if weight.shape != (len(logs),):
            raise ValueError(f"{len(logs)} prompts need as many weights, found {weight.shape}")
        if weight.size == 0:
            return np.ones(logs.shape[1])
        if weight.min() < 0.0:
            raise ValueError(f"remaining_tokens must be >= 0, found {weight.min()}")
        if weight.sum() == 0.0:
            weight = np.ones_like(weight)
        return np.asarray(np.exp(weight @ logs / weight.sum()))


def damage_targets(
    prompt_damage: ArrayLike, global_damage: ArrayLike, *, clip: float = TARGET_CLIP
) -> FloatArray:
    """[n, blocks] y = log(D(prompt) / D(all)), clipped to +-clip.

    Args:
        prompt_damage: [n, blocks] D at the reference bitwidth with each prompt's own moments;
            0 or nan (a prompt that never reached the expert) counts as no deviation.
        global_damage: [blocks] D with the calibration's moments, > 0.
        clip: Largest |y|.

    Raises:
        ValueError: If a global damage is not positive.
    """
    prompt = np.asarray(prompt_damage, dtype=np.float64)
    overall = np.asarray(global_damage, dtype=np.float64)
    if not (overall > 0.0).all():
        raise ValueError(f"global damages must be > 0, found {overall.min()}")
    known = np.isfinite(prompt) & (prompt > 0.0)
    ratio = np.where(known, prompt, overall) / overall
    return np.asarray(np.clip(np.log(ratio), -clip, clip))


def leave_one_out_residuals(features: ArrayLike, targets: ArrayLike, ridge: float) -> FloatArray:
    """[n, blocks] y_i minus the prediction of the ridge regression fitted without prompt i.

    Exact: residual / (1 - leverage), with the bias unpenalised.

    Args:
        features: [n, d].
        targets: [n, blocks].
        ridge: lambda > 0.
    """
    phi = np.asarray(features, dtype=np.float64)
    y = np.asarray(targets, dtype=np.float64)
    left, singular, _ = np.linalg.svd(phi - phi.mean(axis=0), full_matrices=False)
    return _residuals(left, singular, y - y.mean(axis=0), ridge)


def _residuals(left: FloatArray, singular: FloatArray, y: FloatArray, ridge: float) -> FloatArray:
    filtered = left * (singular**2 / (singular**2 + ridge))
    leverage = 1.0 / len(y) + (filtered * left).sum(axis=1)
    return np.asarray((y - filtered @ (left.T @ y)) / (1.0 - leverage)[:, None])


def fit_prompt_heads(
    features: ArrayLike, targets: ArrayLike, *, lambdas: tuple[float, ...] = LAMBDAS
) -> PromptHeads:
    """Fit one ridge regression per block, lambda by leave-one-out.

    Args:
        features: [n, d] of n >= 3 prompts.
        targets: [n, blocks] log damage ratios.
        lambdas: Penalties to choose from, each > 0.

    Raises:
        ValueError: If shapes disagree, there are fewer than 3 prompts, or a penalty is not > 0.
    """
    phi = np.asarray(features, dtype=np.float64)
    y = np.asarray(targets, dtype=np.float64)
    if phi.ndim != 2 or y.ndim != 2 or len(phi) != len(y) or len(phi) < 3:
        raise ValueError(f"features [n, d], targets [n, blocks], n >= 3: {phi.shape}, {y.shape}")
    if not lambdas or min(lambdas) <= 0.0:
        raise ValueError(f"lambdas must be > 0, found {lambdas}")
    mean_phi, mean_y = phi.mean(axis=0), y.mean(axis=0)
    left, singular, right = np.linalg.svd(phi - mean_phi, full_matrices=False)
    centred = y - mean_y
    press = np.stack([(_residuals(left, singular, centred, x) ** 2).sum(axis=0) for x in lambdas])
    choice = press.argmin(axis=0)
    ridge = np.asarray(lambdas, dtype=np.float64)[choice]
    total = (centred**2).sum(axis=0)
    varies = total > 0.0
    r2 = np.where(varies, 1.0 - press.min(axis=0) / np.where(varies, total, 1.0), 0.0)
    is_on = r2 > 0.0
    shrink = singular[:, None] / (singular[:, None] ** 2 + ridge)
    weights = np.where(is_on, right.T @ (shrink * (left.T @ centred)), 0.0)
    return PromptHeads(weights, mean_y - mean_phi @ weights, ridge, r2, is_on)
