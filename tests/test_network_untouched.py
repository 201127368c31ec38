"""The network is left exactly as it was found, and used in the state in which it is."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import brute
import tangents as tg
from brute import error
from cases import case

WAYS = ("factored", "implicit", "dense", "auto")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


class Everything(nn.Module):
    """Batch norm, dropout, attention, in-place operations, a buffer; it refuses large inputs, late."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.attend = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
        self.head = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x):
        h = self.drop(self.norm(self.conv(x)).relu_())
        h = self.attend(h.transpose(1, 2))
        if x.abs().max() > 100:
            raise RuntimeError("the network's own complaint")
        return self.head(h.mean(1))


def network():
    """In a state as mixed as can be: some modules train, some are frozen, hooks are in place."""
    model = Everything().double()
    model.drop.eval()
    model.attend.norm1.eval()
    model.conv.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.norm.register_forward_hook(lambda module, args, output: None)
    model.head.register_full_backward_hook(lambda module, gin, gout: None)
    return model, torch.randn(4, 3, 6, dtype=torch.float64)


def state(model):
    """All that may not change, copied, with the identity of tensors and modules."""
    hooks = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return {
        "modules": [(name, id(m), m.training) for name, m in model.named_modules()],
        "parameters": [
            (name, id(p), p.requires_grad, p._version, id(p.grad), p.is_leaf) for name, p in model.named_parameters()
        ],
        "buffers": [(name, id(b), b._version) for name, b in model.named_buffers()],
        "hooks": [len(getattr(m, name)) for m in model.modules() for name in hooks],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "values": {name: t.clone() for name, t in model.state_dict().items()},
        "gradient": model.head.weight.grad.clone(),
        "random numbers": torch.get_rng_state(),
        "modes": torch._C._len_torch_function_stack(),
        "grad mode": torch.is_grad_enabled(),
    }


def assert_same(before, after):
    for name, tensor in before.pop("values").items():
        assert torch.equal(tensor, after["values"][name]), name
    for name in ("gradient", "random numbers"):
        assert torch.equal(before.pop(name), after[name]), name
    for name, value in before.items():
        assert value == after[name], name


def use_all(model, X, way):
    lin = tg.linearize(model, way=way)
    J, K = lin.jacobian(X), lin.kernel(X)
    lin(X)
    J @ torch.ones(lin.num_params, dtype=torch.float64)
    J.T @ torch.ones(8, dtype=torch.float64)
    J.to_dense(), J.row_norms_squared(), K.to_dense(), K.diagonal()
    J.plan.explain()
    for method in ("exact", "finite-difference"):
        F = lin.fisher(X, "categorical", method=method)
        F @ torch.ones(lin.num_params, dtype=torch.float64)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_changes(way):
    model, X = network()
    before = state(model)
    use_all(model, X, way)
    assert_same(before, state(model))


@pytest.mark.parametrize("way", WAYS)
def test_nothing_changes_without_gradients_either(way):
    model, X = network()
    with torch.no_grad():
        before = state(model)
        use_all(model, X, way)
        assert_same(before, state(model))


@pytest.mark.parametrize("way", WAYS)
def test_products_inside_no_grad_and_inference_mode_are_right(way):
    model, X = case("cnn").build()
    v = torch.randn(case("cnn").jacobian().shape[1], dtype=torch.float64)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = tg.linearize(model, way=way).jacobian(X) @ v
        assert error(found.clone(), case("cnn").jacobian() @ v) < 1e-10


@pytest.mark.parametrize("way", WAYS)
def test_nothing_changes_after_an_exception(way):
    model, X = network()
    lin = tg.linearize(model, way=way)
    before = state(model)
    for use in (
        lambda: lin(1000 * X),
        lambda: lin.jacobian(1000 * X) @ torch.ones(lin.num_params, dtype=torch.float64),
        lambda: lin.jacobian(1000 * X).T @ torch.ones(8, dtype=torch.float64),
        lambda: lin.kernel(X, 1000 * X).to_dense(),
        lambda: lin.kernel(1000 * X).diagonal(),
    ):
        with pytest.raises(Exception, match="the network's own complaint"):
            use()
    assert_same(before, state(model))


def test_the_inputs_are_left_alone():
    """Their values, that they require a gradient, and that they have none."""
    model, X = network()
    X.requires_grad_(True)
    copy = X.detach().clone()
    use_all(model, X, "factored")
    assert torch.equal(X, copy)
    assert X.grad is None
    assert X.requires_grad


@pytest.mark.parametrize("way", WAYS)
def test_a_network_that_overwrites_its_inputs_does_not_overwrite_ours(way):
    """A first activation in place, as is common: each product starts from the inputs as they were given."""
    model, X = case("mlp").build()
    expected = brute.jacobian(nn.Sequential(nn.LeakyReLU(0.1), model), X)
    copy, v = X.clone(), torch.randn(expected.shape[1], dtype=torch.float64)
    lin = tg.linearize(nn.Sequential(nn.LeakyReLU(0.1, inplace=True), model), way=way)
    J = lin.jacobian(X)
    for _ in range(2):
        assert error(J @ v, expected @ v) < 1e-10
        assert error(J.to_dense(), expected) < 1e-10
        assert error(lin.kernel(X).to_dense(), expected @ expected.T) < 1e-10
    assert torch.equal(X, copy)


