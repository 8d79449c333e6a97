"""Training as people write it: loops of frameworks, several processes, networks of many kinds."""

import copy
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import intaglio
from intaglio import stages
from support import nets
from support.qat_models import assert_evaluates_alike, trainable
from support.slow_params import slow_params, slow_params_except

FOUR = intaglio.Setting(weights_dtype="s4", activations_dtype="u4")


def norms_and_dropout(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(54, 4)
    )


def batch(step: int, n: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(n, 3, 5, 5, generator=draw), torch.randint(0, 4, (n,), generator=draw)


# -- loops of frameworks ----------------------------------------------------------------------------------------------


class Task(nn.Module):
    """What one writes for Lightning: the model is a child, and hooks say what is done with it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.average = net, copy.deepcopy(net)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW([p for p in self.net.parameters() if p.requires_grad], lr=1e-3)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)

    def training_step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(images), labels)

    @torch.no_grad()
    def on_train_batch_end(self) -> None:
        """A moving average of everything that is a number."""
        mine = self.net.state_dict()
        for name, value in self.average.state_dict().items():
            if value.dtype.is_floating_point:
                value.lerp_(mine[name].to(value.dtype), 0.1)

    def on_validation_start(self) -> None:
        self.eval()

    def on_validation_end(self) -> None:
        self.train()

    def validation_step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.average(images), labels)


class Trainer:
    """Fits a `Task`: clips gradients, validates every second step, saves and resumes."""

    def __init__(self, task: Task) -> None:
        self.task, self.step, self.losses = task.to("cpu").train(), 0, list[float]()
        self.optimizer, self.schedule = task.configure_optimizers()

    def fit(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.optimizer.zero_grad(set_to_none=True)
            self.task.training_step(*batch(self.step)).backward()
            nn.utils.clip_grad_norm_(self.task.parameters(), 0.5, error_if_nonfinite=True)
            self.optimizer.step()
            self.schedule.step()
            self.task.on_train_batch_end()
            if self.step % 2 == 0:
                self.task.on_validation_start()
                with torch.no_grad():
                    self.losses.append(self.task.validation_step(*batch(1000)).item())
                self.task.on_validation_end()

    def save(self, path) -> None:
        parts = {name: getattr(self, name).state_dict() for name in ("task", "optimizer", "schedule")}
        torch.save({**parts, "step": self.step, "random": torch.get_rng_state()}, path)

    def resume(self, path) -> None:
        saved = torch.load(path, weights_only=True)
        for name in ("task", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(saved[name])
        self.step = saved["step"]
        torch.set_rng_state(saved["random"])


def trainer(learned: bool) -> Trainer:
    prepared = trainable(norms_and_dropout(), batch(0)[0], stages.Quantizer(intaglio.Recipe.of({}, FOUR)))
    stages.calibrate(prepared, [batch(0)[0]], progress=False)
    return Trainer(Task(prepared.learn_scales(learned)))


@pytest.mark.parametrize("learned", [*slow_params(False, reason="the same loop without learned scales"), True])
def test_a_loop_with_hooks_averages_clipping_and_checkpoints_resumes_bit_for_bit(tmp_path, learned):
    straight = trainer(learned)
    torch.manual_seed(7)
    straight.fit(3)
    straight.save(tmp_path / "checkpoint.pt")
    straight.fit(3)
    resumed = trainer(learned)
    resumed.resume(tmp_path / "checkpoint.pt")
    resumed.fit(3)
    for (name, expected), got in zip(
        straight.task.state_dict().items(), resumed.task.state_dict().values(), strict=True
    ):
        assert torch.equal(got, expected), name
    assert resumed.losses == straight.losses[1:]
    for net in (straight.task.net, straight.task.average):
        assert_evaluates_alike(net, batch(0)[0])


def test_copies_have_independent_switches():
    """A copy for the average validates without rounding, while the model goes on training with it."""
    prepared = trainable(norms_and_dropout(), batch(0)[0])
    prepared(batch(0)[0])
    average = copy.deepcopy(prepared).round_values(False).eval()
    assert prepared.training
    prepared.observe_ranges(False)
    x = batch(1)[0]
    assert not torch.equal(prepared.eval()(x), average(x))
    assert not torch.equal(prepared(x), prepared.round_values(False)(x))
    assert torch.equal(prepared(x), average(x))


def test_a_state_loaded_into_a_parent_reaches_the_model_inside():
    """`load_state_dict` of a parent calls none of its children's."""
    learning = trainable(norms_and_dropout(), batch(0)[0])
    stages.calibrate(learning, [batch(0)[0]], progress=False)
    state = nn.ModuleDict({"net": learning.learn_scales()}).state_dict()
    fresh = trainable(norms_and_dropout(), batch(0)[0])
    nn.ModuleDict({"net": fresh}).load_state_dict(state)
    assert all(scale.requires_grad for scale in fresh.scale_parameters())
    assert len(fresh.scale_parameters()) == len(learning.scale_parameters())


# -- several processes ------------------------------------------------------------------------------------------------

RANK = """
    import sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import intaglio

    rank, ranks, folder, mode = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{ranks}{mode}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    batches = torch.randn(5, 8, 3, 5, 5)
    mine = [images.chunk(ranks)[rank] for images in batches]
    prepared = intaglio.stages.prepare(intaglio.stages.capture(model, batches[0], train=True), qat=True)
    intaglio.stages.calibrate(prepared, mine[:1], progress=False)
    if mode != "observed":
        prepared.learn_scales() if mode == "learned" else prepared.observe_ranges(False)
        prepared.freeze_batch_norms()  # their statistics of a part are not those of the whole
    parallel = DistributedDataParallel(prepared)
    optimizer = torch.optim.SGD([p for p in parallel.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    for images in mine[1:3]:
        optimizer.zero_grad()
        parallel(images).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        results = parallel.eval()(batches[4])
    torch.save((prepared.state_dict(), results), f"{folder}/{mode}{ranks}{rank}.pt")
    if rank == 0:
        assert torch.equal(intaglio.stages.convert(prepared)(batches[4]), results)
"""


def processes(folder, ranks: int, mode: str) -> list:
    """State and results of each rank."""
    script = folder / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    started = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(ranks), str(folder), mode])
        for rank in range(ranks)
    ]
    assert [process.wait(timeout=300) for process in started] == [0] * ranks
    return [torch.load(folder / f"{mode}{ranks}{rank}.pt") for rank in range(ranks)]


