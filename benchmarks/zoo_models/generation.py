"""Parts of diffusion models of diffusers, other generators, and PyTorch's own transformer."""

from __future__ import annotations

import torch
from torch import nn

from zoo_models.entry import Entry


def unet() -> Entry:
    """Return the conditional U-Net of Stable Diffusion with few channels."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=8,
    )

    def batch(count: int) -> dict[str, torch.Tensor]:
        return {
            "sample": torch.randn(count, 4, 16, 16),
            "timestep": torch.randint(0, 1000, (count,)),
            "encoder_hidden_states": torch.randn(count, 8, 32),
        }

    return Entry(model.eval(), batch, {}, "transformer", most_used=True)


def unet_2d() -> Entry:
    """Return the unconditional U-Net of DDPM with few channels."""
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return Entry(
        model.eval(), lambda n: {"sample": torch.randn(n, 3, 16, 16), "timestep": torch.randint(0, 1000, (n,))}
    )


def autoencoder(part: str) -> Entry:
    """Return the decoder or the encoder of the autoencoder of Stable Diffusion."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    model = AutoencoderKL(
        block_out_channels=(16, 32),
        norm_num_groups=8,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ).eval()
    if part == "decoder":
        return Entry(model.decoder, lambda n: (torch.randn(n, 4, 16, 16),), most_used=True)
    return Entry(model.encoder, lambda n: (torch.randn(n, 3, 32, 32),))


def diffusion_transformer() -> Entry:
    """Return a small diffusion transformer (DiT)."""
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=16, norm_num_groups=8
    ).eval()

    def batch(count: int) -> dict[str, torch.Tensor]:
        return {
            "hidden_states": torch.randn(count, 4, 16, 16),
            "timestep": torch.randint(0, 1000, (count,)),
            "class_labels": torch.randint(0, 1000, (count,)),
        }

    return Entry(model, batch, {}, "transformer")


class Generator(nn.Module):
    """The generator of DCGAN."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs, stride, padding in (
            (32, 4 * width, 1, 0),
            (4 * width, 2 * width, 2, 1),
            (2 * width, width, 2, 1),
        ):
            layers += [
                nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
            ]
        self.layers = nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x[:, :, None, None])


class SuperResolution(nn.Module):
    """ESPCN: convolutions and a pixel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 5, padding=2),
            nn.Tanh(),
            nn.Conv2d(32, 16, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(16, 27, 3, padding=1),
        )
        self.shuffle = nn.PixelShuffle(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.shuffle(self.layers(x)))


class UNet(nn.Module):
    """U-Net for segmentation with transposed convolutions."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
                nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            )

        self.first, self.second, self.third = block(3, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.second_up, self.first_up, self.head = (
            block(4 * width, 2 * width),
            block(2 * width, width),
            nn.Conv2d(width, 2, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        b = self.second(nn.functional.max_pool2d(a, 2))
        c = self.third(nn.functional.max_pool2d(b, 2))
        b = self.second_up(torch.cat([b, self.up2(c)], 1))
        return self.head(self.first_up(torch.cat([a, self.up1(b)], 1)))


def torch_transformer() -> Entry:
    """Return PyTorch's own encoder-decoder with a causal mask."""
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 2, 2, 64, batch_first=True).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(10)
    return Entry(model, lambda n: {"src": torch.randn(n, 14, 32), "tgt": torch.randn(n, 10, 32), "tgt_mask": mask})


def drawn(make: type[nn.Module], *shape: int) -> Entry:
    """Return an entry of a model that takes one tensor, with a batch in front of the shape."""
    torch.manual_seed(0)
    return Entry(make().eval(), lambda count: (torch.randn(count, *shape),))


MODELS = {
    "sd_unet": unet,
    "ddpm_unet": unet_2d,
    "vae_decoder": lambda: autoencoder("decoder"),
    "vae_encoder": lambda: autoencoder("encoder"),
    "dit": diffusion_transformer,
    "dcgan": lambda: drawn(Generator, 32),
    "espcn": lambda: drawn(SuperResolution, 3, 24, 24),
    "u_net": lambda: drawn(UNet, 3, 32, 32),
    "torch_transformer": torch_transformer,
}