def test_the_modes_in_which_it_is_found_do_not_matter():
    """In training mode, half in training mode and in eval mode: one Jacobian, that of eval."""
    model, X = network()
    expected = brute.jacobian(model, X)
    for change in (model.train, model.eval, model.attend.train):
        change()
        assert error(tg.linearize(model).jacobian(X).to_dense(), expected) < 1e-10


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight.add_(0.1),
        lambda model: torch.optim.SGD(model.parameters(), 0.1).step(),
        lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
    ],
    ids=["in place", "optimizer", "load_state_dict"],
)
@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_changed_are_an_error(way, change):
    model, X = case("mlp").build()
    lin = tg.linearize(model, way=way)
    J, K = lin.jacobian(X), lin.kernel(X)
    K @ torch.ones(15, dtype=torch.float64)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with torch.no_grad():
        change(model)
    for use in (
        lambda: lin(X),
        lambda: lin.jacobian(X).to_dense(),
        lambda: J @ torch.ones(lin.num_params, dtype=torch.float64),
        lambda: J.T @ torch.ones(15, dtype=torch.float64),
        lambda: K @ torch.ones(15, dtype=torch.float64),
        lambda: K.to_dense(),
    ):
        with pytest.raises(ValueError, match=r"lineari[sz]e again"):
            use()
    assert error(tg.linearize(model).jacobian(X).to_dense(), brute.jacobian(model, X)) < 1e-10


@pytest.mark.parametrize("way", ["factored", "implicit"])
def test_two_threads_on_one_network(way):
    model, X = case("residual in place").build()
    model.train()
    expected = case("residual in place").jacobian()
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(expected.shape[1], generator=generator, dtype=torch.float64)
    u = torch.randn(expected.shape[0], generator=generator, dtype=torch.float64)
    barrier = threading.Barrier(2)

    def work():
        errors = []
        for _ in range(12):
            barrier.wait(timeout=60)
            J = tg.linearize(model, way=way).jacobian(X)
            errors += [error(J @ v, expected @ v), error(J.T @ u, expected.T @ u)]
        return errors

    before = {name: t.clone() for name, t in model.state_dict().items()}
    with ThreadPoolExecutor(2) as pool:
        errors = [result.result() for result in [pool.submit(work) for _ in range(2)]]
    assert max(errors[0] + errors[1]) < 1e-10
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert all(module.training for module in model.modules())


def inner_module_compiled(model):
    model[0] = torch.compile(model[0], backend="eager")
    return model


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    "compiled",
    [
        lambda model: torch.compile(model, backend="eager"),
        compiled_in_place,
        inner_module_compiled,
    ],
    ids=["whole", "in place", "inside"],
)
@pytest.mark.parametrize("way", WAYS)
def test_compiled_networks(way, compiled):
    for name in ("mlp", "cnn"):
        model, X = case(name).build()
        expected = case(name).jacobian()
        v = torch.randn(expected.shape[1], dtype=torch.float64)
        model = compiled(model)
        model(X)  # compiled before it is linearised, as a network in use is
        J = tg.linearize(model, way=way).jacobian(X)
        assert error(J @ v, expected @ v) < 1e-10
        assert error(J.to_dense(), expected) < 1e-10


def exported(model, X):
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    return torch.export.export(model, (X,), dynamic_shapes=shapes, strict=False).module()


@pytest.mark.parametrize(
    "form",
    [
        lambda model, X: torch.fx.symbolic_trace(model),
        lambda model, X: torch.jit.script(model),
        exported,
        lambda model, X: nn.DataParallel(model),
    ],
    ids=["fx", "scripted", "exported", "data parallel"],
)
@pytest.mark.parametrize("way", WAYS)
def test_networks_in_other_forms(way, form):
    for name in ("mlp", "cnn", "GRU batch first", "embedding"):
        model, X = case(name).build()
        expected = case(name).jacobian()
        J = tg.linearize(form(model, X), way=way).jacobian(X)
        v = torch.randn(expected.shape[1], dtype=torch.float64)
        assert error(J @ v, expected @ v) < 1e-10, name
        assert error(J.to_dense(), expected) < 1e-10, name


def test_a_network_wrapped_for_distributed_training(tmp_path):
    model, X = case("mlp").build()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        for way in WAYS:
            J = tg.linearize(wrapped, way=way).jacobian(X)
            v = torch.randn(J.shape[1], dtype=torch.float64)
            assert error(J.to_dense(), case("mlp").jacobian()) < 1e-10
            assert error(J @ v, case("mlp").jacobian() @ v) < 1e-10
    finally:
        torch.distributed.destroy_process_group()
