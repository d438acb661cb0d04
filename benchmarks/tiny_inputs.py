"""Networks and images of the few-shot suites, and how they travel to a machine that has neither."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from elastictrainer.data.episodes import Bank
from elastictrainer.data.models import LoadedModel, load_model

sys.path.insert(0, str(Path(__file__).parent))
from workloads import WEIGHTS

DOMAINS = {"cub200": "cub200", "pets37": "pets37"}  # others lie in fewshot/


def network(name: str, args: argparse.Namespace, *, meta: bool) -> LoadedModel:
    if meta:
        return load_model(
            "timm/tf_efficientnet_lite0" if name == "builtin" else f"torchvision/{name}",
            weights=args.meta / name / "model.safetensors",
            image_size=args.image_size,
        )
    if name == "builtin":
        return load_model("builtin", image_size=args.image_size)
    special = dict(WEIGHTS.get(name, {}))
    file = special.pop("file", None)
    weights = args.weights / file if args.weights and file else None
    options = special if weights else {}
    return load_model(f"torchvision/{name}", weights=weights, image_size=args.image_size, **options)


def bank_of(domain: str, like: LoadedModel, args: argparse.Namespace) -> Bank:
    return Bank(
        str(args.data / DOMAINS.get(domain, f"fewshot/{domain}")),
        image_size=like.image_size,
        normalisation=like.normalisation,
        device=args.device,
        seed=args.seed,
    )
