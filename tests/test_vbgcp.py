"""VBGCP against coordinate ascent in loops, and on tensors drawn from its own model."""

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.optimize import minimize_scalar
from scipy.special import gammaln

from baselines.main_effects import MainEffects
from baselines.vbgcp import VBGCP
from ented.errors import InputError
from ented.likelihoods import Bernoulli, NegativeBinomial
from ented.tensor import COOTensor

SHAPE, RANK = (3, 3, 3), 2
PRIOR = {"ard_shape": 1.5, "ard_rate": 0.7, "offset_precision": 0.4}  # none such that leaving it out goes unseen
pytestmark = pytest.mark.usefixtures("float64")


def entries():
    """14 of 27 cells, one of them twice, and none in row 2 of mode 1."""
    rng = np.random.default_rng(0)
    cells = np.argwhere(np.ones(SHAPE))
    cells = cells[cells[:, 1] != 2]
    indices = np.concatenate([rng.permutation(cells)[:13], cells[:1]])
    return torch.from_numpy(indices), torch.from_numpy(rng.negative_binomial(2, 0.3, len(indices))).double()


def make():
    """A module on the tiny tensor, away from its initial values in every part of its state."""
    torch.manual_seed(0)
    module = VBGCP(SHAPE, NegativeBinomial(20), RANK, **PRIOR)
    module.initialise(*entries())
    root = 0.4 * torch.randn(sum(SHAPE), RANK, RANK)
    module.mean.copy_(torch.randn(sum(SHAPE), RANK))
    module.covariance.copy_(root @ root.mT + 0.05 * torch.eye(RANK))
    module.alpha_rate.copy_(torch.tensor([3.0, 8.0]))
    module.offset_mean.fill_(0.3)
    module.offset_variance.fill_(0.2)
    module.zeta.fill_(1.7)
    return module


# The model with loops over entries, rows and components; factors and covariances are lists of modes.


class Loops:
    def __init__(self, module: VBGCP):
        cuts = np.cumsum(SHAPE)[:-1]
        self.A = np.split(module.mean.numpy().copy(), cuts)
        self.S = np.split(module.covariance.numpy().copy(), cuts)
        self.a = PRIOR["ard_shape"] + sum(SHAPE) / 2
        self.b = module.alpha_rate.numpy().copy()
        self.m, self.v, self.zeta = module.offset_mean.item(), module.offset_variance.item(), module.zeta.item()
        indices, values = entries()
        self.cells, self.x = indices.tolist(), values.numpy()

    def moments(self, cell, modes=(0, 1, 2)):
        """E[w_r] and E[w_r w_s] of the products over the given modes."""
        first, second = np.ones(RANK), np.ones((RANK, RANK))
        for d in modes:
            mean, covariance = self.A[d][cell[d]], self.S[d][cell[d]]
            for r in range(RANK):
                first[r] *= mean[r]
                for s in range(RANK):
                    second[r, s] *= mean[r] * mean[s] + covariance[r, s]
        return first, second

    def f_moments(self, cell):
        """E[f] and E[f^2]."""
        first, second = self.moments(cell)
        square = self.m**2 + self.v + 2 * self.m * sum(first) + second.sum()
        return self.m + sum(first), square

    def theta(self, cell, x):
        c = np.sqrt(self.f_moments(cell)[1])
        return (x + self.zeta) / (2 * c) * np.tanh(c / 2)

    def update_factors(self, d):
        thetas = [self.theta(cell, x) for cell, x in zip(self.cells, self.x, strict=True)]
        others = [e for e in range(3) if e != d]
        for i in range(SHAPE[d]):
            P, h = np.diag(self.a / self.b), np.zeros(RANK)
            for cell, x, theta in zip(self.cells, self.x, thetas, strict=True):
                if cell[d] == i:
                    first, second = self.moments(cell, others)
                    P, h = P + theta * second, h + ((x - self.zeta) / 2 - theta * self.m) * first
            self.S[d][i] = np.linalg.inv(P)
            self.A[d][i] = np.linalg.solve(P, h)

    def update_offset(self):
        p, h = PRIOR["offset_precision"], 0.0
        for cell, x in zip(self.cells, self.x, strict=True):
            theta = self.theta(cell, x)
            p, h = p + theta, h + (x - self.zeta) / 2 - theta * sum(self.moments(cell)[0])
        self.m, self.v = h / p, 1 / p

    def update_alpha(self):
        for r in range(RANK):
            squares = [self.A[d][i][r] ** 2 + self.S[d][i][r, r] for d in range(3) for i in range(SHAPE[d])]
            self.b[r] = PRIOR["ard_rate"] + sum(squares) / 2

    def data(self, zeta):
        """E[log p(x, omega | f) - log q(omega)] with omega ~ PG(x + zeta, c) integrated out."""
        total = 0
        for cell, x in zip(self.cells, self.x, strict=True):
            f, square = self.f_moments(cell)
            c = np.sqrt(square)
            total += gammaln(x + zeta) - gammaln(x + 1) - gammaln(zeta)
            total += (x - zeta) / 2 * f - (x + zeta) * np.log(2 * np.cosh(c / 2))
        return total

    def update_zeta(self):
        result = minimize_scalar(
            lambda log_zeta: -self.data(np.exp(log_zeta)),
            bounds=(-6, 6),
            method="bounded",
            options={"xatol": 1e-10},
        )
        self.zeta = np.exp(result.x)

    def elbo(self):
        """The expectations over q(alpha) by numerical integration."""
        total = self.data(self.zeta)
        offset = stats.norm(self.m, self.v**0.5)
        offset_prior = stats.norm(0, PRIOR["offset_precision"] ** -0.5)
        total += offset.expect(lambda m: offset_prior.logpdf(m) - offset.logpdf(m))
        for r in range(RANK):
            alpha = stats.gamma(self.a, scale=1 / self.b[r])
            prior = stats.gamma(PRIOR["ard_shape"], scale=1 / PRIOR["ard_rate"])
            total += alpha.expect(lambda a, q=alpha, p=prior: p.logpdf(a) - q.logpdf(a))
            total += sum(SHAPE) / 2 * alpha.expect(np.log)
            for d in range(3):
                for i in range(SHAPE[d]):
                    total -= alpha.expect(lambda a: a) / 2 * (self.A[d][i][r] ** 2 + self.S[d][i][r, r])
        for d in range(3):
            for i in range(SHAPE[d]):
                total -= RANK / 2 * np.log(2 * np.pi)
                total += stats.multivariate_normal(self.A[d][i], self.S[d][i]).entropy()
        return total

    def assert_close(self, module):
        def close(tensor, array):
            # minimize_scalar finds zeta to about 1e-8, half of double precision's digits
            np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-6, atol=1e-8)

        close(module.mean, np.concatenate(self.A))
        close(module.covariance, np.concatenate(self.S))
        close(module.alpha_rate, self.b)
        close(module.offset_mean, self.m)
        close(module.offset_variance, self.v)
        close(module.zeta, self.zeta)


