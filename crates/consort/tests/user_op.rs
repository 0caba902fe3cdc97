//! SPEC B20, eager: an op that a user declares runs on tensors like a built-in one, with a kernel of its own or without.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::kernels::{Arg, Kernel, KernelCx, KernelError, ViewMut};
use consort::layout::{Dims, Layout};
use consort::ops::{
    Alias, Cost, CostCx, Cotangents, Effects, EvalCx, EvalError, InferCx, Joined, Layouts, OpDef, VjpCx,
};
use consort::{Collective, Dtype, GroupName, Kind, Reduce, Route, Tensor, apply, compile, spawn};
use consort_ir::literal::{Data, Literal};
use consort_ir::op;
use consort_ir::types::Type;
use consort_types::Failure;

op! {
    /// `a * x + y`, in one go.
    ///
    /// (C1) Both operands are float tensors of one type and shape.
    pub struct Axpy("axpy")(x, y) {
        /// The factor.
        a: f64
    }
    example "mesh ()\n\nfunc @f(v0: f32[1], v1: f32[1]) -> f32[1] {\n    v2 = axpy[a=2.0] v0, v1 : f32[1]\n    return v2\n}\n; run: @f([1], [10]) == [12]\n"
}

impl OpDef for Axpy {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let (x, y) = (cx.tensor(0)?, cx.tensor(1)?);
        cx.require_same_shape("C1", "y of shape", &x.shape, &y.shape)?;
        Ok(vec![x.clone().into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(cx.result_numel())
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let (Data::Float(x), Data::Float(y)) = (&args[0].data, &args[1].data) else {
            return Err(EvalError::new("expected floats"));
        };
        let data = x.iter().zip(y).map(|(x, y)| self.a * x + y).collect();
        Ok(vec![Literal::floats(args[0].dtype, args[0].shape.clone(), data)])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let g = cx.cotangent(0);
        cx.each(|i| Some(if i == 0 { g * self.a } else { g }))
    }
}

/// A kernel that also adds 1000, to distinguish it from the evaluation.
fn run<'a>(
    _cx: &KernelCx<'a>,
    op: &dyn OpDef,
    args: &[Arg<'a>],
    results: &mut [ViewMut<'a>],
) -> Result<(), KernelError> {
    let (Some(Axpy { a }), [Arg::View(x), Arg::View(y)]) = (op.as_any().downcast_ref(), args) else {
        return Err(KernelError::new("expected two operands"));
    };
    let (x, y) = (x.elements::<f32>()?, y.elements::<f32>()?);
    let out = results[0].elements::<f32>()?;
    out.iter_mut().zip(x.iter().zip(y)).for_each(|(z, (x, y))| *z = *a as f32 * x + y + 1000.0);
    Ok(())
}

#[test]
fn b20_a_user_op_runs_eagerly() {
    let outcomes = spawn(2, |mesh| {
        let (x, y) = (Tensor::from_iter([1.0f32, 2.0])?, Tensor::ones(Dtype::F32, &[2])?);
        let once = |a: f64| apply(&Axpy { a }, [x.clone(), y.clone()]);
        assert_eq!(once(3.0)?[0].to_vec::<f32>()?, [4.0, 7.0]);
        assert_eq!(once(3.0)?[0].varies(), ["world"]);
        mesh.add_kernel(Kernel { op: "axpy", family: "user", in_place: false, strided: false, run })?;
        assert_eq!(once(3.0)?[0].to_vec::<f32>()?, [1004.0, 1007.0]);
        assert_eq!(once(-1.0)?[0].to_vec::<f32>()?, [1000.0, 999.0]);
        let error =
            apply(&Axpy { a: 1.0 }, [x.clone(), Tensor::ones(Dtype::F32, &[3])?]).unwrap_err().to_string();
        assert!(error.starts_with("axpy: expected y of shape [2], got [3] (C1)\n  at "), "{error}");
        Ok(())
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}

op! {
    /// The diagonal of a square matrix.
    ///
    /// (C1) The operand is a square matrix.
    pub struct Diagonal("diagonal")(x) {}
    example "mesh ()\n\nfunc @f(v0: f32[2,2]) -> f32[2] {\n    v1 = diagonal v0 : f32[2]\n    return v1\n}\n; run: @f([[1, 2], [3, 4]]) == [1, 4]\n"
}

impl OpDef for Diagonal {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = cx.tensor(0)?;
        let [rows, columns] = &x.shape[..] else {
            return Err(Failure::rule("C1", "expected a matrix"));
        };
        let (rows_only, columns_only) = (std::slice::from_ref(rows), std::slice::from_ref(columns));
        cx.require_same_shape("C1", "as many columns as rows:", rows_only, columns_only)?;
        Ok(vec![x.with_shape(vec![rows.clone()]).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn alias(&self) -> Alias {
        Alias::View
    }
    fn view(&self, _cx: &EvalCx<'_>, x: &Layout) -> Result<Option<Layouts>, EvalError> {
        let (shape, strides) =
            (Dims::from_slice(&x.shape[..1]), Dims::from_elem(x.strides[0] + x.strides[1], 1));
        Ok(Some(std::iter::once(Layout { shape, strides, start: x.start }).collect()))
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let (Data::Float(x), n) = (&args[0].data, args[0].shape[0]) else {
            return Err(EvalError::new("expected floats"));
        };
        let data = (0..n).map(|i| x[i * n + i]).collect();
        Ok(vec![Literal::floats(args[0].dtype, vec![n], data)])
    }
}

op! {
    /// The elements in reverse. It is called a view, but no layout shows it: there are no negative strides.
    pub struct Reversed("reversed")(x) {}
    example "mesh ()\n\nfunc @f(v0: f32[2]) -> f32[2] {\n    v1 = reversed v0 : f32[2]\n    return v1\n}\n; run: @f([1, 2]) == [2, 1]\n"
}

impl OpDef for Reversed {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        Ok(vec![cx.tensor(0)?.clone().into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(cx.result_numel())
    }
    fn alias(&self) -> Alias {
        Alias::View
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let Data::Float(x) = &args[0].data else { return Err(EvalError::new("expected floats")) };
        Ok(vec![Literal::floats(args[0].dtype, args[0].shape.clone(), x.iter().rev().copied().collect())])
    }
}

op! {
    /// Two lists, the second one first.
    ///
    /// (C1) Both operands are lists of one type.
    pub struct After("after")(x, y) {}
    example "mesh ()\n\nfunc @f(v0: f32[1], v1: f32[2]) -> f32[3] {\n    v2 = after v0, v1 : f32[3]\n    return v2\n}\n; run: @f([1], [2, 3]) == [2, 3, 1]\n"
}

impl OpDef for After {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let (x, y) = (cx.tensor(0)?, cx.tensor(1)?);
        match (&x.shape[..], &y.shape[..]) {
            ([a], [b]) if x.dtype == y.dtype => {
                Ok(vec![x.with_shape(vec![a + b]).with_varies(x.varies.union(y.varies)).into()])
            }
            _ => Err(Failure::rule("C1", "expected two lists of one type")),
        }
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(consort_ir::index::Index::constant(0))
    }
    fn joins(&self) -> bool {
        true
    }
    fn boxes(&self, _cx: &EvalCx<'_>, shapes: &[&[usize]]) -> Result<Vec<Joined>, EvalError> {
        let [x, y] = shapes else { return Err(EvalError::new("expected two operands")) };
        let whole = |operand, size: &[usize], to| Joined {
            operand,
            from: Dims::from_elem(0, 1),
            to: Dims::from_elem(to, 1),
            size: Dims::from_slice(size),
        };
        Ok(vec![whole(1, y, 0), whole(0, x, y[0])])
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        Ok(vec![Literal::concat(&[args[1], args[0]], 0)])
    }
}

op! {
    /// Everybody gets what the next member has.
    ///
    /// (C1) The shapes are equal on all members.
    pub struct NextStart("next_start")(x) {
        /// From whom.
        route: Route,
        /// The group.
        over: GroupName
    }
    example "mesh (sp: 2)\n\nfunc @f(v0: f32[1]{sp}) -> f32[1]{sp} {\n    v1 = next_start[route=ring(-1), over=sp] v0 : pending<f32[1]{sp}>\n    v2 = wait v1 : f32[1]{sp}\n    return v2\n}\n; run: @f([1] | [2]) == [2] | [1]\n"
}

impl OpDef for NextStart {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = cx.tensor(0)?;
        x.shape.iter().try_for_each(|size| cx.require_equal_on("C1", "a size", size, self.over))?;
        Ok(vec![Type::Pending(vec![x.with_varies(x.varies.union(cx.mesh.group_axes(self.over)))])])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.comm(consort_ir::index::Index::constant(0), cx.result_bytes())
    }
    fn collective(&self) -> Option<Collective<'_, consort_ir::index::Index>> {
        Some(Collective { route: Some(&self.route), ..Collective::new(Kind::Permute, self.over) })
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let Route::Ring(by) = self.route else { return Err(Failure::new("expected a ring")) };
        cx.together(|_, terms| cx.start_wait(NextStart { route: Route::Ring(-by), over: self.over }, terms))
    }
}

/// Every facet, eager and compiled, in a function that also computes the operands in the storage of the joined result.
#[test]
fn b20_every_facet_of_a_user_op_holds_eagerly_and_compiled() {
    let outcomes = spawn(2, |mesh| {
        let me = mesh.my_rank()? as f32;
        let world = mesh.axis("world")?;
        let over = world.name();
        let f = move |x: Tensor| -> consort::Result<Vec<Tensor>> {
            let one =
                |op: &dyn OpDef, args: Vec<Tensor>| apply(op, args).map(|mut results| results.remove(0));
            let diagonal = one(&Diagonal {}, vec![x.clone()])?;
            let other = one(&Diagonal {}, vec![x.permute(&[1, 0])?.narrow(0, 1, 2)?.narrow(1, 0, 2)?])?;
            let reversed = one(&Reversed {}, vec![diagonal.clone()])?;
            let joined = one(&After {}, vec![(&diagonal + &reversed)?, (&other * &other)?])?;
            let op = NextStart { route: Route::Ring(-1), over };
            let next = world.apply(&op, [joined.clone()])?.remove(0);
            Ok(vec![diagonal, other, reversed, joined, next])
        };
        let x = |rank: f32| (0..9).map(|i| i as f32 + 100.0 * rank).collect::<Vec<_>>();
        let wanted = |rank: f32| {
            let at = |i: usize| x(rank)[i];
            let (diagonal, other) = (vec![at(0), at(4), at(8)], vec![at(1), at(5)]);
            let reversed: Vec<f32> = diagonal.iter().rev().copied().collect();
            let mut joined: Vec<f32> = other.iter().map(|x| x * x).collect();
            joined.extend(diagonal.iter().zip(&reversed).map(|(a, b)| a + b));
            [diagonal, other, reversed, joined]
        };
        let (mine, next) = (wanted(me), wanted(1.0 - me)[3].clone());
        let check = |how: &str, got: Vec<Tensor>| -> consort::Result<()> {
            for (got, want) in got.iter().zip(mine.iter().chain([&next])) {
                assert_eq!(got.to_vec::<f32>()?, *want, "{how}");
            }
            Ok(())
        };
        let tensor = || Tensor::from_slice(&x(me), &[3, 3]);
        check("eager", f(tensor()?)?)?;
        let compiled = compile(f).fullgraph(true);
        for _ in 0..3 {
            check("compiled", compiled.call(tensor()?)?)?;
        }
        // Views and joins that plans know of run nothing of the op.
        let explained = compiled.explain();
        assert_eq!(explained.graphs[0].evaluated, ["reversed"]);
        assert!(explained.to_string().contains("without a kernel, evaluated slowly: reversed\n"));
        Ok::<(), consort::Error>(())
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}

/// An op with the name of a built-in one, which passes and kernels would take for that.
mod namesake {
    use super::*;

    op! {
        /// Not what `neg` is.
        pub struct Neg("neg")(x) {}
        example "mesh ()\n\nfunc @f(v0: f32[1]) -> f32[1] {\n    v1 = neg v0 : f32[1]\n    return v1\n}\n; run: @f([1]) == [1]\n"
    }

    impl OpDef for Neg {
        fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
            Ok(vec![cx.tensor(0)?.clone().into()])
        }
        fn cost(&self, cx: &CostCx<'_>) -> Cost {
            cx.free()
        }
        fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
            Ok(vec![args[0].clone()])
        }
    }
}

#[test]
fn b20_a_name_that_is_taken_is_refused() {
    let x = Tensor::from_iter([1.0f32]).unwrap();
    let said = "neg: expected a name that no built-in op has, got `neg`\n  at ";
    let eager = apply(&namesake::Neg {}, [x.clone()]).map(drop).unwrap_err().to_string();
    let traced = compile(|x: Tensor| Ok(apply(&namesake::Neg {}, [x])?.remove(0)));
    let traced = traced.call(x.clone()).map(drop).unwrap_err().to_string();
    assert!(eager.starts_with(said) && traced.starts_with(said), "{eager}\n{traced}");
    assert_eq!(x.neg().unwrap().to_vec::<f32>().unwrap(), [-1.0]);
}

op! {
    /// Twice x, computed on the host.
    pub struct Hosted("hosted")(x) {}
    example ""
}

impl OpDef for Hosted {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        Ok(vec![cx.tensor(0)?.clone().into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(cx.result_numel())
    }
    fn effects(&self) -> Effects {
        Effects::Host
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let Data::Float(x) = &args[0].data else { return Err(EvalError::new("expected floats")) };
        let data = x.iter().map(|x| 2.0 * x).collect();
        Ok(vec![Literal::floats(args[0].dtype, args[0].shape.clone(), data)])
    }
}

/// Compiled it would be wrong to leave it out: its result is a tensor.
#[test]
fn b20_a_host_op_that_returns_a_tensor_runs_eagerly_and_compiled() {
    let f = |x: Tensor| apply(&Hosted {}, [x.add(&x)?])?.remove(0).add(&x);
    let x = || Tensor::from_slice(&[1.0f32, 2.0, 3.0], &[3]).unwrap();
    assert_eq!(f(x()).unwrap().to_vec::<f32>().unwrap(), [5.0, 10.0, 15.0]);
    let compiled = compile(f).fullgraph(true);
    for _ in 0..3 {
        assert_eq!(compiled.call(x()).unwrap().to_vec::<f32>().unwrap(), [5.0, 10.0, 15.0]);
    }
    assert_eq!(compiled.explain().graphs[0].evaluated, ["hosted"]);
}

#[test]
fn b20_a_user_op_is_differentiated() {
    let outcomes = spawn(1, |_| {
        let both = consort::grad(|(x, y): (Tensor, Tensor)| {
            let z = apply(&Axpy { a: 3.0 }, [x, y])?.remove(0);
            z.mul(&z)?.sum_all()
        });
        let (x, y) = both.call((Tensor::from_iter([1.0f64, 2.0])?, Tensor::from_iter([10.0f64, 20.0])?))?;
        Ok((x.to_vec::<f64>()?, y.to_vec::<f64>()?))
    });
    // 2 z times 3 and times 1, with z = 3 x + y.
    for outcome in outcomes {
        assert_eq!(outcome.unwrap(), (vec![78.0, 156.0], vec![26.0, 52.0]));
    }
}

/// An operand that is equal has the sum of what all ranks contribute, by the op's own rule.
#[test]
fn b20_the_gradient_of_a_user_op_follows_from_placements() {
    let outcomes = spawn(2, |mesh| {
        let (rank, group) = (mesh.my_rank()? as f64, mesh.clone());
        let loss = move |(x, y): (Tensor, Tensor)| {
            let z = apply(&Axpy { a: 3.0 }, [x, y])?.remove(0);
            group.all_reduce(z.mul(&z)?.sum_all()?, Reduce::Sum)
        };
        let (alone, whole) = (loss.clone(), loss);
        let x = Tensor::from_iter([1.0f64, 2.0])?.replicated()?;
        let y = Tensor::from_iter([10.0 + rank, 20.0])?;
        let alone = consort::grad(alone).call((x.clone(), y.clone()))?;
        let whole =
            compile(move |args: (Tensor, Tensor)| consort::grad(whole.clone()).call(args)).call((x, y))?;
        for (x, y) in [&alone, &whole] {
            assert_eq!((x.varies().len(), y.varies().len()), (0, 1));
        }
        let lists = [alone.0, alone.1, whole.0, whole.1];
        lists.iter().map(Tensor::to_vec::<f64>).collect::<consort::Result<Vec<_>>>()
    });
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        // z = 3 x + y is [13 + rank, 26]. By x: 6 z, summed over both ranks; by y: 2 z.
        let (x, y) = (vec![6.0 * 27.0, 6.0 * 52.0], vec![26.0 + 2.0 * rank as f64, 52.0]);
        assert_eq!(outcome.unwrap(), [x.clone(), y.clone(), x, y]);
    }
}

/// What comes from the next rank has its cotangent from there, by the collective's own rule.
#[test]
fn b20_a_user_collective_is_differentiated() {
    let outcomes = spawn(3, |mesh| {
        let (rank, group) = (mesh.my_rank()? as f64, mesh.clone());
        let world = mesh.axis("world")?;
        let op = NextStart { route: Route::Ring(-1), over: world.name() };
        let weight = Tensor::from_iter([rank + 1.0])?;
        let slope = consort::grad(move |x: Tensor| {
            let next = world.apply(&op, [x])?.remove(0);
            group.all_reduce(next.mul(&next)?.mul(&weight)?.sum_all()?, Reduce::Sum)
        });
        let made = slope.call(Tensor::from_iter([rank + 2.0])?)?.item::<f64>()?;
        Ok((made, slope.explain().graphs[0].program.matches("next_start").count()))
    });
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        // The rank before reads x, and weighs its square by its number and 1.
        let before = ((rank + 2) % 3) as f64;
        assert_eq!(outcome.unwrap(), (2.0 * (rank as f64 + 2.0) * (before + 1.0), 2));
    }
}

op! {
    /// Twice the operand.
    ///
    /// (C1) The operand is of f32.
    pub struct Twice("twice")(x) {}
    example "mesh ()\n\nfunc @f(v0: f32[1]) -> f32[1] {\n    v1 = twice v0 : f32[1]\n    return v1\n}\n; run: @f([3]) == [6]\n"
}

impl OpDef for Twice {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        Ok(vec![cx.tensor(0)?.clone().into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(cx.result_numel())
    }
    fn eval(&self, _cx: &EvalCx<'_>, _: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        Err(EvalError::new("it has a kernel"))
    }
}

/// Reads its operand as if it had no gaps.
fn twice<'a>(
    _cx: &KernelCx<'a>,
    _op: &dyn OpDef,
    args: &[Arg<'a>],
    results: &mut [ViewMut<'a>],
) -> Result<(), KernelError> {
    let [Arg::View(x)] = args else { return Err(KernelError::new("expected an operand")) };
    let out = results[0].elements::<f32>()?;
    out.iter_mut().zip(x.elements::<f32>()?).for_each(|(z, x)| *z = 2.0 * x);
    Ok(())
}

#[test]
fn b20_a_kernel_that_reads_no_strides_gets_packed_operands() {
    let outcomes = spawn(1, |mesh| {
        mesh.add_kernel(Kernel { op: "twice", family: "user", in_place: false, strided: false, run: twice })?;
        let views = |x: Tensor| -> consort::Result<Vec<Tensor>> {
            let row = x.narrow(0, 1, 1)?.broadcast_to(&[2, 2])?;
            [x.t()?, x.narrow(1, 1, 1)?, row]
                .into_iter()
                .map(|x| Ok(apply(&Twice {}, [x])?.remove(0)))
                .collect()
        };
        let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
        let compiled = compile(views);
        for all in [views(x.clone())?, compiled.call(x)?] {
            let all = all.iter().map(Tensor::to_vec::<f32>).collect::<consort::Result<Vec<_>>>()?;
            assert_eq!(all, [vec![2.0, 6.0, 4.0, 8.0], vec![4.0, 8.0], vec![6.0, 8.0, 6.0, 8.0]]);
        }
        Ok(())
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}
