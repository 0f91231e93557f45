"""A linear method for the tests: each linear layer keeps its inputs of largest magnitude."""

from dataclasses import dataclass

import torch

from moesaic.methods.base import LinearMethod
from moesaic.methods.contents import Description
from moesaic.modeling import MoesaicThresholdedLinear


@dataclass(frozen=True)
class Magnitude(LinearMethod):
    """One threshold for each layer, by the quantile of its calibration inputs."""

    description = Description(
        "magnitude", "", "Keeps the inputs of largest magnitude.", "transformers"
    )

    @torch.no_grad()
    def convert_linear(self, weights, inputs, share, generator):
        sparse = MoesaicThresholdedLinear.like(weights, share)
        state = {name: value.clone() for name, value in weights.state_dict().items()}
        state["input_scale"] = torch.ones(weights.in_features)
        state["threshold"] = torch.tensor(-1.0)
        if share < 1:
            sizes = torch.cat([x_TD.abs().flatten() for x_TD in inputs.fit()])
            state["threshold"] = sizes.float().quantile(1 - share)
        sparse.load_state_dict(state, assign=True)
        return sparse
