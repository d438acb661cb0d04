"""The graph of networks that people use, with every kind of branch, against the engine's own word."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from elastictrainer.profiling.trace import trace
from tests.zoo import classify


def _torchvision(name, **options):
    return pytest.importorskip("torchvision").models.get_model(name, num_classes=3, **options)


def _timm(name, **options):
    return pytest.importorskip("timm").create_model(name, num_classes=3, **options)


NETWORKS = {
    "residual": lambda: _torchvision("resnet18"),
    "dense": lambda: _torchvision("densenet121"),
    "inception": lambda: _torchvision("googlenet", aux_logits=False, init_weights=False),
    "windows": lambda: _torchvision("swin_t"),
    "attention": lambda: _timm("vit_tiny_patch16_224", img_size=64),
    "convolutions as transformers": lambda: _timm("convnext_atto"),
    "squeeze and excite": lambda: _timm("mobilenetv3_small_050"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", NETWORKS)
def test_reached_is_what_the_engine_runs(kind):
    torch.manual_seed(0)
    model, batch = NETWORKS[kind](), (torch.randn(2, 3, 64, 64), torch.tensor([0, 1]))
    parameters = dict(model.named_parameters())
    traced = trace(model, classify, batch, parameters)
    graph = traced.graph
    model.zero_grad()
    assert set(graph.names) == set(parameters)
    assert not graph.unused
    rng = np.random.default_rng(0)
    for depth in rng.integers(1, len(graph.names) + 1, 3):
        chosen = np.unique([depth - 1, *np.flatnonzero(rng.random(depth) < 0.3)])
        live = traced.locate(classify(model, batch))
        ran: set[int] = set()
        for i, node in enumerate(live.operations):
            node.register_prehook(lambda _, i=i, ran=ran: ran.add(i))
        live.loss.backward(inputs=[parameters[graph.names[k]] for k in chosen])
        assert ran == set(np.flatnonzero(graph.reached(chosen)))
