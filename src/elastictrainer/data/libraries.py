"""Networks by name from torchvision and timm: built, described and listed through one small protocol."""

from __future__ import annotations

import difflib
import functools
import socket
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol
from urllib.parse import urlparse
from urllib.request import getproxies

from torch import Tensor, nn

from elastictrainer.data.normalisation import NAMED, Normalisation
from elastictrainer.data.weights import one_line
from elastictrainer.errors import ConfigError, ElasticTrainerError, ModelError

__all__ = ["Architecture", "ModelEntry", "find_architecture", "list_models"]

_OFFLINE = "is the network reachable? Without it give a local file (weights='model.safetensors') or weights=None"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of `elastictrainer ls models`."""

    name: str
    description: str


class Architecture(Protocol):
    """A network that a library can build; `size_argument` is what its builder calls the image size."""

    @property
    def name(self) -> str: ...
    @property
    def size_argument(self) -> str: ...
    def build(self, num_classes: int | None, **arguments: Any) -> nn.Module: ...
    def published(self) -> tuple[Normalisation, int]: ...
    def default_tensors(self, **arguments: Any) -> dict[str, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Torchvision:
    """One of torchvision's classification networks."""

    arch: str
    size_argument: str = "image_size"

    @property
    def name(self) -> str:
        return f"torchvision/{self.arch}"

    def build(self, num_classes: int | None, **arguments: Any) -> nn.Module:
        from torchvision.models import get_model

        if num_classes is not None:
            arguments["num_classes"] = num_classes
        with warnings.catch_warnings():
            # GoogLeNet and Inception warn that their default initialisation will change; it is the library's choice.
            warnings.simplefilter("ignore", FutureWarning)
            model: nn.Module = get_model(self.arch, weights=None, **arguments)
        return model

    def published(self) -> tuple[Normalisation, int]:
        """What the library's default weights expect: normalisation and image size."""
        from torchvision.models import get_model_weights

        transforms = get_model_weights(self.arch).DEFAULT.transforms()
        return Normalisation.of(transforms.mean, transforms.std), int(transforms.crop_size[0])

    def default_tensors(self, **arguments: Any) -> dict[str, Tensor]:
        from torchvision.models import get_model_weights

        choice = get_model_weights(self.arch).DEFAULT
        try:
            tensors: dict[str, Tensor] = choice.get_state_dict(progress=False, check_hash=True)
        except (OSError, RuntimeError) as error:
            raise ModelError(
                f"{self.name}: its weights {choice} cannot be downloaded: {one_line(error)}; {_OFFLINE}"
            ) from error
        return tensors

    def describe(self) -> str:
        from torchvision.models import get_model_weights

        best = get_model_weights(self.arch).DEFAULT.meta
        accuracy = best.get("_metrics", {}).get("ImageNet-1K", {}).get("acc@1")
        words = f"{best['num_params'] / 1e6:.1f}M parameters"
        return f"{words}, {accuracy:.1f}% on ImageNet with its own weights" if accuracy else words


@dataclass(frozen=True, slots=True)
class Timm:
    """One of timm's networks, with or without a weights tag (`resnet50.a1_in1k`)."""

    arch: str
    size_argument: str = "img_size"

    @property
    def name(self) -> str:
        return f"timm/{self.arch}"

    def build(self, num_classes: int | None, **arguments: Any) -> nn.Module:
        import timm

        if num_classes is not None:
            arguments["num_classes"] = num_classes
        model: nn.Module = timm.create_model(self.arch, pretrained=False, **arguments)
        return model

    def published(self) -> tuple[Normalisation, int]:
        """What the library's default weights expect: normalisation and image size."""
        import timm

        config = timm.get_pretrained_cfg(self.arch, allow_unregistered=True)
        if config is None:
            return NAMED["imagenet"], 224
        return Normalisation.of(config.mean, config.std), int(config.input_size[-1])

    def default_tensors(self, **arguments: Any) -> dict[str, Tensor]:
        import timm

        config = timm.get_pretrained_cfg(self.arch, allow_unregistered=True)
        if config is None or not config.has_weights:
            raise ModelError(f"{self.name} has no weights of its own in timm; give a local file or weights=None")
        self._refuse_early(config.hf_hub_id)
        try:
            tensors: dict[str, Tensor] = timm.create_model(self.arch, pretrained=True, **arguments).state_dict()
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"{self.name}: its weights cannot be downloaded: {one_line(error)}; {_OFFLINE}") from error
        return tensors

    def _refuse_early(self, hub_id: str | None) -> None:
        """Say at once what the hub's client says after a minute of retries: no network, and nothing in its cache."""
        if not hub_id or getproxies():
            return
        from huggingface_hub import constants, try_to_load_from_cache

        if any(isinstance(try_to_load_from_cache(hub_id, f), str) for f in ("model.safetensors", "pytorch_model.bin")):
            return
        host = urlparse(constants.ENDPOINT).hostname or constants.ENDPOINT
        try:
            socket.getaddrinfo(host, 443)
        except OSError as error:
            raise ModelError(
                f"{self.name}: its weights cannot be downloaded: {host}: {one_line(error)}; {_OFFLINE}"
            ) from error

    def describe(self) -> str:
        import timm

        config = timm.get_pretrained_cfg(self.arch)
        if config is None or not config.has_weights:
            return "no weights of its own"
        return f"{config.input_size[-1]} px, default weights {config.tag or 'untagged'}"


