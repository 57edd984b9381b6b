"""packhouse.trainer: a plain InternLM2 and the loop that trains it on the packs of a plan."""

from packhouse.trainer.log import StepLog, print_step
from packhouse.trainer.loss import count_trained_tokens, cross_entropy
from packhouse.trainer.model import CONFIGS, InternLM2, ModelConfig
from packhouse.trainer.optim import TrainConfig, learning_rate, make_optimizer
from packhouse.trainer.train import train

__all__ = [
    "CONFIGS",
    "InternLM2",
    "ModelConfig",
    "StepLog",
    "TrainConfig",
    "count_trained_tokens",
    "cross_entropy",
    "learning_rate",
    "make_optimizer",
    "print_step",
    "train",
]
