"""The cost model: which way to hold a Jacobian, from counted operations, bytes and the memory that is free."""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._pytree import tree_map

from tangents.inputs import Inputs, length
from tangents.jacobian.assembly import OUTPUTS_TOGETHER
from tangents.jacobian.factored import FactoredBlock, Findings, held_bytes
from tangents.jacobian.factors import WORKSPACE, Factor, Lookup, Outer
from tangents.jacobian.features import ROW_CHUNK
from tangents.jacobian.gram import positions_are_cheaper
from tangents.jacobian.machine import CALL, Operations, SavedBytes, free_memory, machine_speed
from tangents.network import Network

WAYS = ("factored", "implicit", "dense")
PRODUCTS = 20  # products with K that a Jacobian is assumed to serve where no way is asked for
PROBED = 4  # inputs that the counts are read off
# Bytes of activations and gradients held while one batch is captured, and the most inputs in it: a GPU wants more.
WORKING_SET = {"cpu": 2**30, "cuda": 2**33}
LARGEST_BATCH = {"cpu": 2048, "cuda": 2**16}


@dataclass(frozen=True)
class Counts:
    """What one input costs, read off a few."""

    outputs: int
    parameters: int
    item: int  # bytes of a number
    forward: float  # operations of a forward pass
    activations: float  # bytes that a forward pass keeps for the backward pass
    captured: float  # bytes of gradients while factors are made
    factors: float  # bytes of the factors kept
    products: float  # operations of one product with the factors
    pairs: float  # operations of one pair of inputs in K
    generic: int  # parameters that go the generic way
    whole: float  # operations of forming all rows from the factors
    uses: int  # factors
    by_rows: int  # columns that K is formed from by rows, the others going by positions
    tile: float  # bytes of scratch for one pair of inputs, by positions
    widest: float  # bytes of the largest layer's inputs and outputs


@dataclass(frozen=True)
class Estimate:
    """One way's costs for ``n`` inputs."""

    way: str
    held: float  # bytes kept between products
    building: float  # bytes besides, while a batch is captured
    working: float  # bytes besides, while multiplying
    build: float  # operations before the first product
    product: float  # operations of one J v and one J^T u
    seconds: float  # building and PRODUCTS products, a rough figure
    fits: bool

    @property
    def scratch(self) -> float:
        return max(self.building, self.working)


@dataclass
class Plan:
    """How a Jacobian will be held, and why; ``explain()`` says so."""

    way: str
    asked: str
    n: int
    batch: int
    keep: bool
    limit: int
    counts: Counts
    estimates: dict[str, Estimate]
    generic: Mapping[str, str] = field(default_factory=dict)  # parameter -> why it goes the generic way

    @property
    def once(self) -> Estimate:
        """The costs of the way in which things are done that are done once, such as the dense K."""
        return self.estimates["factored" if self.asked == "auto" else self.way]

    def tiles_are_cheaper(self, columns: int, other_n: int, symmetric: bool) -> bool:
        """Whether K times so many columns counts fewer operations by forming K tile by tile than by J and J^T."""
        c = self.counts
        products = 2.0 * columns * (self.n + other_n) * c.products
        tiles = self.n * other_n * (c.pairs + 2.0 * columns) * (0.5 if symmetric else 1.0)
        return self.way == "factored" and self.keep and tiles < products

    def peak_bytes(self, job: str, dtype: torch.dtype = torch.float64, columns: int = 1) -> int:
        """Bytes expected at the peak of a job: "product" (of K with so many columns), "gram" (dense K in a dtype),
        "diagonal" or "fisher"."""
        c, chosen, once = self.counts, self.estimates[self.way], self.once
        item = torch.finfo(dtype).bits // 8
        if job in ("product", "fisher"):
            tiles = 0.0
            if job == "product" and self.tiles_are_cheaper(columns, self.n, symmetric=True):
                tiles = (self.batch * c.outputs) ** 2 * c.item + self._pairs_held(self.batch)
            held = chosen.held if self.keep else 0
            return int(max(held * (1 - self.batch / self.n) + chosen.building, held + chosen.working + tiles))
        if job == "diagonal":
            block = self.batch * once.held / self.n
            return int(max(once.building, block + _columns_held(c, c.outputs * self.batch, 8)))
        if job == "gram":
            K = item * (self.n * c.outputs) ** 2
            working = K + max(_columns_held(c, c.outputs * self.n, item), self._pairs_held(self.n))
            return int(max(once.held * (1 - self.batch / self.n) + once.building, once.held + working))
        raise ValueError(f"job is 'product', 'gram', 'diagonal' or 'fisher', not {job!r}")

    def _pairs_held(self, n: int) -> float:
        """Bytes of scratch of the positions formula."""
        return min(8 * WORKSPACE, n * n * self.counts.tile)

    def explain(self) -> str:
        """A table of what each way would cost, which was chosen and which parameters go the generic way."""
        c = self.counts
        table = Table(title=f"Jacobian of {self.n} inputs x {c.outputs} outputs, {c.parameters:,} parameters")
        for column in ("way", "kept", "scratch", "to build", "a product", "time", ""):
            table.add_column(column, justify="left" if column in ("way", "") else "right")
        for name in WAYS:
            e = self.estimates[name]
            table.add_row(
                name, _bytes(e.held), _bytes(e.scratch), _operations(e.build), _operations(e.product),
                f"{e.seconds:.2g} s", self._why(e),
            )  # fmt: skip
        lines = [
            f"time: building and {PRODUCTS} products with K, at this machine's measured speed; {_bytes(self.limit)} of "
            "memory may be used (memory_limit= changes that)",
            f"inputs are taken {self.batch} at a time" + ("" if self.keep else " and worked out anew for each product"),
        ]
        if self.generic:
            lines.append("parameters that go the generic way (automatic differentiation):")
            lines += [f"  {name}: {reason}" for name, reason in self.generic.items()]
        elif self.way == "factored":
            lines.append("every parameter has factors")
        return _render(table) + "\n".join(lines)

    def _why(self, e: Estimate) -> str:
        if e.way == self.way:
            if not e.fits:
                return "chosen: nothing fits; worked out anew for each product"
            return "chosen: asked for" if self.asked != "auto" else "chosen: the fastest that fits"
        if not e.fits:
            return "does not fit the memory"
        return "possible" if self.asked != "auto" else "slower"


