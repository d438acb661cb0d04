"""Meta-training is killed anywhere and goes on: it ends in the weights that it would have ended in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from elastictrainer.data.episodes import Bank
from elastictrainer.data.normalisation import Normalisation
from elastictrainer.fewshot.heads import Prototypes
from elastictrainer.fewshot.meta import meta_train
from elastictrainer.runtime.run import Run

PER_EPOCH, EPOCHS = 4, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("twelve")
    rng = np.random.default_rng(0)
    for kind in range(12):
        (root / f"kind{kind}").mkdir()
        for k in range(4):
            pixels = rng.integers(0, 60, (32, 32, 3))
            pixels[:, kind % 6 :: 6, kind % 3] += 150
            Image.fromarray(pixels.astype(np.uint8)).save(root / f"kind{kind}" / f"{k}.png")
    return root


class Net(torch.nn.Module):
    """With a norm, whose statistics a resumed run could lose, and dropout, whose draws it could repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 6, 3), torch.nn.BatchNorm2d(6)
        self.drop, self.fc = torch.nn.Dropout(0.2), torch.nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.drop(self.norm(self.conv(x)).relu().mean((2, 3))))


class Killed(BaseException):
    """Nothing catches it."""


def train(bank: Bank, out: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    meta_train(
        model, Prototypes("fc"), bank, out=out, resume=True, ways=3, shots=2, queries=2, episodes=PER_EPOCH,
        epochs=EPOCHS, lr=0.05, deterministic=True, checkpoint_every=0.0, progress=False,
    )  # fmt: skip
    return model.state_dict()


@pytest.mark.parametrize("steps", [1, 3, PER_EPOCH, 7])
def test_killed_every_few_tasks(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    bank = Bank(str(folder), image_size=12, normalisation=Normalisation.parse("none"))
    whole = train(bank, tmp_path / "whole")
    real, sessions = Run.stepped, 0
    while not (tmp_path / "killed" / "result.json").exists():
        sessions += 1
        assert sessions <= PER_EPOCH * EPOCHS + 1
        left = steps

        def stepped(self: Run, loss: torch.Tensor) -> None:
            nonlocal left
            real(self, loss)
            left -= 1
            if left < 0:  # one task more than was asked for, so that each session gets on
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(Run, "stepped", stepped)
            try:
                killed = train(bank, tmp_path / "killed")
            except Killed:
                continue
    assert sessions > 1
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    start = Net().state_dict()
    assert not torch.equal(start["conv.weight"], whole["conv.weight"])


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is a POSIX signal")
def test_the_command_killed_from_outside(folder: Path, tmp_path: Path) -> None:
    """kill -9 to `elastictrainer metatrain`, twice, then --resume to the end: bit-equal to a run left alone."""
    words = [
        sys.executable, "-m", "elastictrainer", "metatrain", "--model", "torchvision/shufflenet_v2_x0_5", "--data",
        str(folder), "--image-size", "32", "--ways", "2", "--shots", "2", "--queries", "2", "--episodes", "6",
        "--epochs", "4", "--device", "cpu", "--threads", "1", "--deterministic", "--resume", "--json", "--out",
    ]  # fmt: skip
    out = tmp_path / "killed"

    def checkpoints() -> set[str]:
        return {path.name for path in (out / "checkpoint").glob("save-????????")}

    for _ in range(2):
        before = checkpoints()
        process = subprocess.Popen([*words, str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        patience = time.monotonic() + 90
        while process.poll() is None and checkpoints() <= before and time.monotonic() < patience:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it was over before it could be killed"
    for folder_of in (out, tmp_path / "whole"):
        subprocess.run([*words, str(folder_of)], check=True, capture_output=True)
    killed, whole = (load_file(path / "model.safetensors") for path in (out, tmp_path / "whole"))
    assert killed.keys() == whole.keys()
    assert all(torch.equal(killed[name], whole[name]) for name in whole)
