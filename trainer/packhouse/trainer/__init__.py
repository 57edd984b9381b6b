"""packhouse.trainer: a plain InternLM2, ways to cut it over ranks, and the loop that trains it on a plan."""

from packhouse.trainer.evaluate import evaluate
from packhouse.trainer.generate import generate
from packhouse.trainer.hf import load_config, load_hf, save_hf
from packhouse.trainer.log import StepLog, print_step
from packhouse.trainer.loss import count_trained_tokens, cross_entropy
from packhouse.trainer.model import CONFIGS, InternLM2, ModelConfig
from packhouse.trainer.optim import TrainConfig, learning_rate, make_optimizer
from packhouse.trainer.parallel import Options, ShardedModel, build, make_groups, parallelize, plain
from packhouse.trainer.train import train

__all__ = [
    "CONFIGS",
    "InternLM2",
    "ModelConfig",
    "Options",
    "ShardedModel",
    "StepLog",
    "TrainConfig",
    "build",
    "count_trained_tokens",
    "cross_entropy",
    "evaluate",
    "generate",
    "learning_rate",
    "load_config",
    "load_hf",
    "make_groups",
    "make_optimizer",
    "parallelize",
    "plain",
    "print_step",
    "save_hf",
    "train",
]
