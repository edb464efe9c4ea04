"""Operations of Triton's intermediate code as C++: rounding, NaN, ends of integers, shapes, loops, memory."""

import math
import shutil

import pytest
import torch

from tests.triton_on_cpu.kernel import Kernel, KernelFault
from tests.triton_on_cpu.ttir import UnknownOperation

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler"
)

ELEMENTS = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "f8E4M3FN",
    torch.float8_e5m2: "f8E5M2",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
}
INF = math.inf
NAN = math.nan


@pytest.fixture(autouse=True, scope="module")
def compiled_here(tmp_path_factory: pytest.TempPathFactory):
    """Kernels of these tests are compiled anew, into a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE_KIT_TRITON_ON_CPU", str(tmp_path_factory.mktemp("kernels")))
        yield


def kernel(body: str, *parameters: str) -> Kernel:
    """A kernel with parameters ``%0``, ``%1``, ... of the types given."""
    listed = ", ".join(f"%{i}: {kind}" for i, kind in enumerate(parameters))
    return Kernel(f"module {{\ntt.func public @tested({listed}) {{\n{body}\ntt.return\n}}\n}}\n")


def pointer(tensor: torch.Tensor) -> str:
    return f"!tt.ptr<{ELEMENTS[tensor.dtype]}>"


def load(name: str, parameter: int, tensor: torch.Tensor) -> str:
    """Lines that load a whole contiguous tensor."""
    shape = "x".join(map(str, tensor.shape))
    size = tensor.numel()
    kind = pointer(tensor)
    return f"""
        %{name}r = tt.make_range {{end = {size} : i32, start = 0 : i32}} : tensor<{size}xi32>
        %{name}s = tt.reshape %{name}r : tensor<{size}xi32> -> tensor<{shape}xi32>
        %{name}b = tt.splat %{parameter} : {kind} -> tensor<{shape}x{kind}>
        %{name}p = tt.addptr %{name}b, %{name}s : tensor<{shape}x{kind}>, tensor<{shape}xi32>
        %{name} = tt.load %{name}p : tensor<{shape}x{kind}>"""


def store(name: str, parameter: int, tensor: torch.Tensor) -> str:
    """Lines that store a whole contiguous tensor."""
    shape = "x".join(map(str, tensor.shape))
    pointers = load(f"to{name}", parameter, tensor).rpartition("\n")[0]
    return f"{pointers}\n        tt.store %to{name}p, %{name} : tensor<{shape}x{pointer(tensor)}>"


def computed(body: str, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """Run lines that make ``%out`` of the whole inputs ``%a``, ``%b``, ``%c``; into ``out``."""
    names = "abc"[: len(inputs)]
    loads = [
        load(name, number, tensor) for number, (name, tensor) in enumerate(zip(names, inputs, strict=True))
    ]
    tensors = (*inputs, out)
    made = kernel(
        "\n".join([*loads, body, store("out", len(inputs), out)]), *(pointer(each) for each in tensors)
    )
    made.launch((1,), tensors)()
    return out


def elementwise(name: str, out: torch.dtype, *inputs: torch.Tensor) -> torch.Tensor:
    """Run one operation over vectors; ``name`` may have a predicate behind it."""
    size = inputs[0].numel()
    names = ", ".join(f"%{each}" for each in "abc"[: len(inputs)])
    operation, _, predicate = name.partition(" ")
    arguments = f"{predicate}, {names}" if predicate else names
    types = f"tensor<{size}x{ELEMENTS[inputs[-1].dtype]}>"
    is_conversion = inputs[-1].dtype != out and not predicate
    types += f" to tensor<{size}x{ELEMENTS[out]}>" if is_conversion else ""
    lines = f"%out = {operation} {arguments} : {types}"
    if predicate:
        widened = f"%out = arith.extui %holds : tensor<{size}xi1> to tensor<{size}xi8>"
        lines = f"%holds = {operation} {arguments} : {types}\n{widened}"
    return computed(lines, torch.full((size,), 77, dtype=torch.float32).to(out), *inputs)


def floats() -> torch.Tensor:
    """fp32 numbers of all sizes, among them those half way between two halves, and those just beside them."""
    by = torch.Generator().manual_seed(5)
    anywhere = torch.randint(-(2**31), 2**31, (40_000,), generator=by).to(torch.int32)
    short = torch.arange(0, 2**16, 3).int() << 16
    beside = torch.cat([short + bits for bits in (0x1000, 0x7FFF, 0x8000, 0x8001)]).int()
    fp8 = torch.arange(0x3A000000, 0x48800000, 0x10000).int()  # where e4m3 and e5m2 round
    return torch.cat([anywhere, short, beside, fp8, fp8 + 1]).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_rounded_to_nearest_even(dtype):
    x = floats()
    assert torch.equal(bits(elementwise("arith.truncf", dtype, x)), bits(x.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_is_rounded_to_nearest_even_and_saturates(dtype):
    x = floats()
    top = torch.finfo(dtype).max
    expected = x.clamp(-top, top).to(dtype)
    ours = elementwise("tt.fp_to_fp", dtype, x)
    assert torch.equal(bits(ours), bits(expected))


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bits, of NaN one pattern."""
    x = torch.where(x.float().isnan(), NAN, x.float()).to(x.dtype)
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_every_short_float_is_read(dtype):
    size = 256**dtype.itemsize
    every = torch.arange(size).to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)
    operation = "tt.fp_to_fp" if dtype.itemsize == 1 else "arith.extf"
    ours = elementwise(operation, torch.float32, every)
    assert torch.equal(bits(ours), bits(every.float()))


