"""Metrics of tensor completion (paper, appendix "Experiments"), in torchmetrics so that they add up over batches."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import BinaryAUROC
from torchmetrics.utilities import dim_zero_cat

from ented.predictive import Predictive

METRICS = {
    "binary": ["auc", "nll", "nll_plugin"],
    "count": ["rmse", "mape", "nll", "nll_plugin", "rmse_plugin", "mape_plugin"],
}


class RelativeRMSE(Metric):
    """sqrt(sum (x - prediction)^2) / sqrt(sum x^2)."""

    full_state_update = False

    def __init__(self, **options):
        super().__init__(**options)
        self.set_dtype(torch.float64)
        self.add_state("error", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, prediction: Float[Tensor, "S"], x: Float[Tensor, "S"]) -> None:
        self.error += (x - prediction).square().sum()
        self.total += x.square().sum()

    def compute(self) -> Float[Tensor, ""]:
        return (self.error / self.total).sqrt()


class Mean(Metric):
    """Mean of all values, in double precision; torchmetrics' own falls back to single where a module is moved."""

    full_state_update = False

    def __init__(self, **options):
        super().__init__(**options)
        self.set_dtype(torch.float64)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("entries", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Float[Tensor, "S"]) -> None:
        self.total += values.sum()
        self.entries += values.numel()

    def compute(self) -> Float[Tensor, ""]:
        return self.total / self.entries


class AUC(BinaryAUROC):
    """Area under the ROC curve; nan where all entries are ones, or all zeros."""

    def compute(self) -> Float[Tensor, ""]:
        target = dim_zero_cat(self.target)
        return super().compute() if target.min() < target.max() else torch.tensor(torch.nan)


class CompletionMetrics(nn.Module):
    """Metrics of predictive distributions against the values that came.

    binary: auc, nll, nll_plugin. count: rmse, mape, nll, nll_plugin, and rmse_plugin, mape_plugin.

    nll is the mean of -log p(x) under the posterior predictive distribution, rmse the relative error of its mean, and
    mape the mean of |x - a| / (x + 1) for the summary a of that distribution that makes it smallest, see
    `Predictive.relative_median`. The `_plugin` metrics, which the paper's tables hold, are of f fixed at its posterior
    mean: nll_plugin, and for both errors the mean count at that f. Where the predictive has no log_prob, there are no
    nlls.

    Parameters
    ----------
    kind : "binary" or "count".
    sync_on_compute : whether the entries of all processes count.
    """

    def __init__(self, kind: str, sync_on_compute: bool = True):
        super().__init__()
        self.kind = kind
        makers = {"auc": AUC, "rmse": RelativeRMSE}
        self.metrics = nn.ModuleDict(
            {name: makers.get(name.split("_")[0], Mean)(sync_on_compute=sync_on_compute) for name in METRICS[kind]}
        )

    def update(self, predictive: Predictive, x: Float[Tensor, "S"], mape: bool = True) -> None:
        """Add the entries with values `x`; mape, which takes long, may be left out."""
        if self.kind == "binary":
            self.metrics["auc"].update(predictive.mean, x.long())
        for suffix, prediction in {"": predictive, "_plugin": predictive.plugin()}.items():
            log_prob = prediction.log_prob(x)
            if log_prob is not None:
                self.metrics["nll" + suffix].update(-log_prob)
            if self.kind == "count":
                self.metrics["rmse" + suffix].update(prediction.mean, x)
                if suffix or mape:
                    point = prediction.mean if suffix else prediction.relative_median
                    self.metrics["mape" + suffix].update((x - point).abs() / (x + 1))

    def compute(self) -> dict[str, Float[Tensor, ""]]:
        """All metrics of the entries added since the last reset."""
        return {name: metric.compute() for name, metric in self.metrics.items() if metric.update_called}

    def reset(self) -> None:
        for metric in self.metrics.values():
            metric.reset()
