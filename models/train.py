"""Train a landmark network: a folder of scans and a folder of landmark files in, a model folder out.

    python -m models.train SCANS LANDMARKS -o models/NAME

See the README chapter on training for what the options mean.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from monai.networks.nets import DynUNet
from torch import Tensor, nn

from app.manifest import IntensitySpec
from models.augment import Augmentation, Sample, pose
from models.specimens import Specimen, landmark_names, load_specimen, pair_files
from models.targets import field_axis, make_targets, vote_loss

SHAPES = ((64, 64, 64), (80, 64, 48), (48, 80, 64), (64, 48, 80), (80, 80, 48), (48, 64, 80))


@dataclass(frozen=True, slots=True)
class Recipe:
    spacing_mm: float = 0.42
    radius_mm: float = 2.1
    stride: int = 2
    filters: tuple[int, ...] = (24, 48, 96, 128)
    steps: int = 3600
    batch: int = 2
    rate: float = 2e-3
    seed: int = 1


def build(recipe: Recipe, landmarks: int) -> nn.Module:
    depth = len(recipe.filters)
    net = DynUNet(
        3,
        1,
        4 * landmarks,
        kernel_size=[3] * depth,
        strides=[2] * depth,
        upsample_kernel_size=[2] * (depth - 1),
        filters=list(recipe.filters),
        norm_name=("INSTANCE", {"affine": True}),
    )
    with torch.no_grad():
        net.output_block.conv.conv.bias[:landmarks] = -6.0
    return net.to(memory_format=torch.channels_last_3d)


def peak_error(field: Tensor, samples: Sequence[Sample], recipe: Recipe) -> np.ndarray:
    c = len(samples[0].points)
    centres = torch.stack(
        torch.meshgrid(
            *[field_axis(n, recipe.stride) for n in samples[0].image.shape[1:]], indexing="ij"
        ),
        -1,
    ).reshape(-1, 3)
    out = []
    for f, s in zip(field, samples, strict=True):
        best = f[:c].flatten(1).argmax(1)
        offs = f[c:].unflatten(0, (3, c)).flatten(2)
        found = centres[best] + offs[:, torch.arange(c), best].T
        out.append(np.linalg.norm(found.numpy() - s.points, axis=1) * recipe.spacing_mm)
    return np.concatenate(out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("scans", type=Path)
    parser.add_argument("landmarks", type=Path)
    parser.add_argument("-o", type=Path, required=True)
    parser.add_argument("--validate", default="")
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    recipe = Recipe(steps=args.steps)
    spacing = [recipe.spacing_mm] * 3
    pairs = pair_files(args.scans, args.landmarks)
    names = landmark_names(pairs)
    held = set(args.validate.split(","))
    everyone = [
        load_specimen(p, names, spacing, IntensitySpec(method="percentile", lower=1.0, upper=99.5))
        for p in pairs
    ]
    train = [s for s in everyone if s.name not in held]
    val = [s for s in everyone if s.name in held]
    print(len(train), len(val), recipe, flush=True)
    torch.manual_seed(recipe.seed)
    rng = np.random.default_rng(recipe.seed)
    net = build(recipe, len(names))
    opt = torch.optim.AdamW(net.parameters(), lr=recipe.rate, weight_decay=1e-2)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, recipe.rate, recipe.steps, pct_start=0.15)
    start = 0
    ck = args.o / "checkpoint.pt"
    if args.resume and ck.exists():
        c = torch.load(ck)
        net.load_state_dict(c["net"])
        opt.load_state_dict(c["opt"])
        sched.load_state_dict(c["sched"])
        start = c["step"]
        rng.bit_generator.state = c["rng"]
    args.o.mkdir(parents=True, exist_ok=True)
    aug = Augmentation()
    vrng = np.random.default_rng(7)
    vsamples = [
        pose(s, SHAPES[0], spacing, Augmentation(crop=0, elastic_mm=0, scale=0, stretch=0), vrng)
        for s in val
        for _ in range(2)
    ]
    t0 = time.time()
    run = []
    for step in range(start, recipe.steps):
        shape = SHAPES[int(rng.integers(len(SHAPES)))]
        samples = [
            pose(train[int(rng.integers(len(train)))], shape, spacing, aug, rng)
            for _ in range(recipe.batch)
        ]
        x = torch.stack([s.image for s in samples]).contiguous(memory_format=torch.channels_last_3d)
        targets = make_targets(samples, spacing, recipe.stride, recipe.radius_mm, False)
        field = net(x)
        a, b = vote_loss(field, targets, recipe.radius_mm / recipe.spacing_mm)
        opt.zero_grad()
        (a + 2 * b).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        sched.step()
        run.append((a.item(), b.item()))
        if step % 50 == 49:
            m = np.mean(run, 0)
            run = []
            print(
                f"{step + 1} {time.time() - t0:.0f}s score {m[0]:.3f} offset {m[1]:.4f} lr {sched.get_last_lr()[0]:.2e}",
                flush=True,
            )
        if step % 300 == 299 or step + 1 == recipe.steps:
            net.eval()
            with torch.no_grad():
                e = np.concatenate(
                    [
                        peak_error(
                            net(s.image[None].contiguous(memory_format=torch.channels_last_3d)),
                            [s],
                            recipe,
                        )
                        for s in vsamples
                    ]
                )
            net.train()
            print(
                f"  VAL mean {np.nanmean(e):.3f} median {np.nanmedian(e):.3f} >1mm {np.nanmean(e > 1):.3f}",
                flush=True,
            )
            torch.save(
                {
                    "net": net.state_dict(),
                    "opt": opt.state_dict(),
                    "sched": sched.state_dict(),
                    "step": step + 1,
                    "rng": rng.bit_generator.state,
                    "names": names,
                    "recipe": asdict(recipe),
                },
                ck,
            )


if __name__ == "__main__":
    main()
