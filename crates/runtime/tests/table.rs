//! Every kernel against its op's own evaluation: all element types, operands in every layout, in place where it can.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "table/cases.rs"]
mod cases;

use std::collections::{BTreeMap, BTreeSet};

use cases::{Case, Holds, Operand, cases};
use consort_ir::dtype::Dtype;
use consort_ir::index::{Facts, Index};
use consort_ir::infer::infer;
use consort_ir::mesh::{Axes, Mesh, Rank};
use consort_ir::ops::{BUILT_IN, EvalCx, Undecided};
use consort_ir::tensor::Tensor;
use consort_ir::types::{TensorType, Type};
use consort_runtime::kernels::{Arg, Kernel, KernelCx, View, ViewMut, find};
use consort_runtime::layout::Layout;
use consort_runtime::threads::Threads;
use consort_runtime::tolerance;

/// Ops that are no kernel's: the executor communicates, runs blocks and keeps sizes itself.
const OUTSIDE: [&str; 18] = [
    "all_reduce_start",
    "all_gather_start",
    "reduce_scatter_start",
    "all_to_all_start",
    "broadcast_start",
    "reduce_start",
    "gather_start",
    "scatter_start",
    "all_gather_v_start",
    "reduce_scatter_v_start",
    "permute_start",
    "exchange_start",
    "barrier_start",
    "wait",
    "size_of",
    "to_size",
    "cond",
    "scan",
];

/// Ops whose kernel has not been written.
const WITHOUT_KERNEL: [&str; 0] = [];

/// A list of numbers that looks random (splitmix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// A tensor of what an operand holds; `special` puts infinities, NaN and zeros of both signs among floats.
    fn tensor(&mut self, operand: &Operand, special: bool) -> Tensor {
        let (dtype, shape) = (operand.dtype, operand.shape.clone());
        let n: usize = shape.iter().product();
        if let Holds::Below(end) = operand.holds {
            return Tensor::ints(dtype, shape, (0..n).map(|_| self.below(end) as i64).collect());
        }
        if !dtype.is_float() {
            let (low, high) = dtype.int_range();
            let number = |at: usize| [low, high, 0, 1, -1][at];
            let small = |x: u64| (x % 40) as i64 - 20;
            let pick = |numbers: &mut Numbers| match numbers.below(12) {
                at @ 0..5 => number(at),
                _ => small(numbers.next()),
            };
            return Tensor::ints(dtype, shape, (0..n).map(|_| pick(self)).collect());
        }
        let specials = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.0, 1.0, 1e-40, -2.5];
        let pick = |numbers: &mut Numbers| {
            if special && numbers.below(12) == 0 {
                return specials[numbers.below(specials.len())];
            }
            let wide = [1.0, 1.0, 1.0, 10.0, 100.0][numbers.below(5)];
            ((numbers.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0) * wide
        };
        Tensor::floats(dtype, shape, (0..n).map(|_| pick(self)).collect())
    }
}

/// Bytes at an address that fits every element type.
struct Bytes(Vec<u64>, usize);

impl Bytes {
    fn new(len: usize) -> Bytes {
        // What no element is: a kernel that reads between elements is seen.
        Bytes(vec![0xabab_abab_abab_abab; len.div_ceil(8)], len)
    }

    fn get(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.0)[..self.1]
    }

    fn get_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.0)[..self.1]
    }
}

/// How an operand lies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lies {
    Contiguous,
    Permuted,
    Sliced,
    Stepped,
    Repeated(usize),
}

/// A tensor in storage.
struct Placed {
    tensor: Tensor,
    layout: Layout,
    bytes: Bytes,
}

impl Placed {
    fn new(mut tensor: Tensor, lies: Lies) -> Placed {
        let shape = tensor.shape.clone();
        let layout = match lies {
            Lies::Contiguous => Layout::contiguous(&shape),
            Lies::Permuted => {
                let back: Vec<usize> = (0..shape.len()).rev().collect();
                Layout::contiguous(&shape.iter().rev().copied().collect::<Vec<_>>()).permuted(&back)
            }
            Lies::Sliced => {
                let whole: Vec<usize> = shape.iter().map(|size| size + 3).collect();
                let all = Layout::contiguous(&whole);
                (0..shape.len()).fold(all, |layout, i| layout.narrowed(i, 1, shape[i]))
            }
            Lies::Stepped => {
                let whole: Vec<usize> = shape.iter().map(|size| size * 2).collect();
                let mut layout = Layout::contiguous(&whole);
                (layout.shape, layout.strides) =
                    (shape[..].into(), layout.strides.iter().map(|s| s * 2).collect());
                layout
            }
            Lies::Repeated(dim) => {
                let mut one = shape.clone();
                one[dim] = 1.min(one[dim]);
                let first = tensor.narrow(dim, 0, one[dim]);
                let parts: Vec<&Tensor> = (0..shape[dim]).map(|_| &first).collect();
                if !parts.is_empty() {
                    tensor = Tensor::concat(&parts, dim);
                }
                Layout::contiguous(&one).broadcast(&shape)
            }
        };
        let width = tensor.dtype.size();
        let mut bytes = Bytes::new((layout.start + layout.span()) * width);
        for (element, at) in tensor.to_bytes().chunks_exact(width).zip(offsets(&layout)) {
            bytes.get_mut()[at * width..][..width].copy_from_slice(element);
        }
        Placed { tensor, layout, bytes }
    }

