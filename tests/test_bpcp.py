"""Bayesian Poisson CP, beside the same coordinate ascent written as loops."""

import numpy as np
import pytest
import torch
from baseline_data import cells, cp, halves, tensor
from scipy import stats
from scipy.special import digamma, gammaln

from baselines.bpcp import BPCP
from baselines.main_effects import MainEffects
from ented.likelihoods import NegativeBinomial

NB = NegativeBinomial(20)
missings = pytest.mark.parametrize("missing", ["masked", "zeros"])
pytestmark = pytest.mark.usefixtures("float64")


def draw(shape, rank, seed=0):
    rng = np.random.default_rng(seed)
    mean = cp([rng.gamma(0.7, 1.7, (size, rank)) for size in shape])
    return rng.poisson(mean), mean, rng


class Loops:
    """The posterior of a 3 x 3 x 3 tensor's factors, an element at a time."""

    def __init__(self, model: BPCP, entries: dict, everywhere: dict):
        self.entries, self.everywhere, self.alpha = entries, everywhere, model.alpha
        self.gamma = model.gamma.numpy().reshape(3, 3, -1).copy()  # mode, row, component
        self.delta = model.delta.numpy().reshape(3, 3, -1).copy()
        self.beta = model.beta.numpy().copy()

    def log_a(self, d, i, r):
        return digamma(self.gamma[d, i, r]) - np.log(self.delta[d, i, r])

    def a(self, d, i, r):
        return self.gamma[d, i, r] / self.delta[d, i, r]

    def shares(self, cell):
        weights = [np.exp(sum(self.log_a(d, cell[d], r) for d in range(3))) for r in range(self.gamma.shape[2])]
        return np.array(weights) / sum(weights)

    def update(self, d):
        shares = {cell: self.shares(cell) for cell in self.entries}
        others = [e for e in range(3) if e != d]
        for i in range(3):
            for r in range(self.gamma.shape[2]):
                self.gamma[d, i, r] = self.alpha + sum(
                    x * shares[cell][r] for cell, x in self.entries.items() if cell[d] == i
                )
                self.delta[d, i, r] = self.alpha * self.beta[d] + sum(
                    np.prod([self.a(e, cell[e], r) for e in others]) for cell in self.everywhere if cell[d] == i
                )
        self.beta[d] = 1 / np.mean([self.a(d, i, r) for i in range(3) for r in range(self.gamma.shape[2])])

    def elbo(self):
        """E[log p(x, y, A)] - E[log q(y)] - E[log q(A)] with the divided counts y ~ multinomial(x, shares).

        Given the shares s, E[log p(y | A)] - E[log q(y)] is sum_r x s_r (E[log rate_r] - log s_r) - E[rate_r] - log x!.
        """
        value = 0.0
        for cell, x in self.everywhere.items():
            s = self.shares(cell)
            for r in range(len(s)):
                log_rate = sum(self.log_a(d, cell[d], r) for d in range(3))
                value += x * s[r] * (log_rate - np.log(s[r])) - np.prod([self.a(d, cell[d], r) for d in range(3)])
            value -= gammaln(x + 1)
        for d, i, r in np.ndindex(*self.gamma.shape):
            rate = self.alpha * self.beta[d]
            value += self.alpha * np.log(rate) - gammaln(self.alpha)
            value += (self.alpha - 1) * self.log_a(d, i, r) - rate * self.a(d, i, r)
            value += stats.gamma.entropy(self.gamma[d, i, r], scale=1 / self.delta[d, i, r])
        return value


