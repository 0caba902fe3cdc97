//! Functions with a gradient of their own.

use std::fmt::Write;
use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;

use consort_ir::mesh::Mesh;
use consort_ir::op;
use consort_ir::ops::{Attr, Cost, CostCx, Cotangents, InferCx, OpDef, VjpCx};
use consort_ir::program::Func;
use consort_ir::text::{Cursor, ParseError};
use consort_ir::types::Type;
use consort_types::Failure;

use crate::error::{Error, Result};
use crate::flatten::Flatten;
use crate::trace::{self, Session};

type Site = &'static Location<'static>;

/// A function with a gradient of its own. `forward` returns the result, and what the backward needs besides; `backward`
/// takes that and the cotangent of the result, and returns the gradient by the argument. Both may communicate. Without a
/// gradient the function is `forward` alone.
///
/// The gradient by a tensor must have its element type and shape, and differ over no more axes: where the tensor is equal
/// on ranks and the cotangent is not, `backward` sums over them. That by a tensor without floats is not read. What
/// `forward` captures must not need a gradient.
///
/// ```
/// use consort::{Tensor, custom_vjp, grad};
///
/// # fn main() -> consort::Result<()> {
/// // Rounds; its gradient is that of the identity.
/// let round = custom_vjp(|x: Tensor| Ok((x.round()?, ())), |(), slope: Tensor| Ok(slope));
/// let slope = grad(move |x: Tensor| x.mul(&round(x.clone())?)?.sum_all());
/// // x round(x) has the gradient round(x) + x.
/// assert_eq!(slope.call(Tensor::from_iter([1.25f64, 2.75])?)?.to_vec::<f64>()?, [2.25, 5.75]);
/// # Ok(()) }
/// ```
#[track_caller]
pub fn custom_vjp<A: Flatten, R: Flatten, S: Flatten>(
    forward: impl Fn(A) -> Result<(R, S)>,
    backward: impl Fn(S, R) -> Result<A>,
) -> impl Fn(A) -> Result<R> {
    let site = Location::caller();
    move |args| match trace::current().filter(|session| session.takes_gradient()) {
        Some(session) => session.custom_vjp(&forward, &backward, args, site),
        None => Ok(forward(args)?.0),
    }
}

impl Session {
    /// Records `forward`, and a node that gives its results on and has the traced `backward` as its rule.
    fn custom_vjp<A: Flatten, R: Flatten, S: Flatten>(
        self: &Rc<Self>,
        forward: &impl Fn(A) -> Result<(R, S)>,
        backward: &impl Fn(S, R) -> Result<A>,
        args: A,
        site: Site,
    ) -> Result<R> {
        let at @ (name, _) = ("custom_vjp", site);
        let operands = self.operands(&args.flatten(), name, site)?;
        let types = self.types(&operands)?;
        let own = self.own_function(types.clone(), at, |params| forward(args.unflatten(params)?))?;
        let (result, kept) = &own.made;
        let made = self.splice(&own.func, &[operands.clone(), own.captured.clone()].concat(), at)?;
        let made = self.operands(&made, name, site)?;
        let (results, residuals) = made.split_at(result.flatten().len());
        let entering = self.types(&[residuals, results].concat())?;
        let back = self.own_function(entering, at, |params| {
            let (own, cotangents) = params.split_at(residuals.len());
            backward(kept.unflatten(own.to_vec())?, result.unflatten(cotangents.to_vec())?)
        })?;
        self.check_slopes(&back.func.results, &types, site)?;
        let op = CustomVjp {
            results: results.len(),
            residuals: residuals.len(),
            constants: back.captured.len(),
            inputs: operands.len(),
            rule: Rule(Arc::new(back.func)),
        };
        let all = [results, residuals, &back.captured, &operands, &own.captured].concat();
        let values = self.mark(&op, &all, at)?;
        result.unflatten(self.tensors(&values, at)?)
    }