    fn view(&self) -> View<'_> {
        let bytes = &self.bytes.get()[self.layout.start * self.tensor.dtype.size()..];
        View { dtype: self.tensor.dtype, shape: &self.layout.shape, strides: &self.layout.strides, bytes }
    }
}

fn offsets(layout: &Layout) -> Vec<usize> {
    let mut list = vec![layout.start];
    for (size, stride) in layout.shape.iter().zip(&layout.strides) {
        list = list.iter().flat_map(|at| (0..*size).map(move |i| at + i * stride)).collect();
    }
    list
}

/// In what the kernels of this test run.
struct Bench {
    mesh: Mesh,
    threads: [Threads; 2],
}

impl Bench {
    fn cx(&self) -> EvalCx<'_> {
        static NONE: BTreeMap<consort_ir::index::Sym, i64> = BTreeMap::new();
        EvalCx { mesh: &self.mesh, rank: Rank(0), symbols: &NONE }
    }

    /// The types of the results, where the op's rule accepts the operands.
    fn results(&self, case: &Case) -> Option<Vec<TensorType>> {
        let ty = |operand: &Operand| {
            let shape = operand.shape.iter().map(|size| Index::from(*size)).collect();
            Type::from(TensorType::new(operand.dtype, shape, Axes::NONE))
        };
        let args: Vec<Type> = case.operands.iter().map(ty).collect();
        let mut facts = Facts::new(&self.mesh);
        let types = infer(&*case.op, &self.mesh, &args, &[], &mut facts, Undecided::Refuse).ok()?;
        types.iter().map(|ty| ty.as_tensor().cloned()).collect()
    }

    /// Runs a kernel and compares; those operands that are none lie where the first result goes, which holds `first`.
    fn run(
        &self,
        kernel: &Kernel,
        case: &Case,
        results: &[TensorType],
        operands: &[Option<&Placed>],
        first: Option<&Tensor>,
    ) -> Result<(), String> {
        let size = |size: &Index| usize::try_from(size.as_const().unwrap()).unwrap();
        let shapes: Vec<Vec<usize>> = results.iter().map(|ty| ty.shape.iter().map(size).collect()).collect();
        for threads in &self.threads {
            let bytes = |(ty, shape): (&TensorType, &Vec<usize>)| {
                Bytes::new(shape.iter().product::<usize>() * ty.dtype.size())
            };
            let mut storage: Vec<Bytes> = results.iter().zip(&shapes).map(bytes).collect();
            if let (Some(first), Some(storage)) = (first, storage.first_mut()) {
                storage.get_mut().copy_from_slice(&first.to_bytes());
            }
            let mut out: Vec<ViewMut<'_>> = Vec::new();
            for ((ty, shape), storage) in results.iter().zip(&shapes).zip(&mut storage) {
                out.push(ViewMut { dtype: ty.dtype, shape, bytes: storage.get_mut() });
            }
            let args: Vec<Arg<'_>> =
                operands.iter().map(|x| x.map_or(Arg::Result, |x| Arg::View(x.view()))).collect();
            let cx = KernelCx { sizes: self.cx(), threads };
            (kernel.run)(&cx, &*case.op, &args, &mut out)
                .map_err(|error| format!("{}: {error}", kernel.op))?;
            let tensors: Vec<&Tensor> =
                operands.iter().map(|x| x.map_or_else(|| first.unwrap(), |x| &x.tensor)).collect();
            let got = results.iter().zip(&shapes).zip(&storage).map(|((ty, shape), storage)| {
                Tensor::from_bytes(ty.dtype, shape.clone(), storage.get()).unwrap()
            });
            tolerance::check(&*case.op, &self.cx(), &tensors, &got.collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// All ways to run a case; what went wrong.
    fn check(
        &self,
        kernel: &Kernel,
        case: &Case,
        results: &[TensorType],
        numbers: &mut Numbers,
    ) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut note = |how: String, outcome: Result<(), String>| {
            if let Err(error) = outcome {
                wrong.push(format!("{error}\n    {:?} of {}, {how}", case.op, types(case)));
            }
        };
        for special in [false, true] {
            let tensors: Vec<Tensor> =
                case.operands.iter().map(|operand| numbers.tensor(operand, special)).collect();
            for lies in layouts(case, numbers) {
                let placed: Vec<Placed> =
                    tensors.iter().zip(&lies).map(|(x, lies)| Placed::new(x.clone(), *lies)).collect();
                let operands: Vec<Option<&Placed>> = placed.iter().map(Some).collect();
                note(format!("{lies:?}"), self.run(kernel, case, results, &operands, None));
            }
            if kernel.in_place {
                let whole = |i: usize| {
                    let size = |size: &Index| size.as_const().and_then(|size| usize::try_from(size).ok());
                    let shape: Option<Vec<usize>> = results[0].shape.iter().map(size).collect();
                    tensors[i].dtype == results[0].dtype && Some(&tensors[i].shape) == shape.as_ref()
                };
                let fitting: Vec<usize> = (0..tensors.len()).filter(|i| whole(*i)).collect();
                let placed: Vec<Placed> =
                    tensors.iter().map(|x| Placed::new(x.clone(), Lies::Permuted)).collect();
                let each = fitting.iter().map(|i| vec![*i]);
                for here in each.chain((fitting.len() > 1).then(|| fitting.clone())) {
                    // Places must stay places, so they are what all share where they take part.
                    let Some(first) = here
                        .iter()
                        .rfind(|i| matches!(case.operands[**i].holds, Holds::Below(_)))
                        .or(here.first())
                    else {
                        continue;
                    };
                    let operands: Vec<Option<&Placed>> =
                        placed.iter().enumerate().map(|(i, x)| (!here.contains(&i)).then_some(x)).collect();
                    let outcome = self.run(kernel, case, results, &operands, Some(&tensors[*first]));
                    note(format!("in place of operands {here:?}"), outcome);
                }
            }
        }
        wrong
    }
}

fn types(case: &Case) -> String {
    let text = |operand: &Operand| format!("{}{:?}", operand.dtype, operand.shape);
    case.operands.iter().map(text).collect::<Vec<_>>().join(", ")
}

/// Each operand in each layout with the others without gaps, and all operands in each layout.
fn layouts(case: &Case, numbers: &mut Numbers) -> Vec<Vec<Lies>> {
    let n = case.operands.len();
    let mut list = vec![vec![Lies::Contiguous; n]];
    for (i, operand) in case.operands.iter().enumerate() {
        let repeated = (0..operand.shape.len()).map(Lies::Repeated);
        for lies in [Lies::Permuted, Lies::Sliced, Lies::Stepped].into_iter().chain(repeated) {
            let mut one = vec![Lies::Contiguous; n];
            one[i] = lies;
            list.push(one);
        }
    }
    if n > 1 {
        list.extend([Lies::Permuted, Lies::Sliced, Lies::Stepped].map(|lies| vec![lies; n]));
        let repeated = |operand: &Operand| match operand.shape.len() {
            0 => Lies::Contiguous,
            rank => Lies::Repeated(numbers.below(rank)),
        };
        list.push(case.operands.iter().map(repeated).collect());
    }
    list
}

#[test]
fn every_kernel_gives_what_its_op_means() {
    let mesh = Mesh::new(Vec::<(String, u32)>::new()).unwrap();
    let bench = Bench { mesh, threads: [Threads::ONE, Threads::new(2)] };
    let mut numbers = Numbers(7);
    let (mut runs, mut wrong) = (BTreeMap::new(), Vec::new());
    for dtype in Dtype::ALL {
        for case in cases(dtype) {
            let name = case.op.info().name;
            let Some(results) = bench.results(&case) else { continue };
            let Some(kernel) = find(name) else { continue };
            *runs.entry(name).or_insert(0) += 1;
            wrong.extend(bench.check(kernel, &case, &results, &mut numbers));
        }
    }
    let by_op: BTreeSet<&str> = wrong.iter().filter_map(|text| text.split(':').next()).collect();
    assert!(
        wrong.is_empty(),
        "{} runs are wrong, of {by_op:?}:\n{}",
        wrong.len(),
        wrong.iter().take(40).cloned().collect::<Vec<_>>().join("\n")
    );
    println!("{} ops, {} cases", runs.len(), runs.values().sum::<usize>());
}

#[test]
fn every_op_has_cases_and_a_kernel_or_is_listed() {
    let mesh = Mesh::new(Vec::<(String, u32)>::new()).unwrap();
    let bench = Bench { mesh, threads: [Threads::ONE, Threads::ONE] };
    let all = Dtype::ALL.into_iter().flat_map(cases);
    let tried: BTreeSet<&str> =
        all.filter(|case| bench.results(case).is_some()).map(|case| case.op.info().name).collect();
    let names: BTreeSet<&str> =
        BUILT_IN.iter().flat_map(|(_, rows)| rows.iter()).map(|info| info.name).collect();
    let expected: BTreeSet<&str> = names.iter().copied().filter(|name| !OUTSIDE.contains(name)).collect();
    assert_eq!(tried, expected, "ops with cases, and ops that need them");
    let without: Vec<&str> = expected.into_iter().filter(|name| find(name).is_none()).collect();
    let mut listed = WITHOUT_KERNEL.to_vec();
    listed.sort_unstable();
    assert_eq!(without, listed, "ops without a kernel, and those listed as such");
}