def test_fp64_is_rounded_once_to_fp16():
    """1 + 2^-11 is half way between two numbers; a little more must not be lost on the way through fp32."""
    half_way = 1 + 2.0**-11
    x = torch.tensor(
        [half_way, half_way + 2.0**-40, half_way - 2.0**-40, 1e300, -1e-300], dtype=torch.float64
    )
    ours = elementwise("arith.truncf", torch.float16, x)
    assert ours.tolist() == [1, 1 + 2.0**-10, 1, INF, -0.0]


def test_halves_are_rounded_after_each_operation():
    torch.manual_seed(0)
    a = torch.randn(1000).bfloat16()
    b = torch.randn(1000).bfloat16()
    product = elementwise("arith.mulf", torch.bfloat16, a, b)
    assert torch.equal(product, (a.float() * b.float()).bfloat16())
    total = elementwise("arith.addf", torch.bfloat16, a, b)
    assert torch.equal(total, (a.float() + b.float()).bfloat16())


def test_only_fma_skips_the_rounding_of_the_product():
    torch.manual_seed(0)
    a = torch.randn(1000)
    b = torch.randn(1000)
    c = -a * b
    fused = elementwise("math.fma", torch.float32, a, b, c)
    assert torch.equal(fused, (a.double() * b.double() + c.double()).float()) and fused.any()
    lines = "%p = arith.mulf %a, %b : tensor<1000xf32>\n%out = arith.addf %p, %c : tensor<1000xf32>"
    assert not computed(lines, torch.ones(1000), a, b, c).any()


def test_maxima_and_minima_of_nan():
    a = torch.tensor([NAN, 1.0, NAN, 2.0])
    b = torch.tensor([3.0, NAN, NAN, 5.0])
    number = {name: elementwise(f"arith.{name}numf", torch.float32, a, b) for name in ("max", "min")}
    spreading = {name: elementwise(f"arith.{name}imumf", torch.float32, a, b) for name in ("max", "min")}
    assert number["max"][[0, 1, 3]].tolist() == [3, 1, 5] and number["max"][2].isnan()
    assert number["min"][[0, 1, 3]].tolist() == [3, 1, 2] and number["min"][2].isnan()
    assert spreading["max"].isnan().tolist() == [True, True, True, False] and spreading["max"][3] == 5
    assert spreading["min"].isnan().tolist() == [True, True, True, False] and spreading["min"][3] == 2


PREDICATES = {
    # less, equal, greater, one of them NaN
    "oeq": [0, 1, 0, 0], "one": [1, 0, 1, 0], "olt": [1, 0, 0, 0], "ole": [1, 1, 0, 0], "ogt": [0, 0, 1, 0],
    "oge": [0, 1, 1, 0], "ord": [1, 1, 1, 0], "ueq": [0, 1, 0, 1], "une": [1, 0, 1, 1], "ult": [1, 0, 0, 1],
    "ule": [1, 1, 0, 1], "ugt": [0, 0, 1, 1], "uge": [0, 1, 1, 1], "uno": [0, 0, 0, 1],
}  # fmt: skip


