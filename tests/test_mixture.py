"""A mixture of models is its components side by side."""

import copy

import numpy as np
import pytest
import torch
from small_model import ENTRIES, JITTER, RANK, SHAPE, VARIANCE, kinds, make_entries, make_model

from ented.factors import FactorTable
from ented.kernels import RBF
from ented.likelihoods import Bernoulli, NegativeBinomial
from ented.model import ENTED, mixture


def make_components(kind):
    """Three models with every option, whose learned parameters differ, and the same as one."""
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        likelihood = (
            Bernoulli(True) if kind == "binary" else NegativeBinomial(3.0 + seed, learned=True, quadrature=True)
        )
        kernel = RBF(torch.linspace(1, 2, len(SHAPE) * RANK), VARIANCE, learned=True)
        model = ENTED(FactorTable(SHAPE, RANK, 1.0, 0.3, "degrees"), likelihood, 6, 2, kernel, JITTER).double()
        model.table.set_degrees(torch.arange(sum(SHAPE)))
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        models.append(model)
    return models, mixture(copy.deepcopy(models))


@kinds
def test_a_step_of_a_mixture_is_one_of_each_component(kind):
    models, together = make_components(kind)
    indices, x = make_entries(kind)
    noise = torch.randn(3, ENTRIES, len(SHAPE), RANK, dtype=torch.float64)
    results = together.step(indices, x, 2.0, 0.3, noise)
    expected = [model.step(indices, x, 2.0, 0.3, noise[i]) for i, model in enumerate(models)]
    for result, of_components in zip(results, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(result, torch.stack(of_components).mean(0))
    for i, model in enumerate(models):
        state = {name: tensor[i] for name, tensor in together.state_dict().items()}
        torch.testing.assert_close(state, dict(model.state_dict()))
        gradients = {name: parameter.grad[i] for name, parameter in together.named_parameters()}
        torch.testing.assert_close(gradients, {name: parameter.grad for name, parameter in model.named_parameters()})
        torch.testing.assert_close(together.elbo(indices, x)[i], model.elbo(indices, x))
    terms = [model.log_prior() - model.q.kl() for model in models]
    torch.testing.assert_close(together.prior_terms(), torch.stack(terms).mean())


@kinds
def test_a_mixture_predicts_with_the_moments_of_its_components(kind):
    """Of the log odds, or of the logarithm of the mean count, whatever each component's shape is."""
    models, together = make_components(kind)
    indices, _ = make_entries(kind)
    of_components = [model.predictive(indices) for model in models]
    latent = together.predictive(indices)

    def log_mean(predictive):
        return predictive.f_mean + (np.log(predictive.likelihood.zeta) if kind == "count" else 0)

    means = torch.stack([log_mean(predictive) for predictive in of_components])
    variances = torch.stack([predictive.f_variance for predictive in of_components])
    torch.testing.assert_close(latent.mean, torch.stack([predictive.mean for predictive in of_components]).mean(0))
    torch.testing.assert_close(log_mean(latent), means.mean(0))
    torch.testing.assert_close(latent.f_variance, variances.mean(0) + means.var(0, correction=0))
    if kind == "count":
        zetas = [predictive.likelihood.zeta for predictive in of_components]
        assert latent.likelihood.zeta == pytest.approx(np.prod(zetas) ** (1 / 3)) and len(set(zetas)) == 3


def test_a_mixture_of_one_is_the_model():
    model = make_model("count", 2)
    assert mixture([model]) is model