def elbo(module):
    indices, values = entries()
    return module.elbo(values, *module.f_moments(indices))


def updates(module):
    """Those of a sweep, in turn: of the module, and of the loops."""
    indices, values = entries()
    for mode in range(3):
        yield (
            lambda mode=mode: module.update_factors(mode, indices, values),
            lambda loops, mode=mode: loops.update_factors(mode),
        )
    yield lambda: module.update_offset(values, *module.f_moments(indices)), Loops.update_offset
    yield module.update_alpha, Loops.update_alpha
    yield lambda: module.update_zeta(values, *module.f_moments(indices)), Loops.update_zeta


def test_every_update_is_that_of_coordinate_ascent_in_loops():
    module = make()
    loops = Loops(module)
    for _ in range(2):
        for update, update_in_loops in updates(module):
            update()
            update_in_loops(loops)
            loops.assert_close(module)


def test_a_sweep_is_all_updates_and_returns_the_bound():
    module = make()
    loops = Loops(module)
    objective = module.sweep(*entries())
    for _, update_in_loops in updates(module):
        update_in_loops(loops)
    loops.assert_close(module)
    assert objective.item() == pytest.approx(loops.elbo(), rel=1e-7)


def test_the_bound_is_that_of_loops_and_numerical_integration():
    module = make()
    assert elbo(module).item() == pytest.approx(Loops(module).elbo(), rel=1e-8)


def test_the_bound_grows_at_every_update():
    module = make()
    before = elbo(module).item()
    gains = []
    for _ in range(30):
        for update, _ in updates(module):
            update()
            after = elbo(module).item()
            gains.append(after - before)
            before = after
    assert min(gains) > -1e-10 * abs(before)  # rounding
    assert min(gains[:6]) > 1e-3  # and at first each of them does something


def test_moments_of_f_are_those_of_sampled_factors():
    module, (indices, _) = make(), entries()
    rng = np.random.default_rng(0)
    loops, n = Loops(module), 200_000
    f_mean, f_variance = module.f_moments(indices)
    for cell, mean, variance in zip(indices.tolist()[:4], f_mean, f_variance, strict=False):
        rows = [rng.multivariate_normal(loops.A[d][i], loops.S[d][i], n) for d, i in enumerate(cell)]
        f = rng.normal(loops.m, loops.v**0.5, n) + (rows[0] * rows[1] * rows[2]).sum(1)
        squares = (f - mean.item()) ** 2
        # four standard errors
        assert f.mean() == pytest.approx(mean.item(), abs=4 * f.std() / n**0.5)
        assert squares.mean() == pytest.approx(variance.item(), abs=4 * squares.std() / n**0.5)


def test_rows_without_entries_have_their_prior():
    module = make()
    module.update_factors(1, *entries())
    row = SHAPE[0] + 2
    assert torch.equal(module.mean[row], torch.zeros(RANK))
    torch.testing.assert_close(module.covariance[row], torch.diag(1 / module.alpha))