def test_comparisons_of_floats():
    a = torch.tensor([1.0, 2.0, 3.0, NAN])
    b = torch.tensor([2.0, 2.0, 2.0, 2.0])
    lines = []
    for number, predicate in enumerate(PREDICATES):
        total = f"%t{number - 1}" if number else "%none"
        lines.append(f"""
            %h{number} = arith.cmpf {predicate}, %a, %b : tensor<4xf32>
            %e{number} = arith.extui %h{number} : tensor<4xi1> to tensor<4xi32>
            %n{number} = arith.constant dense<{number}> : tensor<4xi32>
            %s{number} = arith.shli %e{number}, %n{number} : tensor<4xi32>
            %t{number} = arith.ori {total}, %s{number} : tensor<4xi32>""")
    first = "%none = arith.constant dense<0> : tensor<4xi32>"
    last = f"%z = arith.constant dense<0> : tensor<4xi32>\n%out = arith.ori %t{number}, %z : tensor<4xi32>"
    found = computed("\n".join([first, *lines, last]), torch.zeros(4, dtype=torch.int32), a, b)
    ours = {name: [int(each) >> place & 1 for each in found] for place, name in enumerate(PREDICATES)}
    assert ours == PREDICATES


def test_comparisons_of_integers_have_a_sign_or_none():
    a = torch.tensor([-1, 1, 2], dtype=torch.int32)
    b = torch.tensor([1, -1, 2], dtype=torch.int32)
    assert elementwise("arith.cmpi slt", torch.int8, a, b).tolist() == [1, 0, 0]
    assert elementwise("arith.cmpi ult", torch.int8, a, b).tolist() == [0, 1, 0]
    assert elementwise("arith.cmpi uge", torch.int8, a, b).tolist() == [1, 0, 1]


def test_integers_at_their_ends():
    low = -(2**31)
    high = 2**31 - 1
    a = torch.tensor([low, 7, -7, high], dtype=torch.int32)
    b = torch.tensor([-1, 0, 2, high], dtype=torch.int32)
    assert elementwise("arith.divsi", torch.int32, a, b).tolist() == [low, -1, -3, 1]
    assert elementwise("arith.remsi", torch.int32, a, b).tolist() == [0, -1, -1, 0]
    assert elementwise("arith.addi", torch.int32, a, b).tolist() == [high, 7, -5, -2]
    assert elementwise("arith.muli", torch.int32, a, b).tolist() == [low, 0, -14, 1]


def test_shifts_by_more_than_there_are_bits():
    a = torch.tensor([-8, -8, 8, -8], dtype=torch.int32)
    b = torch.tensor([1, 32, 40, 31], dtype=torch.int32)
    assert elementwise("arith.shrsi", torch.int32, a, b).tolist() == [-4, -1, 0, -1]
    assert elementwise("arith.shrui", torch.int32, a, b).tolist() == [2**31 - 4, 0, 0, 1]
    assert elementwise("arith.shli", torch.int32, a, b).tolist() == [-16, 0, 0, 0]


def test_floats_that_no_integer_holds():
    x = torch.tensor([2.9, -2.9, 3e9, -3e9, INF, -INF, NAN])
    high = 2**31 - 1
    low = -(2**31)
    assert elementwise("arith.fptosi", torch.int32, x).tolist() == [2, -2, high, low, high, low, 0]
    assert elementwise("arith.fptosi", torch.int8, x).tolist() == [2, -2, 127, -128, 127, -128, 0]
    wide = elementwise("arith.fptoui", torch.int32, x).tolist()
    assert [each % 2**32 for each in wide] == [2, 0, 3_000_000_000, 0, 2**32 - 1, 0, 0]


