"""Input images: sizes, transparency, pixel values."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.images import ResizeRule, image_size, load_image, resize, to_pixels

VAE, VIT = ResizeRule(1024, 512, 16), ResizeRule(980, 224, 14)


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        (VAE, (1024, 1024), (1024, 1024)),
        (VAE, (600, 800), (608, 800)),  # to a multiple of 16, rounded half to even
        (VAE, (3000, 1500), (1024, 512)),  # the longest side down to 1024
        (VAE, (100, 200), (512, 1024)),  # the shortest side up to 512
        (VAE, (500, 4000), (128, 1024)),  # the longest side wins
        (VIT, (1024, 1024), (980, 980)),
        (VIT, (100, 100), (224, 224)),
        (VIT, (608, 800), (602, 798)),
    ],
)
def test_sizes(rule: ResizeRule, before: tuple[int, int], after: tuple[int, int]) -> None:
    assert rule.size(*before) == after


def test_many_pixels_are_scaled_down_by_their_ratio() -> None:
    height, width = ResizeRule(4000, 16, 16).size(2000, 1600)
    scale = 14 * 14 * 9 * 1024 / (2000 * 1600)
    assert (height, width) == (round(2000 * scale / 16) * 16, round(1600 * scale / 16) * 16)


def test_pixels_run_from_minus_one_to_one() -> None:
    image = torch.tensor([[[0, 128, 255]]], dtype=torch.uint8)
    pixels = to_pixels(load_image(image))
    assert pixels.shape == (3, 1, 1)
    assert pixels.flatten().tolist() == pytest.approx([-1, 128 / 127.5 - 1, 1], abs=1e-6)


def test_transparency_becomes_white() -> None:
    clear = Image.new("RGBA", (2, 2), (10, 20, 30, 0))
    assert to_pixels(load_image(clear)).eq(1).all()
    assert to_pixels(load_image(Image.new("L", (2, 2), 0))).eq(-1).all()


def test_pil_and_uint8_tensors_are_the_same_image(photo: torch.Tensor) -> None:
    pil = Image.fromarray(photo.numpy())
    rule = ResizeRule(64, 32, 4)
    from_pil, from_tensor = resize(load_image(pil), rule), resize(load_image(photo), rule)
    assert torch.equal(to_pixels(from_pil), to_pixels(from_tensor))
    assert image_size(from_pil) == rule.size(40, 56) == (40, 56)


def test_float_images_are_resized_by_the_same_rule() -> None:
    ramp = torch.linspace(-1, 1, 100).expand(3, 90, 100)
    image = resize(load_image(ramp), ResizeRule(64, 32, 4))
    assert image_size(image) == (56, 64)  # 57.6 fits 56 better than 60
    pixels = to_pixels(image)
    assert pixels.dtype == torch.float32
    assert pixels.min() >= -1
    assert pixels.max() <= 1
    assert torch.allclose(pixels[0, 0, 1:].diff(), torch.tensor(2 / 64), atol=0.02)
    assert resize(load_image(pixels), ResizeRule(64, 32, 4)) is pixels


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(3, 4, dtype=torch.uint8),
        torch.zeros(3, 4, 4, dtype=torch.uint8),
        torch.zeros(4, 4, 3),
        torch.zeros(4, 4, 3, dtype=torch.int32),
        torch.zeros(3, 0, 4),
    ],
)
def test_wrong_tensors_are_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(SchemaError, match="image"):
        load_image(wrong)


def test_other_things_are_refused() -> None:
    with pytest.raises(TypeError, match="texts and images, not bytes"):
        load_image(b"png")  # type: ignore[arg-type]
