"""Recovery by light fine-tuning: LoRA, learnable gates, balance, distillation."""

from moesaic.finetune.report import FinetuneReport
from moesaic.finetune.run import finetune

__all__ = ["FinetuneReport", "finetune"]