def test_true_is_minus_one_where_it_has_a_sign():
    x = torch.tensor([0, 3], dtype=torch.int32)
    zero = "%zero = arith.constant dense<0> : tensor<2xi32>\n%h = arith.cmpi ne, %a, %zero : tensor<2xi32>\n"
    out = torch.zeros(2, dtype=torch.int32)
    assert computed(f"{zero}%out = arith.extsi %h : tensor<2xi1> to tensor<2xi32>", out, x).tolist() == [
        0,
        -1,
    ]
    assert computed(f"{zero}%out = arith.extui %h : tensor<2xi1> to tensor<2xi32>", out, x).tolist() == [0, 1]


def test_constants():
    lines = """
        %f = arith.constant dense<0xFF800000> : tensor<1xf32>
        %s = tt.reshape %f : tensor<1xf32> -> tensor<1xf32>
        %h = arith.constant dense<-3.40282347E+38> : tensor<1xf32>
        %out = arith.maxnumf %s, %h : tensor<1xf32>"""
    assert computed(lines, torch.zeros(1)) == torch.finfo(torch.float32).min
    low = """
        %l = arith.constant dense<-9223372036854775808> : tensor<1xi64>
        %out = tt.reshape %l : tensor<1xi64> -> tensor<1xi64>"""
    assert computed(low, torch.zeros(1, dtype=torch.int64)) == -(2**63)


def test_shapes():
    x = torch.arange(24).reshape(2, 3, 4)
    order = "%out = tt.trans %a {order = array<i32: 2, 0, 1>} : tensor<2x3x4xi64> -> tensor<4x2x3xi64>"
    assert torch.equal(computed(order, torch.zeros(4, 2, 3).long(), x), x.permute(2, 0, 1))
    row = torch.arange(3).reshape(1, 3, 1)
    spread = "%out = tt.broadcast %a : tensor<1x3x1xi64> -> tensor<2x3x4xi64>"
    assert torch.equal(computed(spread, torch.zeros(2, 3, 4).long(), row), row.expand(2, 3, 4))
    index = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32)
    values = torch.arange(6).reshape(2, 3)
    gather = (
        "%out = tt.gather %a[%b] {axis = 1 : i32} : (tensor<2x3xi64>, tensor<2x2xi32>) -> tensor<2x2xi64>"
    )
    assert torch.equal(
        computed(gather, torch.zeros(2, 2).long(), values, index), values.gather(1, index.long())
    )
    join = "%out = tt.join %a, %b : tensor<2x3xi64> -> tensor<2x3x2xi64>"
    joined = computed(join, torch.zeros(2, 3, 2).long(), values, -values)
    assert torch.equal(joined, torch.stack((values, -values), -1))


def test_a_product_sums_in_fp32():
    torch.manual_seed(0)
    a = torch.randn(3, 64).bfloat16()
    b = torch.randn(64, 5).bfloat16()
    c = torch.randn(3, 5)
    product = "%out = tt.dot %a, %b, %c : tensor<3x64xbf16> * tensor<64x5xbf16> -> tensor<3x5xf32>"
    exact = a.double() @ b.double() + c.double()
    assert (computed(product, torch.zeros(3, 5), a, b, c) - exact).abs().max() < 1e-5


def test_a_product_in_tf32_is_refused():
    types = "tensor<2x2xf32> * tensor<2x2xf32> -> tensor<2x2xf32>"
    product = f"%out = tt.dot %a, %b, %c, inputPrecision = tf32 : {types}"
    with pytest.raises(UnknownOperation, match="tt.dot"):
        computed(product, *torch.zeros(4, 2, 2))


def test_a_reduction_of_pairs_with_a_region():
    """The largest of each column and the first row in which it is."""
    x = torch.tensor([[1.0, 5.0], [4.0, 5.0], [4.0, 2.0]])
    rows = torch.tensor([[0, 0], [1, 1], [2, 2]], dtype=torch.int32)
    pairs = """
        %best:2 = "tt.reduce"(%a, %b) <{axis = 0 : i32}> ({
        ^bb0(%l: f32, %i: i32, %r: f32, %j: i32):
          %more = arith.cmpf ogt, %r, %l : f32
          %v = arith.select %more, %r, %l : f32
          %k = arith.select %more, %j, %i : i32
          tt.reduce.return %v, %k : f32, i32
        }) : (tensor<3x2xf32>, tensor<3x2xi32>) -> (tensor<2xf32>, tensor<2xi32>)
        %out = tt.reshape %best#1 : tensor<2xi32> -> tensor<2xi32>"""
    assert computed(pairs, torch.zeros(2, dtype=torch.int32), x, rows).tolist() == [1, 0]


