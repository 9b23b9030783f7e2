"""Calls, layers and terms of a loss without the effect that they are meant to have; and none of
those that have it."""

from __future__ import annotations

import copy
import io
import itertools
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainfit
from helpers_learning import findings_of, train
from trainfit.hooks.learning import LearningObserver
from trainfit.results.findings import Finding
from trainfit.simgpu.session import Simulation

Tensor = torch.Tensor
Training = Callable[["Run"], None]
Found = Callable[[Training], tuple[Finding, ...]]


class Run:
    """A training of four steps."""

    def __init__(self, device: str, observer: LearningObserver) -> None:
        self.device = device
        self.observer = observer
        self.models: list[nn.Module] = []

    def steps(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        before_step: Callable[[], Any] = lambda: None,
        data: Tensor | None = None,
    ) -> None:
        model.to(self.device)
        self.models.append(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(32, 16) if data is None else data
        loader = DataLoader(TensorDataset(x, torch.zeros(len(x), dtype=torch.long)), 8)

        def of_batch(batch: list[Tensor]) -> Tensor:
            rows, y = (each.to(self.device) for each in batch)
            return loss(model(rows), y)

        train(self.observer, model, of_batch, loader, optimizer, between=before_step)


def _found(device: str, simulation: Simulation | None, training: Training) -> tuple[Finding, ...]:
    def of(observer: LearningObserver) -> Run:
        run = Run(device, observer)
        training(run)
        assert run.models
        return run

    return findings_of(of, simulation)


@pytest.fixture(params=["cpu", "cuda"])
def found(request: pytest.FixtureRequest) -> Iterator[Found]:
    if request.param == "cpu":
        yield lambda training: _found("cpu", None, training)
    else:
        with trainfit.simulate("T4") as simulation:
            yield lambda training: _found("cuda", simulation, training)


@pytest.fixture
def simulated() -> Iterator[Found]:
    """Of what is seen on the simulated device only."""
    with trainfit.simulate("T4") as simulation:
        yield lambda training: _found("cuda", simulation, training)


def net(outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, outputs))


def _is_here(finding: Finding) -> bool:
    return finding.place is not None and finding.place.file.endswith("test_misuse.py")


def test_a_term_of_the_loss_that_is_cut_off(simulated: Found) -> None:
    def of(term: Callable[[nn.Module, Tensor], Tensor]) -> tuple[Finding, ...]:
        model = net()
        return simulated(
            lambda run: run.steps(model, lambda out, y: F.cross_entropy(out, y) + term(model, out))
        )

    def in_place(model: nn.Module, out: Tensor) -> Tensor:
        total = torch.zeros((), device="cuda")
        for each in model.parameters():
            total += each.data.square().sum()
        return total

    for term, operator in (
        (lambda _, out: 0.5 * out.argmax(1).float().mean(), "argmax"),
        (lambda _, out: (out > 0).float().sum() / 8, "gt"),
        (lambda model, _: 1e-3 * sum((p.data**2).sum() for p in model.parameters()), "data"),
        (lambda model, _: 1e-3 * in_place(model, _), "data"),
        (lambda _, out: F.mse_loss(out.detach(), torch.zeros_like(out)), "detach"),
    ):
        (finding,) = of(term)
        assert finding.kind == "term_cut_off" and operator in finding.cause and _is_here(finding)
    for term in (
        lambda _, out: out.square().mean(),
        lambda _, out: 0.1 * (out.square().mean() - out.mean()).detach(),  # as it is written
        lambda _, out: (out * (out > 0).float()).mean(),
        lambda _, out: torch.zeros((), device="cuda"),
        lambda model, _: 1e-3 * sum((p**2).sum() for p in model.parameters()),
        lambda model, out: out.mean() * (1 / out.detach().abs().mean()),
    ):
        assert of(term) == ()
    # What a library adds by itself, as Pyro's ELBO does the density of a point.
    elbo: dict[str, Any] = {}
    source = "def elbo(loss, out):\n    return loss + (out == out).float().log().sum()\n"
    exec(compile(source, f"{sysconfig.get_path('purelib')}/elbo.py", "exec"), elbo)

    def total(out: Tensor, y: Tensor) -> Tensor:
        added: Tensor = elbo["elbo"](F.cross_entropy(out, y), out)
        return added

    assert simulated(lambda run: run.steps(net(), total)) == ()
    # A number that is shown, and not part of what is trained.
    shown: list[Tensor] = []

    def loss(out: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(out, y)
        shown.append((value + out.argmax(1).float().mean()).detach())
        return value

    assert simulated(lambda run: run.steps(net(), loss)) == ()


def test_what_a_script_saves_has_no_marks(simulated: Found) -> None:
    def training(run: Run) -> None:
        model = net()

        def loss(out: Tensor, y: Tensor) -> Tensor:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "classes": out.argmax(1)}, file)
            file.seek(0)
            assert torch.load(file)["classes"].shape == (8,)
            return F.cross_entropy(out, y)

        run.steps(model, loss)

    assert simulated(training) == ()


