"""Table of contents: every method, a row each. Read without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

_CMOE = (
    "Pei et al., Analytical FFN-to-MoE Restructuring via Activation Pattern Analysis, "
    "ACL 2026"
)
_CMOE_URL = "https://arxiv.org/abs/2502.04416"


@dataclass(frozen=True)
class Description:
    """What a table, a model card and a configuration say of a method.

    `where` is the class, as MODULE:CLASS. `runs` says which engines run the result;
    None for a reference, which no model can hold.
    """

    name: str
    where: str
    about: str
    runs: str | None
    paper: str | None = None
    url: str | None = None


_STOCK = "transformers, vLLM, llama.cpp, as any model of its family"
_EXPORTED = "transformers, vLLM, llama.cpp, after moesaic export"
_OURS = "transformers and vLLM, with our architecture"
_OURS_ON_A_CPU = "transformers, and vLLM on a CPU, with our architecture"
_TRANSFORMERS = "transformers, with our architecture"

METHODS = {
    row.name: row
    for row in (
        Description(
            "moesaic",
            "moesaic.methods.moesaic:Moesaic",
            "Experts by contribution, a linear router in closed form, repaired outputs.",
            _EXPORTED,
        ),
        Description(
            "moesaic-dynamic",
            "moesaic.methods.moesaic:MoesaicDynamic",
            "As moesaic, but a token runs as many experts as it needs; layers share a "
            "budget.",
            _OURS,
        ),
        Description(
            "moesaic-neurons",
            "moesaic.methods.neurons:MoesaicNeurons",
            "Every neuron is an expert, chosen by copies of its weights in a few bits. "
            "For one user at a time.",
            _OURS,
        ),
        Description(
            "cmoe",
            "moesaic.methods.cmoe:CMoE",
            "The paper's method to the letter.",
            _OURS,
            _CMOE,
            _CMOE_URL,
        ),
        Description(
            "cmoe-code",
            "moesaic.methods.cmoe:CMoECode",
            "What the paper's released code does.",
            _OURS,
            _CMOE,
            _CMOE_URL,
        ),
        Description(
            "static",
            "moesaic.methods.static:Static",
            "Keeps the best neurons and drops the others; no routing.",
            _EXPORTED,
        ),
        Description(
            "static-repaired",
            "moesaic.methods.static:StaticRepaired",
            "As static, with the output weights refitted by least squares.",
            _EXPORTED,
        ),
        Description(
            "flap",
            "moesaic.methods.flap:Flap",
            "Static pruning by fluctuation; an output bias keeps the pruned mean.",
            _OURS,
            "An et al., Fluctuation-based Adaptive Structured Pruning for Large "
            "Language Models, AAAI 2024",
            "https://arxiv.org/abs/2312.11983",
        ),
        Description(
            "teal",
            "moesaic.methods.teal:Teal",
            "Every linear layer reads its inputs of largest magnitude only.",
            _OURS_ON_A_CPU,
            "Liu et al., Training-Free Activation Sparsity in Large Language Models, "
            "ICLR 2025",
            "https://arxiv.org/abs/2408.14690",
        ),
        Description(
            "wina",
            "moesaic.methods.wina:Wina",
            "Every linear layer reads the inputs that weigh most in it.",
            _OURS_ON_A_CPU,
            "Chen et al., WINA: Weight Informed Neuron Activation for Accelerating "
            "Large Language Model Inference",
            "https://arxiv.org/abs/2505.19427",
        ),
        Description(
            "cats",
            "moesaic.methods.cats:CATS",
            "All gates are computed; neurons whose gates are small are skipped.",
            _OURS,
            "Lee et al., CATS: Contextually-Aware Thresholding for Sparsity in Large "
            "Language Models, COLM 2024",
            "https://arxiv.org/abs/2404.08763",
        ),
        Description(
            "griffin",
            "moesaic.methods.griffin:Griffin",
            "A prompt runs all neurons and chooses those that the answer runs.",
            _TRANSFORMERS,
            "Dong et al., Prompt-prompted Adaptive Structured Pruning for Efficient LLM "
            "Generation, 2024",
            "https://arxiv.org/abs/2404.01365",
        ),
        Description(
            "emoe",
            "moesaic.methods.emoe:EMoE",
            "Experts of neurons with like gates, scored by their mean; no fitting.",
            _EXPORTED,
            "Qiu et al., Unlocking Emergent Modularity in Large Language Models, NAACL "
            "2024",
            "https://arxiv.org/abs/2310.10908",
        ),
        Description(
            "expertweaver",
            "moesaic.methods.expertweaver:ExpertWeaver",
            "Experts of neurons with large gates on the same texts, scored by their mean.",
            _OURS,
            "Zhao et al., ExpertWeaver: Unlocking the Inherent MoE in Dense LLMs with "
            "GLU Activation Patterns, 2026",
            "https://arxiv.org/abs/2602.15521",
        ),
        Description(
            "moefication",
            "moesaic.methods.moefication:MoEfication",
            "Experts of neurons with like weights; a small network learns who is active.",
            _OURS,
            "Zhang et al., MoEfication: Transformer Feed-forward Layers are Mixtures of "
            "Experts, Findings of ACL 2022",
            "https://arxiv.org/abs/2110.01786",
        ),
        Description(
            "g-moefication",
            "moesaic.methods.g_moefication:GMoEfication",
            "As moefication, but an expert that does not run puts out its mean.",
            _OURS,
            "Lee et al., Breaking ReLU Barrier: Generalized MoEfication for Dense "
            "Pretrained Models, EMNLP 2024",
            "https://aclanthology.org/2024.emnlp-main.563",
        ),
        Description(
            "llama-moe",
            "moesaic.methods.llama_moe:LlamaMoE",
            "Random experts, outputs scaled up, and a gate that only training can teach.",
            _OURS,
            "Zhu et al., LLaMA-MoE: Building Mixture-of-Experts from LLaMA with "
            "Continual Pre-training, EMNLP 2024",
            "https://arxiv.org/abs/2406.16554",
        ),
        Description(
            "llama-moe-v2",
            "moesaic.methods.llama_moe_v2:LlamaMoEV2",
            "Experts by gradients, one for each cluster of inputs, and one for all.",
            _EXPORTED,
            "Qu et al., LLaMA-MoE v2: Exploring Sparsity of LLaMA from Perspective of "
            "Mixture-of-Experts with Post-Training, 2024",
            "https://arxiv.org/abs/2411.15708",
        ),
        Description(
            "moebert",
            "moesaic.methods.moebert:MoEBERT",
            "The most important neurons in every expert; a hash of the token chooses.",
            _TRANSFORMERS,
            "Zuo et al., MoEBERT: from BERT to Mixture-of-Experts via "
            "Importance-Guided Adaptation, NAACL 2022",
            "https://arxiv.org/abs/2204.07675",
        ),
        Description(
            "read-me",
            "moesaic.methods.read_me:ReadMe",
            "An expert for each kind of text; one router, before the first layer.",
            _TRANSFORMERS,
            "Cai et al., Read-ME: Refactorizing LLMs as Router-Decoupled Mixture of "
            "Experts with System Co-Design, NeurIPS 2024",
            "https://arxiv.org/abs/2410.19123",
        ),
        Description(
            "sleb",
            "moesaic.methods.sleb:SLEB",
            "Takes whole blocks out, the least missed one first; no routing.",
            _STOCK,
            "Song et al., SLEB: Streamlining LLMs through Redundancy Verification and "
            "Elimination of Transformer Blocks, ICML 2024",
            "https://arxiv.org/abs/2402.09025",
        ),
        Description(
            "slicegpt",
            "moesaic.methods.slicegpt:SliceGPT",
            "Rotates the residual stream to its main axes and cuts the others off.",
            _TRANSFORMERS,
            "Ashkboos et al., SliceGPT: Compress Large Language Models by Deleting Rows "
            "and Columns, ICLR 2024",
            "https://arxiv.org/abs/2401.15024",
        ),
        Description(
            "random",
            "moesaic.methods.references:Random",
            "Random experts and a useless router: what every method has to beat.",
            _OURS,
        ),
        Description(
            "oracle",
            "moesaic.methods.references:Oracle",
            "The experts of moesaic; each token runs its best. Saves nothing.",
            None,
        ),
        Description(
            "neuron-oracle",
            "moesaic.methods.references:NeuronOracle",
            "Each token runs its best neurons. Saves nothing.",
            None,
        ),
    )
}