def find_architecture(name: str) -> Torchvision | Timm:
    """The network called `torchvision/NAME`, `timm/NAME` or plainly `NAME` (torchvision's if both have it).

    Raises:
        ModelError: when no library has it (with names that come close) or the library is not installed.
    """
    library, slash, arch = name.partition("/")
    if not slash:
        library, arch = "", name
    if library not in ("", "torchvision", "timm"):
        raise ModelError(f"model {name!r}: library {library!r} is unknown; write torchvision/NAME or timm/NAME")
    problems = []
    for kind, known in (("torchvision", _torchvision_names), ("timm", _timm_names)):
        if library in ("", kind):
            try:
                # timm's tag (`resnet50.a1_in1k`) names weights, not another network.
                if arch in known() or (kind == "timm" and arch.split(".")[0] in known()):
                    return Torchvision(arch) if kind == "torchvision" else Timm(arch)
            except ImportError as error:
                problems.append(f"{kind} is not installed ({one_line(error)})")
    if problems:
        raise ModelError(f"model {name!r} cannot be looked up: {'; '.join(problems)}; install elastictrainer[vision]")
    names = {*(_torchvision_names() if library != "timm" else ()), *(_timm_names() if library != "torchvision" else ())}
    close = difflib.get_close_matches(arch, sorted(names), n=3)
    hint = f"did you mean {', '.join(close)}?" if close else "`elastictrainer ls models` lists the names"
    raise ModelError(f"model {name!r} is unknown to {library or 'torchvision and timm'}; {hint}")


def list_models(pattern: str = "*") -> Iterator[ModelEntry]:
    """The built-in model and every network of torchvision and timm that is installed, by glob, described.

    Costs the import of both libraries (seconds on a small board), nothing a model.
    """
    if fnmatchcase("builtin", pattern):
        yield ModelEntry("builtin", "EfficientNet-Lite0 with ImageNet weights from an ordinary package (extra: demo)")
    for kind, known in ((Torchvision, _torchvision_names), (Timm, _timm_names)):
        try:
            names = known()
        except ImportError:
            continue
        for arch in names:
            entry = kind(arch)
            if fnmatchcase(arch, pattern) or fnmatchcase(entry.name, pattern):
                yield ModelEntry(entry.name, entry.describe())


def build(architecture: Architecture, num_classes: int | None, arguments: dict[str, Any]) -> nn.Module:
    """Build a network; a wrong builder argument is one clear line."""
    try:
        return architecture.build(num_classes, **arguments)
    except ElasticTrainerError:
        raise
    except NotImplementedError:
        raise  # only raised on the meta device; the caller then builds for real
    except RuntimeError as error:
        if reads_values(error):
            raise NotImplementedError(one_line(error)) from error
        if not arguments:
            raise
        raise ModelError(f"{architecture.name} cannot be built with {arguments}: {one_line(error)}") from error
    except TypeError as error:
        raise ConfigError(f"{architecture.name} cannot be built with {arguments}: {one_line(error)}") from error
    except Exception as error:
        if not arguments:
            raise
        raise ModelError(f"{architecture.name} cannot be built with {arguments}: {one_line(error)}") from error


def reads_values(error: Exception) -> bool:
    """Whether this says that something read a number on the meta device; older torches call it a RuntimeError."""
    return isinstance(error, NotImplementedError) or "cannot be called on meta tensors" in str(error)


@functools.cache
def _torchvision_names() -> tuple[str, ...]:
    import torchvision

    return tuple(torchvision.models.list_models(module=torchvision.models))


@functools.cache
def _timm_names() -> tuple[str, ...]:
    import timm

    return tuple(timm.list_models())