def test_a_long_sum_is_as_exact_as_a_gpus():
    """Added one after another, the last of so many numbers lose bits."""
    size = 4099  # odd ones are left over
    x = torch.full((size,), 0.1)
    total = f"""
        %sum = "tt.reduce"(%a) <{{axis = 0 : i32}}> ({{
        ^bb0(%l: f32, %r: f32):
          %s = arith.addf %l, %r : f32
          tt.reduce.return %s : f32
        }}) : (tensor<{size}xf32>) -> f32
        %out = tt.splat %sum : f32 -> tensor<1xf32>"""
    exact = pytest.approx(float(x.double().sum()), rel=2e-7)
    assert float(computed(total, torch.zeros(1), x)) == exact
    in_order = torch.zeros(1)
    for element in x:
        in_order += element
    assert float(in_order) != exact


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_scan_in_both_directions(is_reversed):
    x = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    scan = f"""
        %out = "tt.scan"(%a) <{{axis = 1 : i32, reverse = {str(is_reversed).lower()}}}> ({{
        ^bb0(%l: i32, %r: i32):
          %s = arith.addi %l, %r : i32
          tt.scan.return %s : i32
        }}) : (tensor<2x3xi32>) -> tensor<2x3xi32>"""
    expected = x.flip(1).cumsum(1).flip(1) if is_reversed else x.cumsum(1)
    assert torch.equal(computed(scan, torch.zeros(2, 3, dtype=torch.int32), x), expected.int())


def test_a_loop_may_exchange_what_it_carries():
    body = """
        %zero = arith.constant 0 : i32
        %one = arith.constant 1 : i32
        %ten = arith.constant 10 : i32
        %f:2 = scf.for %i = %zero to %ten step %one iter_args(%x = %zero, %y = %one) -> (i32, i32)  : i32 {
          %s = arith.addi %x, %y : i32
          scf.yield %y, %s : i32, i32
        }
        tt.store %0, %f#0 : !tt.ptr<i32>"""
    out = torch.zeros(1, dtype=torch.int32)
    kernel(body, pointer(out)).launch((1,), [out])()
    assert out == 55  # Fibonacci's tenth


def test_a_while_loop_and_branches():
    """Collatz: steps from 27 to 1."""
    body = """
        %one = arith.constant 1 : i32
        %two = arith.constant 2 : i32
        %three = arith.constant 3 : i32
        %zero = arith.constant 0 : i32
        %r:2 = scf.while (%n = %1, %steps = %zero) : (i32, i32) -> (i32, i32) {
          %more = arith.cmpi sgt, %n, %one : i32
          scf.condition(%more) %n, %steps : i32, i32
        } do {
        ^bb0(%n: i32, %steps: i32):
          %rest = arith.remsi %n, %two : i32
          %even = arith.cmpi eq, %rest, %zero : i32
          %next = scf.if %even -> (i32) {
            %half = arith.divsi %n, %two : i32
            scf.yield %half : i32
          } else {
            %triple = arith.muli %n, %three : i32
            %odd = arith.addi %triple, %one : i32
            scf.yield %odd : i32
          }
          %s = arith.addi %steps, %one : i32
          scf.yield %next, %s : i32, i32
        }
        tt.store %0, %r#1 : !tt.ptr<i32>"""
    out = torch.zeros(1, dtype=torch.int32)
    kernel(body, pointer(out), "i32").launch((1,), [out, 27])()
    assert out == 111


def test_a_return_before_the_end():
    body = """
        %id = tt.get_program_id x : i32
        %ends = arith.cmpi sge, %id, %1 : i32
        cf.cond_br %ends, ^bb1, ^bb2(%id : i32)
      ^bb1:  // pred: ^bb0
        tt.return
      ^bb2(%place: i32):  // pred: ^bb0
        %p = tt.addptr %0, %place : !tt.ptr<i32>, i32
        %n = tt.get_num_programs x : i32
        tt.store %p, %n : !tt.ptr<i32>"""
    out = torch.zeros(5, dtype=torch.int32)
    kernel(body, pointer(out), "i32").launch((5,), [out, 3])()
    assert out.tolist() == [5, 5, 5, 0, 0]