def count(network: Network, inputs: Inputs, findings: Findings) -> Counts:
    """Capture a few inputs and count what one costs."""
    batch = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, inputs.first(PROBED))
    probed = length(batch)
    saved = SavedBytes({p.untyped_storage().data_ptr() for p in network.parameters.values()})
    with Operations() as counter, torch.no_grad():
        network(batch)
    with saved:
        network.outputs_with_graph(batch)
    block = FactoredBlock(network, batch, findings)
    factors = [f for found in block.factors.values() for f in found]
    item = torch.finfo(network.dtype).bits // 8
    sizes = dict(zip(network.columns.names, network.columns.sizes, strict=True))
    generic = sum(sizes[name] for name in findings.generic if name in sizes)
    outers = [f for f in factors if isinstance(f, Outer)]
    pairwise = [f for f in outers if positions_are_cheaper(f, f.T, inputs.n)]
    compact = sum(min(f.size, inputs.n * f.T * f.width) for f in factors if isinstance(f, Lookup))
    by_rows = sum(f.size for f in factors if f not in pairwise and not isinstance(f, Lookup)) + compact + generic
    forward = max(counter.total, 2.0 * network.columns.total * probed) / probed
    return Counts(
        outputs=block.o,
        parameters=network.columns.total,
        item=item,
        forward=forward,
        activations=saved.total / probed,
        captured=block.captured_bytes / probed,
        factors=held_bytes(block.factors) / probed + generic * block.o * item,
        products=sum(f.product_operations() for f in factors) / probed + (8 * forward if generic else 0),
        pairs=sum(_pair_operations(f) for f in factors) + 2.0 * block.o**2 * generic,
        generic=generic,
        whole=sum(f.row_operations() for f in factors) / probed + (2 * forward * block.o if generic else 0),
        uses=len(factors) + len(findings.generic),
        by_rows=by_rows,
        tile=item * max((f.T * f.T * (1 + 2 * f.o * f.o) for f in pairwise), default=0.0),
        widest=item * max((f.T * (f.q + f.r) for f in outers), default=0.0),
    )


def _pair_operations(f: Factor) -> float:
    """Operations of one pair of inputs in K: the cheaper of the two formulas of `gram.py`."""
    rows = 2.0 * f.o * f.o * f.size
    if isinstance(f, Outer):
        return min(rows, f.T * f.T * (2.0 * f.q + 2.0 * f.o * f.o * f.r + 10.0 * f.o * f.o))
    return min(rows, 2.0 * f.o * f.o * f.T * f.width) if isinstance(f, Lookup) else rows