    /// Checks that what a backward returned fits the tensors that it is the gradient by.
    fn check_slopes(&self, slopes: &[Type], args: &[Type], site: Site) -> Result<()> {
        let failed = |failure: Box<Failure>| Err(Error::of("custom_vjp", failure, site));
        if slopes.len() != args.len() {
            let expected = format!("a gradient by each of the {} tensors of the argument", args.len());
            return failed(Failure::new((expected, slopes.len().to_string())));
        }
        let mesh = self.world.mesh();
        let is_float = |ty: &Type| ty.tensors().iter().any(|tensor| tensor.dtype.is_float());
        for (i, (slope, arg)) in slopes.iter().zip(args).enumerate() {
            if !is_float(arg) || self.fits(slope, arg)? {
                continue;
            }
            let expected = format!("a gradient by argument {i} of type {}", arg.display(&mesh));
            let failure = Failure::new((expected, slope.display(&mesh).to_string()));
            let more = slope.varies().minus(arg.varies());
            if more.is_empty() {
                return failed(failure);
            }
            let axes = mesh.axes_text(more);
            let note = format!("sum it over {axes} in the backward: an all_reduce by `sum` makes it equal");
            return failed(failure.note(note));
        }
        Ok(())
    }
}

/// The backward of a user's function: from what its forward kept, the cotangents of its results and what it captured, to
/// the cotangents of its arguments.
#[derive(Clone, Debug)]
struct Rule(Arc<Func>);

impl PartialEq for Rule {
    fn eq(&self, other: &Rule) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Attr for Rule {
    const KIND: &'static str = "the rule of a user";
    fn write(&self, out: &mut String, _mesh: &Mesh) {
        let _ = write!(out, "@{}", self.0.name);
    }
    fn read(cursor: &mut Cursor<'_>) -> std::result::Result<Rule, ParseError> {
        Err(cursor.error("a user's gradient cannot be read from a text"))
    }
}

op! {
    /// The results of a user's function, as they are. Its operands are these results, what the forward keeps for the
    /// backward, what the backward captured, the arguments, and what the forward captured. It is there for its gradient, and
    /// is taken out when that has been taken.
    struct CustomVjp("custom_vjp")(; args..) {
        /// How many results.
        results: usize,
        /// How many tensors the forward keeps.
        residuals: usize,
        /// How many tensors the backward captured.
        constants: usize,
        /// How many arguments.
        inputs: usize,
        /// The backward.
        rule: Rule
    }
    example ""
}

impl CustomVjp {
    /// The number of its first operand that is an argument.
    fn first_input(&self) -> usize {
        self.results + self.residuals + self.constants
    }
}

impl OpDef for CustomVjp {
    fn infer(&self, cx: &mut InferCx<'_>) -> std::result::Result<Vec<Type>, Box<Failure>> {
        Ok(cx.args.iter().take(self.results).cloned().collect())
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn passes_gradient(&self, operand: usize) -> bool {
        operand >= self.first_input()
    }
    fn is_rule_alone(&self) -> bool {
        true
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let (from, end) = (self.first_input(), self.first_input() + self.inputs);
        if (end..cx.n_args()).any(|i| cx.wants(i)) {
            let got = "one that is also needed by a tensor that it captured";
            return Err(Failure::new(("a gradient by the argument alone", got))
                .note("make the tensor a part of the argument, or stop its gradient with `stop_gradient`"));
        }
        let kept = self.results..self.results + self.residuals;
        let mut args: Vec<_> = kept.map(|i| cx.arg(i)).collect();
        args.extend((0..self.results).map(|i| cx.cotangent(i)));
        args.extend((self.results + self.residuals..from).map(|i| cx.arg(i)));
        let slopes = cx.splice(&self.rule.0, &args);
        let slope = |i: usize| slopes.get(i.checked_sub(from)?).copied().filter(|_| cx.wants(i));
        Ok((0..cx.n_args()).map(slope).collect())
    }
}