def test_predicts_counts_with_the_learned_shape_and_the_moments_of_f():
    module, (indices, _) = make(), entries()
    predictive, loops = module.predictive(indices), Loops(module)
    assert predictive.likelihood.zeta == 1.7
    for n, cell in enumerate(indices.tolist()):
        f, square = loops.f_moments(cell)
        assert predictive.f_mean[n].item() == pytest.approx(f)
        assert predictive.f_variance[n].item() == pytest.approx(square - f**2)
        assert predictive.plugin().mean[n].item() == pytest.approx(1.7 * np.exp(f))


# on tensors from the model itself


def draw(seed=0, shape=(20, 15, 10), rank=2, zeta=5.0, offset=1.0):
    """Two thirds of the cells to train with, the others for the test, and f of the latter."""
    rng = np.random.default_rng(seed)
    factors = [rng.normal(size=(size, rank)) for size in shape]
    f = offset + np.einsum("ir,jr,kr->ijk", *factors)
    x = rng.negative_binomial(zeta, 1 / (1 + np.exp(f)))
    cells = torch.from_numpy(rng.permutation(np.argwhere(np.ones(shape))))
    values = torch.from_numpy(x[tuple(cells.numpy().T)]).double()
    cut = 2 * len(cells) // 3
    train, test = (COOTensor(cells[part], values[part], shape) for part in (slice(cut), slice(cut, None)))
    return train, test, torch.from_numpy(f[tuple(test.indices.numpy().T)])


@pytest.fixture(scope="module")
def fitted():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    train, test, f = draw()
    torch.manual_seed(0)
    module = VBGCP(train.shape, NegativeBinomial(20), rank=4).fit(train, epochs=200)
    torch.set_default_dtype(before)
    return module, train, test, f


def test_recovers_the_tensor_it_was_drawn_as(fitted):
    module, train, test, f = fitted
    nll = -module.predictive(test.indices).log_prob(test.values).mean()
    oracle = -NegativeBinomial(5.0).log_prob(test.values, f).mean()
    main_effects = MainEffects(train.shape, NegativeBinomial(20)).fit(train, epochs=20)
    without_products = -main_effects.predictive(test.indices).log_prob(test.values).mean()
    assert without_products - oracle > 0.4
    # 2000 entries for 90 parameters cost 90 / 2 / 2000 = 0.02 nats
    assert nll - oracle < 0.05
    # standard error of log zeta, about (2 / n)^1/2 for n entries whose count is large: below 5 %
    assert module.zeta.item() == pytest.approx(5, rel=0.2)


def test_counts_from_one_on_are_counts_and_one():
    train, test, _ = draw(shape=(6, 5, 4))
    predictions = []
    for smallest in 0, 1:
        torch.manual_seed(0)
        module = VBGCP(train.shape, NegativeBinomial(20, smallest), rank=2)
        module.fit(COOTensor(train.indices, train.values + smallest, train.shape), epochs=30)
        predictive = module.predictive(test.indices)
        predictions.append([predictive.mean - smallest, predictive.log_prob(test.values + smallest), module.zeta])
    for without, shifted in zip(*predictions, strict=True):
        torch.testing.assert_close(without, shifted)


def test_components_without_data_are_switched_off(fitted):
    """Two of four. Shape and rate of q(alpha) are 100 + 45 / 2 and 1 + half the sum of 45 squares."""
    module, *_ = fitted
    precision = module.alpha.sort().values
    # squares of mean 1, whose sum has a standard deviation of (2 / 45)^1/2 = 21 %; three of them
    assert precision[:2].tolist() == pytest.approx([122.5 / 23.5] * 2, rel=0.65)
    assert (precision[2:] > 122.5 / 2).all()  # squares that sum to less than 2
    sizes = module.mean.square().sum(0)
    assert (sizes > 1e-3).sum() == 2


def test_goes_on_from_a_checkpoint_to_the_same_numbers():
    train, *_ = draw()

    def fresh(seed):
        torch.manual_seed(seed)
        return VBGCP(train.shape, NegativeBinomial(20), rank=3)

    whole, half, resumed = fresh(0), fresh(0), fresh(1)
    whole.fit(train, epochs=6)
    half.fit(train, epochs=3)
    resumed.load_state_dict(half.state_dict())
    resumed.fit(train, epochs=3)
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_a_float32_fit_agrees():
    train, test, _ = draw()
    torch.manual_seed(0)
    double = VBGCP(train.shape, NegativeBinomial(20), rank=2)
    single = VBGCP(train.shape, NegativeBinomial(20), rank=2).float()
    single.load_state_dict(double.state_dict())
    double.fit(train, 5)
    single.fit(train, 5)
    assert single.mean.dtype == torch.float32
    predictive = single.predictive(test.indices)
    assert predictive.f_mean.dtype == torch.float64
    # rounding of 6e-8, enlarged by sums over 2000 entries and by five sweeps
    torch.testing.assert_close(predictive.f_mean, double.predictive(test.indices).f_mean, rtol=1e-2, atol=1e-2)


def test_binary_entries_are_refused():
    with pytest.raises(InputError, match="VBGCP is for count entries, these are binary: choose another model="):
        VBGCP(SHAPE, Bernoulli(), rank=2)