def test_a_graph_that_goes_back_through_all_steps(simulated: Found) -> None:
    def of(after: Callable[[nn.Module], Callable[[], Any]]) -> tuple[Finding, ...]:
        def training(run: Run) -> None:
            model = net().to(run.device)
            run.steps(model, F.cross_entropy, after(model))

        return simulated(training)

    def average(*, grad: bool) -> Callable[[nn.Module], Callable[[], Any]]:
        def made(model: nn.Module) -> Callable[[], Any]:
            averages = {name: each.clone() for name, each in model.named_parameters()}

            @torch.set_grad_enabled(grad)
            def update() -> None:
                for name, each in model.named_parameters():
                    averages[name] = 0.9 * averages[name] + 0.1 * each

            return update

        return made

    (finding,) = of(average(grad=True))
    assert finding.kind == "graph_grows" and _is_here(finding)
    assert of(average(grad=False)) == ()

    def losses(*, graph: bool) -> tuple[Finding, ...]:
        total = torch.zeros((), device="cuda")

        def loss(out: Tensor, y: Tensor) -> Tensor:
            nonlocal total
            value = F.cross_entropy(out, y)
            total = total + (value if graph else value.detach())
            return value

        return simulated(lambda run: run.steps(net(), loss))

    assert [each.kind for each in losses(graph=True)] == ["graph_grows"]
    assert losses(graph=False) == ()
    # A tensor that is computed once, before all steps, and used in each; nobody trains it.
    once = nn.Parameter(torch.ones(4)).cuda()
    found = simulated(lambda run: run.steps(net(), lambda o, y: F.cross_entropy(o + once, y)))
    assert [each.kind for each in found] == ["not_registered"]


def test_a_loss_that_is_averaged_before_its_mask(simulated: Found) -> None:
    mask = torch.ones(8)

    def masked(reduction: str) -> tuple[Finding, ...]:
        def loss(out: Tensor, y: Tensor) -> Tensor:
            each = F.cross_entropy(out, y, reduction=reduction)
            return (each * mask.to(each.device)).sum() / mask.to(each.device).sum()

        return simulated(lambda run: run.steps(net(), loss))

    (finding,) = masked("mean")
    assert finding.kind == "loss_averaged" and "reduction='none'" in finding.fixes[0].action
    assert _is_here(finding)
    assert masked("none") == ()


class Rounds(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 8), nn.Linear(8, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.function(self.first(x)))
        return out


def test_what_a_flat_function_cuts_off(found: Found) -> None:
    for function, name in ((torch.sign, "sign"), (torch.round, "round"), (torch.floor, "floor")):
        (finding,) = found(lambda run, of=function: run.steps(Rounds(of), F.cross_entropy))
        assert finding.kind == "gradient_flat" and finding.severity == "critical"
        assert f"as {name} has no slope (first.weight, first.bias)" in finding.title
    for function in (
        lambda x: x + (torch.round(x) - x).detach(),  # straight-through
        lambda x: torch.sigmoid(x),
        lambda x: torch.sign(x) * x,
    ):
        assert found(lambda run, of=function: run.steps(Rounds(of), F.cross_entropy)) == ()


