"""The posterior of f, and its KL, against those of GPyTorch's sparse GP."""

import gpytorch
import torch
from small_model import JITTER, LENGTHSCALE, VARIANCE, blocks_1_2_3, make_entries, make_model, side_by_side


class SVGP(gpytorch.models.ApproximateGP):
    """GPyTorch's sparse GP, whitened by L' u with L = chol(K) as here."""

    def __init__(self, X, mean, covariance):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(X))
        strategy = gpytorch.variational.VariationalStrategy(self, X, distribution, jitter_val=JITTER)
        super().__init__(strategy)
        distribution.variational_mean.data = mean
        distribution.chol_variational_covar.data = torch.linalg.cholesky(covariance)
        strategy.variational_params_initialized.fill_(1)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.covar_module.outputscale = VARIANCE
        self.covar_module.base_kernel.lengthscale = LENGTHSCALE

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@blocks_1_2_3
def test_posterior_is_gpytorchs(blocks):
    """Orthogonal blocks are one block of all points whose whitened covariance is block diagonal."""
    model, (indices, _) = make_model("binary", blocks), make_entries("binary")
    q = model.q.mean.flatten(), torch.block_diag(*model.q.covariance)
    svgp = SVGP(model.inducing.X.detach().clone(), *q).double().eval()
    with torch.no_grad():
        expected = svgp(side_by_side(model.Z, indices))
        expected_kl = svgp.variational_strategy.kl_divergence()
    predictive = model.predictive(indices)
    torch.testing.assert_close(predictive.f_mean, expected.mean)
    # GPyTorch adds its jitter to the variance of f too
    torch.testing.assert_close(predictive.f_variance, expected.variance - JITTER)
    torch.testing.assert_close(model.q.kl(), expected_kl)
