"""CoSTCo (Liu, Li, Tsang, Liu 2019): a convolutional network over the stacked embeddings of an entry's indices."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributions import Bernoulli
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss, relu

from ented.lightning import GradientModule
from ented.likelihoods import PolyaGamma
from ented.predictive import Known, Point, Predictive


class CoSTCo(GradientModule):
    """Two convolutions share their filters among the components of the embeddings, two dense layers follow.

    Counts are predicted by a nonnegative number and fitted by least squares; binary entries by the logit of their
    probability, and fitted by the cross entropy. Two things differ from the authors' code: the first filters run across
    the modes, as the publication says, where the code reshapes the stack of embeddings without transposing it; and
    the logit has no ReLU, under which a probability could not be below one half.

    Parameters
    ----------
    shape : sizes of the tensor's modes.
    likelihood : only the kind of the entries is taken from it.
    rank : length of an embedding.
    channels : filters of each convolution and width of the hidden dense layer; the authors' code has `rank` of them.
    lr : Adam's learning rate.
    """

    likelihood_settings = ()

    def __init__(self, shape: tuple[int, ...], likelihood: PolyaGamma, rank: int, channels: int, lr: float):
        super().__init__(likelihood.kind, lr)
        self.binary = likelihood.kind == "binary"
        self.embeddings = nn.ModuleList([nn.Embedding(size, rank) for size in shape])
        self.across_modes = nn.Conv2d(1, channels, (1, len(shape)))
        self.across_rank = nn.Conv2d(channels, channels, (rank, 1))
        self.hidden = nn.Linear(channels, channels)
        self.output = nn.Linear(channels, 1)
        # the initial values of Keras, which the authors use
        for embedding in self.embeddings:
            nn.init.uniform_(embedding.weight, -0.05, 0.05)
        for layer in (self.across_modes, self.across_rank, self.hidden, self.output):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, indices: Int[Tensor, "S D"]) -> Float[Tensor, "S"]:
        """The logit of a binary entry, or the expected count."""
        rows = [embedding(i) for embedding, i in zip(self.embeddings, indices.T, strict=True)]
        image = torch.stack(rows, -1)[:, None]  # S x 1 x R x D
        features = relu(self.across_rank(relu(self.across_modes(image)))).flatten(1)
        output = self.output(relu(self.hidden(features))).squeeze(1)
        return output if self.binary else relu(output)

    def predictive(self, indices: Int[Tensor, "S D"]) -> Predictive:
        with torch.no_grad():
            output = self(indices).double()
        return Known(Bernoulli(logits=output)) if self.binary else Point(output)

    def initialise(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> None:
        """Counts start at their mean: where every output starts below zero, the last ReLU has no gradient."""
        if not self.binary:
            self.output.bias.fill_(values.mean())

    def loss(self, indices: Int[Tensor, "S D"], values: Float[Tensor, "S"]) -> Float[Tensor, ""]:
        return (binary_cross_entropy_with_logits if self.binary else mse_loss)(self(indices), values)