class Sign(torch.autograd.Function):
    """A sign with a derivative of its own, under PyTorch's name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def test_a_function_of_the_script_s_own_has_its_own_derivative(found: Found) -> None:
    assert found(lambda run: run.steps(Rounds(Sign.apply), F.cross_entropy)) == ()


def test_a_flat_function_in_one_of_two_losses(found: Found) -> None:
    def training(run: Run) -> None:
        model = Rounds(torch.sign)

        def loss(out: Tensor, y: Tensor) -> Tensor:
            F.cross_entropy(out, y).backward(retain_graph=True)
            return model.first(torch.ones(8, 16, device=out.device)).mean()

        run.steps(model, loss)

    assert found(training) == ()


def test_a_state_that_is_the_model_s_own(found: Found) -> None:
    def of(other: Callable[[nn.Module], nn.Module]) -> tuple[Finding, ...]:
        model = net()

        def training(run: Run) -> None:
            target = other(model.to(run.device))
            copied = lambda: target.load_state_dict(model.state_dict())  # noqa: E731
            run.steps(model, F.cross_entropy, copied)

        return found(training)

    (finding,) = of(lambda model: model)
    assert finding.kind == "own_state" and _is_here(finding)
    assert of(copy.deepcopy) == ()


def test_an_iterator_that_is_used_up(found: Found) -> None:
    def of(parameters: Callable[[nn.Module], Any], *, again: bool) -> list[str]:
        def training(run: Run) -> None:
            model = net()
            once = parameters(model)
            clip = nn.utils.clip_grad_norm_
            run.steps(
                model, F.cross_entropy, lambda: clip(parameters(model) if again else once, 1.0)
            )

        return [finding.kind for finding in found(training)]

    assert of(lambda model: model.parameters(), again=False) == ["clips_nothing"]
    assert of(lambda model: itertools.chain(model.parameters()), again=False) == ["clips_nothing"]
    assert of(lambda model: model.parameters(), again=True) == []
    assert of(lambda model: list(model.parameters()), again=False) == []


class Attends(nn.Module):
    def __init__(self, softmax: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.keys, self.last = nn.Linear(6, 6), nn.Linear(30, 4)
        self.softmax = softmax

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.bmm(self.keys(x), x.transpose(1, 2))
        out: Tensor = self.last(torch.bmm(self.softmax(scores), x).flatten(1))
        return out


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_a_softmax_over_samples(found: Found) -> None:
    def of(softmax: Callable[[Tensor], Tensor]) -> tuple[Finding, ...]:
        data = torch.randn(32, 5, 6)
        return found(lambda run: run.steps(Attends(softmax), F.cross_entropy, data=data))

    (finding,) = of(nn.Softmax())
    assert finding.kind == "softmax_over_samples" and "8×5×5" in finding.title
    assert _is_here(finding)
    assert of(nn.Softmax(dim=-1)) == ()
    over_queries = [each.kind for each in of(lambda x: F.softmax(x, 1))]
    assert over_queries in ([], ["softmax_over_queries"])  # of a simulated GPU it is told
    assert of(lambda x: F.softmax(x.flatten(0, 1)).view(-1, 5, 5)) == ()  # of two: over the last


class Sequence(nn.Module):
    def __init__(self, layer: nn.Module, *, turn: bool) -> None:
        super().__init__()
        self.layer, self.last, self.turn = layer, nn.Linear(12, 4), turn

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.turn else x
        is_attention = isinstance(self.layer, nn.MultiheadAttention)
        out = self.layer(x, x, x)[0] if is_attention else self.layer(x)
        out = out[0] if isinstance(out, tuple) else out
        scores: Tensor = self.last(out.mean(0 if self.turn else 1))
        return scores


@pytest.mark.parametrize(
    "make",
    [
        lambda **given: nn.LSTM(12, 12, **given),
        lambda **given: nn.GRU(12, 12, **given),
        lambda **given: nn.MultiheadAttention(12, 2, **given),
        lambda **given: nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, **given), 1),
    ],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_samples_that_are_taken_for_steps(simulated: Found, make: Callable[..., nn.Module]) -> None:
    def of(*, turn: bool, **given: Any) -> tuple[Finding, ...]:
        data = torch.randn(32, 5, 12)
        layer = Sequence(make(**given), turn=turn)
        return simulated(lambda run: run.steps(layer, F.cross_entropy, data=data))

    (finding,) = of(turn=False)
    assert finding.kind == "samples_as_steps" and "8×5×12, the batch first" in finding.title
    assert _is_here(finding)
    assert of(turn=True) == of(turn=False, batch_first=True) == ()


def test_a_module_that_is_told_to_need_no_gradient(found: Found) -> None:
    def of(freeze: Callable[[nn.Module], Any]) -> list[str]:
        def training(run: Run) -> None:
            model = nn.Sequential(net(16), nn.Linear(16, 4))
            freeze(model[0])
            run.steps(model, F.cross_entropy)

        return [finding.kind for finding in found(training)]

    assert of(lambda part: setattr(part, "requires_grad", False)) == ["freeze_ignored"]
    assert of(lambda part: part.requires_grad_(False)) == []

    def both(part: nn.Module) -> None:
        part.requires_grad_(False)
        part.requires_grad = False

    assert of(both) == []


def test_a_logarithm_of_a_softmax(found: Found) -> None:
    def of(log: Callable[[Tensor], Tensor], loss: Any = F.nll_loss) -> tuple[Finding, ...]:
        return found(lambda run: run.steps(net(), lambda out, y: loss(log(out), y)))

    (finding,) = of(lambda x: x.softmax(1).log())
    assert finding.kind == "log_of_softmax" and _is_here(finding)
    (finding,) = of(lambda x: x.log_softmax(0), F.cross_entropy)
    assert finding.kind == "activation_elsewhere" and "logits" in finding.fixes[0].action
    assert of(lambda x: x.log_softmax(1)) == of(lambda x: (x.softmax(1) + 1e-6).log()) == ()


class Stack(nn.Module):
    """Layers one after another, or heads of one result."""

    def __init__(self, layers: nn.Module, *, chained: bool = True) -> None:
        super().__init__()
        self.inp = nn.Linear(16, 16)
        self.layers = layers
        self.chained = chained

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        if not self.chained:
            return torch.stack([layer(x) for layer in self.layers]).mean(0)  # type: ignore[union-attr]
        for layer in self.layers:  # type: ignore[union-attr]
            x = layer(x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(x).relu()


def test_one_layer_in_place_of_several(found: Found) -> None:
    def of(make: Callable[[], nn.Module], **options: bool) -> list[Finding]:
        return [
            each
            for each in found(lambda run: run.steps(Stack(make(), **options), F.cross_entropy))
            if each.kind == "one_layer"
        ]

    for make in (
        lambda: nn.ModuleList([Block()] * 6),
        lambda: nn.Sequential(*[Block()] * 6),
        lambda: nn.ModuleList([nn.Linear(16, 16)] * 6),
    ):
        (one,) = of(make)
        assert one.title.startswith("6 layers are one and the same ") and _is_here(one)
    assert not of(lambda: nn.ModuleList([Block()] * 6), chained=False)
    assert not of(lambda: nn.ModuleList([Block() for _ in range(6)]))
    activation = nn.ReLU()
    assert not of(lambda: nn.Sequential(nn.Linear(16, 16), activation, Block(), activation))


def test_tied_weights_and_a_layer_in_a_loop_are_meant(found: Found) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.into, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
            self.out.weight = self.into.weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.into(x)
            for _ in range(3):
                x = self.block(x)
            return self.out(x)

    assert not found(lambda run: run.steps(Tied(), F.cross_entropy))


def test_large_one_hot_vectors_on_the_gpu(simulated: Found) -> None:
    def of(make: Callable[[Tensor], Tensor], classes: int) -> list[Finding]:
        def loss(out: Tensor, y: Tensor) -> Tensor:
            target = make(torch.zeros(8, classes // 8, dtype=torch.long, device="cuda"))
            return F.cross_entropy(out, y) + 0 * out.sum() * target.flatten()[0]

        return [
            each for each in simulated(lambda run: run.steps(net(), loss)) if each.kind == "one_hot"
        ]

    def scattered(y: Tensor) -> Tensor:
        return torch.zeros(*y.shape, 50_000, device="cuda").scatter_(-1, y.unsqueeze(-1), 1)

    (one,) = of(lambda y: F.one_hot(y, 50_000).float(), 1024)
    assert one.title.startswith("One-hot vectors of 8×128×50000 are 391 MiB") and _is_here(one)
    assert "indices" in one.fixes[0].action
    (other,) = of(scattered, 2048)
    assert "8×256×50000" in other.title
    assert not of(lambda y: F.one_hot(y, 10).float(), 1024)