@missings
def test_every_update_and_the_bound_are_those_of_loops(missing):
    values, _, rng = draw((3, 3, 3), 2, seed=4)
    observed = [tuple(cell) for cell in cells((3, 3, 3))[rng.permutation(27)[:15]].tolist()]
    entries = {cell: int(values[cell]) for cell in observed}
    everywhere = (
        entries
        if missing == "masked"
        else {tuple(cell): entries.get(tuple(cell), 0) for cell in cells((3, 3, 3)).tolist()}
    )
    train = tensor(np.array(observed), np.array(list(entries.values())), (3, 3, 3))
    model = BPCP((3, 3, 3), NB, rank=2, missing=missing)
    loops = Loops(model, entries, everywhere)
    before = -np.inf
    for _ in range(4):
        for mode in range(3):
            model.update(mode, train.indices, train.values)
            loops.update(mode)
            np.testing.assert_allclose(model.gamma.numpy(), loops.gamma.reshape(9, -1), rtol=1e-10)
            np.testing.assert_allclose(model.delta.numpy(), loops.delta.reshape(9, -1), rtol=1e-10)
            np.testing.assert_allclose(model.beta.numpy(), loops.beta, rtol=1e-10)
            elbo = model.elbo(train.indices, train.values).item()
            assert elbo == pytest.approx(loops.elbo(), rel=1e-10)
            assert elbo > before
            before = elbo


@missings
def test_the_bound_grows_until_it_converges(missing):
    values, _, rng = draw((8, 7, 6), 2)
    train, _, _ = halves(values, rng)
    model, objective = BPCP((8, 7, 6), NB, rank=4, missing=missing, tolerance=1e-6), []
    while not model.converged:
        model.fit(train, 1)
        objective.append(model.objective.item())
    assert 5 < len(objective) < 2000
    assert (np.diff(objective) > -1e-9).all()


def test_the_predictive_has_the_moments_of_samples():
    values, _, rng = draw((6, 5, 4), 2)
    train, test, _ = halves(values, rng)
    model = BPCP((6, 5, 4), NB, rank=2).fit(train, 50)
    posterior = torch.distributions.Gamma(model.gamma, model.delta)
    samples = posterior.sample((20_000,)).split(model.shape, dim=1)
    rate = sum(
        torch.stack([factor[:, test.indices[:, d], r] for d, factor in enumerate(samples)]).prod(0) for r in range(2)
    )
    counts = torch.poisson(rate)
    predictive = model.predictive(test.indices)
    spread = counts.std(0)
    assert ((predictive.mean - counts.mean(0)).abs() < 5 * spread / 20_000**0.5 + 1e-9).all()
    std = predictive.columns()["std"]
    torch.testing.assert_close(std, spread, rtol=0.15, atol=0.02)  # the fourth moments are large
    # a probability of zero that is right to a hundredth, under a rate that is no gamma variable
    torch.testing.assert_close(
        predictive.log_prob(torch.zeros(len(test))).exp(), (-rate).exp().mean(0), rtol=0, atol=0.02
    )
    # the plug-in is Poisson at the mean
    assert torch.equal(predictive.plugin().mean, predictive.mean)
    x = test.values.numpy()
    expected = stats.poisson.logpmf(x, predictive.mean.numpy())
    assert predictive.plugin().log_prob(test.values).numpy() == pytest.approx(expected)


def test_the_geometric_estimate_is_the_exponential_of_the_mean_log():
    values, _, rng = draw((6, 5, 4), 1)
    train, test, _ = halves(values, rng)
    model = BPCP((6, 5, 4), NB, rank=1, estimate="geometric").fit(train, 50)
    samples = torch.distributions.Gamma(model.gamma, model.delta).sample((40_000,)).log().mean(0).split(model.shape)
    expected = sum(factor[test.indices[:, d], 0] for d, factor in enumerate(samples)).exp()
    torch.testing.assert_close(model.predictive(test.indices).mean, expected, rtol=0.05, atol=1e-3)


def test_what_was_not_seen_is_predicted_nearly_as_well_as_by_the_truth():
    """About 200 parameters from 3000 entries: an excess log loss of 200 / (2 * 3000) = 0.03 an entry, twice for slack.

    The rank is twice the truth's.
    """
    shape = (20, 20, 15)
    values, mean, rng = draw(shape, 2)
    train, test, rows = halves(values, rng)
    oracle = stats.poisson.logpmf(values, mean).reshape(-1)[rows].mean()
    model = BPCP(shape, NB, rank=4, tolerance=1e-6).fit(train, 500)
    effects = MainEffects(shape, NB).fit(train, 500)
    excess = oracle - model.predictive(test.indices).log_prob(test.values).mean().item()
    rival = oracle - effects.predictive(test.indices).log_prob(test.values).mean().item()
    assert excess < 0.06 and rival > 4 * excess
