"""Networks and images of the few-shot suites, and how they travel to a machine that has neither.

`pack` makes one archive of them: `data/` with every image at the resolution used, at most `--per-class` of each class,
as WebP of quality 90; `weights/` with each network of `--models` (and of `--meta` its meta-trained self) without its
last layer, which features do not pass, tensors of two or more dimensions in half precision, as those of
`../shared/weights` are; `lib/` with the packages that may be missing there. Unpack it with `python3 -m zipfile -e`, and
say `--data`, `--weights`, `--meta` and `PYTHONPATH`.
"""

from __future__ import annotations

import argparse
import io
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.torch import save

from elastictrainer.data.episodes import Bank
from elastictrainer.data.models import LoadedModel, load_model

sys.path.insert(0, str(Path(__file__).parent))
from workloads import WEIGHTS

DOMAINS = {"cub200": "cub200", "pets37": "pets37"}  # others lie in fewshot/
PACKAGES = ("timm", "yaml")


def network(name: str, args: argparse.Namespace, *, meta: bool, classes: int | None = None) -> LoadedModel:
    """Plain or meta-trained; weights from an archive of `pack`, from `--weights`, or (builtin) from its package."""
    architecture = "timm/tf_efficientnet_lite0" if name == "builtin" else f"torchvision/{name}"
    size, special = args.image_size, dict(WEIGHTS.get(name, {}))
    file = special.pop("file", None)
    packed = args.weights / f"{name}.safetensors" if args.weights else None
    if meta:
        return load_model(
            architecture, weights=args.meta / name / "model.safetensors", image_size=size, num_classes=classes
        )
    if packed and packed.exists():
        return load_model(architecture, weights=packed, image_size=size, num_classes=classes)
    if name == "builtin":
        return load_model("builtin", image_size=size, num_classes=classes)
    weights = args.weights / file if args.weights and file else None
    options = special if weights else {}
    return load_model(architecture, weights=weights, image_size=size, num_classes=classes, **options)


def bank_of(domain: str, like: LoadedModel, args: argparse.Namespace) -> Bank:
    return Bank(
        str(args.data / DOMAINS.get(domain, f"fewshot/{domain}")),
        image_size=like.image_size,
        normalisation=like.normalisation,
        device=args.device,
        seed=args.seed,
    )


def pack_suite(args: argparse.Namespace) -> None:
    """Write the archive `--out`."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(args.out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in args.models.split(","):
            for meta in (False, True) if args.meta else (False,):
                loaded = network(name, args, meta=meta, classes=2)
                where = f"meta/{name}/model.safetensors" if meta else f"weights/{name}.safetensors"
                archive.writestr(where, halved(loaded))
        for domain in dict.fromkeys((args.source, *filter(None, args.domains.split(",")))):
            bank = bank_of(domain, loaded, args)
            for position in some_of_each(bank.labels, args.per_class):
                member = f"data/{DOMAINS.get(domain, f'fewshot/{domain}')}/{bank.classes[bank.labels[position]]}"
                archive.writestr(f"{member}/{position:06d}.webp", as_webp(bank, position))
        for package in PACKAGES:
            spec = find_spec(package)
            assert spec is not None
            assert spec.origin is not None
            root = Path(spec.origin).parent
            for path in sorted(root.rglob("*")):
                if path.suffix in (".py", ".txt", ".csv"):
                    archive.write(path, f"lib/{package}/{path.relative_to(root)}")
    print(f"wrote {args.out}: {args.out.stat().st_size / 2**20:.1f} MiB", file=sys.stderr)


def some_of_each(labels: np.ndarray, most: int) -> list[int]:
    """Positions of the first `most` images of each class; of all for 0."""
    found = [np.flatnonzero(labels == label)[: most or None] for label in np.unique(labels)]
    return sorted(int(position) for positions in found for position in positions)


def as_webp(bank: Bank, position: int) -> bytes:
    pixels = bank.pixels(np.asarray([position]))[0]
    file = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy()).save(file, "WEBP", quality=90)
    return file.getvalue()


def halved(loaded: LoadedModel) -> bytes:
    tensors = {
        name: tensor.half() if tensor.is_floating_point() and tensor.dim() > 1 else tensor.clone()
        for name, tensor in loaded.model.state_dict().items()
    }
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, loaded.metadata())