@pytest.mark.slow(reason="several processes that train together")
@pytest.mark.parametrize("mode", ["learned", "kept"])
def test_two_processes_train_as_one_on_the_whole_batch(tmp_path, mode):
    """Where nothing depends on the rest of the batch, as statistics of batch norms and moving averages do."""
    (first, result), (second, _) = processes(tmp_path, 2, mode)
    ((whole, expected),) = processes(tmp_path, 1, mode)
    for name, values in whole.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], values, rtol=1e-4, atol=1e-5, msg=name)
    step = max(values.abs().max().item() for name, values in whole.items() if name.endswith("scale"))
    assert (result - expected).abs().max() <= step


@pytest.mark.slow(reason="several processes that train together")
def test_all_ranks_evaluate_with_the_same_observed_ranges(tmp_path):
    """Their averages are the first rank's, as other buffers are, and their scales follow them."""
    (first, result), (second, other) = processes(tmp_path, 2, "observed")
    for name, values in first.items():
        assert torch.equal(values, second[name]), name
    assert torch.equal(result, other)


# -- networks ---------------------------------------------------------------------------------------------------------


class Inverted(nn.Module):
    """MobileNet's block with SiLU: wide, depthwise, narrow, and a shortcut around."""

    def __init__(self, channels: int, wide: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU())
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True)
        )
        self.project = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.project(self.depthwise(self.expand(x))))


def mobile() -> tuple[nn.Module, list[torch.Tensor]]:
    stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 4)
    model = nn.Sequential(*stem, Inverted(8, 16), Inverted(8, 16), *head)
    return nets.randomize(model).train(), [torch.randn(4, 3, 12, 12)]


class Layer(nn.Module):
    """BERT's: attention, two linear layers with GELU, a norm behind each sum."""

    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.heads, self.p = heads, p
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow, self.dropout = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(p)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        parts = (part(x).unflatten(2, (self.heads, -1)) for part in (self.query, self.key, self.value))
        q, k, v = (part.transpose(1, 2) for part in parts)
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None], dropout_p=p)
        x = self.norms[0](x + self.dropout(self.out(y.transpose(1, 2).flatten(2))))
        return self.norms[1](x + self.dropout(self.narrow(F.gelu(self.wide(x)))))


class Encoder(nn.Module):
    """BERT in small: embeddings of tokens and places, two layers, the first token's head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, width), nn.Embedding(12, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer(width, 2, 0.1) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.norm(self.tokens(ids) + self.places(torch.arange(ids.shape[1]))))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(torch.tanh(x[:, 0]))


def encoder() -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    mask = torch.ones(4, 12, dtype=torch.bool)
    mask[1, 8:] = False
    return Encoder().train(), [torch.randint(0, 50, (4, 12)), mask]


@pytest.mark.slow(reason="trains a network; the loop above trains with learned scales, too")
@pytest.mark.parametrize(
    "setting",
    slow_params_except(FOUR, of=[intaglio.Setting(), FOUR], reason="the same training in eight bits"),
    ids=["eight", "four"],
)
@pytest.mark.parametrize("network", [mobile, *slow_params(encoder, reason="a small training of another field")])
def test_networks_of_two_fields_learn_in_eight_and_four_bits(network, setting):
    model, inputs = network()
    captured = stages.capture(model, tuple(inputs), train=True)
    prepared = stages.prepare(captured, stages.Quantizer(intaglio.Recipe.of({}, setting)), qat=True)
    stages.calibrate(prepared, [tuple(inputs)], progress=False)
    scales = prepared.learn_scales().scale_parameters()
    assert all(p.grad is None for p in prepared.parameters())
    others = [p for p in prepared.parameters() if p.requires_grad and all(p is not scale for scale in scales)]
    optimizer = torch.optim.Adam([{"params": others}, {"params": scales, "lr": 1e-4}], lr=3e-3)
    labels, losses = torch.tensor([0, 1, 2, 1]), []
    for step in range(12):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(prepared(*inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) < sum(losses[:3])
    assert all(p.grad is not None for p in prepared.parameters() if p.requires_grad)
    assert_evaluates_alike(prepared, *inputs)
