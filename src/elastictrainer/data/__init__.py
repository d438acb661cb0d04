"""Images and models through one door: folders, torchvision, timm, the built-in default."""

from __future__ import annotations

from elastictrainer.data.augment import Augment
from elastictrainer.data.images import Images, load_images
from elastictrainer.data.libraries import ModelEntry, list_models
from elastictrainer.data.loader import Batch, Loader
from elastictrainer.data.models import LoadedModel, ModelInputs, load_model, model_inputs
from elastictrainer.data.normalisation import Normalisation
from elastictrainer.data.recipe import Recipe
from elastictrainer.data.torchvision_sets import DatasetEntry, list_datasets
from elastictrainer.data.weights import LoadReport, read_weights

__all__ = [
    "Augment",
    "Batch",
    "DatasetEntry",
    "Images",
    "LoadReport",
    "LoadedModel",
    "Loader",
    "ModelEntry",
    "ModelInputs",
    "Normalisation",
    "Recipe",
    "list_datasets",
    "list_models",
    "load_images",
    "load_model",
    "model_inputs",
    "read_weights",
]