MASKED = """
    %range = tt.make_range {end = 4 : i32, start = 0 : i32} : tensor<4xi32>
    %limit = tt.splat %2 : i32 -> tensor<4xi32>
    %in = arith.cmpi slt, %range, %limit : tensor<4xi32>
    %from = tt.splat %0 : !tt.ptr<f32> -> tensor<4x!tt.ptr<f32>>
    %fp = tt.addptr %from, %range : tensor<4x!tt.ptr<f32>>, tensor<4xi32>
    %to = tt.splat %1 : !tt.ptr<f32> -> tensor<4x!tt.ptr<f32>>
    %tp = tt.addptr %to, %range : tensor<4x!tt.ptr<f32>>, tensor<4xi32>
"""


def test_what_a_mask_leaves_out_is_nan_or_the_other_value():
    x = torch.arange(4.0)
    out = torch.zeros(4)
    lines = "%v = tt.load %fp, %in : tensor<4x!tt.ptr<f32>>\ntt.store %tp, %v : tensor<4x!tt.ptr<f32>>"
    kernel(MASKED + lines, pointer(x), pointer(out), "i32").launch((1,), [x, out, 2])()
    assert out[:2].tolist() == [0, 1] and out[2:].isnan().all()
    lines = """
        %seven = arith.constant dense<7.000000e+00> : tensor<4xf32>
        %v = tt.load %fp, %in, %seven : tensor<4x!tt.ptr<f32>>
        tt.store %tp, %v : tensor<4x!tt.ptr<f32>>"""
    kernel(MASKED + lines, pointer(x), pointer(out), "i32").launch((1,), [x, out, 2])()
    assert out.tolist() == [0, 1, 7, 7]


def test_a_store_leaves_what_its_mask_rules_out():
    x = torch.arange(4.0)
    out = torch.full((4,), 9.0)
    lines = "%v = tt.load %fp : tensor<4x!tt.ptr<f32>>\ntt.store %tp, %v, %in : tensor<4x!tt.ptr<f32>>"
    kernel(MASKED + lines, pointer(x), pointer(out), "i32").launch((1,), [x, out, 3])()
    assert out.tolist() == [0, 1, 2, 9]


def test_an_access_outside_of_the_memory_of_a_launch_is_a_fault():
    """It is named with its line, and does nothing."""
    x = torch.arange(8.0)
    out = torch.zeros(4)
    lines = """
        %v = tt.load %fp, %in : tensor<4x!tt.ptr<f32>> loc(#loc1)
        tt.store %tp, %v : tensor<4x!tt.ptr<f32>> loc(#loc2)"""
    made = Kernel(
        "module {\ntt.func public @tested(%0: !tt.ptr<f32>, %1: !tt.ptr<f32>, %2: i32) {\n"
        f"{MASKED}{lines}\n"
        'tt.return\n}\n}\n#loc1 = loc("v"(#loc3))\n#loc2 = loc("k.py":9:4)\n#loc3 = loc("k.py":8:4)\n'
    )
    whole = [(x.data_ptr(), 32), (out.data_ptr(), 16)]
    made.launch((1,), [x, out, 4], memory=whole)()
    assert out.tolist() == [0, 1, 2, 3]
    with pytest.raises(
        KernelFault, match=r"tt\.load of tested at k\.py:8, in program \(0, 0, 0\): byte 8 .* of 8 bytes"
    ):
        made.launch((1,), [x, out, 4], memory=[(x.data_ptr(), 8), whole[1]])()
    made.launch((1,), [x, out, 2], memory=[(x.data_ptr(), 8), whole[1]])()  # the mask rules the others out
    with pytest.raises(KernelFault, match=r"tt\.store of tested at k\.py:9"):
        made.launch((1,), [x, out, 4], memory=[whole[0], (out.data_ptr(), 12)])()


