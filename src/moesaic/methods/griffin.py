"""GRIFFIN: a prompt chooses neurons, and all tokens after it run these alone.

Dong et al., Prompt-prompted Adaptive Structured Pruning for Efficient LLM Generation,
arXiv:2404.01365. Over the prompt all neurons run; h of every token is scaled to unit
length, and the neurons of largest norm over tokens stay for the rest of the sequence.
Nothing is fitted, and each layer keeps the same number.

The prompt is the first `prompt` tokens of a sequence, so that perplexity by windows
measures the tokens after it too. With prompt=0 all tokens of a call are the prompt: in
`generate` the whole of it, as in the paper, and then perplexity shows nothing skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.calibration.ffn_inputs import FFNInputs
from moesaic.errors import MoesaicError
from moesaic.families import DenseFFN
from moesaic.layout import Layout
from moesaic.methods.base import (
    Budget,
    FFNMethod,
    FFNShape,
    ModelShape,
    block_config,
    neuron_layout,
    refuse_mixture,
    setting,
    shape_of,
)
from moesaic.methods.contents import METHODS
from moesaic.modeling import (
    BlockConfig,
    MoEConfig,
    MoesaicPromptNeurons,
    RouterConfig,
    Sizes,
)
from moesaic.parts.carve import carve_prompt_neurons


@dataclass(frozen=True)
class Griffin(FFNMethod):
    """The neurons that the prompt makes most use of."""

    description = METHODS["griffin"]
    takes_grain = False

    prompt: int = setting(
        128,
        "Tokens at a sequence's start that run whole and choose; 0: all that are given "
        "at once.",
        0,
    )

    def layouts(self, shape: ModelShape, budget: Budget) -> list[Layout]:
        """Every neuron alone. Raises MoesaicError where sequences are not seen."""
        refuse_mixture(
            self, shape, "wants whole sequences, which experts do not see"
        )
        if shape.identities:  # OPT
            raise MoesaicError(
                f"{shape.name} lays the tokens of all sequences in one row for its FFNs, "
                f"and method {self.name!r} wants whole sequences; take another method"
            )
        return [neuron_layout(budget, shape.ffn.intermediate_size)]

    def block(self, ffn: FFNShape) -> BlockConfig:
        router = RouterConfig("prompt", "topk", prompt=self.prompt)
        return block_config(ffn, router, replacement="prompt-neurons")

    def convert_ffn(
        self,
        weights: DenseFFN,
        inputs: FFNInputs,
        sizes: Sizes,
        generator: np.random.Generator,
    ) -> MoesaicPromptNeurons:
        """The FFN as it was, which will choose by itself."""
        block = self.block(shape_of(weights))
        return carve_prompt_neurons(weights, block, sizes)

    def words(self, moe: MoEConfig) -> str:
        sizes = moe.first_sizes
        first = f"the first {self.prompt} tokens"
        if not self.prompt:
            first = "the prompt"
        return f"{sizes.num_active} of {sizes.num_routed} neurons, chosen by {first}"