def make(
    network: Network,
    inputs: Inputs,
    counts: Counts,
    findings: Findings,
    way: str = "auto",
    batch_size: int | str = "auto",
    memory_limit: int | None = None,
) -> Plan:
    """Choose a way, a batch size, and whether to keep what is built."""
    limit = int(memory_limit) if memory_limit is not None else int(0.6 * free_memory(network.device))
    batch = batch_size if isinstance(batch_size, int) else _batch(counts, inputs.n, limit, way, network.device)
    estimates = {name: _estimate(name, counts, inputs.n, batch, limit, network) for name in WAYS}
    if way == "auto":
        fitting = [e for e in estimates.values() if e.fits] or [estimates["factored"], estimates["implicit"]]
        chosen = min(fitting, key=lambda e: e.seconds).way
    else:
        chosen = way
    return Plan(
        way=chosen,
        asked=way,
        n=inputs.n,
        batch=inputs.n if inputs.requires_grad else batch,
        keep=estimates[chosen].fits,
        limit=limit,
        counts=counts,
        estimates=estimates,
        generic=findings.generic,
    )


def _batch(c: Counts, n: int, limit: int, way: str, device: torch.device) -> int:
    """As many inputs as the working set holds: fewer passes, and products of a size that runs at full speed. All
    batches alike, so that what is found out about the first holds for the others."""
    each = c.activations + c.captured + 1
    if way == "implicit":  # whose kernels are formed from one batch's rows at a time
        each = max(each, float(c.outputs * c.parameters * c.item))
    kind = "cuda" if device.type == "cuda" else "cpu"
    most = int(max(1, min(n, LARGEST_BATCH[kind], min(WORKING_SET[kind], limit / 4) // each)))
    return -(-n // -(-n // most))


def _columns_held(c: Counts, rows: int, item: int) -> float:
    """Bytes of the columns that are multiplied at a time, and of forming them."""
    return min(ROW_CHUNK, rows * c.by_rows * item) + (min(WORKSPACE, rows * c.widest) if c.by_rows else 0)


def _estimate(way: str, c: Counts, n: int, batch: int, limit: int, network: Network) -> Estimate:
    vectors = c.parameters * c.item
    # The graph, all outputs' gradients and one more set of them, the largest layer's on the way, and two vectors of
    # parameters for the check.
    more = min(OUTPUTS_TOGETHER if network.device.type == "cuda" else 1, c.outputs) / c.outputs
    building = batch * (c.activations + c.captured * (1 + more) + 2 * c.widest) + 2 * vectors
    rows = float(c.outputs * c.parameters * c.item)
    if way == "factored":
        held, working = n * c.factors, 3 * vectors + min(2 * WORKSPACE, 2 * batch * c.widest)
        build, product, moved = n * (c.outputs + 4) * c.forward, 2 * n * c.products, 2 * n * c.factors
    elif way == "implicit":
        held, building, working = n * c.activations, 0.0, 2 * batch * c.activations + 5 * vectors
        build, product, moved = n * c.forward, 5 * n * c.forward, 4 * n * c.activations
    else:
        held, working = n * rows, 2 * vectors
        building = max(building, batch * (2 * rows + c.factors))
        build, product, moved = n * ((c.outputs + 4) * c.forward + c.whole), 4 * n * rows / c.item, 2 * n * rows
    speed, bandwidth = machine_speed(network.device, network.dtype)
    fits = max(held * (1 - batch / n) + building, held + working) <= limit
    total = build + PRODUCTS * product if fits else PRODUCTS * (build + product)
    blocks = -(-n // batch)
    calls = blocks * {"factored": 16 * c.uses, "implicit": 40 * c.uses, "dense": 8}[way]
    seconds = total / speed + PRODUCTS * (moved / bandwidth + calls * CALL)
    return Estimate(way, held, building, working, build, product, seconds, fits)


def _render(table: Table) -> str:
    text = io.StringIO()
    Console(file=text, width=110).print(table)
    return text.getvalue()


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000 or unit == "GiB":
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
        value /= 1024
    raise AssertionError


def _operations(value: float) -> str:
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < 1000 or unit == "P":
            return f"{value:.3g} {unit}op"
        value /= 1000
    raise AssertionError