def test_atomic_operations_give_what_was_there():
    """Four elements add to one address."""
    counter = torch.tensor([10], dtype=torch.int32)
    before = torch.zeros(4, dtype=torch.int32)
    types = "(tensor<4x!tt.ptr<i32>>, tensor<4xi32>, tensor<4xi1>) -> tensor<4xi32>"
    body = f"""
        %one = arith.constant dense<1> : tensor<4xi32>
        %yes = arith.constant dense<true> : tensor<4xi1>
        %p = tt.splat %1 : !tt.ptr<i32> -> tensor<4x!tt.ptr<i32>>
        %out = tt.atomic_rmw add, acq_rel, gpu, %p, %one, %yes : {types}"""
    made = kernel(body + store("out", 0, before), pointer(before), pointer(counter))
    made.launch((2,), [before, counter])()
    assert counter == 18 and before.tolist() == [14, 15, 16, 17]


def test_an_unsigned_maximum_and_a_comparison_with_exchange():
    place = torch.tensor([5, -1], dtype=torch.int32)
    body = """
        %big = arith.constant -2 : i32
        %yes = arith.constant true
        %a = tt.atomic_rmw umax, relaxed, gpu, %0, %big, %yes : (!tt.ptr<i32>, i32, i1) -> i32
        %one = arith.constant 1 : i32
        %next = tt.addptr %0, %one : !tt.ptr<i32>, i32
        %minus = arith.constant -1 : i32
        %b = tt.atomic_cas acq_rel, gpu, %next, %minus, %a : (!tt.ptr<i32>, i32, i32) -> i32
        %c = tt.atomic_cas acq_rel, gpu, %next, %minus, %big : (!tt.ptr<i32>, i32, i32) -> i32"""
    kernel(body, pointer(place)).launch((1,), [place])()
    assert place.tolist() == [-2, 5]


def test_programs_run_in_the_order_that_is_named():
    """Each writes its number: the last one stays."""
    body = "%id = tt.get_program_id y : i32\ntt.store %0, %id : !tt.ptr<i32>"
    out = torch.zeros(1, dtype=torch.int32)
    made = kernel(body, pointer(out))
    made.launch((1, 3), [out])()
    assert out == 2
    made.launch((1, 3), [out], order=[2, 0, 1])()
    assert out == 1


def test_a_computation_reads_what_memory_holds_when_it_runs():
    x = torch.zeros(3)
    out = torch.zeros(3)
    body = load("a", 0, x) + "\n%out = arith.addf %a, %a : tensor<3xf32>" + store("out", 1, out)
    compute = kernel(body, pointer(x), pointer(out)).launch((1,), [x, out])
    for value in (1.0, 4.0):
        x.fill_(value)
        compute()
        assert out.tolist() == [2 * value] * 3


def test_an_unknown_operation_is_named():
    with pytest.raises(UnknownOperation, match=r"math\.cosh.*tensor<2xf32>"):
        computed("%out = math.cosh %a : tensor<2xf32>", torch.zeros(2), torch.zeros(2))


def test_unknown_instructions_are_named():
    options = '{constraints = "=f,f", packed_element = 1 : i32, pure = true}'
    types = "tensor<2xf32> -> tensor<2xf32>"
    asm = f'%out = tt.elementwise_inline_asm "add.f32 $0, $1, $1;" {options} %a : {types}'
    with pytest.raises(UnknownOperation, match=r"add\.f32"):
        computed(asm, torch.zeros(2), torch.zeros(2))


def test_a_kernel_that_waits_for_other_programs_is_refused():
    """A barrier over a grid: each program runs to its end before the next begins."""
    body = """
        %one = arith.constant 1 : i32
        %none = arith.constant 0 : i32
        %yes = arith.constant true
        %all = tt.get_num_programs x : i32
        %last = scf.while (%n = %none) : (i32) -> i32 {
          %less = arith.cmpi slt, %n, %all : i32
          scf.condition(%less) %n : i32
        } do {
        ^bb0(%n: i32):
          %now = tt.atomic_rmw add, acq_rel, gpu, %0, %none, %yes : (!tt.ptr<i32>, i32, i1) -> i32
          scf.yield %now : i32
        }"""
    with pytest.raises(UnknownOperation, match=r"tt\.atomic_rmw: a loop that waits"):
        kernel(body, "!tt.ptr<i32>")
