"""Several fits of one model as one: folds, seeds and learning rates are a leading dimension of every tensor.

A step of ENTED is small, and what it costs is mostly the calls that it makes; B replicas make them once. Each has its
own entries, initial values, minibatches, learning rate and number of epochs, and ends with the numbers of a fit by
itself, up to rounding. A replica without a minibatch, because its epoch has fewer or its training has ended, has
entries of scale 0 and steps of size 0, which leave it as it was.
"""

import lightning as L
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

from ented.adam import ReplicaAdam
from ented.datamodule import NOISE, COODataModule, generator
from ented.gaussian_process import ENTEDModule, check_numbers, warn_of_many_points
from ented.likelihoods import check_comparable
from ented.model import stack
from ented.predictive import LatentMixture
from ented.recorder import History
from ented.tensor import COOTensor

ReplicaBatch = tuple[Int[Tensor, "B S D"], Float[Tensor, "B S"], Float[Tensor, "B S"]]


class ReplicaBatches(Sampler):
    """Rows of the replicas' next minibatches, (B, S), where -1 fills up; none for a replica whose training has ended.

    Parameters
    ----------
    streams : each replica's own sampler.
    histories : of the replicas.
    """

    def __init__(self, streams: list[Sampler], histories: list[History]):
        self.streams, self.histories = streams, histories

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each epoch."""
        for stream in self.streams:
            if hasattr(stream, "set_epoch"):
                stream.set_epoch(epoch)

    def __len__(self) -> int:
        return max(map(len, self.streams))

    def __iter__(self):
        pairs = zip(self.streams, self.histories, strict=True)
        epoch = [[] if history.ended else list(stream) for stream, history in pairs]
        size = max(len(rows) for batches in epoch for rows in batches)  # one size for all steps
        none = torch.tensor([], dtype=torch.long)
        # as many steps in every epoch, also where the longest stream has ended: Lightning validates after that number
        for i in range(len(self)):
            step = [batches[i] if i < len(batches) else none for batches in epoch]
            rows = pad_sequence(step, batch_first=True, padding_value=-1)
            yield pad(rows, (0, size - rows.shape[1]), value=-1)


class StackedEntries(Dataset):
    """Entries of B tensors, read by B lists of rows; a row of -1 is any entry, with scale 0."""

    def __init__(self, tensors: list[COOTensor], dtype: torch.dtype):
        self.indices = torch.cat([tensor.indices for tensor in tensors])
        self.values = torch.cat([tensor.values for tensor in tensors]).to(dtype)
        self.sizes = torch.tensor([len(tensor) for tensor in tensors])[:, None]
        self.starts = self.sizes.cumsum(0) - self.sizes

    def __getitem__(self, rows: Int[Tensor, "B S"]) -> ReplicaBatch:
        present = rows >= 0
        at = rows.clamp_min(0) + self.starts
        batch = present.sum(1, keepdim=True).clamp_min(1)
        return self.indices[at], self.values[at], (present * self.sizes / batch.double()).to(self.values.dtype)


class ReplicaData(L.LightningDataModule):
    """Minibatches (indices, values, scale) of several data modules side by side.

    An entry's scale is N / S, what it stands for, and 0 where it only fills up.

    Parameters
    ----------
    replicas : their data modules.
    histories : know whose training has ended.
    """

    def __init__(self, replicas: list[COODataModule], histories: list[History]):
        super().__init__()
        self.replicas, self.histories = replicas, histories

    def train_dataloader(self) -> DataLoader:
        batches = ReplicaBatches([data.train_dataloader().sampler for data in self.replicas], self.histories)
        entries = StackedEntries([data.train for data in self.replicas], self.replicas[0].dtype)
        return DataLoader(entries, sampler=batches, batch_size=None, pin_memory=torch.cuda.is_available())

    def val_dataloader(self) -> DataLoader | list:
        if not self.replicas[0].validation:
            return []
        batches = ReplicaBatches([data.val_dataloader().sampler for data in self.replicas], self.histories)
        entries = StackedEntries([data.validation for data in self.replicas], torch.float64)
        return DataLoader(entries, sampler=batches, batch_size=None)


class ReplicasModule(L.LightningModule):
    """`ENTEDModule` with a leading dimension.

    Parameters
    ----------
    replicas : what is to be trained; `unstack` gives them the result.
    data : the minibatches.
    compile : see `ENTEDModule`.

    Raises
    ------
    InputError : their counts start at different numbers.
    """

    automatic_optimization = False

    def __init__(self, replicas: list[ENTEDModule], data: ReplicaData, compile: bool = False):
        super().__init__()
        self.replicas, self.histories = replicas, data.histories
        for module, of_replica in zip(replicas, data.replicas, strict=True):
            module.start(of_replica.train)
        # `stack` keeps what is no tensor of the first only
        check_comparable([module.model.likelihood for module in replicas])
        self.model = stack([module.model for module in replicas])
        self.metrics = nn.ModuleList(module.metrics for module in replicas)
        self.step = torch.compile(self.model.step) if compile else self.model.step
        numbers = {
            "lr": [module.lr for module in replicas],
            "rho": [module.rho for module in replicas],
            "entries": [len(replica.train) for replica in data.replicas],
            "bound_sum": [0] * len(replicas),
            "log_prob_sum": [0] * len(replicas),
        }
        for name, of_replicas in numbers.items():
            self.register_buffer(name, torch.tensor(of_replicas, dtype=torch.float64), persistent=False)

    def on_train_start(self) -> None:
        for replica in self.trainer.datamodule.replicas:
            warn_of_many_points(self.model.inducing.X.shape[-2], len(replica.train))

    def configure_optimizers(self) -> ReplicaAdam:
        return ReplicaAdam(self.model.parameters(), self.lr)

    def on_train_epoch_start(self) -> None:
        self.bound_sum.zero_()
        self.log_prob_sum.zero_()
        epoch, replicas = self.current_epoch, self.trainer.datamodule.replicas
        self.random = [generator(replica.seed, epoch, NOISE) for replica in replicas]
        pairs = list(zip(self.replicas, self.histories, strict=True))
        (group,) = self.optimizers().param_groups
        group["lr"] = self.lr * self.lr.new_tensor([module.decay(epoch, history.epochs) for module, history in pairs])
        self.rho_now = self.rho * self.rho.new_tensor(
            [module.anneal(epoch, history.epochs) for module, history in pairs]
        )

    def noise(self, batch_index: int, size: int) -> Float[Tensor, "B ... S D R"] | None:
        """For the draw of each replica's factors: what it would draw by itself, and zeros where it has no entries."""
        if not self.model.table.variational:
            return None
        draws = []
        for random, module, replica, history in zip(
            self.random, self.replicas, self.trainer.datamodule.replicas, self.histories, strict=True
        ):
            entries = 0 if history.ended or batch_index >= len(replica.sizes) else replica.sizes[batch_index]
            draws.append(pad(module.model.table.noise(entries, random), (0, 0, 0, 0, 0, size - entries)))
        noise = torch.stack(draws)
        noise = noise.pin_memory() if torch.cuda.is_available() else noise
        return noise.to(self.device, non_blocking=True)

    def training_step(self, batch: ReplicaBatch, batch_index: int) -> None:
        indices, values, scale = batch
        present = scale > 0
        active = present.any(-1)
        noise = self.noise(batch_index, values.shape[-1])
        bound, log_prob = self.step(indices, values, scale, self.rho_now * active, noise)
        self.optimizers().step(active=active)
        self.bound_sum += (bound * present).sum(-1)
        self.log_prob_sum += (log_prob * present).sum(-1)

    def validation_step(self, batch: ReplicaBatch, _) -> None:
        indices, values, scale = batch
        means, variances = self.model.posterior(indices)
        # what fills up stands last; here the host waits for the device
        for i, present in enumerate((scale > 0).sum(-1).tolist()):
            if present:
                likelihood = self.model.likelihood.known(i)
                latent = LatentMixture(likelihood, means[i, :, :present], variances[i, :, :present])
                self.metrics[i].update(latent, values[i, :present], mape=False)

    def on_validation_start(self) -> None:
        check_numbers(self.model, self.bound_sum, self.lr, self.current_epoch)

    def on_train_epoch_end(self) -> None:
        check_numbers(self.model, self.bound_sum, self.lr, self.current_epoch)

    def epoch_metrics(self) -> list[dict[str, float]]:
        """What each replica says of the epoch that has just ended, as `ENTEDModule` does."""
        with torch.no_grad():
            elbo = self.bound_sum + self.model.prior_terms()
        of_epoch = {"elbo": elbo.tolist(), "train_nll_plugin": (-self.log_prob_sum / self.entries).tolist()}
        if self.model.likelihood.learned:
            of_epoch["zeta"] = [self.model.likelihood.known(i).zeta for i in range(len(self.replicas))]
        rows = []
        for i, metrics in enumerate(self.metrics):
            held_out = {f"val_{name}": value.item() for name, value in metrics.compute().items()}
            rows.append(held_out | {name: numbers[i] for name, numbers in of_epoch.items()})
            metrics.reset()
        return rows

    def unstack(self) -> None:
        """Hand each replica what became of it."""
        state = self.model.state_dict()
        for i, module in enumerate(self.replicas):
            module.model.load_state_dict({name: tensor[i] for name, tensor in state.items()})
